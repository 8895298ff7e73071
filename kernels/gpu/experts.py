"""Mixtures of experts on a GPU, in Triton: five launches per layer.

1. `_route` chooses the experts of each token.
2. `_sort_pairs` sorts the pairs of a token and one of its experts by expert, each expert's in the
   order of the tokens, and cuts them into tiles of rows that share an expert.
3. `_multiply_tile` multiplies a tile with the gate and up of its expert and gates the product,
4. and again with down, and stores each row at the place of its pair.
5. `_combine_products` takes the weighted sum of each token's products, in the order of its experts.

How many tiles there are depends on the choice, so grids follow a bound, and programs without a tile
return at once: CUDA graphs can hold every launch. Decode steps read each touched expert once; their
tiles are low, and features are cut finely, so that the programs of a few experts fill a GPU.
Products are float32 sums in one order along the features, rounded as the reference's are.

Legend: T tokens, X experts, K experts of a token, P = T * K pairs, M tiles, E features, F features
of an expert on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import ExpertWeights
from kernels.reference.experts import ReferenceExperts

_CHUNK_PAIRS = 1024, 4096  # pairs that a program sorts at once: of few pairs, of many
_FEATURES_PER_PROGRAM = 1024  # features of a token's products that a program of four warps adds up
_TILE_WORDS = tl.constexpr(3)  # of a tile: its expert, its first place, its number of rows
_NO_EXPERT = tl.constexpr(1 << 30)  # above all, for a minimum; not what padding chooses
_MIN_FLOAT32 = tl.constexpr(torch.finfo(torch.float32).min)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """How products are cut: rows of a tile, output features of a program, input features of a
    step.
    """

    rows: int
    features: int
    step: int
    num_warps: int
    num_stages: int


def choose_tile_config(rows_per_expert: float, itemsize: int) -> TileConfig:
    """Tiles for products of about so many rows with each expert. There are two kinds, so that the
    smallest and the largest step compile all that others use.
    """
    if itemsize == 4:  # float32 has no matrix instructions that are exact
        return TileConfig(rows=16, features=32, step=32, num_warps=4, num_stages=2)
    if rows_per_expert <= 16:
        return TileConfig(rows=16, features=32, step=128, num_warps=4, num_stages=4)
    return TileConfig(rows=128, features=64, step=64, num_warps=8, num_stages=3)


class TritonExperts(ReferenceExperts):
    """`ExpertKernels` in Triton. Each kernel is compiled at its first use."""

    def route(
        self,
        logits_TX: Tensor,
        num_experts_per_token: int,
        normalizes_weights: bool,
        num_live_tokens_1: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Tensor]:
        """As `route_reference`, except that NaN and minus infinity count as the smallest number.
        One program per token.
        """
        assert logits_TX.is_contiguous()
        num_tokens, num_experts = logits_TX.shape
        shape, device = (num_tokens, num_experts_per_token), logits_TX.device
        weights_TK = torch.empty(shape, dtype=torch.float32, device=device)
        ids_TK = torch.empty(shape, dtype=torch.int32, device=device)
        _route[(num_tokens,)](
            logits_TX,
            num_live_tokens_1,
            weights_TK,
            ids_TK,
            X=num_experts,
            K=num_experts_per_token,
            NORMALIZES=normalizes_weights,
            PADDED_EXPERTS=triton.next_power_of_2(num_experts),
            PADDED_CHOSEN=triton.next_power_of_2(num_experts_per_token),
            num_warps=1,
        )
        return weights_TK, ids_TK

    def mlp(
        self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: ExpertWeights, /
    ) -> Tensor:
        """As `expert_mlp_reference`. `x_TE` is contiguous, and has the dtype of the weights."""
        assert x_TE.is_contiguous() and ids_TK.is_contiguous() and weights_TK.is_contiguous()
        (num_tokens, num_experts_per_token), num_pairs = ids_TK.shape, ids_TK.numel()
        num_experts, hidden_size, num_features = experts.down.shape
        tile_config = choose_tile_config(num_pairs / num_experts, x_TE.itemsize)
        order_P, tiles_M3 = _sort_pairs_by_expert(ids_TK, num_experts, tile_config.rows)
        hidden_PF = x_TE.new_empty(num_pairs, num_features)
        product_PE = x_TE.new_empty(num_pairs, hidden_size)
        out_TE = torch.empty_like(x_TE)
        for x, weight, out in (
            (x_TE, experts.gate_up, hidden_PF),
            (hidden_PF, experts.down, product_PE),
        ):
            _multiply_tile[(len(tiles_M3) * triton.cdiv(out.shape[1], tile_config.features),)](
                *(x, weight, order_P, tiles_M3, out),
                K=num_experts_per_token,
                SIZE_IN=x.shape[1],
                SIZE_OUT=out.shape[1],
                GATED=out is hidden_PF,
                ROWS=tile_config.rows,
                FEATURES=tile_config.features,
                STEP=tile_config.step,
                num_warps=tile_config.num_warps,
                num_stages=tile_config.num_stages,
            )
        tile_features = min(_FEATURES_PER_PROGRAM, triton.next_power_of_2(hidden_size))
        _combine_products[(num_tokens * triton.cdiv(hidden_size, tile_features),)](
            product_PE,
            weights_TK,
            out_TE,
            K=num_experts_per_token,
            E=hidden_size,
            FEATURES=tile_features,
        )
        return out_TE


def _sort_pairs_by_expert(
    ids_TK: Tensor, num_experts: int, tile_rows: int
) -> tuple[Tensor, Tensor]:
    """(pairs by expert, int32 [P]; tiles, int32 [M, 3]). One program per expert. Each expert with
    tokens has at most one tile that is not full; M is a bound, and tiles that are left over have no
    rows. Pairs of no expert, X, are in no tile.
    """
    num_pairs = ids_TK.numel()
    num_tiles = min(num_experts, num_pairs) + num_pairs // tile_rows
    order_P = torch.empty(num_pairs, dtype=torch.int32, device=ids_TK.device)
    tiles_M3 = torch.empty(num_tiles, 3, dtype=torch.int32, device=ids_TK.device)
    _sort_pairs[(num_experts,)](
        ids_TK,
        order_P,
        tiles_M3,
        num_pairs,
        num_tiles,
        tile_rows,
        X=num_experts,
        BINS=triton.next_power_of_2(num_experts),
        CHUNK=_CHUNK_PAIRS[num_pairs > _CHUNK_PAIRS[0]],
    )
    return order_P, tiles_M3


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    logits_TX,
    num_live_tokens_1,
    weights_TK,
    ids_TK,
    X: tl.constexpr,
    K: tl.constexpr,
    NORMALIZES: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    PADDED_CHOSEN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    x, choice_index = tl.arange(0, PADDED_EXPERTS), tl.arange(0, PADDED_CHOSEN)
    is_candidate = x < X
    logits = tl.load(logits_TX + token * X + x, mask=is_candidate, other=0.0).to(tl.float32)
    logits = tl.where(is_candidate & (logits > _MIN_FLOAT32), logits, _MIN_FLOAT32)
    max_logit = tl.max(logits)
    total = tl.sum(tl.where(is_candidate, tl.exp(logits - max_logit), 0.0))
    ids = tl.zeros([PADDED_CHOSEN], tl.int32)
    weights = tl.zeros([PADDED_CHOSEN], tl.float32)
    for k in range(K):
        best_logit = tl.max(tl.where(is_candidate, logits, _MIN_FLOAT32))
        expert = tl.min(tl.where(is_candidate & (logits == best_logit), x, _NO_EXPERT))
        is_candidate = is_candidate & (x != expert)
        ids = tl.where(choice_index == k, expert, ids)
        weights = tl.where(choice_index == k, tl.exp(best_logit - max_logit) / total, weights)
    if NORMALIZES:
        weights = weights / tl.sum(weights)
    if num_live_tokens_1 is not None:
        is_live = token < tl.load(num_live_tokens_1)
        ids, weights = tl.where(is_live, ids, X), tl.where(is_live, weights, 0.0)
    tl.store(weights_TK + token * K + choice_index, weights, mask=choice_index < K)
    tl.store(ids_TK + token * K + choice_index, ids, mask=choice_index < K)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "tile_rows"])
def _sort_pairs(  # type: ignore[no-untyped-def]
    ids_P,
    order_P,
    tiles_M3,
    num_pairs,
    num_tiles,
    tile_rows,
    X: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The pairs and tiles of one expert; the last expert's program empties what is left."""
    expert = tl.program_id(0)
    bins, i = tl.arange(0, BINS), tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for first_pair in range(0, num_pairs, CHUNK):
        is_pair = first_pair + i < num_pairs
        ids = tl.load(ids_P + first_pair + i, mask=is_pair, other=0)
        counts += tl.histogram(ids, BINS, mask=is_pair & (ids < X))
    tiles_per_expert = (counts + tile_rows - 1) // tile_rows
    start = tl.sum(tl.where(bins < expert, counts, 0))
    num_rows = tl.sum(tl.where(bins == expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, tiles_per_expert, 0))
    for row in range(0, num_rows, tile_rows):
        tile_record = tiles_M3 + (tile + row // tile_rows) * _TILE_WORDS
        tl.store(tile_record, expert)
        tl.store(tile_record + 1, start + row)
        tl.store(tile_record + 2, min(tile_rows, num_rows - row))
    if expert == X - 1:
        for empty_tile in range(tile + (num_rows + tile_rows - 1) // tile_rows, num_tiles):
            tl.store(tiles_M3 + empty_tile * _TILE_WORDS + 2, 0)
    for first_pair in range(0, num_pairs, CHUNK):
        is_pair = first_pair + i < num_pairs
        ids = tl.load(ids_P + first_pair + i, mask=is_pair, other=0)
        is_own = (is_pair & (ids == expert)).to(tl.int32)
        place = start + tl.cumsum(is_own, 0) - 1
        tl.store(order_P + place, first_pair + i, mask=is_own != 0)
        start += tl.sum(is_own)


@triton.jit
def _multiply_tile(  # type: ignore[no-untyped-def]
    x,
    weight,
    order_P,
    tiles_M3,
    out,
    K: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
):
    """The rows of one tile times `FEATURES` output features of their expert.

    GATED: x_TE by gate_up_X2FE; silu(gate) * up to out_PF, sorted by expert. Otherwise: x_PF,
    sorted by expert, by down_XEF, to out_PE, each row at the place of its pair.
    """
    tile_record = tiles_M3 + tl.program_id(0) // tl.cdiv(SIZE_OUT, FEATURES) * _TILE_WORDS
    num_rows = tl.load(tile_record + 2)
    if num_rows == 0:
        return
    expert, first_place = tl.load(tile_record).to(tl.int64), tl.load(tile_record + 1)
    row, i = tl.arange(0, ROWS), tl.arange(0, STEP)
    y = tl.program_id(0) % tl.cdiv(SIZE_OUT, FEATURES) * FEATURES + tl.arange(0, FEATURES)
    is_row, is_feature = row < num_rows, y < SIZE_OUT
    pairs = tl.load(order_P + first_place + row, mask=is_row, other=0)
    rows_in = (pairs // K if GATED else first_place + row).to(tl.int64)
    rows_out = (first_place + row if GATED else pairs).to(tl.int64)
    x += rows_in[:, None] * SIZE_IN + i[None, :]
    weight += (expert * SIZE_OUT * (2 if GATED else 1) + y)[None, :] * SIZE_IN + i[:, None]
    product = tl.zeros([ROWS, FEATURES], tl.float32)
    up = tl.zeros([ROWS, FEATURES], tl.float32)
    for start in range(0, SIZE_IN, STEP):
        is_input = start + i < SIZE_IN
        mask = is_input[:, None] & is_feature[None, :]
        x_tile = tl.load(x + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
        tile = tl.load(weight + start, mask=mask, other=0.0)
        product = tl.dot(x_tile, tile, product, input_precision="ieee")
        if GATED:
            up_tile = tl.load(weight + SIZE_OUT * SIZE_IN + start, mask=mask, other=0.0)
            up = tl.dot(x_tile, up_tile, up, input_precision="ieee")
    if GATED:
        dtype: tl.constexpr = out.dtype.element_ty
        gate = product.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        product = silu * up.to(dtype).to(tl.float32)
    out += rows_out[:, None] * SIZE_OUT + y[None, :]
    tl.store(out, product, mask=is_row[:, None] & is_feature[None, :])


@triton.jit
def _combine_products(  # type: ignore[no-untyped-def]
    product_PE, weights_TK, out_TE, K: tl.constexpr, E: tl.constexpr, FEATURES: tl.constexpr
):
    token = (tl.program_id(0) // tl.cdiv(E, FEATURES)).to(tl.int64)
    e = tl.program_id(0) % tl.cdiv(E, FEATURES) * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros([FEATURES], tl.float32)
    for k in range(K):
        weight = tl.load(weights_TK + token * K + k)
        num_stored_features = tl.where(weight == 0.0, 0, E)  # padding has none
        product = tl.load(
            product_PE + (token * K + k) * E + e, mask=e < num_stored_features, other=0.0
        )
        total += weight * product.to(tl.float32)
    tl.store(out_TE + token * E + e, total, mask=e < E)
