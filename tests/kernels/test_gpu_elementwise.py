"""Triton's norms, rotary embedding, KV store and gate against the references, on a GPU or in the
interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.gpu import elementwise
from kernels.reference.activation import silu_and_mul_reference
from kernels.reference.norm import add_rms_norm_reference, rms_norm_reference
from kernels.reference.rope import qk_norm_rope_store_reference
from tests.kernels.gpu_device import DEVICE

EPS = 1e-6
# Triton's interpreter truncates to bfloat16 instead of rounding, so float16 takes its place there.
BFLOAT16 = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
DTYPES = list(dict.fromkeys((torch.float32, torch.float16, BFLOAT16)))
# Both compute in float32, in different orders and with different approximations of square roots and
# exponentials. Near the middle of two 16-bit numbers, that decides which one is taken, and a
# product with it changes by as much again.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
# The terms that a rotation adds are at most this large, so the sum may be off by the tolerance for
# that size.
LARGEST = 8


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(got: torch.Tensor, want: torch.Tensor, *, largest: float = 1.0) -> None:
    """Within the tolerance, relative to each number or to `largest`; and rounded in the same
    places, so few 16-bit numbers differ.
    """
    assert got.dtype == want.dtype
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, atol=tolerance * largest, rtol=tolerance)
    if want.dtype != torch.float32:
        assert (got != want).sum() <= 1 + want.numel() // 100


# Norms


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 4096), torch.float32),
        ((7, 1), torch.float32),
        ((9, 80), torch.float16),
        ((2, 3, 64), BFLOAT16),
        ((0, 64), torch.float32),
    ],
    ids=str,
)
def test_norms_equal_the_references(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of rows of a slice, of three dimensions too."""
    size = shape[-1]
    wide, weight = normal(*shape[:-1], 3 * size, dtype=dtype) * 3, normal(size, seed=1, dtype=dtype)
    x, residual, before = wide[..., size : 2 * size], wide[..., :size], wide.clone()
    assert_near(elementwise.rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    normed, total = elementwise.add_rms_norm(x, residual, weight, EPS)
    want_normed, want_total = add_rms_norm_reference(x, residual, weight, EPS)
    assert torch.equal(total, want_total)
    assert_near(normed, want_normed)
    assert torch.equal(wide, before)


def test_norm_adds_eps_where_the_input_is_tiny_and_keeps_the_sign_of_zeros() -> None:
    x, weight = torch.full((1, 8), 1e-4, device=DEVICE), torch.ones(8, device=DEVICE)
    x[0, 1], weight[2] = -0.0, -0.0
    got, want = elementwise.rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS)
    assert_near(got, want)
    assert got.signbit().tolist() == want.signbit().tolist() == [[i in (1, 2) for i in range(8)]]


# The gate


@pytest.mark.parametrize(
    ("num_tokens", "features", "dtype"),
    [
        (2, 3072, torch.float32),
        (5, 1, torch.float32),
        (7, 100, BFLOAT16),
        (3, 1025, torch.float16),
        (0, 64, torch.float32),
    ],
    ids=str,
)
def test_gate_equals_the_reference(num_tokens: int, features: int, dtype: torch.dtype) -> None:
    """Of rows of a slice."""
    wide = (normal(num_tokens, 2 * features + 100) * 4).to(dtype)
    gate_up, before = wide[:, 50:-50], wide.clone()
    assert_near(elementwise.silu_and_mul(gate_up), silu_and_mul_reference(gate_up))
    assert torch.equal(wide, before)


def test_gate_of_zeros_and_of_large_numbers() -> None:
    gate = torch.tensor([0.0, -0.0, 100.0, -100.0, 3e38, -3e38], device=DEVICE)
    gate_up = torch.stack(
        (torch.cat((gate, torch.ones_like(gate))), torch.cat((gate, -torch.ones_like(gate))))
    )
    with np.errstate(over="ignore"):  # an infinite exponential, for which the interpreter warns
        got = elementwise.silu_and_mul(gate_up)
    want = silu_and_mul_reference(gate_up)
    assert_near(got, want, largest=0)
    assert torch.equal(got.signbit(), want.signbit())


