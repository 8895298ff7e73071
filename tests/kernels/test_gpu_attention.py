"""Paged attention in Triton against the reference: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_check_attention import tuned_attention
from kernels.decode_parts import part_starts
from kernels.gpu import attention
from kernels.gpu.attention_launch import LaunchConfig
from kernels.metadata import AttentionMetadata, DecodeParts
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


def divided(case: Case, max_parts: int | None = None) -> Case:
    """The metadata with the decode rows at the front divided between this many programs."""
    q, k_cache, v_cache, attn = case
    query_lens = attn.query_start_B1.diff().tolist()
    num_rows = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    kv_heads = k_cache.shape[2]
    lens = attn.seq_lens_B[:num_rows].cpu().numpy()
    if max_parts is None:
        max_parts = attention.max_parts_on_device(num_rows, kv_heads, attn.max_seq_len, DEVICE)
    decode_parts = None
    if num_rows:
        decode_parts = DecodeParts(
            num_rows=num_rows,
            max_parts=max_parts,
            part_start_B1=torch.from_numpy(part_starts(lens, max_parts)).to(DEVICE),
            num_arrived_BK=torch.zeros(num_rows, kv_heads, dtype=torch.int32, device=DEVICE),
        )
    return q, k_cache, v_cache, replace(attn, decode_parts=decode_parts)


def paged_attention_gpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attention, after dividing the decode rows if they are not divided yet."""
    case = on_device((q, k_cache, v_cache, attn))
    if attn.decode_parts is None:
        case = divided(case)
    out = attention.paged_attention(*case, scale).cpu()
    decode_parts = case[-1].decode_parts
    assert decode_parts is None or not decode_parts.num_arrived_BK.any(), "counters are zeros again"
    return out


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


def test_prompts_behind_more_decode_rows_than_a_tile_holds() -> None:
    lens, query_lens = [3] * 70 + [40, 70, 9], [1] * 70 + [30, 70, 9]
    case = make_case(lens, query_lens, block_size=16, kv_heads=1, group=2, dtype=torch.float16)
    assert_matches_reference(case)


def test_rows_of_padding_get_zeros_or_nothing(new_memory_is_nan: None) -> None:
    """As in a graph: two rows without queries behind the decode rows, which have no parts, and at
    the end one with queries but no tokens.
    """
    lens, query_lens = [40, 33, 0, 0, 70, 0, 0], [1, 1, 0, 0, 9, 0, 5]
    case = make_case(lens, query_lens, block_size=16, kv_heads=1, group=2, dtype=torch.float16)
    part_start_B1 = np.pad(part_starts(np.array(lens[:2], np.int32), 6), (0, 2), mode="edge")
    decode_parts = DecodeParts(
        num_rows=4,
        max_parts=6,
        part_start_B1=torch.from_numpy(part_start_B1).to(DEVICE),
        num_arrived_BK=torch.zeros(4, 1, dtype=torch.int32, device=DEVICE),
    )
    assert_matches_reference((*case[:3], replace(case[3], decode_parts=decode_parts)))


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


@pytest.mark.parametrize("query_len", [2, 31, 32, 33, 130])
@pytest.mark.parametrize("prefix_len", [0, 127, 700])
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


def test_rows_of_one_part_write_the_output_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    empty = torch.empty

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(args[0])
        return empty(*args, **kwargs)

    case = divided(make_case(DECODE_LENS, [1] * 6, head_dim=64), max_parts=6)
    monkeypatch.setattr(torch, "empty", noting)
    out = attention.paged_attention(*on_device(case), 0.125)
    assert made == [case[0].shape], "nothing but the output"
    want = paged_attention_reference(*case, 0.125)
    torch.testing.assert_close(out.cpu(), want, atol=2e-5, rtol=0)


