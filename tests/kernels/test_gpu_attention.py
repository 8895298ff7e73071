"""Paged attention in Triton against the reference: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from kernels.gpu import attention
from kernels.metadata import AttentionMetadata
from kernels.reference.attention import paged_attention_reference
from tests.kernels.gpu_device import DEVICE
from tests.kernels.test_attention import Case, make_case

# float32: both sum in float32, in different orders and with different exponentials. Halves: the
# output, up to 4, is rounded to 11 bits (bfloat16: 8) in each, and the kernels also round their
# softmax weights.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NEEDS_GPU = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
# The interpreter computes bfloat16 products incorrectly.
BFLOAT16 = pytest.param(torch.bfloat16, marks=NEEDS_GPU)

MIXED = ([40, 7, 333, 16, 1, 150, 270], [1, 7, 112, 16, 1, 20, 1])
DECODE_LENS = [300, 17, 128, 1, 129, 65]


@pytest.fixture
def new_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def nan(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", nan)


def on_device(case: Case) -> Case:
    q, k_cache, v_cache, attn = case
    moved = {
        f.name: getattr(attn, f.name).to(DEVICE)
        for f in fields(attn)
        if torch.is_tensor(getattr(attn, f.name))
    }
    return q.to(DEVICE), k_cache.to(DEVICE), v_cache.to(DEVICE), replace(attn, **moved)


def paged_attention_gpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    return attention.paged_attention(*on_device((q, k_cache, v_cache, attn)), scale).cpu()


def assert_matches_reference(case: Case) -> None:
    q = case[0]
    scale = q.shape[-1] ** -0.5
    got, want = paged_attention_gpu(*case, scale), paged_attention_reference(*case, scale)
    torch.testing.assert_close(got, want, atol=TOLERANCE[q.dtype], rtol=0)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "kv_heads", "block_size"),
    [
        (torch.float32, 64, 1, 2, 16),
        (torch.float32, 128, 2, 1, 256),
        (torch.float16, 128, 4, 1, 16),
        (torch.float16, 64, 8, 1, 256),
        (torch.float16, 80, 3, 2, 16),
        (torch.float16, 96, 5, 1, 7),
        (torch.float16, 256, 6, 1, 64),
        (torch.float16, 16, 20, 1, 32),
        pytest.param(torch.bfloat16, 128, 2, 2, 16, marks=NEEDS_GPU),
        pytest.param(torch.bfloat16, 64, 8, 1, 256, marks=NEEDS_GPU),
    ],
)
@pytest.mark.parametrize("lens", [MIXED, (DECODE_LENS, [1] * 6)], ids=["mixed", "decode"])
def test_equals_reference_for_every_shape(
    lens: tuple[list[int], list[int]],
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    kv_heads: int,
    block_size: int,
) -> None:
    case = make_case(
        *lens,
        block_size=block_size,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        seed=head_dim,
    )
    assert_matches_reference(case)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("is_decode", [True, False])
def test_lengths_around_the_edges_of_blocks_tiles_and_splits(
    is_decode: bool, block_size: int
) -> None:
    lens = [n + d for n in (16, 64, 128, 256) for d in (-1, 0, 1)] + [1, 2, 513]
    query_lens = [1] * len(lens) if is_decode else lens
    case = make_case(
        lens,
        query_lens,
        block_size=block_size,
        kv_heads=1,
        group=1,
        head_dim=64,
        dtype=torch.float16,
    )
    assert_matches_reference(case)


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
def test_row_of_2000_tokens(dtype: torch.dtype) -> None:
    for query_len in (1, 70):
        assert_matches_reference(
            make_case(
                [2000, 3, 1999], [query_len, 1, 1], kv_heads=1, head_dim=128, group=2, dtype=dtype
            )
        )


@pytest.mark.parametrize("query_len", [2, 31, 32, 33, 65, 130])
@pytest.mark.parametrize("prefix_len", [0, 1, 127, 700])
def test_chunks_behind_a_cached_prefix(query_len: int, prefix_len: int) -> None:
    lens = [prefix_len + query_len], [query_len]
    assert_matches_reference(make_case(*lens, kv_heads=1, head_dim=64, dtype=torch.float16))


@pytest.mark.parametrize(
    ("dtype", "group"),
    [(torch.float16, 2), (torch.float16, 3), pytest.param(torch.bfloat16, 8, marks=NEEDS_GPU)],
)
def test_large_tiles_of_a_batch_that_fills_the_device(
    dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_num_sms", lambda device: 1)
    assert_matches_reference(
        make_case([500, 140, 3], [200, 140, 1], kv_heads=1, group=group, head_dim=64, dtype=dtype)
    )


def test_one_split_writes_the_output_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_num_sms", lambda device: 1)
    assert attention.count_splits(12, 300, 1) == (1, 1)
    assert_matches_reference(make_case(DECODE_LENS, [1] * 6, head_dim=64))


def test_batch_of_more_rows_than_are_searched_at_once() -> None:
    rng = random.Random(0)
    query_lens = [rng.choice((0, 1, 1, 1, 2, 9)) for _ in range(260)]
    seq_lens = [query_len + rng.randrange(1, 6) for query_len in query_lens]
    assert_matches_reference(
        make_case(seq_lens, query_lens, kv_heads=1, group=3, head_dim=16, dtype=torch.float16)
    )


@pytest.mark.parametrize("max_seq_len", [33, 4096], ids=["one split", "splits"])
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [1, 20, 1, 1]])
def test_padding_rows_get_zeros_and_read_nothing(query_lens: list[int], max_seq_len: int) -> None:
    q, k_cache, v_cache, attn = make_case([5, 33, 20, 9], query_lens, head_dim=64)
    want = paged_attention_reference(q, k_cache, v_cache, attn, 0.25)
    attn.seq_lens_B[2:] = 0
    attn.block_table_BW[2:] = 2**30
    out = paged_attention_gpu(q, k_cache, v_cache, replace(attn, max_seq_len=max_seq_len), 0.25)
    torch.testing.assert_close(out[:-2], want[:-2], atol=2e-5, rtol=0)
    assert not out[-2:].any()


@pytest.mark.parametrize("query_lens", [[1, 0, 1, 0], [9, 0, 4, 0]])
@pytest.mark.parametrize("longest", [100, 300], ids=["one split", "splits"])
def test_row_without_queries_writes_nothing(
    longest: int, query_lens: list[int], new_memory_is_nan: None
) -> None:
    """Not even where the next row would begin: after the last row there is a token that belongs to
    no row.
    """
    q, k_cache, v_cache, attn = make_case([9, 12, longest, 40], query_lens, head_dim=64)
    want = paged_attention_reference(q, k_cache, v_cache, attn, 0.25)
    out = paged_attention_gpu(torch.cat((q, q[:1])), k_cache, v_cache, attn, 0.25)
    torch.testing.assert_close(out[:-1], want, atol=2e-5, rtol=0)
    assert out[-1].isnan().all()


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 5, 40]])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_reads_nothing_beyond_the_end_of_a_row(
    garbage: float, block_size: int, query_lens: list[int]
) -> None:
    """Neither what an earlier owner left in the last block nor later entries of the table."""
    q, k_cache, v_cache, attn = make_case(
        [70, 5, 330], query_lens, block_size=block_size, head_dim=64
    )
    want = paged_attention_reference(q, k_cache, v_cache, attn, 0.25)
    k_cache[0], v_cache[0] = garbage, garbage
    for row, length in enumerate(attn.seq_lens_B.tolist()):
        last, used = divmod(length - 1, block_size)
        attn.block_table_BW[row, last + 1 :] = 2**30
        for cache in (k_cache, v_cache):
            cache[attn.block_table_BW[row, last], used + 1 :] = garbage
    torch.testing.assert_close(
        paged_attention_gpu(q, k_cache, v_cache, attn, 0.25), want, atol=2e-5, rtol=0
    )


@pytest.mark.parametrize(("max_query_len", "max_seq_len"), [(1, 32_768), (8, 32_768), (1, 301)])
def test_bounds_above_what_is_reached_change_nothing(max_query_len: int, max_seq_len: int) -> None:
    q, k_cache, v_cache, attn = make_case(DECODE_LENS, [1] * 6, head_dim=64)
    loose = replace(attn, max_query_len=max_query_len, max_seq_len=max_seq_len)
    assert_matches_reference((q, k_cache, v_cache, loose))


@pytest.mark.parametrize("lens", [MIXED, (DECODE_LENS, [1] * 6)], ids=["mixed", "decode"])
def test_every_output_is_written_and_no_scratch_read_that_was_not(
    lens: tuple[list[int], list[int]], new_memory_is_nan: None
) -> None:
    assert_matches_reference(make_case(*lens, head_dim=80, dtype=torch.float16))


@pytest.mark.parametrize("query_len", [1, 30])
def test_cache_of_more_than_2_to_the_31_elements(query_len: int) -> None:
    """Virtual memory only: pages that are never touched do not exist."""
    kv_heads, block_size, head_dim = 1, 256, 128
    num_blocks = 2**31 // (kv_heads * block_size * head_dim) + 4
    q, small_k, small_v, attn = on_device(
        make_case(
            [40],
            [query_len],
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=torch.float16,
        )
    )
    want = paged_attention_reference(q, small_k, small_v, attn, 0.1)
    k_cache, v_cache = (
        torch.empty(num_blocks, *small.shape[1:], dtype=small.dtype, device=DEVICE)
        for small in (small_k, small_v)
    )
    k_cache[-2], v_cache[-2] = small_k[1], small_v[1]
    attn.block_table_BW[0, 0] = num_blocks - 2
    out = attention.paged_attention(q, k_cache, v_cache, attn, 0.1)
    torch.testing.assert_close(out, want, atol=TOLERANCE[torch.float16], rtol=0)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 20, 1]])
def test_queries_may_be_a_view_and_inputs_stay_unchanged(query_lens: list[int]) -> None:
    q, k_cache, v_cache, attn = make_case([21, 20, 300], query_lens, head_dim=64)
    want = paged_attention_reference(q, k_cache, v_cache, attn, 0.25)
    wide = torch.cat((q, torch.full((len(q), 4, 64), torch.nan)), dim=1).to(DEVICE)
    inputs = on_device((q, k_cache, v_cache, attn))[1:]
    before = [tensor.clone() for tensor in (wide, *inputs[:2])]
    out = attention.paged_attention(wide[:, :4], *inputs, 0.25)
    torch.testing.assert_close(out.cpu(), want, atol=2e-5, rtol=0)
    for tensor, old in zip((wide, *inputs[:2]), before, strict=True):
        torch.testing.assert_close(tensor, old, atol=0, rtol=0, equal_nan=True)
    assert out.is_contiguous()


def test_splits_fill_the_device_within_what_a_row_can_be_split_into() -> None:
    assert attention.count_splits(8, 32_768, 132) == (66, 66)
    assert attention.count_splits(8, 1000, 132) == (8, 8)
    assert attention.count_splits(8, 128, 132) == (1, 1)
    assert attention.count_splits(512, 4096, 132) == (2, 2)
    assert attention.count_splits(528, 4096, 132) == (1, 1)
    assert attention.count_splits(1, 1 << 20, 132) == (128, 128)


def test_a_long_row_is_split_in_a_batch_that_fills_the_device() -> None:
    assert attention.count_splits(528, 32_768, 132) == (8, 1)
    assert attention.count_splits(512, 32_768, 132) == (8, 2)
    assert attention.count_splits(528, 1 << 20, 132) == (128, 1)


@pytest.mark.parametrize("max_seq_len", [9000, 32_768])
def test_long_rows_beside_short_ones(max_seq_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_num_sms", lambda device: 1)
    parts: list[torch.Tensor] = []
    empty = torch.empty

    def keep(*args: Any, **kwargs: Any) -> torch.Tensor:
        parts.append(empty(*args, **kwargs))
        return parts[-1].fill_(torch.nan)

    q, k_cache, v_cache, attn = make_case(
        [40, 9000, 4096, 1, 4097], [1] * 5, kv_heads=1, head_dim=64
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", keep)
        assert_matches_reference((q, k_cache, v_cache, replace(attn, max_seq_len=max_seq_len)))
    _, acc_BHXD, _ = parts
    written_BX = ~acc_BHXD[:, 0, :, 0].isnan()
    assert written_BX.sum(1).tolist() == [1, 3, 1, 1, 2]


@NEEDS_GPU
def test_captured_decode_follows_the_lengths_on_the_device() -> None:
    case = make_case([2000, 1500, 900, 300], [1] * 4, head_dim=128, dtype=torch.bfloat16)
    q, k_cache, v_cache, attn = on_device(case)
    attn = replace(attn, max_seq_len=32_768)
    attention.paged_attention(q, k_cache, v_cache, attn, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.paged_attention(q, k_cache, v_cache, attn, 0.1)
    for lens in ([2000, 1500, 900, 300], [1, 129, 0, 64]):
        attn.seq_lens_B.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        live = [row for row, length in enumerate(lens) if length]
        rows = torch.tensor(live, device=DEVICE)
        count = torch.arange(len(live) + 1, dtype=torch.int32, device=DEVICE)
        some = replace(
            attn,
            query_start_B1=count,
            seq_lens_B=attn.seq_lens_B[rows],
            block_table_BW=attn.block_table_BW[rows],
        )
        want = paged_attention_reference(q[rows], k_cache, v_cache, some, 0.1)
        torch.testing.assert_close(out[rows], want, atol=TOLERANCE[torch.bfloat16], rtol=0)
        assert not out[[row for row in range(4) if row not in live]].any()
