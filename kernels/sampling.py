"""Sampling over a vocabulary split between ranks: what one rank does with its own shard.

Pure functions; the sampler puts the all-reduces between them. Everything that is summed or compared over ranks is an
integer, so a token does not depend on how the vocabulary is split or which rows share the batch:

- the *gap* of a token is (largest logit - its logit) / temperature, float32, 0 for the best token;
- its *weight* is floor(exp(-gap) * 2**40), int64; 2**18 tokens of it stay below 2**58;
- top-k, top-p and min-p are each a limit on the gap, inclusive: ties at the limit are kept;
- the bits of a gap, read as an integer, order as gaps do, so a limit is found exactly by radix descent over them.

Legend: B rows, R rows of a group, V this rank's columns (tokens of its shard), C the columns still looked at,
X bins of a histogram. A column is a token id less the start of the shard.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WEIGHT_ONE = 1 << 40
UNIFORM_BITS = 62
TOP_P_ONE = 1 << 30
# Three digits cover the 31 bits of a gap: (lowest bit, number of bits) from the highest down.
RADIX_PASSES = ((20, 11), (10, 10), (0, 10))
_BLOCK = 128
_MIN_BLOCK = 8
_ID_LIMIT = (1 << 31) - 1
_LOW_31 = (1 << 31) - 1
_LOW_32 = (1 << 32) - 1


# Uniform numbers


def uniform_bits(seeds_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """62 uniform bits a row, int64 in [0, 2**62), a function of (seed, position) only and the same on every device.

    Counter-based: output number `position` of the SplitMix64 generator (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators") whose state is the first output of the one started with `seed`.
    """
    start_B = _mix(seeds_B + _GOLDEN)
    return _shift_right(_mix(start_B + (positions_B + 1) * _GOLDEN), 64 - UNIFORM_BITS)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The SplitMix64 finaliser; int64 products wrap around as unsigned ones do."""
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)


# The best token


def row_best(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest logit, its column) of each row; the lowest column of equals. By block maxima: one pass over V."""
    block_max = _block_reduce(logits_BV, torch.amax)
    columns_BX = _block_columns(block_max.argmax(dim=1), logits_BV.shape[1])
    columns_B1 = columns_BX.gather(1, logits_BV.gather(1, columns_BX).argmax(dim=1, keepdim=True))
    return logits_BV.gather(1, columns_B1).squeeze(1), columns_B1.squeeze(1)


def pack(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """(float32 value, token id) as one int64: larger is a larger value, or the same value and a lower id."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 makes one zero of two
    return (_ordered(bits) << 32) + (_ID_LIMIT - ids)


def unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) of `pack`."""
    bits = _ordered(packed >> 32)
    return bits.to(torch.int32).view(torch.float32), _ID_LIMIT - (packed & _LOW_32)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Sign-extended float32 bits to integers in the order of the floats; its own inverse."""
    return bits ^ ((bits >> 63) & _LOW_31)


# Penalties


def penalize(
    logits_RV: torch.Tensor,
    prompt_RV: torch.Tensor,
    counts_RV: torch.Tensor,
    repetition_R: torch.Tensor,
    presence_R: torch.Tensor,
    frequency_R: torch.Tensor,
) -> torch.Tensor:
    """New logits. `prompt_RV`: bool, token is in the prompt; `counts_RV`: how often it is in the output.

    Repetition (Keskar et al. 2019, arXiv:1909.05858) first, over both: a positive logit is divided by the penalty, a
    negative one multiplied. Then, over the output, the frequency penalty a time and the presence penalty once.
    """
    used_RV = counts_RV > 0
    repetition_R1 = repetition_R[:, None]
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where(prompt_RV | used_RV, repeated_RV, logits_RV)
    return logits_RV - (counts_RV * frequency_R[:, None] + used_RV * presence_R[:, None])


# Gaps and weights