# Queries, keys and values


def make_cos_sin(length: int, head_dim: int) -> torch.Tensor:
    angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "kv_heads", "block_size"),
    [
        (torch.float32, 64, 1, 3, 16),
        (torch.float32, 80, 8, 1, 256),
        (torch.float16, 128, 1, 5, 256),
        (BFLOAT16, 80, 3, 2, 16),
    ],
    ids=str,
)
def test_fused_kernel_turns_queries_and_keys_and_stores(
    dtype: torch.dtype, head_dim: int, group: int, kv_heads: int, block_size: int
) -> None:
    """Heads of a slice; into caches behind a block to which a place of -1 would point."""
    qkv = normal(6, (group + 2) * kv_heads + 2, head_dim, dtype=dtype)[:, 1:-1]
    q_weight, k_weight = (normal(head_dim, seed=seed, dtype=dtype) for seed in (2, 3))
    positions = torch.tensor([0, 1, 5, 299, 17, 17], device=DEVICE)
    positions = positions.int() if kv_heads > 1 else positions
    shape = (1 + 512 // block_size, block_size, kv_heads, head_dim)
    caches = [normal(*shape, seed=seed, dtype=dtype) for seed in (8, 9)]
    want, before = [cache.clone() for cache in caches], qkv.clone()
    places = torch.randperm(512, generator=torch.Generator().manual_seed(4))[:6].to(DEVICE)
    places[::5] = -1
    args = (qkv, q_weight, k_weight, EPS, make_cos_sin(300, head_dim), positions)
    want_q = qk_norm_rope_store_reference(*args, want[0][1:], want[1][1:], places)
    q = elementwise.qk_norm_rope_store(*args, caches[0][1:], caches[1][1:], places)
    assert_near(q, want_q, largest=LARGEST)
    assert_near(caches[0], want[0], largest=LARGEST)
    assert torch.equal(caches[1], want[1])
    assert torch.equal(qkv, before)
    written = places[places >= 0] + block_size
    caches[0].flatten(0, 1)[written] = want[0].flatten(0, 1)[written]
    assert torch.equal(caches[0], want[0]), "no bit has changed anywhere else"


def test_fused_kernel_without_tokens_writes_nothing() -> None:
    caches = [normal(2, 16, 2, 64, seed=seed) for seed in (8, 9)]
    before = [cache.clone() for cache in caches]
    weight, none = normal(64), torch.empty(0, dtype=torch.int64, device=DEVICE)
    args = (normal(0, 8, 64), weight, weight, EPS, make_cos_sin(1, 64), none)
    assert elementwise.qk_norm_rope_store(*args, caches[0], caches[1], none).shape == (0, 4, 64)
    assert torch.equal(caches[0], before[0]) and torch.equal(caches[1], before[1])


def test_slots_beyond_two_to_the_31_elements_are_reached() -> None:
    """Element offsets past int32: the caches lie in virtual memory, of which on a CPU only few
    pages become real.
    """
    num_blocks = (1 << 31) // (16 * 8 * 128) + 8
    caches = [
        torch.empty(num_blocks, 16, 8, 128, dtype=torch.float16, device=DEVICE) for _ in range(2)
    ]
    slots = torch.tensor([num_blocks * 16 - 1], device=DEVICE)
    k, v = (normal(1, 8, 128, seed=seed, dtype=torch.float16) for seed in (1, 2))
    weight = normal(128, seed=3, dtype=torch.float16)
    positions = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    args = (torch.cat((k, k, v), dim=1), weight, weight, EPS, make_cos_sin(1, 128), positions)
    elementwise.qk_norm_rope_store(*args, caches[0], caches[1], slots)
    assert_near(caches[0][-1, -1], rms_norm_reference(k, weight, EPS)[0])
    assert torch.equal(caches[1][-1, -1], v[0])
