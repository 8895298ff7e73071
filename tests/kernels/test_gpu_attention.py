"""Paged attention in Triton against the reference: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.gpu_check_attention import tuned_attention
from kernels.decode_parts import part_starts
from kernels.gpu import attention
from kernels.metadata import AttentionMetadata, DecodeParts
from kernels.reference.attention import paged_attention_reference
from tests.kernels.gpu_device import DEVICE
from tests.kernels.test_attention import Case, make_case

# float32: both sum in float32, in different orders and with different exponentials. Halves: the
# output, up to 4, is rounded to 11 bits (bfloat16: 8) in each, and the kernels also round their
# softmax weights.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

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
            num_arrived_parts_BK=torch.zeros(num_rows, kv_heads, dtype=torch.int32, device=DEVICE),
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
    assert decode_parts is None or not decode_parts.num_arrived_parts_BK.any(), (
        "counters are zeros again"
    )
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
        (torch.float16, 64, 8, 1, 256),
        (torch.float16, 80, 3, 2, 16),
        (torch.float16, 96, 5, 1, 7),
        (torch.float16, 256, 6, 1, 64),
        (torch.float16, 16, 20, 1, 32),
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


def rows_by_name() -> dict[str, list[tuple[int, int]]]:
    """Lengths of rows and of their queries."""
    rng = random.Random(0)
    edges = [n + d for n in (16, 64, 128, 256) for d in (-1, 0, 1)] + [1, 2, 513]
    queries = [rng.choice((0, 1, 1, 1, 2, 9)) for _ in range(260)]
    decoded = [(rng.randrange(1, 20), 1) for _ in range(260)]
    return {
        "decode around the edges of blocks, tiles and parts": [(n, 1) for n in edges],
        "prompts around the edges of blocks and tiles": [(n, n) for n in edges],
        "chunks behind a cached prefix": [(q + n, q) for n in (127, 700) for q in (2, 33, 130)],
        "prompts behind more decode rows than are searched at once": [*decoded, (33, 20), (20, 7)],
        "more rows than are searched at once": [(q + rng.randrange(1, 6), q) for q in queries],
    }


@pytest.mark.parametrize("rows", rows_by_name().values(), ids=rows_by_name())
def test_equals_reference_for_rows_of_every_length(rows: list[tuple[int, int]]) -> None:
    seq_lens, query_lens = map(list, zip(*rows, strict=True))
    assert_matches_reference(
        make_case(seq_lens, query_lens, kv_heads=1, head_dim=64, dtype=torch.float16)
    )


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


@pytest.mark.parametrize(
    ("most", "adjacent", "grid"), [(11, True, (3, 11)), (10, True, (11, 3)), (11, False, (11, 3))]
)
def test_order_of_decode_programs_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, most: int, adjacent: bool, grid: tuple[int, int]
) -> None:
    """As a benchmark chooses, and where there are more parts than a grid's second dimension has."""
    grids: list[tuple[int, ...]] = []
    kernel: Any = attention.decode_kernel

    class Noting:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(attention, "decode_kernel", Noting())
    monkeypatch.setattr(attention, "_MAX_GRID_Y", most)
    case = divided(on_device(make_case(DECODE_LENS, [1] * 6, kv_heads=3, head_dim=64)), 11)
    tune = partial(replace, heads_adjacent=adjacent)
    out = tuned_attention(tune)(*case, 0.125)
    torch.testing.assert_close(out, paged_attention_reference(*case, 0.125), atol=2e-5, rtol=0)
    assert grids == [grid]


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
    options: dict[str, Any] = {"kv_heads": 1, "block_size": 256, "head_dim": 128}
    q, small_k, small_v, attn = make_case([40], [query_len], dtype=torch.float16, **options)
    want = paged_attention_reference(q, small_k, small_v, attn, 0.1)
    num_blocks = 2**31 // (256 * 128) + 4
    shape = (num_blocks, *small_k.shape[1:])
    k_cache, v_cache = (torch.empty(shape, dtype=q.dtype, device=DEVICE) for _ in range(2))
    k_cache[-2], v_cache[-2] = small_k[1], small_v[1]
    attn.block_table_BW[0, 0] = num_blocks - 2
    out = paged_attention_gpu(q, k_cache, v_cache, attn, 0.1)
    torch.testing.assert_close(out, want, atol=TOLERANCE[torch.float16], rtol=0)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 20, 1]])
def test_queries_may_be_a_view(query_lens: list[int]) -> None:
    q, k_cache, v_cache, attn = make_case([21, 20, 300], query_lens, head_dim=64)
    wide = torch.cat((q, torch.full((len(q), 4, 64), torch.nan)), dim=1)
    case = divided(on_device((wide, k_cache, v_cache, attn)))
    out = attention.paged_attention(case[0][:, :4], *case[1:], 0.25)
    want = paged_attention_reference(q, k_cache, v_cache, attn, 0.25)
    torch.testing.assert_close(out.cpu(), want, atol=2e-5, rtol=0)
