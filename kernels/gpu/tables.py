"""The tables of a batch on a GPU, in Triton: one launch each.

Legend: S slots, L token columns, W blocks in a row's table, T tokens of the step, R sampling rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS_PER_PROGRAM = 128


def look_up_tokens(
    tokens_SL: Tensor,
    block_table_SW: Tensor,
    slots_T: Tensor,
    positions_T: Tensor,
    num_stored_tokens_T: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """As `look_up_tokens_reference`; all tensors are contiguous. A position below
    `num_stored_tokens_T`, how many tokens the cache held when the row was admitted, has no place;
    so padding of a graph, at position 0, has 1.
    """
    token_ids_T = torch.empty_like(slots_T)
    kv_places_T = torch.empty_like(slots_T, dtype=torch.int64)
    _look_up_tokens[(triton.cdiv(len(slots_T), _TOKENS_PER_PROGRAM),)](
        tokens_SL,
        block_table_SW,
        slots_T,
        positions_T,
        num_stored_tokens_T,
        token_ids_T,
        kv_places_T,
        len(slots_T),
        tokens_SL.stride(0),
        block_table_SW.stride(0),
        block_size,
        TOKENS=_TOKENS_PER_PROGRAM,
    )
    return token_ids_T, kv_places_T


def write_tokens(
    tokens_SL: Tensor, slots_R: Tensor, positions_R: Tensor, token_ids_R: Tensor
) -> None:
    """As `write_tokens_reference`, nowhere at position 0; all tensors are contiguous."""
    _write_tokens[(triton.cdiv(len(slots_R), _TOKENS_PER_PROGRAM),)](
        tokens_SL,
        slots_R,
        positions_R,
        token_ids_R,
        len(slots_R),
        tokens_SL.stride(0),
        TOKENS=_TOKENS_PER_PROGRAM,
    )


_VARYING_INTS = ["num_tokens", "token_stride", "table_stride", "block_size"]


@triton.jit(do_not_specialize=_VARYING_INTS)
def _look_up_tokens(
    tokens_SL: tl.tensor,
    block_table_SW: tl.tensor,
    slots_T: tl.tensor,
    positions_T: tl.tensor,
    num_stored_tokens_T: tl.tensor,
    token_ids_T: tl.tensor,
    kv_places_T: tl.tensor,
    num_tokens: tl.tensor,
    token_stride: tl.tensor,
    table_stride: tl.tensor,
    block_size: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    index_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask_T = index_T < num_tokens
    row_slot_T = tl.load(slots_T + index_T, mask=mask_T, other=0).to(tl.int64)
    position_T = tl.load(positions_T + index_T, mask=mask_T, other=0)
    stored_len_T = tl.load(num_stored_tokens_T + index_T, mask=mask_T, other=0)
    token_id_T = tl.load(tokens_SL + row_slot_T * token_stride + position_T, mask=mask_T, other=0)
    table_offset_T = row_slot_T * table_stride + position_T // block_size
    block_T = tl.load(block_table_SW + table_offset_T, mask=mask_T, other=0).to(tl.int64)
    kv_place_T = block_T * block_size + position_T % block_size
    tl.store(token_ids_T + index_T, token_id_T, mask=mask_T)
    tl.store(
        kv_places_T + index_T, tl.where(position_T < stored_len_T, -1, kv_place_T), mask=mask_T
    )


@triton.jit(do_not_specialize=["num_rows", "token_stride"])
def _write_tokens(
    tokens_SL: tl.tensor,
    slots_R: tl.tensor,
    positions_R: tl.tensor,
    token_ids_R: tl.tensor,
    num_rows: tl.tensor,
    token_stride: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    index_R = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask_R = index_R < num_rows
    slot_R = tl.load(slots_R + index_R, mask=mask_R, other=0).to(tl.int64)
    position_R = tl.load(positions_R + index_R, mask=mask_R, other=0)
    token_id_R = tl.load(token_ids_R + index_R, mask=mask_R, other=0)
    places_R = tokens_SL + slot_R * token_stride + position_R
    tl.store(places_R, token_id_R.to(tl.int32), mask=mask_R & (position_R > 0))
