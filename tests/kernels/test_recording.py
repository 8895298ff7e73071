"""Kernels that are recorded and replayed compute what they compute when they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu import pool, recording
from kernels.cpu.backend import CPU_KERNELS
from kernels.cpu.jit import as_array
from kernels.cpu.parallel import parallel_for
from kernels.cpu.recording import Recording
from kernels.interface import GroupedCodes
from kernels.metadata import AttentionMetadata
from kernels.reference.grouped import pack_codes, quantize_groups

DIM = 128


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    pool.set_num_threads(request.param)
    yield
    pool.set_num_threads(1)


def attention_step(num_rows: int) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """What changes between steps, and a step of one attention layer with 4-bit codes, whose cache
    holds random numbers.
    """
    dtype = torch.bfloat16
    codes, zeros, scale = quantize_groups(torch.randn(4 * DIM, DIM), 32)
    qkv = CPU_KERNELS.int4.pack_weight(  # type: ignore[union-attr]
        GroupedCodes(words_YW=pack_codes(codes), zeros_YG=zeros, scale_YG=scale, num_rows=4 * DIM)
    )
    norm = torch.rand(DIM, dtype=dtype)
    k_shape, v_shape = CPU_KERNELS.kv_cache_shapes(num_rows, 64, 1, DIM)
    k_cache, v_cache = (torch.randn(shape).to(dtype) for shape in (k_shape, v_shape))
    x, residual = (torch.randn(num_rows, DIM).to(dtype) for _ in range(2))
    positions = torch.arange(num_rows, dtype=torch.int32)
    lens = positions + 1
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    table = torch.arange(num_rows, dtype=torch.int32).unsqueeze(1)
    places = 64 * torch.arange(num_rows) + positions
    attn = AttentionMetadata(
        query_start_B1=starts,
        seq_start_B1=starts,
        seq_lens_B=lens,
        block_table_BW=table,
        kv_places_T=places,
        max_query_len=1,
        max_seq_len=64,
    )
    cos_sin = torch.rand(64, DIM)

    def step() -> Tensor:
        hidden, _ = CPU_KERNELS.add_rms_norm(x, residual, norm, 1e-6)
        heads = CPU_KERNELS.int4.linear(hidden, qkv, None)  # type: ignore[union-attr]
        heads = heads.view(num_rows, 4, DIM)
        q = CPU_KERNELS.qk_norm_rope_store(
            heads, norm, norm, 1e-6, cos_sin, positions, k_cache, v_cache, places
        )
        out = CPU_KERNELS.paged_attention(q, k_cache, v_cache, attn, 0.1).flatten(1)
        out = CPU_KERNELS.silu_and_mul(out)
        CPU_KERNELS.call(lambda: out.add_(1))
        return out

    return [x, residual, positions, lens, table, places, k_cache, v_cache], step


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_replay_has_the_bits_of_the_calls(num_rows: int) -> None:
    inputs, step = attention_step(num_rows)
    with Recording() as recorded:
        out = step()
    assert recorded.is_complete
    x, residual, positions, lens, table, places, k_cache, v_cache = inputs
    for shift in (1, 2):
        x.copy_(torch.randn(x.shape))
        residual.copy_(torch.randn(x.shape))
        for numbers in (positions, lens, places):
            numbers += shift
        table.copy_(table.roll(1, 0))
        places.copy_(64 * table.flatten() + positions)
        cached = k_cache.clone(), v_cache.clone()
        garbage = [torch.full_like(out, torch.nan) for _ in range(100)]  # of freed memory
        recorded.replay()
        replayed, written = out.clone(), (k_cache.clone(), v_cache.clone())
        k_cache.copy_(cached[0])
        v_cache.copy_(cached[1])
        assert torch.equal(replayed, step())
        assert torch.equal(written[0], k_cache) and torch.equal(written[1], v_cache)
        del garbage


def test_calls_are_replayed_in_their_place() -> None:
    x, norm = torch.ones(1, DIM), torch.ones(DIM)
    seen: list[float] = []
    with Recording() as recorded:
        recording.call(lambda: seen.append(-1.0))
        out = CPU_KERNELS.rms_norm(x, norm, 1e-9)
        recording.call(lambda: seen.append(float(out[0, 0])))
    x.zero_()
    out.fill_(7)
    recorded.replay()
    assert seen == [-1.0, 1.0, -1.0, 0.0]


def test_products_of_onednn_are_refused() -> None:
    weight = CPU_KERNELS.pack_weight(torch.randn(64, 64))
    with Recording() as recorded:
        CPU_KERNELS.linear(torch.randn(1, 64), weight, None)
    assert not recorded.is_complete
    CPU_KERNELS.linear(torch.randn(1, 64), weight, None)  # nothing is recorded any more


@numba.njit
def check(index: int, numbers: Any) -> None:
    if numbers[index] < 0:
        raise ValueError("negative")
    numbers[index] += 1


@numba.njit(nogil=True)
def check_all(numbers: Any) -> None:
    parallel_for(len(numbers), check, (numbers,))


def test_a_task_that_raises_in_a_replay_is_an_error() -> None:
    numbers = torch.zeros(4, dtype=torch.int64)
    with Recording() as recorded:
        check_all(as_array(numbers))
    recorded.replay()
    assert numbers.tolist() == [2, 2, 2, 2]
    numbers[2] = -1
    with pytest.raises(RuntimeError, match="a task of a recorded loop"):
        recorded.replay()


def test_too_many_loops_are_an_error() -> None:
    numbers = np.zeros(1, np.int64)
    with pytest.raises(RuntimeError, match="more loops than"), Recording():
        for _ in range(recording._MAX_WORDS // 4):
            check_all(numbers)
    check_all(numbers)  # and nothing is written any more
    with Recording() as recorded:
        check_all(numbers)
    recorded.replay()
