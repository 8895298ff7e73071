"""Paged attention of every GPU backend against its reference: part of the section `numerics`.

Legend: T tokens, H query heads, K KV heads, D head dim, N blocks, P block size, B rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu_check_common import Check, Row, attention_of, refusal, with_parts
from benchmarks.gpu_check_verdicts import judge, poisoned
from kernels.gpu import attention as triton_attention
from kernels.gpu.attention_launch import LaunchConfig, prefill_launch
from kernels.gpu.fp8 import Fp8Widening
from kernels.interface import Kernels
from kernels.metadata import AttentionMetadata
from kernels.reference.attention import paged_attention_reference
from kernels.reference.fp8 import cache_as_float32, to_fp8
from workers.batch.state import StepRows

Attend = Callable[..., torch.Tensor]
# Query heads, KV heads, head dim, block size.
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Lengths of rows and of their queries. `bound`: a wider one than the longest row.
    `num_graph_decodes`: of a mixed graph, its decode rows with their padding.
    """

    seq_lens: list[int]
    query_lens: list[int]
    bound: int | None = None
    num_graph_decodes: int | None = None

    def metadata(
        self,
        block_ids: torch.Tensor,
        block_size: int,
        kernels: Kernels,
        kv_heads: int,
        device: torch.device,
    ) -> AttentionMetadata:
        """With consecutive `block_ids`, divided as the backend needs it."""
        attn = attention_of(
            self.seq_lens, self.query_lens, block_ids, block_size, device, self.bound
        )
        if self.num_graph_decodes is not None:
            attn = dataclasses.replace(attn, max_query_len=sum(self.query_lens))
        return with_parts(attn, self.query_lens, kernels, kv_heads, self.num_graph_decodes)


def as_in_a_mixed_graph(
    seq_lens: list[int], query_lens: list[int], num_tokens: int, num_decodes: int, num_rows: int
) -> Batch:
    """The rows as a graph of `num_tokens` tokens has them, up to 4,096 tokens long: with
    `num_decodes` at the front and `num_rows` in all.
    """
    none_T = np.zeros(sum(query_lens), np.int32)
    rows = StepRows(
        slots_T=none_T,
        positions_T=none_T,
        num_stored_tokens_T=none_T,
        query_start_B1=np.cumsum([0, *query_lens], dtype=np.int32),
        seq_start_B1=np.cumsum([0, *seq_lens], dtype=np.int32),
        seq_lens_B=np.array(seq_lens, np.int32),
        slots_B=none_T[: len(seq_lens)],
        logits_indices_R=none_T[:0],
        sampling_slots_R=none_T[:0],
        sampling_positions_R=none_T[:0],
        num_decode_rows=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        max_decode_len=max(seq_lens),
    ).padded(num_tokens, num_decodes, num_rows, 4096)
    return Batch(
        seq_lens=rows.seq_lens_B.tolist(),
        query_lens=np.diff(rows.query_start_B1).tolist(),
        bound=rows.max_seq_len,
        num_graph_decodes=rows.num_decode_rows,
    )


def _decoding(seq_lens: list[int], bound: int | None = None) -> Batch:
    return Batch(seq_lens=seq_lens, query_lens=[1] * len(seq_lens), bound=bound)


# A padding row, lengths around tiles, a cached prefix, chunks behind decodes; queries enough for
# the large tile of prefill, and rows enough for most of them to be decoded in one part.
_DECODED = [1, 0, 17, 128, 300, 1000, 4097]
BATCHES = {
    "decode": _decoding(_DECODED),
    "decode, bound 8192": _decoding(_DECODED, 8192),
    "prefill": Batch(seq_lens=[300, 31, 64, 1, 129], query_lens=[300, 31, 64, 1, 129]),
    "cached prefix": Batch(seq_lens=[700, 64, 1500], query_lens=[200, 1, 65]),
    "mixed": Batch(seq_lens=[1000, 2049, 513, 64, 9, 77], query_lens=[1, 1, 200, 64, 1, 33]),
    "long prefill": Batch(seq_lens=[2048, 1500], query_lens=[2048, 900]),
    "padded": as_in_a_mixed_graph([300, 77, 513], [1, 1, 129], 136, 5, 9),
    "wide decode": _decoding([0, 1, 15, 16, 17, 255, 256, 257, *range(3, 720, 10)]),
}
_FP8_BATCHES = {kind: BATCHES[kind] for kind in ("decode", "mixed", "long prefill")}
# The long row of "parts" is divided, and its parts are joined.
SMALL_BATCHES = {
    "decode": _decoding([1, 0, 40]),
    "parts": _decoding([330, 1]),
    "mixed": Batch(seq_lens=[40, 9, 20], query_lens=[1, 9, 5]),
    "padded": as_in_a_mixed_graph([40, 9, 20], [1, 1, 5], 10, 4, 7),
}
_SMALL_LARGE_TILE = Batch(seq_lens=[150], query_lens=[150])
# A block size of None stands for the backend's default.
ATTENTION_CASES = (
    (16, 8, 128, None),
    (32, 8, 128, None),
    (8, 8, 64, None),
    (16, 2, 128, 256),
    (16, 8, 128, 256),
)


