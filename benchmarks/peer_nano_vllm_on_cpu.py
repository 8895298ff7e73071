"""nano-vLLM where there is no GPU, to try the adapter: its calls of CUDA do nothing, or go to the
CPU. What it computes is right; its times mean nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_FREE_BYTES, _TOTAL_BYTES = 96 * 2**20, 128 * 2**20
_NO_EFFECT = ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize")


@contextlib.contextmanager
def calls_of_cuda_on_cpu() -> Iterator[None]:
    """For the block: tensors for a GPU stay where they are, memory is 128 MiB, ranks use gloo, and
    nothing is compiled.
    """
    real_tensor, real_group = torch.tensor, torch.distributed.init_process_group
    real_device = torch.set_default_device

    def tensor(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return real_tensor(*args, **options)

    with contextlib.ExitStack() as stack:
        for name in _NO_EFFECT:
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_: None))
        for owner, name, replacement in (
            (torch.cuda, "mem_get_info", lambda: (_FREE_BYTES, _TOTAL_BYTES)),
            (torch.cuda, "memory_stats", _no_memory_stats),
            (torch, "tensor", tensor),
            (torch, "compile", lambda function: function),
            (torch, "set_default_device", lambda device: real_device("cpu")),
            (torch.Tensor, "cuda", lambda self, **_: self),
            (
                torch.distributed,
                "init_process_group",
                lambda _, *args, **options: real_group("gloo", *args, **options),
            ),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        # Imported here, so that it finds `torch.compile` replaced; its Triton kernel needs a GPU.
        attention = importlib.import_module("nanovllm.layers.attention")
        stack.enter_context(mock.patch.object(attention, "store_kvcache", _store))
        yield


def _no_memory_stats() -> dict[str, int]:
    return {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}


def _store(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write keys and values [T, K, D] to their slots of the caches [N, P, K, D]."""
    for new, cache in ((key, k_cache), (value, v_cache)):
        cache.flatten(0, 1)[slots.to(torch.int64)] = new
