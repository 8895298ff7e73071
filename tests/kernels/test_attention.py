"""Paged attention: the CPU version against the reference, the reference against dense attention
written differently.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.metadata import AttentionMetadata
from kernels.reference.attention import paged_attention_reference
from kernels.select import select_backend
from tests.kernels.cpu_caches import to_cpu

CPU = select_backend("cpu", "cpu")
pytestmark = pytest.mark.usefixtures("two_threads")

# Both sum in float32, in different orders.
FLOAT32_TOLERANCE = 1e-5
# The output is rounded to 8 bits once in each, and the CPU version also rounds its softmax weights
# to bfloat16.
BFLOAT16_TOLERANCE = 2e-2

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata]


def make_case(
    seq_lens: list[int],
    query_lens: list[int],
    *,
    block_size: int = 16,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Sequences in shuffled blocks; table entries past the end of a sequence point at a block of
    large, unrelated values.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    order = torch.randperm(sum(num_blocks), generator=generator).to(torch.int32) + 1
    table = torch.zeros(len(seq_lens), max(num_blocks) + 2, dtype=torch.int32)
    for row, blocks in enumerate(order.split(num_blocks)):
        table[row, : len(blocks)] = blocks
    shape = (sum(num_blocks) + 1, block_size, kv_heads, head_dim)
    k_cache, v_cache = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    k_cache[0], v_cache[0] = 50.0, 1000.0
    q = torch.randn(sum(query_lens), kv_heads * group, head_dim, generator=generator).to(dtype)
    attn = AttentionMetadata(
        query_start_B1=torch.tensor(
            [0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32
        ),
        seq_start_B1=torch.tensor(
            [0, *torch.tensor(seq_lens).cumsum(0).tolist()], dtype=torch.int32
        ),
        seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_BW=table,
        kv_places_T=torch.full((sum(query_lens),), -1, dtype=torch.int64),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    return q, k_cache, v_cache, attn


def paged_attention_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """The CPU kernel over the same caches in its own layout."""
    return CPU.paged_attention(q, *to_cpu(k_cache, v_cache), attn, scale)


def dense_attention(case: Case, scale: float) -> torch.Tensor:
    """Each query separately, token by token through the table, in float64."""
    q, k_cache, v_cache, attn = case
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    out = torch.empty_like(q, dtype=torch.float64)
    for row, seq_len in enumerate(attn.seq_lens_B.tolist()):
        start, end = attn.query_start_B1[row : row + 2].tolist()
        for token in range(start, end):
            position = seq_len - (end - token)
            places = [
                (int(attn.block_table_BW[row, p // block_size]), p % block_size)
                for p in range(position + 1)
            ]
            keys, values = (
                torch.stack([cache[b, o] for b, o in places]).double()
                for cache in (k_cache, v_cache)
            )
            for head in range(q.shape[1]):
                weights = (keys[:, head // group] @ q[token, head].double() * scale).softmax(0)
                out[token, head] = weights @ values[:, head // group]
    return out


def assert_cpu_matches_reference(case: Case, tolerance: float = FLOAT32_TOLERANCE) -> None:
    scale = case[0].shape[-1] ** -0.5
    torch.testing.assert_close(
        paged_attention_cpu(*case, scale),
        paged_attention_reference(*case, scale),
        atol=tolerance,
        rtol=0,
    )


MIXED = ([40, 7, 33, 16, 1, 29], [1, 7, 12, 16, 1, 1])


def test_reference_equals_dense_attention_on_a_mixed_batch() -> None:
    case = make_case(*MIXED)
    out = paged_attention_reference(*case, 0.3)
    torch.testing.assert_close(out.double(), dense_attention(case, 0.3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 100, 256])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_cpu_equals_reference_on_a_mixed_batch(block_size: int, head_dim: int) -> None:
    assert_cpu_matches_reference(make_case(*MIXED, block_size=block_size, head_dim=head_dim))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 20, 3]])
def test_cpu_equals_reference_for_every_group_size(group: int, query_lens: list[int]) -> None:
    assert_cpu_matches_reference(make_case([21, 20, 64], query_lens, group=group))


@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 256])
def test_cpu_equals_reference_at_lengths_around_block_edges(block_size: int) -> None:
    around = [block_size * n + d for n in (0, 1, 2, 16) for d in (-1, 0, 1)]
    lens = [n for n in around if 1 <= n <= 300]
    assert_cpu_matches_reference(make_case(lens, [1] * len(lens), block_size=block_size))
    assert_cpu_matches_reference(make_case(lens, lens, block_size=block_size))


@pytest.mark.parametrize("query_len", [2, 15, 16, 17, 63, 64, 65, 129, 300])
@pytest.mark.parametrize("prefix_len", [0, 1, 16, 250])
def test_cpu_equals_reference_for_chunks_behind_a_prefix(query_len: int, prefix_len: int) -> None:
    assert_cpu_matches_reference(make_case([prefix_len + query_len], [query_len]))


def test_cpu_equals_reference_for_a_long_row_in_wide_query_blocks() -> None:
    assert_cpu_matches_reference(make_case([1000], [600], kv_heads=1))


def test_cpu_does_not_depend_on_the_number_of_threads() -> None:
    case = make_case(*MIXED, block_size=64, head_dim=64)
    outputs = []
    for num_threads in (1, 2):
        CPU.set_num_threads(num_threads)
        outputs.append(paged_attention_cpu(*case, 0.25))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_cpu_reads_nothing_beyond_the_end_of_a_row(garbage: float, dtype: torch.dtype) -> None:
    """An earlier owner may have left anything in a block."""
    case = make_case([70, 5, 131], [1, 5, 9], block_size=64, head_dim=64, dtype=dtype)
    q, k_cache, v_cache, attn = case
    want = paged_attention_reference(q, k_cache, v_cache, attn, 0.25)
    for row, length in enumerate(attn.seq_lens_B.tolist()):
        last = int(attn.block_table_BW[row, (length - 1) // 64])
        for cache in (k_cache, v_cache):
            cache[last, (length - 1) % 64 + 1 :] = garbage
    torch.testing.assert_close(
        paged_attention_cpu(q, k_cache, v_cache, attn, 0.25),
        want,
        atol=1e-5 if dtype is torch.float32 else BFLOAT16_TOLERANCE,
        rtol=0,
    )


def test_row_cached_to_its_last_token_attends_to_all_of_it() -> None:
    """A full prefix hit: one query, nothing stored, beside a chunk of another row."""
    case = make_case([32, 20], [1, 20])
    out = paged_attention_cpu(*case, 0.25)
    torch.testing.assert_close(out[:1].double(), dense_attention(case, 0.25)[:1], atol=1e-5, rtol=0)


def test_bounds_above_what_is_reached_change_nothing() -> None:
    q, k_cache, v_cache, attn = make_case([5, 33, 20], [1, 1, 1])
    loose = replace(attn, max_query_len=8, max_seq_len=4096)
    for attend in (paged_attention_cpu, paged_attention_reference):
        tight_out = attend(q, k_cache, v_cache, attn, 0.25)
        assert torch.equal(attend(q, k_cache, v_cache, loose, 0.25), tight_out)


def test_row_without_queries_is_skipped() -> None:
    for attend in (paged_attention_cpu, paged_attention_reference):
        case = make_case([9, 12, 30], [1, 0, 4])
        out = attend(*case, 0.25)
        torch.testing.assert_close(out.double(), dense_attention(case, 0.25), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lens", [MIXED, ([300, 31, 64], [1, 1, 1]), ([300], [300])])
def test_cpu_is_near_the_reference_in_bfloat16(lens: tuple[list[int], list[int]]) -> None:
    assert_cpu_matches_reference(
        make_case(*lens, head_dim=64, dtype=torch.bfloat16), BFLOAT16_TOLERANCE
    )


def test_output_has_the_dtype_of_the_queries_and_inputs_stay_unchanged() -> None:
    for attend in (paged_attention_cpu, paged_attention_reference):
        q, k_cache, v_cache, attn = make_case(*MIXED, dtype=torch.bfloat16)
        before = [tensor.clone() for tensor in (q, k_cache, v_cache)]
        assert attend(q, k_cache, v_cache, attn, 0.25).dtype == torch.bfloat16
        assert all(torch.equal(a, b) for a, b in zip(before, (q, k_cache, v_cache), strict=True))
