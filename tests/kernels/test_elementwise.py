"""Norms, rotary embedding and activation: references against formulas written here, CPU versions
against references.
"""

from __future__ import annotations

import math

import pytest
import torch

from kernels.interface import Kernels
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from kernels.reference.rope import qk_norm_rope_reference
from kernels.select import select_backend

CPU = select_backend("cpu", "cpu")
pytestmark = pytest.mark.usefixtures("two_threads")
BACKENDS = pytest.mark.parametrize(
    "kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.capabilities.name
)
SHAPES = pytest.mark.parametrize("shape", [(1, 16), (7, 64), (15, 127), (300, 96), (0, 64)])
EPS = 1e-6


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight.double()


@BACKENDS
@SHAPES
def test_rms_norm_equals_the_formula(kernels: Kernels, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape) * 3, normal(shape[-1], seed=1)
    before = x.clone()
    out = kernels.rms_norm(x, weight, EPS)
    torch.testing.assert_close(out.double(), exact_rms_norm(x, weight), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)


@BACKENDS
def test_rms_norm_adds_eps_where_the_input_is_tiny(kernels: Kernels) -> None:
    x, weight = torch.full((1, 8), 1e-4), torch.ones(8)
    want = 1e-4 / math.sqrt(1e-8 + EPS)
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, EPS), torch.full((1, 8), want), atol=0, rtol=1e-5
    )


@BACKENDS
def test_rms_norm_in_bfloat16_is_near_the_formula(kernels: Kernels) -> None:
    """The reference rounds twice, before and after the weight, as transformers does; the CPU kernel
    rounds once.
    """
    x, weight = normal(64, 128, dtype=torch.bfloat16), normal(128, seed=1, dtype=torch.bfloat16)
    want = exact_rms_norm(x, weight)
    out = kernels.rms_norm(x, weight, EPS)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.double(), want, atol=1e-6, rtol=2**-7 if kernels is REFERENCE else 2**-8
    )


def test_rms_norm_reference_is_that_of_transformers_bit_by_bit() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for dtype in (torch.float32, torch.bfloat16):
        layer = Qwen3RMSNorm(64, EPS).to(dtype)
        layer.weight.data = normal(64, seed=1, dtype=dtype)
        x = normal(9, 64, dtype=dtype)
        assert torch.equal(REFERENCE.rms_norm(x, layer.weight.data, EPS), layer(x).detach())


@BACKENDS
@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm_is_the_sum_and_its_norm(
    kernels: Kernels, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, residual, weight = (
        normal(*s, seed=i, dtype=dtype) for i, s in enumerate((shape, shape, shape[-1:]))
    )
    before = x.clone(), residual.clone()
    normed, total = kernels.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, before[0] + before[1])
    assert torch.equal(normed, kernels.rms_norm(total, weight, EPS))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def make_cos_sin(length: int, head_dim: int, theta: float = 10000.0) -> torch.Tensor:
    angles = torch.arange(length)[:, None] / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def exact_rope(x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """Features d and d + D/2 as one complex number, rotated by the position."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def norm_rope(
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries, keys as stored in the cache)."""
    num_tokens, kv_heads, head_dim = k.shape
    k_shape, v_shape = kernels.kv_cache_shapes(1, num_tokens, kv_heads, head_dim)
    k_cache, v_cache = torch.zeros(k_shape, dtype=k.dtype), torch.zeros(v_shape, dtype=k.dtype)
    out = kernels.qk_norm_rope_store(
        torch.cat((q, k, k), dim=1),
        q_weight,
        k_weight,
        EPS,
        table,
        positions,
        k_cache,
        v_cache,
        torch.arange(num_tokens),
    )
    return out, k_cache[0] if kernels is REFERENCE else k_cache[0].permute(2, 0, 1)


@BACKENDS
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 16), (8, 1, 64), (6, 2, 128)])
def test_qk_norm_rope_equals_norm_then_complex_rotation(
    kernels: Kernels, heads: int, kv_heads: int, head_dim: int
) -> None:
    positions = torch.tensor([0, 1, 5, 299, 17, 17], dtype=torch.int32)
    q, k = normal(6, heads, head_dim), normal(6, kv_heads, head_dim, seed=1)
    q_weight, k_weight = normal(head_dim, seed=2), normal(head_dim, seed=3)
    out_q, out_k = norm_rope(
        kernels, q, k, q_weight, k_weight, make_cos_sin(300, head_dim), positions
    )
    for out, x, weight in ((out_q, q, q_weight), (out_k, k, k_weight)):
        want = exact_rope(exact_rms_norm(x, weight), positions)
        # The float32 angles of the table are off by 299 * 2**-24 at most.
        torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-5)


def test_qk_norm_rope_reference_is_near_transformers() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    q, k, norm = normal(7, 4, 32), normal(7, 2, 32, seed=1), Qwen3RMSNorm(32, EPS)
    table, positions = make_cos_sin(50, 32), torch.arange(40, 47)
    cos, sin = (part.repeat(1, 2)[positions][None] for part in table.chunk(2, dim=1))
    want = apply_rotary_pos_emb(
        norm(q).transpose(0, 1)[None], norm(k).transpose(0, 1)[None], cos, sin
    )
    ours = qk_norm_rope_reference(q, k, norm.weight.data, norm.weight.data, EPS, table, positions)
    for out, theirs in zip(ours, want, strict=True):
        torch.testing.assert_close(out, theirs[0].transpose(0, 1).detach(), atol=1e-6, rtol=0)


def test_qk_norm_rope_cpu_is_near_the_reference_in_bfloat16() -> None:
    q, k = (
        normal(40, 8, 128, dtype=torch.bfloat16),
        normal(40, 2, 128, seed=1, dtype=torch.bfloat16),
    )
    weight = normal(128, seed=2, dtype=torch.bfloat16)
    args = (q, k, weight, weight, make_cos_sin(300, 128), torch.arange(260, 300, dtype=torch.int32))
    for ours, reference in zip(norm_rope(CPU, *args), norm_rope(REFERENCE, *args), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, reference, atol=2**-5, rtol=2**-6)


@BACKENDS
@pytest.mark.parametrize("shape", [(1, 2), (9, 96), (33, 512), (0, 8)])
def test_silu_and_mul_equals_the_formula(kernels: Kernels, shape: tuple[int, int]) -> None:
    gate_up = normal(*shape) * 4
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = kernels.silu_and_mul(gate_up)
    torch.testing.assert_close(
        out.double(), gate / (1 + torch.exp(-gate)) * up, atol=1e-5, rtol=1e-5
    )
    assert torch.equal(gate_up, before)


def test_silu_and_mul_cpu_is_near_the_formula_in_bfloat16() -> None:
    gate_up = normal(17, 200, dtype=torch.bfloat16)
    gate, up = gate_up.double().chunk(2, dim=-1)
    want = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(CPU.silu_and_mul(gate_up).double(), want, atol=1e-6, rtol=2**-8)