def attention(check: Check, backend: str, kernels: Kernels) -> None:
    """Every kind of batch, for the groups, head dims and block sizes that models and the engine
    use.
    """
    for heads, kv_heads, dim, block_size in [(2, 1, 64, None)] if check.small else ATTENTION_CASES:
        block_size = block_size or kernels.capabilities.default_block_size
        shape = heads, kv_heads, dim, block_size
        words = f"{heads}/{kv_heads} x {dim}, block {block_size}"
        if reason := refusal(kernels, dim, block_size):
            check.add(f"{backend} {words}", partial(dict, note=reason))
            continue
        for kind, batch in (SMALL_BATCHES if check.small else BATCHES).items():
            case = partial(_attention_case, check, kernels, shape, batch)
            check.add(f"{backend} {kind} {words}", case)
        if backend == "triton" and check.small:  # few tokens would never be given the large tile
            attend = tuned_attention(partial(_large_tile, check, dim))
            case = partial(_attention_case, check, kernels, shape, _SMALL_LARGE_TILE)
            check.add(f"triton large tile {words}", partial(case, attend=attend))
    if backend == "triton":
        _attention_fp8(check, kernels)


def _large_tile(check: Check, dim: int, _: LaunchConfig) -> LaunchConfig:
    """Of prefill, as it is chosen for many tokens."""
    is_hopper = check.on_gpu and torch.cuda.get_device_capability(check.device)[0] == 9
    return prefill_launch(check.dtype, dim, is_large_tile=True, is_hopper=is_hopper)


def _attention_fp8(check: Check, kernels: Kernels) -> None:
    """Over a cache of 8-bit numbers, which a GPU may read in two ways besides the usual one."""
    ways: tuple[Fp8Widening | None, ...] = (
        (None, "pairs", "instructions") if check.on_gpu else (None,)
    )
    heads, kv_heads, dim = (2, 1, 64) if check.small else (16, 8, 128)
    for kind, batch in (SMALL_BATCHES if check.small else _FP8_BATCHES).items():
        for way in ways:
            name = f"triton fp8 {kind} {heads}/{kv_heads} x {dim}{f', {way}' if way else ''}"
            attend = kernels.paged_attention if way is None else reading_by(way)
            case = partial(_attention_case, check, kernels, (heads, kv_heads, dim, 16), batch)
            check.add(name, partial(case, cache="fp8", attend=attend))


def reading_by(way: Fp8Widening) -> Attend:
    """Triton's attention, with 8-bit numbers read in this way."""
    return tuned_attention(partial(dataclasses.replace, fp8_widening=way))


def tuned_attention(tune: Callable[[LaunchConfig], LaunchConfig]) -> Attend:
    """Triton's attention, launched as `tune` makes it of the launches that are chosen."""
    choices = {
        name: getattr(triton_attention, name) for name in ("prefill_launch", "decode_launch")
    }
    tuned_choices: dict[str, Any] = {
        name: lambda *shape, choose=choose: tune(choose(*shape)) for name, choose in choices.items()
    }

    def attend(*arguments: Any) -> torch.Tensor:
        with mock.patch.multiple(triton_attention, **tuned_choices):
            return triton_attention.paged_attention(*arguments)

    return attend


def _attention_case(
    check: Check,
    kernels: Kernels,
    shape: Shape,
    batch: Batch,
    cache: Literal["auto", "fp8"] = "auto",
    attend: Attend | None = None,
) -> Row:
    heads, kv_heads, dim, block_size = shape
    num_blocks = sum(-(-seq_len // block_size) for seq_len in batch.seq_lens) + 1
    block_ids = torch.randperm(num_blocks)
    attn = batch.metadata(block_ids[1:], block_size, kernels, kv_heads, check.device)
    # FlashAttention multiplies what lies past the end of a row by 0, so it must be finite.
    poison = torch.nan if kernels.capabilities.name == "triton" else 1e4
    k_cache, v_cache = (check.normal(num_blocks, block_size, kv_heads, dim) for _ in range(2))
    for numbers in (k_cache, v_cache):
        numbers[block_ids[0]] = poison
        for row, seq_len in enumerate(batch.seq_lens):
            if seq_len % block_size:
                last_block = attn.block_table_BW[row, seq_len // block_size]
                numbers[last_block, seq_len % block_size :] = poison
    if cache == "fp8":
        k_cache, v_cache = to_fp8(k_cache), to_fp8(v_cache)
    q_THD = check.normal(sum(batch.query_lens), heads, dim)
    with poisoned():
        out_THD = (attend or kernels.paged_attention)(q_THD, k_cache, v_cache, attn, dim**-0.5)
    exact = paged_attention_reference(
        q_THD.float(), cache_as_float32(k_cache), cache_as_float32(v_cache), attn, dim**-0.5
    )
    # Each softmax weight is rounded before it is multiplied with a value, and so is the output.
    return judge(out_THD, exact, 2)
