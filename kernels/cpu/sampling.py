"""Sampling on a CPU: the kernels of `kernels/reference/sampling.py`, where functions of the same
names say what they compute, each in one pass over the logits it needs.

bfloat16 logits are read as they are. A block whose largest logit lies beyond a limit is never read:
after `row_best`, most kernels read few blocks. Tasks are runs of blocks, so that one row uses every
thread. Compiled without reassociation or contraction: a gap or a weight has the same bits in a
vector loop, in its tail and alone; sums are integer sums.
A gap is (largest logit of all ranks - logit) / temperature, a weight floor(exp(-gap) * 2**40), a
target weight where the drawn token lies in the running sum of this rank's weights. An entry of
a list is a gap and how many tokens it stands for; `prefix_R` is the digits of a gap that earlier
passes found, `top_p_R` in units of 2**-30.
Legend: B rows, R rows of one draw or with a mask, V this rank's columns (tokens of its shard), X
blocks of columns or bins of a histogram, K the largest top-k of a draw, N ranks, W words of a mask,
S parts of a row, each counted by one task; a block is a row's `BLOCK_COLUMNS` columns, the last one
shorter.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import sampling_limits, sampling_weights
from kernels.cpu.jit import as_array
from kernels.cpu.pool import get_num_threads
from kernels.cpu.sampling_weights import GapArrays
from kernels.interface import GapRows
from kernels.reference.sampling import BLOCK_COLUMNS, RADIX_PASSES
from kernels.reference.sampling import pack_value_and_id as pack_value_and_id
from kernels.reference.sampling import target_weight as target_weight
from kernels.reference.sampling import unpack_value_and_id as unpack_value_and_id


def row_best(logits_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_columns = logits_BV.shape
    block_max_BX = torch.empty(num_rows, -(-num_columns // BLOCK_COLUMNS), dtype=torch.float32)
    max_B = torch.empty(num_rows)
    column_B = torch.empty(num_rows, dtype=torch.int64)
    sampling_weights.row_best(
        as_array(logits_BV), block_max_BX.numpy(), max_B.numpy(), column_B.numpy()
    )
    return max_B, column_B, block_max_BX


def block_weights(gap_rows: GapRows, gap_limit_R: Tensor) -> tuple[Tensor, Tensor]:
    sums_RX = torch.empty(len(gap_rows.rows_R), gap_rows.block_max_BX.shape[1], dtype=torch.int64)
    total_R = torch.empty(len(gap_rows.rows_R), dtype=torch.int64)
    sampling_weights.block_weights(
        _as_gap_arrays(gap_rows), gap_limit_R.numpy(), sums_RX.numpy(), total_R.numpy()
    )
    return sums_RX, total_R


def pick_column(
    gap_rows: GapRows, gap_limit_R: Tensor, sums_RX: Tensor, target_weight_R: Tensor
) -> Tensor:
    column_R = torch.empty_like(target_weight_R)
    arrays = (tensor.numpy() for tensor in (gap_limit_R, sums_RX, target_weight_R, column_R))
    sampling_weights.pick_column(_as_gap_arrays(gap_rows), *arrays)
    return column_R


def list_nearest(gap_rows: GapRows, top_k_R: Tensor, max_top_k: int) -> Tensor:
    lists_RK = torch.empty(len(gap_rows.rows_R), max_top_k, dtype=torch.int64)
    sampling_limits.list_nearest(_as_gap_arrays(gap_rows), top_k_R.numpy(), lists_RK.numpy())
    return lists_RK


def gap_limits_from_lists(
    lists_NRK: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_gap_limit_R: Tensor
) -> tuple[Tensor, Tensor]:
    gap_limit_R = torch.empty_like(min_p_gap_limit_R)
    kept_weight_NR = torch.empty(lists_NRK.shape[:2], dtype=torch.int64)
    arrays = (
        tensor.numpy()
        for tensor in (lists_NRK, top_k_R, top_p_R, min_p_gap_limit_R, gap_limit_R, kept_weight_NR)
    )
    sampling_limits.gap_limits_from_lists(*arrays)
    return gap_limit_R, kept_weight_NR


def gap_histogram(
    gap_rows: GapRows, gap_limit_R: Tensor, prefix_R: Tensor, radix_pass: int, by_weight: bool
) -> Tensor:
    shift, num_bits = RADIX_PASSES[radix_pass]
    num_rows = len(gap_rows.rows_R)
    # One histogram per task; with few rows, each row is split so that every thread has a part.
    num_parts = -(-get_num_threads() // max(1, num_rows))
    histogram_RSX = torch.zeros(num_rows, num_parts, 1 << num_bits, dtype=torch.int64)
    bounds, histogram = (gap_limit_R.numpy(), prefix_R.numpy()), histogram_RSX.numpy()
    sampling_limits.gap_histogram(
        _as_gap_arrays(gap_rows), *bounds, shift, num_bits, by_weight, histogram
    )
    return histogram_RSX.sum(dim=1)


def mask_columns(logits_BV: Tensor, rows_R: Tensor, mask_words_RW: Tensor, first_bit: int) -> None:
    logits = as_array(logits_BV)
    minus_infinity = np.uint16(0xFF80) if logits_BV.dtype is torch.bfloat16 else np.float32(-np.inf)
    sampling_limits.mask_columns(
        logits, as_array(rows_R), as_array(mask_words_RW), first_bit, minus_infinity
    )


def run_each_once(dtype: torch.dtype) -> None:
    """Run every kernel on one logit of this dtype, so that it is compiled."""
    logits_BV = torch.zeros(1, 1, dtype=dtype)
    max_B, column_B, block_max_BX = row_best(logits_BV)
    gap_rows = GapRows(
        logits_BV=logits_BV,
        block_max_BX=block_max_BX,
        rows_R=column_B,
        max_R=max_B,
        temperature_R=max_B + 1,
    )
    ones_R = column_B + 1
    gap_limit_R, _ = gap_limits_from_lists(
        list_nearest(gap_rows, ones_R, 1)[None], ones_R, ones_R, max_B
    )
    gap_histogram(gap_rows, gap_limit_R, column_B.to(torch.int32), 0, False)
    pick_column(gap_rows, gap_limit_R, block_weights(gap_rows, gap_limit_R)[0], column_B)
    mask_columns(logits_BV, column_B, column_B[None].to(torch.int32), 0)


def _as_gap_arrays(gap_rows: GapRows) -> GapArrays:
    row_tensors = (gap_rows.block_max_BX, gap_rows.rows_R, gap_rows.max_R, gap_rows.temperature_R)
    logits_BV = as_array(gap_rows.logits_BV)
    return logits_BV, *(tensor.numpy() for tensor in row_tensors)  # type: ignore[return-value]
