"""The KV store: every version writes exactly the slots it is told to, and nothing else."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import CPU, REFERENCE, Kernels

torch.set_num_threads(1)

BACKENDS = pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)


def store_one_by_one(rows: torch.Tensor, cache: torch.Tensor, slots: list[int]) -> torch.Tensor:
    out = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            out[slot // cache.shape[1], slot % cache.shape[1]] = rows[token]
    return out


@BACKENDS
@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_land_in_their_slots_and_minus_one_writes_nothing(
    kernels: Kernels, block_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(block_size)
    shape = kernels.kv_cache_shape(-(-600 // block_size), block_size, 2, 16)
    k_cache, v_cache = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(40, 2, 16, generator=generator).to(dtype) for _ in range(2))
    slots = torch.randperm(600, generator=generator)[:40]
    slots[[0, 7, 39]] = -1
    want_k, want_v = (store_one_by_one(r, c, slots.tolist()) for r, c in ((k, k_cache), (v, v_cache)))
    kernels.store_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, want_k)
    assert torch.equal(v_cache, want_v)


@BACKENDS
def test_step_of_only_padding_leaves_the_cache_alone(kernels: Kernels) -> None:
    k_cache, v_cache = torch.ones(4, 4, 1, 8), torch.ones(4, 4, 1, 8)
    kernels.store_kv(torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), k_cache, v_cache, torch.full((3,), -1))
    assert torch.equal(k_cache, torch.ones(4, 4, 1, 8))
    assert torch.equal(v_cache, torch.ones(4, 4, 1, 8))


@BACKENDS
def test_layers_are_views_of_one_tensor_and_only_one_is_written(kernels: Kernels) -> None:
    cache = torch.zeros(2, 3, *kernels.kv_cache_shape(5, 4, 2, 8))
    k, v = torch.ones(2, 2, 8), torch.full((2, 2, 8), 2.0)
    kernels.store_kv(k, v, cache[0, 1], cache[1, 1], torch.tensor([3, 17]))
    assert cache[0, 1].sum() == k.sum()
    assert cache[1, 1].sum() == v.sum()
    assert cache.sum() == k.sum() + v.sum()


@BACKENDS
def test_projections_may_be_slices_of_one_tensor(kernels: Kernels) -> None:
    qkv = torch.arange(2 * 4 * 8, dtype=torch.float32).view(2, 4, 8)
    k_cache, v_cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    kernels.store_kv(qkv[:, 2:3], qkv[:, 3:4], k_cache, v_cache, torch.tensor([5, 0]))
    assert torch.equal(k_cache[1, 1], qkv[0, 2:3])
    assert torch.equal(v_cache[0, 0], qkv[1, 3:4])


@BACKENDS
def test_slots_beyond_two_to_the_31_elements_are_reached(kernels: Kernels) -> None:
    """Element offsets past int32: the cache is virtual memory, of which only the written page becomes real."""
    num_blocks = (1 << 31) // (16 * 8 * 128) + 8
    cache = torch.empty(kernels.kv_cache_shape(num_blocks, 16, 8, 128), dtype=torch.uint8)
    last = num_blocks * 16 - 1
    rows = torch.full((1, 8, 128), 7, dtype=torch.uint8)
    kernels.store_kv(rows, rows, cache, cache, torch.tensor([last]))
    assert torch.equal(cache[num_blocks - 1, 15], rows[0])


def test_cache_that_is_not_contiguous_is_refused_by_the_cpu_version() -> None:
    cache = torch.zeros(4, 2, 4, 8).transpose(1, 2)
    with pytest.raises(RuntimeError, match="view"):
        CPU.store_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), cache, cache, torch.tensor([1]))
