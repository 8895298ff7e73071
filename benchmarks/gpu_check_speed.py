"""Time of each kernel against its lower bound on this machine, and against flash-attn where there
is one.

    floor = max(bytes / memory bandwidth, floating-point operations / peak)

Each input is read once and each output written once. Device time; inputs are used in turn, so none
is in the cache, except where they are so small that it holds them all: such a row is marked
"cached" and has no share.
Legend: T tokens, B rows, S tokens of a row, H query heads, K KV heads, X = H + 2K, D head dim, N
blocks, P block size, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu_check_attention import reading_by
from benchmarks.gpu_check_common import (
    Call,
    Check,
    Row,
    attention_of,
    median_us,
    num_sets,
    refusal,
    rounded,
    share,
    timed,
    with_parts,
)
from benchmarks.gpu_check_sampling import products, whole_sampler
from kernels.gpu.fp8 import Fp8Widening
from kernels.interface import GapRows, Kernels

EPS = 1e-6
# Query heads, KV heads, head dim: of Qwen3-0.6B and of Qwen3-8B.
_HEADS = ((16, 8, 128), (32, 8, 128))
_SMALL_HEADS = ((2, 1, 64),)
# The bound that decode graphs are captured with unless `max_model_len` is given.
_GRAPH_BOUND = 40960


def speed(check: Check) -> None:
    """Run the section."""
    pool = Pool.allocate(check)
    for heads in _SMALL_HEADS if check.small else _HEADS:
        _decode(check, pool, heads)
        _prefill(check, pool, heads)
    del pool
    if check.on_gpu:
        torch.cuda.empty_cache()
    pool = Pool.of_codes(check)
    for heads in _SMALL_HEADS if check.small else _HEADS:
        _decode_fp8(check, pool, heads)
    del pool
    if check.on_gpu:
        torch.cuda.empty_cache()
    _elementwise(check)
    _store(check)
    _sampling(check)
    whole_sampler(check)
    products(check)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Random numbers that every cache is a view of."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(cls, check: Check) -> Pool:
        """40 GB, which the largest decode nearly fills, or half of the free memory."""
        size = 2**14
        if check.on_gpu and not check.small:
            size = min(40 * 10**9, torch.cuda.mem_get_info(check.device)[0] // 2) // (
                2 * check.dtype.itemsize
            )
        parts = [
            torch.empty(size, dtype=check.dtype, device=check.device).normal_() for _ in range(2)
        ]
        return cls(keys=parts[0], values=parts[1])

    @classmethod
    def of_codes(cls, check: Check) -> Pool:
        """8-bit numbers, positive and finite: 2 GB, or an eighth of the free memory."""
        size = 2**14
        if check.on_gpu and not check.small:
            size = min(2 * 10**9, torch.cuda.mem_get_info(check.device)[0] // 8) // 2
        keys, values = (
            torch.randint(0x7F, (size,), dtype=torch.uint8, device=check.device) for _ in range(2)
        )
        return cls(keys=keys, values=values)

    def caches(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        num = math.prod(shape)
        return self.keys[:num].view(shape), self.values[:num].view(shape)


# Attention


def _decode(check: Check, pool: Pool, heads: tuple[int, int, int]) -> None:
    _, kv_heads, dim = heads
    contexts, batches = ((40,), (1, 3)) if check.small else ((512, 4096, 32768), (1, 16, 64, 256))
    for context in contexts:
        for batch in batches:
            if batch * (context + 256) * kv_heads * dim <= pool.keys.numel():
                _attention(
                    check,
                    pool,
                    f"decode {batch} x {context}",
                    heads,
                    [context] * batch,
                    [1] * batch,
                )
    if not check.small:
        for batch in (1, 64):
            name = f"decode {batch} x 512, bound {_GRAPH_BOUND}"
            _attention(check, pool, name, heads, [512] * batch, [1] * batch, _GRAPH_BOUND)
        for others in (64, 79):
            name = f"decode {others} x 512, 1 x 32768"
            _attention(check, pool, name, heads, [512] * others + [32768], [1] * (others + 1))


def _decode_fp8(check: Check, pool: Pool, heads: tuple[int, int, int]) -> None:
    """Over a cache of 8-bit numbers, in blocks of 16."""
    num_heads, kv_heads, dim = heads
    for batch, context in ((2, 40),) if check.small else ((1, 32768), (64, 512), (64, 4096)):
        name = f"decode fp8 {batch} x {context}, {num_heads}/{kv_heads} x {dim}"
        check.add(name, partial(_each_way, check, pool, heads, [context] * batch))


def _each_way(check: Check, pool: Pool, heads: tuple[int, int, int], seq_lens: list[int]) -> Row:
    """A time for each way that the device has of reading 8-bit numbers; `share` is of the best."""
    ways: tuple[Fp8Widening, ...] = ("pairs", "instructions") if check.on_gpu else ("singly",)
    kernels, ones = check.backends["triton"], [1] * len(seq_lens)
    num_bytes = attention_bytes(heads, seq_lens, ones, check.dtype.itemsize, cache_itemsize=1)
    times = {}
    for way in ways:
        times[way] = attention_us(
            check, pool, kernels, 16, heads, seq_lens, ones, None, num_bytes, reading_by(way)
        )
    floor = check.floor_us(num_bytes)
    row: Row = {f"{way}_us": rounded(us) for way, us in times.items()}
    row["floor_us"] = rounded(floor)
    return row | share(check, num_bytes, floor, min(times.values()))


def _prefill(check: Check, pool: Pool, heads: tuple[int, int, int]) -> None:
    if check.small:
        _attention(check, pool, "mixed", heads, [20, 9, 30], [1, 9, 5])
        return
    _attention(check, pool, "prefill 1 x 2048", heads, [2048], [2048])
    _attention(check, pool, "prefill 4 x 4096", heads, [4096] * 4, [4096] * 4)
    _attention(check, pool, "chunk 512 behind 7680", heads, [8192], [512])
    _attention(
        check,
        pool,
        "mixed 64 x 2048, 1024, 512",
        heads,
        [2048] * 64 + [2048, 512],
        [1] * 64 + [1024, 512],
    )


def _attention(
    check: Check,
    pool: Pool,
    name: str,
    heads: tuple[int, int, int],
    seq_lens: list[int],
    query_lens: list[int],
    bound: int | None = None,
) -> None:
    """A row with a time for each block size of ours and one for flash-attn. `share` and
    `of_flash_attn`, which is their time as a multiple of ours, are those of the first.
    """
    num_heads, kv_heads, dim = heads
    seen = sum(q * (s - q) + q * (q + 1) // 2 for s, q in zip(seq_lens, query_lens, strict=True))
    itemsize = check.dtype.itemsize
    num_bytes = attention_bytes(heads, seq_lens, query_lens, itemsize, itemsize)
    flops = 4 * num_heads * dim * seen
    runs = [
        (f"block_{size}", check.backends["triton"], size)
        for size in ((16,) if check.small else (16, 64, 256))
    ]
    others = {name: other for name, other in check.backends.items() if name != "triton"}
    refused = {name: reason for name in others if (reason := refusal(others[name], dim))}
    runs += [
        (name, other, other.capabilities.default_block_size)
        for name, other in others.items()
        if name not in refused
    ]

    def measure() -> Row:
        times: dict[str, float] = {}
        failed: Row = {}
        for label, kernels, block_size in runs:
            try:
                times[label] = attention_us(
                    check, pool, kernels, block_size, heads, seq_lens, query_lens, bound, num_bytes
                )
            except Exception as error:  # the other times are still measured
                traceback.print_exc()
                failed |= {label: type(error).__name__, "passed": False}
        row = {f"{label}_us": rounded(us) for label, us in times.items()} | refused | failed
        floor = check.floor_us(num_bytes, flops)
        row["floor_us"] = rounded(floor)
        if "block_16" in times:
            row |= share(check, num_bytes, floor, times["block_16"])
            if "flash_attn" in times:
                row["of_flash_attn"] = rounded(times["flash_attn"] / times["block_16"], 3)
        return row

    check.add(f"{name}, {num_heads}/{kv_heads} x {dim}", measure)


def attention_bytes(
    heads: tuple[int, int, int],
    seq_lens: list[int],
    query_lens: list[int],
    itemsize: int,
    cache_itemsize: int,
) -> int:
    """Bytes that attention must move: keys and values in, queries in, outputs out."""
    num_heads, kv_heads, dim = heads
    cached, queries = 2 * kv_heads * sum(seq_lens), 2 * num_heads * sum(query_lens)
    return dim * (cache_itemsize * cached + itemsize * queries)


def attention_us(
    check: Check,
    pool: Pool,
    kernels: Kernels,
    block_size: int,
    heads: tuple[int, int, int],
    seq_lens: list[int],
    query_lens: list[int],
    bound: int | None,
    num_bytes: int,
    attend: Callable[..., torch.Tensor] | None = None,
) -> float:
    """Microseconds of attention over blocks of the pool in random order; `attend`: another function
    than that of `kernels`.
    """
    num_heads, kv_heads, dim = heads
    each = sum(-(-seq_len // block_size) for seq_len in seq_lens)
    sets = min(
        num_sets(check, num_bytes), pool.keys.numel() // (each * block_size * kv_heads * dim)
    )
    keys, values = pool.caches(sets * each, block_size, kv_heads, dim)
    calls: list[Call] = []
    for block_ids in torch.randperm(sets * each).split(each):
        attn = attention_of(seq_lens, query_lens, block_ids, block_size, check.device, bound)
        attn = with_parts(attn, query_lens, kernels, kv_heads)
        q_THD = check.normal(sum(query_lens), num_heads, dim)
        calls.append(
            partial(attend or kernels.paged_attention, q_THD, keys, values, attn, dim**-0.5)
        )
    return median_us(check, calls)


# The others


def _elementwise(check: Check) -> None:
    for num_tokens in (3,) if check.small else (1, 64, 2048):
        for width in (64,) if check.small else (1024, 4096):
            row_bytes, features = check.dtype.itemsize * num_tokens * width, 3 * width
            shape = f"{num_tokens} x {width}"
            timed(
                check,
                f"rms_norm {shape}",
                partial(_rms_norm, check, num_tokens, width),
                2 * row_bytes,
            )
            timed(
                check,
                f"add_rms_norm {shape}",
                partial(_add_rms_norm, check, num_tokens, width),
                4 * row_bytes,
            )
            make = partial(_silu_and_mul, check, num_tokens, features)
            timed(check, f"silu_and_mul {num_tokens} x {features}", make, 9 * row_bytes)


def _rms_norm(check: Check, num_tokens: int, width: int) -> Call:
    return partial(
        check.backends["triton"].rms_norm, check.normal(num_tokens, width), check.normal(width), EPS
    )


def _add_rms_norm(check: Check, num_tokens: int, width: int) -> Call:
    x_TE, residual_TE = check.normal(num_tokens, width), check.normal(num_tokens, width)
    return partial(
        check.backends["triton"].add_rms_norm, x_TE, residual_TE, check.normal(width), EPS
    )


def _silu_and_mul(check: Check, num_tokens: int, features: int) -> Call:
    return partial(check.backends["triton"].silu_and_mul, check.normal(num_tokens, 2 * features))


def _store(check: Check) -> None:
    for heads in _SMALL_HEADS if check.small else _HEADS:
        num_heads, kv_heads, dim = heads
        for num_tokens in (3,) if check.small else (1, 64, 2048):
            # Queries, keys and values in and out, and one line of the table per token.
            num_bytes = (
                num_tokens * dim * (2 * (num_heads + 2 * kv_heads) * check.dtype.itemsize + 4)
            )
            name = f"qk_norm_rope_store {num_tokens}, {num_heads}/{kv_heads} x {dim}"
            timed(check, name, partial(_store_call, check, num_tokens, heads), num_bytes)


def _store_call(check: Check, num_tokens: int, heads: tuple[int, int, int]) -> Call:
    num_heads, kv_heads, dim = heads
    cache_shape = (-(-num_tokens // 16), 16, kv_heads, dim)
    return partial(
        check.backends["triton"].qk_norm_rope_store,
        check.normal(num_tokens, num_heads + 2 * kv_heads, dim),
        check.normal(dim),
        check.normal(dim),
        EPS,
        check.normal(num_tokens, dim, dtype=torch.float32),
        torch.arange(num_tokens, dtype=torch.int32, device=check.device),
        check.normal(*cache_shape),
        check.normal(*cache_shape),
        torch.randperm(16 * cache_shape[0], device=check.device)[:num_tokens],
    )


def _sampling(check: Check) -> None:
    num_columns = 300 if check.small else 151936
    for num_rows in (2,) if check.small else (1, 64, 256):
        num_bytes = torch.bfloat16.itemsize * num_rows * num_columns
        shape = f"{num_rows} x {num_columns}"
        timed(
            check, f"row_best {shape}", partial(_row_best, check, num_rows, num_columns), num_bytes
        )
        timed(
            check,
            f"block_weights {shape}",
            partial(_block_weights, check, num_rows, num_columns),
            num_bytes,
        )


def _row_best(check: Check, num_rows: int, num_columns: int) -> Call:
    logits_BV = 3 * check.normal(num_rows, num_columns, dtype=torch.bfloat16)
    return partial(check.backends["triton"].sampling.row_best, logits_BV)


def _block_weights(check: Check, num_rows: int, num_columns: int) -> Call:
    """Reads every token, because no block is beyond the limit."""
    kernels = check.backends["triton"].sampling
    logits_BV = check.normal(num_rows, num_columns, dtype=torch.bfloat16)
    max_R, _, block_max_BX = kernels.row_best(logits_BV)
    gap_rows = GapRows(
        logits_BV=logits_BV,
        block_max_BX=block_max_BX,
        rows_R=torch.arange(num_rows, device=check.device),
        max_R=max_R,
        temperature_R=torch.ones_like(max_R),
    )
    return partial(kernels.block_weights, gap_rows, torch.full_like(max_R, torch.inf))
