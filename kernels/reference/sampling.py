"""Sampling over a vocabulary split between ranks: what one rank does with its own shard.

Pure functions; the sampler calls the all-reduces between them. Everything that is summed or
compared over ranks is an integer, so a token does not depend on how the vocabulary is split or
which rows share the batch:

- the *gap* of a token is (largest logit - its logit) / temperature, float32, 0 for the best token;
- its *weight* is floor(exp(-gap) * 2**40), int64; 2**18 tokens of it stay below 2**58;
- top-k, top-p and min-p are each an inclusive limit on the gap: ties at the limit are kept;
- the bits of a gap, read as an integer, have the same order as gaps, so a limit is found exactly by
  radix descent over them;
- a NaN logit counts as -infinity and is never chosen.

What reads the logits is a method of `SamplingKernels`, here in plain PyTorch. Gaps have the same
bits in every backend; weights may differ by the rounding of the exponential, but within one backend
they are one function of the gap.

Legend: B rows, R rows of one draw, with penalties, or with a mask, V this rank's columns (tokens of
its shard), X blocks of columns or bins of a histogram, K the largest top-k of a draw, N ranks, W
words of a mask, C any columns. A column is a token id minus the start of the shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import GapRows

WEIGHT_ONE = 1 << 40
UNIFORM_BITS = 62
# The increment of SplitMix64 and the two factors of its finalizer, as signed numbers.
SPLITMIX64 = tuple(
    word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
TOP_P_ONE = 1 << 30
# Three digits cover the 31 bits of a gap: (lowest bit, number of bits) from the highest down.
RADIX_PASSES = ((20, 11), (10, 10), (0, 10))
BLOCK_COLUMNS = 128
# The largest top-k whose nearest tokens are listed; beyond it, limits are found by radix descent.
MAX_LISTED_TOP_K = 256
INFINITY_BITS = 0x7F800000
_ID_LIMIT = (1 << 31) - 1
_LOW_31_BITS = (1 << 31) - 1
_LOW_32_BITS = (1 << 32) - 1


# Uniform numbers


def uniform_bits(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """62 uniform bits per row, int64 in [0, 2**62), a function of (seed, position) only and the
    same on every device.

    Counter-based: output number `position` of the SplitMix64 generator (Steele, Lea and Flood 2014,
    "Fast splittable pseudorandom number generators") whose state is the first output of the one
    started with `seed`.
    """
    start_B = _mix(seeds_B + SPLITMIX64[0])
    return _shift_right(_mix(start_B + (positions_B + 1) * SPLITMIX64[0]), 64 - UNIFORM_BITS)


def _mix(z: Tensor) -> Tensor:
    """The SplitMix64 finalizer; int64 products wrap around as unsigned ones do."""
    z = (z ^ _shift_right(z, 30)) * SPLITMIX64[1]
    z = (z ^ _shift_right(z, 27)) * SPLITMIX64[2]
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


# The best token


def row_best(logits_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(largest logit float32 [B], its column int64 [B], the lowest of equals; largest of each block
    float32 [B, X]).
    """
    logits_BV = logits_BV.to(torch.float32)
    logits_BV = torch.where(logits_BV.isnan(), -torch.inf, logits_BV)
    column_B1 = logits_BV.argmax(dim=1, keepdim=True)
    max_B = logits_BV.gather(1, column_B1).squeeze(1)
    return max_B, column_B1.squeeze(1), _blocks(logits_BV, -torch.inf).amax(dim=2)


