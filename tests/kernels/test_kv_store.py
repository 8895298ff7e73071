"""The KV store: every backend writes exactly the slots it is told to, in its own layout, and
nothing else.
"""

from __future__ import annotations

import pytest
import torch

from kernels.interface import Kernels
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from kernels.reference.kv_store import store_kv_reference
from kernels.select import select_backend
from tests.kernels.cpu_caches import from_cpu

CPU = select_backend("cpu", "cpu")
pytestmark = pytest.mark.usefixtures("two_threads")
BACKENDS = pytest.mark.parametrize(
    "kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.capabilities.name
)
Caches = tuple[torch.Tensor, torch.Tensor]


def token_major(kernels: Kernels, caches: Caches) -> Caches:
    """A backend's caches as [N, P, K, D]."""
    return caches if kernels is REFERENCE else from_cpu(*caches)


def store(
    kernels: Kernels, k: torch.Tensor, v: torch.Tensor, caches: Caches, slots: torch.Tensor
) -> None:
    """Keys that norm and rotation do not change: mean square 1, at an angle of 0."""
    dim = k.shape[2]
    table = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), dim=1)
    weight = torch.ones(dim, dtype=k.dtype)
    kernels.qk_norm_rope_store(
        torch.cat((k, k, v), dim=1),
        weight,
        weight,
        0.0,
        table,
        torch.zeros(len(k), dtype=torch.int32),
        *caches,
        slots,
    )


def signs(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


def make_caches(
    kernels: Kernels, num_blocks: int, block_size: int, kv_heads: int, dtype: torch.dtype
) -> Caches:
    k_shape, v_shape = kernels.kv_cache_shapes(num_blocks, block_size, kv_heads, 16)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(k_shape, generator=generator).to(dtype), torch.randn(
        v_shape, generator=generator
    ).to(dtype)


@BACKENDS
@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_land_in_their_slots_and_minus_one_writes_nothing(
    kernels: Kernels, block_size: int, dtype: torch.dtype
) -> None:
    caches = make_caches(kernels, -(-600 // block_size), block_size, 2, dtype)
    k = signs(40, 2, 16, seed=2).to(dtype)
    v = torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    slots = torch.randperm(600, generator=torch.Generator().manual_seed(4))[:40]
    slots[[0, 7, 39]] = -1
    want = tuple(cache.clone() for cache in token_major(kernels, caches))
    for rows, cache in zip((k, v), want, strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot // block_size, slot % block_size] = rows[token]
    store(kernels, k, v, caches, slots)
    for ours, theirs in zip(token_major(kernels, caches), want, strict=True):
        assert torch.equal(ours, theirs)


@BACKENDS
def test_step_of_only_padding_leaves_the_cache_alone(kernels: Kernels) -> None:
    caches = make_caches(kernels, 4, 4, 1, torch.float32)
    before = [cache.clone() for cache in caches]
    store(kernels, signs(3, 1, 16, seed=2), signs(3, 1, 16, seed=3), caches, torch.full((3,), -1))
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))


@BACKENDS
def test_slots_beyond_two_to_the_31_elements_are_reached(kernels: Kernels) -> None:
    """Element offsets past int32: the cache is virtual memory, of which only the written pages
    become real.
    """
    num_blocks = (1 << 31) // (16 * 8 * 128) + 8
    k_shape, v_shape = kernels.kv_cache_shapes(num_blocks, 16, 8, 128)
    caches = torch.empty(k_shape, dtype=torch.bfloat16), torch.empty(v_shape, dtype=torch.bfloat16)
    k, v = signs(1, 8, 128, seed=2).bfloat16(), signs(1, 8, 128, seed=3).bfloat16()
    store(kernels, k, v, caches, torch.tensor([num_blocks * 16 - 1]))
    last = token_major(kernels, (caches[0][-1:], caches[1][-1:]))
    assert torch.equal(last[0][0, 15], k[0])
    assert torch.equal(last[1][0, 15], v[0])


def test_reference_writes_into_a_cache_that_is_not_contiguous() -> None:
    cache = torch.zeros(4, 2, 4, 8).transpose(1, 2)
    store_kv_reference(torch.ones(1, 2, 8), torch.ones(1, 2, 8), cache, cache, torch.tensor([1]))
    assert cache[0, 1].eq(1).all() and cache.sum() == 16