def test_rows_without_parts_go_the_way_of_prompts() -> None:
    case = make_case(DECODE_LENS, [1] * 6, head_dim=64)
    out = attention.paged_attention(*on_device(case), 0.125)
    want = paged_attention_reference(*case, 0.125)
    torch.testing.assert_close(out.cpu(), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("extra", [0, 5, 400])
@pytest.mark.parametrize("lens", [MIXED, (DECODE_LENS, [1] * 6)], ids=["mixed", "decode"])
def test_any_number_of_parts_gives_the_same(
    lens: tuple[list[int], list[int]], extra: int, new_memory_is_nan: None
) -> None:
    """Including more parts than there are tiles. No memory is read that was not written."""
    rows = sorted(zip(*lens, strict=True), key=lambda row: row[1] != 1)
    seq_lens, query_lens = [row[0] for row in rows], [row[1] for row in rows]
    case = make_case(seq_lens, query_lens, kv_heads=2, group=3, head_dim=80, dtype=torch.float16)
    assert_matches_reference(divided(case, query_lens.count(1) + extra))


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Those of the launches, as they are made."""
    launches: list[tuple[int, ...]] = []

    class Noting:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append(grid)
            return self.kernel[grid]

    for name in ("decode_kernel", "prefill_kernel"):
        monkeypatch.setattr(attention, name, Noting(getattr(attention, name)))
    return launches


def test_a_mixed_batch_takes_two_launches(grids: list[tuple[int, ...]]) -> None:
    """The decode rows at its front, and all others, single queries among them."""
    assert_matches_reference(make_case([50, 9, 40, 7], [1, 1, 30, 1], kv_heads=2, head_dim=64))
    assert grids == [(2, 2), (33 * 2 // 32 + 2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_order_of_decode_programs_changes_no_bit(
    dtype: torch.dtype, grids: list[tuple[int, ...]]
) -> None:
    case = make_case(DECODE_LENS, [1] * 6, kv_heads=3, group=2, head_dim=64, dtype=dtype)
    case = divided(on_device(case), 11)
    outs = [
        tuned_attention(partial(replace, heads_adjacent=adjacent))(*case, 0.125)
        for adjacent in (True, False)
    ]
    assert grids == [(3, 11), (11, 3)]
    assert torch.equal(outs[0], outs[1]) and outs[0].isfinite().all()


@pytest.mark.parametrize(("most", "grid"), [(11, (3, 11)), (10, (11, 3))])
def test_more_parts_than_a_grid_may_have_in_its_second_dimension_are_in_the_first(
    most: int,
    grid: tuple[int, int],
    grids: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_MAX_GRID_Y", most)
    case = make_case(DECODE_LENS, [1] * 6, kv_heads=3, group=2, head_dim=64)
    assert_matches_reference(divided(case, 11))
    assert grids == [grid]


@pytest.mark.parametrize("tile_m", [16, 64])
@pytest.mark.parametrize("tile_c", [16, 128])
def test_launch_that_a_benchmark_chooses_is_used(tile_m: int, tile_c: int) -> None:
    case = on_device(make_case(*MIXED, head_dim=64, dtype=torch.float16))
    chosen: list[LaunchConfig] = []

    def tune(launch: LaunchConfig) -> LaunchConfig:
        chosen.append(replace(launch, tile_m=tile_m, tile_c=tile_c, num_warps=4))
        return chosen[-1]

    out = tuned_attention(tune)(*case, 0.125)
    want = paged_attention_reference(*case, 0.125)
    torch.testing.assert_close(out, want, atol=TOLERANCE[torch.float16], rtol=0)
    assert len(chosen) == 1, "without decode parts, one launch"


def test_more_decode_rows_than_are_searched_at_once_before_prompts() -> None:
    rng = random.Random(1)
    seq_lens = [rng.randrange(1, 20) for _ in range(260)] + [33, 20]
    query_lens = [1] * 260 + [20, 7]
    assert_matches_reference(make_case(seq_lens, query_lens, kv_heads=1, head_dim=16))


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


def test_long_rows_beside_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    empty = torch.empty

    def keep(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(empty(*args, **kwargs))
        return made[-1].fill_(torch.nan)

    lens = [40, 9000, 4096, 1, 4097]
    case = divided(make_case(lens, [1] * 5, kv_heads=1, head_dim=64), max_parts=11)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", keep)
        assert_matches_reference(case)
    _, acc_XHD, *_ = made
    written = (~acc_XHD[:, 0, 0].isnan()).tolist()
    # A row of one part writes no part; the long ones have five, two and two.
    assert written == [False, *[True] * 5, *[True] * 2, False, *[True] * 2]


@NEEDS_GPU
def test_captured_decode_follows_the_lengths_on_the_device() -> None:
    case = make_case([2000, 1500, 900, 300], [1] * 4, head_dim=128, dtype=torch.bfloat16)
    max_parts = attention.max_parts_on_device(4, case[1].shape[2], 32_768, DEVICE)
    q, k_cache, v_cache, attn = divided(on_device(case), max_parts)
    assert attn.decode_parts is not None
    attention.paged_attention(q, k_cache, v_cache, attn, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.paged_attention(q, k_cache, v_cache, attn, 0.1)
    for lens in ([2000, 1500, 900, 300], [1, 129, 0, 64]):
        attn.seq_lens_B.copy_(torch.tensor(lens, dtype=torch.int32))
        starts = part_starts(np.array(lens, np.int32), max_parts)
        attn.decode_parts.part_start_B1.copy_(torch.from_numpy(starts))
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