def token_gaps(logits_RV: torch.Tensor, max_R: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    """(max - logit) / temperature, at least 0, infinite for a masked token. No temperature can overflow the best."""
    return (max_R[:, None] - logits_RV).div_(temperature_R[:, None])


def token_weights(gaps_RC: torch.Tensor, limit_R: torch.Tensor | None = None) -> torch.Tensor:
    """floor(exp(-gap) * 2**40), int64, and 0 beyond the limit. The exponential is float32, the scaling exact."""
    weights_RC = gaps_RC.neg().exp_().mul_(float(WEIGHT_ONE)).to(torch.int64)
    return weights_RC if limit_R is None else weights_RC.mul_(gaps_RC <= limit_R[:, None])


# Limits by radix descent


def gap_histogram(
    gaps_RC: torch.Tensor, prefix_R: torch.Tensor, radix_pass: int, weights_RC: torch.Tensor | None
) -> torch.Tensor:
    """Weights (or, with none, tokens) by the digit of this pass, int64 [R, X], of the gaps that start with `prefix_R`.

    `prefix_R` int32 holds the digits found so far; it is ignored in pass 0.
    """
    shift, num_bits = RADIX_PASSES[radix_pass]
    heads_RC = gaps_RC.view(torch.int32) >> shift
    digits_RC = (heads_RC & ((1 << num_bits) - 1)).to(torch.int64)
    if weights_RC is None:
        weights_RC = torch.ones_like(digits_RC)
    if radix_pass > 0:
        weights_RC = weights_RC * ((heads_RC >> num_bits) == prefix_R[:, None])
    histogram_RX = torch.zeros(len(gaps_RC), 1 << num_bits, dtype=torch.int64, device=gaps_RC.device)
    return histogram_RX.scatter_add_(1, digits_RC, weights_RC)


def next_digit(histogram_RX: torch.Tensor, wanted_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the first bin up to which `wanted_R` is reached, what is still wanted of that bin)."""
    reached_RX = histogram_RX.cumsum(dim=1)
    digit_R1 = (reached_RX < wanted_R[:, None]).sum(dim=1, keepdim=True).clamp_(max=histogram_RX.shape[1] - 1)
    before_R1 = reached_RX.gather(1, digit_R1) - histogram_RX.gather(1, digit_R1)
    return digit_R1.squeeze(1), wanted_R - before_R1.squeeze(1)


def append_digit(prefix_R: torch.Tensor, digit_R: torch.Tensor, radix_pass: int) -> torch.Tensor:
    """The digits found so far with one more; after the last pass, the bits of the limit."""
    return (prefix_R << RADIX_PASSES[radix_pass][1]) + digit_R.to(torch.int32)


def top_p_target(mass_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Least kept weight, ceil(mass * top_p / 2**30) and at least 1, exactly; `top_p_R` is in units of 2**-30."""
    high_R, low_R = mass_R >> 31, mass_R & _LOW_31
    rest_R = low_R * top_p_R + (TOP_P_ONE - 1)
    return (high_R * top_p_R * 2 + (rest_R >> 30)).clamp_(min=1)


# Fewer columns


def kth_gap_bound(gaps_RV: torch.Tensor, top_k_R: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """A gap no smaller than the k-th smallest of the row, infinite where none is known cheaply.

    The k-th smallest of the block minima is one: k blocks have a token within it. Many more blocks than tokens wanted
    (`max_top_k`, the largest of `top_k_R`) make it tight.
    """
    width = min(_BLOCK, max(_MIN_BLOCK, gaps_RV.shape[1] // (8 * max_top_k)))
    minima_RX = _block_reduce(gaps_RV, torch.amin, width).sort(dim=1).values
    bound_R = minima_RX.gather(1, (top_k_R - 1).clamp(0, minima_RX.shape[1] - 1)[:, None]).squeeze(1)
    return torch.where(top_k_R <= minima_RX.shape[1], bound_R, torch.inf)


def compact(gaps_RV: torch.Tensor, bound_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gaps, columns) [R, C] of the tokens within the bound, in order; infinite gaps fill up the shorter rows.

    C depends on the values, so this is for the CPU: on a GPU it would make the host wait.
    """
    rows_N, columns_N = (gaps_RV <= bound_R[:, None]).nonzero(as_tuple=True)
    counts_R = torch.bincount(rows_N, minlength=len(gaps_RV))
    places_N = torch.arange(len(rows_N), device=rows_N.device) - (counts_R.cumsum(0) - counts_R)[rows_N]
    width = max(1, int(counts_R.max()))
    gaps_RC = torch.full((len(gaps_RV), width), torch.inf, device=gaps_RV.device)
    columns_RC = torch.zeros(len(gaps_RV), width, dtype=torch.int64, device=gaps_RV.device)
    gaps_RC[rows_N, places_N] = gaps_RV[rows_N, columns_N]
    columns_RC[rows_N, places_N] = columns_N
    return gaps_RC, columns_RC


# The pick


def pick_index(bits_R: torch.Tensor, total_R: torch.Tensor) -> torch.Tensor:
    """floor(bits / 2**62 * total) exactly, for a total below 2**58: products of 31-bit halves never overflow."""
    bits_high, bits_low = bits_R >> 31, bits_R & _LOW_31
    total_high, total_low = total_R >> 31, total_R & _LOW_31
    middle = total_high * bits_low + total_low * bits_high + ((total_low * bits_low) >> 31)
    return total_high * bits_high + (middle >> 31)


def block_sums(weights_RC: torch.Tensor) -> torch.Tensor:
    """Weights by block of columns, [R, X]: all that needs to be kept of a row until its place is known."""
    return _block_reduce(weights_RC, torch.sum)


def find_block(sums_RX: torch.Tensor, index_R: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(columns of the block where the running sum first exceeds the index, what of the index is left in it)."""
    reached_RX = sums_RX.cumsum(dim=1)
    block_R1 = (reached_RX <= index_R[:, None]).sum(dim=1, keepdim=True).clamp_(max=sums_RX.shape[1] - 1)
    before_R1 = reached_RX.gather(1, block_R1) - sums_RX.gather(1, block_R1)
    return _block_columns(block_R1.squeeze(1), num_columns), index_R - before_R1.squeeze(1)


def find_in_block(weights_RX: torch.Tensor, columns_RX: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """The column where the running sum of the block's weights first exceeds the index.

    Where a short block repeats its last column, the sum exceeds it at the first occurrence.
    """
    place_R1 = (weights_RX.cumsum(dim=1) <= index_R[:, None]).sum(dim=1, keepdim=True)
    return columns_RX.gather(1, place_R1.clamp_(max=columns_RX.shape[1] - 1)).squeeze(1)


def find_column(weights_RC: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """The column where the running sum of weights first exceeds `index_R`, for 0 <= index < the sum of the row."""
    columns_RX, rest_R = find_block(block_sums(weights_RC), index_R, weights_RC.shape[1])
    return find_in_block(weights_RC.gather(1, columns_RX), columns_RX, rest_R)


def _block_reduce(values_RC: torch.Tensor, reduce: Callable[..., torch.Tensor], width: int = _BLOCK) -> torch.Tensor:
    """`reduce` over blocks of `width` columns, the last one shorter."""
    body = values_RC.shape[1] // width * width
    parts = [reduce(values_RC[:, :body].view(len(values_RC), -1, width), dim=2)] if body else []
    if body < values_RC.shape[1]:
        parts.append(reduce(values_RC[:, body:], dim=1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _block_columns(block_R: torch.Tensor, num_columns: int) -> torch.Tensor:
    """[R, X] the columns of one block a row; a short last block repeats its last column."""
    columns_RX = block_R[:, None] * _BLOCK + torch.arange(_BLOCK, device=block_R.device)
    return columns_RX.clamp_(max=num_columns - 1)
