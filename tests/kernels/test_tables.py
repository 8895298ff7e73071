"""The tables of a batch: Triton against the reference, on a GPU or in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu import tables
from kernels.reference.tables import look_up_tokens_reference, write_tokens_reference
from tests.kernels.gpu_device import DEVICE

SLOTS, COLUMNS = 9, 70


def random_ints(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(limit, shape, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 500])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_tokens_and_slots_are_looked_up(num_tokens: int, block_size: int) -> None:
    torch.manual_seed(num_tokens)
    tokens_SL = random_ints(1000, SLOTS, COLUMNS)
    # Places beyond 2**31.
    blocks_SW = random_ints(2**31 - 1, SLOTS, -(-COLUMNS // block_size))
    slots_T, positions_T = random_ints(SLOTS, num_tokens), random_ints(COLUMNS, num_tokens)
    arguments = tokens_SL, blocks_SW, slots_T, positions_T, random_ints(40, num_tokens), block_size
    got, want = tables.look_up_tokens(*arguments), look_up_tokens_reference(*arguments)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert (got[1] == -1).any() or num_tokens == 1


@pytest.mark.parametrize("num_rows", [1, 9])
def test_tokens_are_written(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    slots_R = torch.randperm(SLOTS, device=DEVICE)[:num_rows].to(torch.int32)
    positions_R = random_ints(COLUMNS, num_rows)
    token_ids_R = random_ints(150_000, num_rows).to(torch.int64)
    got = random_ints(1000, SLOTS, COLUMNS)
    want = got.clone()
    tables.write_tokens(got, slots_R, positions_R, token_ids_R)
    write_tokens_reference(want, slots_R, positions_R, token_ids_R)
    assert torch.equal(got, want)


@pytest.mark.parametrize("write", [tables.write_tokens, write_tokens_reference])
def test_a_token_at_position_0_is_padding_and_not_written(write: Any) -> None:
    table_SL = torch.full((3, 5), -1, dtype=torch.int32, device=DEVICE)
    slots_R, positions_R = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        for numbers in ([0, 2, 0, 0], [0, 1, 4, 0])
    )
    write(table_SL, slots_R, positions_R, torch.arange(4, device=DEVICE) + 7)
    assert table_SL.tolist() == [[-1, -1, -1, -1, 9], [-1] * 5, [-1, 8, -1, -1, -1]]
