"""Caches of 8-bit numbers: every backend stores and reads them as the reference does."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from kernels.gpu.fp8 import _BFLOAT16_PAIR_PTX, _FLOAT16_PAIR_PTX
from kernels.interface import Kernels
from kernels.metadata import AttentionMetadata
from kernels.reference.attention import paged_attention_reference
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from kernels.reference.fp8 import MAX_FP8, cache_as_float32, from_fp8, to_fp8
from kernels.select import select_backend
from tests.kernels.cpu_caches import from_cpu, to_cpu
from tests.kernels.gpu_device import DEVICE
from tests.kernels.ptx import numbers_of, run_ptx
from tests.kernels.test_attention import MIXED, Case, make_case
from tests.kernels.test_gpu_attention import divided

CPU = select_backend("cpu", "cpu")
TRITON = select_backend(DEVICE.type, "triton")
pytestmark = pytest.mark.usefixtures("two_threads")
BACKENDS = pytest.mark.parametrize("kernels", [CPU, TRITON], ids=["cpu", "triton"])
EVERY_CODE = torch.arange(256, dtype=torch.uint8)


def numbers() -> torch.Tensor:
    """Every number of 8 bits, the midpoint between each and the next with its neighbors, and
    numbers that are too large or too small.
    """
    codes = from_fp8(EVERY_CODE)
    finite = codes[codes.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    around = [torch.nextafter(middles, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    others = torch.tensor([0.0, -0.0, 464.0, 465.0, 1e30, torch.inf, 1e-30, 2**-10, torch.nan])
    torch.manual_seed(0)
    drawn = torch.randn(500) * torch.randint(-12, 10, (500,)).float().exp2()
    return torch.cat((finite, middles, *around, others, -others, drawn))


def test_the_reference_rounds_to_nearest_and_does_not_overflow() -> None:
    x = numbers()
    x = x[x.isfinite()]
    finite = from_fp8(EVERY_CODE)
    finite = finite[finite.isfinite()]
    nearest = (x.clamp(-MAX_FP8, MAX_FP8)[:, None] - finite[None, :]).abs().min(dim=1).values
    assert torch.equal((x.clamp(-MAX_FP8, MAX_FP8) - from_fp8(to_fp8(x))).abs(), nearest)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_is_stored_as_the_reference_stores_it(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    """As values, which reach the cache unchanged, and as keys, which are rotated."""
    x = numbers().to(dtype)
    if kernels is TRITON:  # it also squares them, about which the interpreter complains
        x = x[x.abs() < 1e15]
    v_TKD = torch.nn.functional.pad(x, (0, -len(x) % 32)).view(-1, 2, 16)
    torch.manual_seed(0)
    qk = torch.randn(len(v_TKD), 4, 16).to(dtype)
    angle_LE = torch.randn(50, 8)
    arguments = (
        torch.cat((qk, v_TKD), dim=1),
        torch.ones(16, dtype=dtype),
        torch.ones(16, dtype=dtype),
        1e-6,
        torch.cat((angle_LE.cos(), angle_LE.sin()), dim=1),
        torch.randint(50, (len(v_TKD),), dtype=torch.int32),
    )
    slots = torch.randperm(16 * 16)[: len(v_TKD)]
    shapes = REFERENCE.kv_cache_shapes(16, 16, 2, 16)
    want = [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]
    REFERENCE.qk_norm_rope_store(*arguments, want[0], want[1], slots)
    shapes = kernels.kv_cache_shapes(16, 16, 2, 16)
    device = DEVICE if kernels is TRITON else torch.device("cpu")
    got = [torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes]
    moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    kernels.qk_norm_rope_store(*moved, *got, slots.to(device))  # type: ignore[call-arg, arg-type]
    keys, values = from_cpu(got[0], got[1], dtype) if kernels is CPU else got
    assert torch.equal(values.cpu(), want[1])
    # With a different rounding of the rotation, a key may be on the other side of a midpoint.
    got_keys, want_keys = from_fp8(keys.cpu()), from_fp8(want[0])
    torch.testing.assert_close(got_keys, want_keys, atol=0.01, rtol=2**-3)
    assert (got_keys != want_keys).float().mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_a_gpu_keeps_only_finite_numbers(dtype: torch.dtype) -> None:
    """The next owner of the block must not find others there, nor multiply them by 0."""
    x = torch.tensor([1.0, torch.nan, -torch.inf, torch.inf, 2.0, -torch.nan, 3.0, -4.0] * 2)
    activation = torch.float32 if dtype is torch.uint8 else dtype
    qkv = torch.ones(1, 3, 16, dtype=activation, device=DEVICE)
    qkv[0, 2] = x
    weight = torch.ones(16, dtype=activation, device=DEVICE)
    caches = [torch.zeros(1, 4, 1, 16, dtype=dtype, device=DEVICE) for _ in range(2)]
    table = torch.ones(1, 16, device=DEVICE)
    zeros = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # warnings of the interpreter, about NaN
        TRITON.qk_norm_rope_store(
            qkv, weight, weight, 1e-6, table, zeros, caches[0], caches[1], zeros.long()
        )
    most = 448.0 if dtype is torch.uint8 else 0.0
    want = torch.tensor([1.0, 0.0, -most, most, 2.0, 0.0, 3.0, -4.0] * 2)
    assert torch.equal(cache_as_float32(caches[1][0, 0, 0]).cpu(), want)


@pytest.mark.parametrize(
    ("dtype", "pairs"),
    [(torch.float16, _FLOAT16_PAIR_PTX), (torch.bfloat16, _BFLOAT16_PAIR_PTX)],
    ids=["float16", "bfloat16"],
)
def test_assembly_for_pairs_is_exact_and_keeps_order(dtype: torch.dtype, pairs: Any) -> None:
    """Without a GPU: its few instructions, executed here."""
    codes = EVERY_CODE[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    words = codes.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    results = [run_ptx(pairs.value, dtype, {"$2": word}) for word in words.tolist()]
    numbers = [numbers_of(result[name], dtype) for result in results for name in ("$0", "$1")]
    is_number = from_fp8(codes).isfinite()
    got, want = torch.cat(numbers), from_fp8(codes).to(dtype)
    assert torch.equal(got[is_number].view(torch.int16), want[is_number].view(torch.int16))


def attend(kernels: Kernels, case: Case, scale: float) -> torch.Tensor:
    q, k_cache, v_cache, attn = case
    if kernels is CPU:
        return kernels.paged_attention(q, *to_cpu(k_cache, v_cache, q.dtype), attn, scale)
    names = [f.name for f in fields(attn) if torch.is_tensor(getattr(attn, f.name))]
    attn = replace(attn, **{name: getattr(attn, name).to(DEVICE) for name in names})
    moved = divided((q.to(DEVICE), k_cache.to(DEVICE), v_cache.to(DEVICE), attn))
    return kernels.paged_attention(*moved, scale).cpu()


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_is_read_exactly(kernels: Kernels, dtype: torch.dtype) -> None:
    """A row of one token gives the token's values."""
    if dtype is (torch.float16 if kernels is CPU else torch.bfloat16):
        pytest.skip("the CPU has no float16; the interpreter's products of bfloat16 are wrong")
    codes = torch.cat((EVERY_CODE[:0x7F], EVERY_CODE[0x80:0xFF], EVERY_CODE[:2]))
    count = torch.arange(9, dtype=torch.int32)
    v_cache = torch.zeros(8, 16, 1, 32, dtype=torch.uint8)
    v_cache[:, 0, 0] = codes.view(8, 32)
    attn = AttentionMetadata(
        query_start_B1=count,
        seq_start_B1=count,
        seq_lens_B=torch.ones(8, dtype=torch.int32),
        block_table_BW=count[:8, None].clone(),
        kv_places_T=torch.full((8,), -1),
        max_query_len=1,
        max_seq_len=1,
    )
    out = attend(kernels, (torch.ones(8, 1, 32, dtype=dtype), v_cache, v_cache, attn), 1.0)
    assert torch.equal(out.flatten().float(), from_fp8(codes))


@BACKENDS
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize("lens", [MIXED, ([300, 31, 64], [1, 1, 1])], ids=["mixed", "decode"])
def test_attention_equals_the_reference(
    kernels: Kernels, lens: tuple[list[int], list[int]], block_size: int, head_dim: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16) if kernels is CPU else (torch.float32,):
        q, k_cache, v_cache, attn = make_case(*lens, block_size=block_size, head_dim=head_dim)
        k_cache[0], v_cache[0] = 448.0, 448.0
        case = q.to(dtype), to_fp8(k_cache), to_fp8(v_cache), attn
        want = paged_attention_reference(*case, 0.25)
        tolerance = 2e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(attend(kernels, case, 0.25), want, atol=tolerance, rtol=0)