def pack_value_and_id(values: Tensor, ids: Tensor) -> Tensor:
    """(float32 value, token id) as one int64: larger is a larger value, or the same value and a
    lower id.
    """
    value_bits = (values + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    return (_ordered_bits(value_bits) << 32) + (_ID_LIMIT - ids)


def unpack_value_and_id(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(values, ids) of `pack_value_and_id`."""
    bits = _ordered_bits(packed >> 32)
    return bits.to(torch.int32).view(torch.float32), _ID_LIMIT - (packed & _LOW_32_BITS)


def _ordered_bits(bits: Tensor) -> Tensor:
    """Sign-extended float32 bits to integers in the order of the floats; its own inverse."""
    return bits ^ ((bits >> 63) & _LOW_31_BITS)


# Penalties


def penalize(
    logits_RV: Tensor,
    is_in_prompt_RV: Tensor,
    counts_RV: Tensor,
    repetition_R: Tensor,
    presence_R: Tensor,
    frequency_R: Tensor,
) -> Tensor:
    """New logits. `is_in_prompt_RV`: bool, token is in the prompt; `counts_RV`: how often it is in
    the output.

    Repetition (Keskar et al. 2019, arXiv:1909.05858) first, over both: a positive logit is divided
    by the penalty, a negative one multiplied. Then, over the output, the frequency penalty per
    occurrence and the presence penalty once.
    """
    is_in_output_RV = counts_RV > 0
    repetition_R1 = repetition_R[:, None]
    penalized_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where(is_in_prompt_RV | is_in_output_RV, penalized_RV, logits_RV)
    return logits_RV - (counts_RV * frequency_R[:, None] + is_in_output_RV * presence_R[:, None])


# Gaps and weights


def token_gaps(logits_RV: Tensor, max_R: Tensor, temperature_R: Tensor) -> Tensor:
    """(max - logit) / temperature, at least 0, infinite for a masked token. The best token's gap is
    0 at any temperature.
    """
    return (max_R[:, None] - logits_RV).div_(temperature_R[:, None])


def token_weights(gaps_RC: Tensor, gap_limit_R: Tensor | None = None) -> Tensor:
    """floor(exp(-gap) * 2**40), int64, and 0 beyond the limit. The exponential is float32, the
    scaling exact.
    """
    weights_RC = gaps_RC.neg().exp_().mul_(float(WEIGHT_ONE)).to(torch.int64)
    return (
        weights_RC
        if gap_limit_R is None
        else torch.where(gaps_RC <= gap_limit_R[:, None], weights_RC, 0)
    )


def block_weights(gap_rows: GapRows, gap_limit_R: Tensor) -> tuple[Tensor, Tensor]:
    """Weights within the limit (float32, inclusive): (sums by block [R, X], sums by row [R]),
    int64.
    """
    sums_RX = _blocks(token_weights(_all_gaps(gap_rows), gap_limit_R), 0).sum(dim=2)
    return sums_RX, sums_RX.sum(dim=1)


def _all_gaps(gap_rows: GapRows) -> Tensor:
    """Gaps of the whole rows [R, V]. The gap of a NaN logit is NaN and lies within no limit."""
    logits_RV = gap_rows.logits_BV.index_select(0, gap_rows.rows_R).to(torch.float32)
    return token_gaps(logits_RV, gap_rows.max_R, gap_rows.temperature_R)


# Limits from a list of the nearest tokens


def list_nearest(gap_rows: GapRows, top_k_R: Tensor, max_top_k: int) -> Tensor:
    """The k smallest gaps per row, int64 [R, K], ascending: the high half holds the bits of the
    gap, the low half the number of tokens it stands for, which is 1, except that entry k also
    counts further tokens with the same gap. (infinity, 0) stands for no token.

    `top_k_R` int64, 1 to `max_top_k` = K, which the host knows.
    """
    gaps_RV = _all_gaps(gap_rows)
    nearest_gaps_RK = gaps_RV.topk(
        min(max_top_k, gaps_RV.shape[1]), dim=1, largest=False, sorted=True
    ).values
    nearest_gaps_RK = nearest_gaps_RK.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    nearest_gaps_RK = torch.nn.functional.pad(
        nearest_gaps_RK, (0, max_top_k - nearest_gaps_RK.shape[1]), value=torch.inf
    )
    last_entry_R1 = top_k_R[:, None] - 1
    last_gap_R1 = nearest_gaps_RK.gather(1, last_entry_R1)
    is_listed_RK = torch.arange(max_top_k, device=nearest_gaps_RK.device) <= last_entry_R1
    nearest_gaps_RK = torch.where(is_listed_RK, nearest_gaps_RK, torch.inf)
    num_ties_R1 = (gaps_RV == last_gap_R1).sum(1, keepdim=True) - (
        nearest_gaps_RK == last_gap_R1
    ).sum(1, keepdim=True)
    counts_RK = nearest_gaps_RK.isfinite().to(torch.int64)
    counts_RK.scatter_add_(1, last_entry_R1, torch.where(last_gap_R1.isfinite(), num_ties_R1, 0))
    return (nearest_gaps_RK.view(torch.int32).to(torch.int64) << 32) + counts_RK


def gap_limits_from_lists(
    lists_NRK: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_gap_limit_R: Tensor
) -> tuple[Tensor, Tensor]:
    """(gap limit float32 [R] of top-k, then top-p, then min-p over all ranks; weight each rank
    keeps, int64 [N, R]).

    `lists_NRK`: `list_nearest` of every rank. No rank keeps a token beyond its own k nearest and
    their ties, so the lists contain everything needed. `top_p_R` int64 in units of 2**-30;
    `min_p_gap_limit_R` float32, infinite for none.
    """
    gaps_RC, counts_RC = _entry_gaps_and_counts(
        lists_NRK.transpose(0, 1).flatten(1).sort(dim=1).values
    )
    top_k_gap_limit_R = _gap_at_target(gaps_RC, counts_RC, top_k_R)
    weights_RC = token_weights(gaps_RC, top_k_gap_limit_R) * counts_RC
    top_p_gap_limit_R = _gap_at_target(
        gaps_RC, weights_RC, top_p_target(weights_RC.sum(dim=1), top_p_R)
    )
    top_p_gap_limit_R = torch.where(top_p_R < TOP_P_ONE, top_p_gap_limit_R, torch.inf)
    gap_limit_R = torch.minimum(
        torch.minimum(top_k_gap_limit_R, top_p_gap_limit_R), min_p_gap_limit_R
    )
    kept_weights = [
        token_weights(gaps_RK, gap_limit_R) * counts_RK
        for gaps_RK, counts_RK in map(_entry_gaps_and_counts, lists_NRK)
    ]
    return gap_limit_R, torch.stack(kept_weights).sum(dim=2)


def _entry_gaps_and_counts(lists_RC: Tensor) -> tuple[Tensor, Tensor]:
    """(gaps, counts) of entries of `list_nearest`."""
    return (lists_RC >> 32).to(torch.int32).view(torch.float32), lists_RC & _LOW_32_BITS


def _gap_at_target(gaps_RC: Tensor, amounts_RC: Tensor, target_R: Tensor) -> Tensor:
    """The gap at which the running sum reaches `target_R`, infinite where it never does."""
    place_R1 = (amounts_RC.cumsum(dim=1) < target_R[:, None]).sum(dim=1, keepdim=True)
    return torch.nn.functional.pad(gaps_RC, (0, 1), value=torch.inf).gather(1, place_R1).squeeze(1)


# Limits by radix descent


def gap_histogram(
    gap_rows: GapRows, gap_limit_R: Tensor, prefix_R: Tensor, radix_pass: int, by_weight: bool
) -> Tensor:
    """Tokens, or their weights, by the digit of this pass, int64 [R, X]: of the gaps up to
    `gap_limit_R` (float32) that start with the digits found so far, `prefix_R` int32, 0 in pass 0.
    """
    shift, num_bits = RADIX_PASSES[radix_pass]
    gaps_RV = _all_gaps(gap_rows)
    gap_prefixes_RV = gaps_RV.view(torch.int32) >> shift
    digits_RV = (gap_prefixes_RV & ((1 << num_bits) - 1)).to(torch.int64)
    is_counted_RV = (gaps_RV <= gap_limit_R[:, None]) & (
        (gap_prefixes_RV >> num_bits) == prefix_R[:, None]
    )
    amounts_RV = (
        token_weights(gaps_RV) * is_counted_RV if by_weight else is_counted_RV.to(torch.int64)
    )
    histogram_RX = torch.zeros(
        len(gaps_RV), 1 << num_bits, dtype=torch.int64, device=gaps_RV.device
    )
    return histogram_RX.scatter_add_(1, digits_RV, amounts_RV)


def next_digit(histogram_RX: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """(the first bin up to which `target_R` is reached, else the last one, how much of that bin is
    still wanted).
    """
    running_sum_RX = histogram_RX.cumsum(dim=1)
    digit_R1 = (
        (running_sum_RX < target_R[:, None])
        .sum(dim=1, keepdim=True)
        .clamp_(max=histogram_RX.shape[1] - 1)
    )
    sum_before_R1 = running_sum_RX.gather(1, digit_R1) - histogram_RX.gather(1, digit_R1)
    return digit_R1.squeeze(1), target_R - sum_before_R1.squeeze(1)


def top_p_target(weight_R: Tensor, top_p_R: Tensor) -> Tensor:
    """What top-p keeps at the least of the weight `weight_R`: ceil(weight * top_p / 2**30) and at
    least 1, exactly; `top_p_R` is in units of 2**-30.
    """
    high_R, low_R = weight_R >> 31, weight_R & _LOW_31_BITS
    low_product_R = low_R * top_p_R + (TOP_P_ONE - 1)
    return (high_R * top_p_R * 2 + (low_product_R >> 30)).clamp_(min=1)


# The pick


def target_weight(
    seeds_R: Tensor, positions_R: Tensor, kept_weight_NR: Tensor, rank: int
) -> Tensor:
    """Where the drawn token of each row lies in the running sum of this rank's weights, int64 [R];
    below 0 or beyond them where another rank has it. The ranks' weights, `kept_weight_NR` int64,
    follow each other in token-id order.

    `seeds_R`, `positions_R`: int64, see `uniform_bits`.
    """
    target_weight_R = uniform_below(uniform_bits(seeds_R, positions_R), kept_weight_NR.sum(dim=0))
    return target_weight_R - kept_weight_NR[:rank].sum(dim=0)


def uniform_below(bits_R: Tensor, total_R: Tensor) -> Tensor:
    """A number from 0 to total - 1, uniform as the bits are: floor(bits / 2**62 * total) exactly,
    for a total below 2**58: products of 31-bit halves never overflow.
    """
    bits_high, bits_low = bits_R >> 31, bits_R & _LOW_31_BITS
    total_high, total_low = total_R >> 31, total_R & _LOW_31_BITS
    middle = total_high * bits_low + total_low * bits_high + ((total_low * bits_low) >> 31)
    return total_high * bits_high + (middle >> 31)


def pick_column(
    gap_rows: GapRows, gap_limit_R: Tensor, sums_RX: Tensor, target_weight_R: Tensor
) -> Tensor:
    """The column where the running sum of the weights within the limit first exceeds
    `target_weight_R`, int64 [R]; -1 where that weight is not in this shard: below 0, or not below
    the sum of the row.

    `sums_RX`: from `block_weights`, for backends that look into one block alone.
    """
    running_sum_RV = token_weights(_all_gaps(gap_rows), gap_limit_R).cumsum(dim=1)
    column_R = (running_sum_RV <= target_weight_R[:, None]).sum(dim=1)
    in_shard_R = (target_weight_R >= 0) & (column_R < running_sum_RV.shape[1])
    return torch.where(in_shard_R, column_R, -1)


def _blocks(values_RC: Tensor, padding: float) -> Tensor:
    """[R, X, `BLOCK_COLUMNS`]: the values by block, with padding at the end of the last one."""
    num_padding_columns = -values_RC.shape[1] % BLOCK_COLUMNS
    padded_RC = torch.nn.functional.pad(values_RC, (0, num_padding_columns), value=padding)
    return padded_RC.view(len(values_RC), -1, BLOCK_COLUMNS)


def mask_columns(logits_BV: Tensor, rows_R: Tensor, mask_words_RW: Tensor, first_bit: int) -> None:
    """Set the columns of rows `rows_R` whose bit is 0 to minus infinity, in place.

    logits_BV: float32 or bfloat16, contiguous. rows_R: int64, no row twice. mask_words_RW: int32,
    bits from the lowest of the first word on; column 0 is bit `first_bit`, which is below 32.
    """
    columns_V = torch.arange(logits_BV.shape[1], device=logits_BV.device) + first_bit
    bits_RV = mask_words_RW.index_select(1, columns_V >> 5) >> (columns_V & 31).to(torch.int32)
    logits_BV[rows_R] = logits_BV[rows_R].masked_fill_((bits_RV & 1) == 0, -torch.inf)
