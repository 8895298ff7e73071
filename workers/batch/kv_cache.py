"""The memory of the KV cache of one rank, and how much of it a GPU has.

Owns one tensor; every layer works on a view of it. Never decides which block holds what: the
scheduler does. The layout of one layer's keys and values is the backend's
(`Kernels.kv_cache_shapes`).
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from configs.engine import ResolvedConfig
from kernels.interface import Kernels
from scheduler.errors import ConfigError
from workers.batch.kv_plan import megabytes
from workers.device import Device
from workers.memory.gpu import SharedGpuMemory, lies_on_gpu
from workers.memory.inheritance import LastingMemory
from workers.memory.lasting import SharedMemfd, has_memfds
from workers.models.qwen3 import LayerCache
from workers.progress import Progress

logger = logging.getLogger(__name__)

# Device memory that CUDA and NCCL hold outside torch's allocator; no call reports it per process.
_CUDA_CONTEXT_BYTES = 768 * 2**20


def gpu_budget(
    config: ResolvedConfig,
    device: Device,
    run_step: Callable[[], None],
    make_runner: Callable[[], object],
    lasting_bytes: int = 0,
) -> list[tuple[str, int]]:
    """The parts of a GPU's memory budget: its share of the total, what this process holds, the peak
    of the largest step (`run_step`), and what a runner over a throw-away cache of one block holds,
    mostly graphs (`make_runner`). Where a spare is to stand by, it has as much, but shares the
    weights, which then take `lasting_bytes` outside torch's allocator.

    Only this process's own use counts. What other processes hold is deducted only as far as the
    budget would not fit into the free memory.
    """
    peak_bytes = device.peak_during(run_step)
    memory_before = device.memory()
    runner = make_runner()
    memory_after = device.memory()
    # Memory that graphs hold in the CUDA driver shows only in the free memory, which other
    # processes may change meanwhile: take the larger.
    runner_bytes = max(
        memory_after.reserved - memory_before.reserved, memory_before.free - memory_after.free
    )
    del runner
    memory = device.memory()
    share_bytes = int(memory.total * config.engine.gpu_memory_utilization)
    own_bytes = memory.reserved + lasting_bytes + _CUDA_CONTEXT_BYTES
    budget_terms = [
        ("share of the device", share_bytes),
        ("weights and CUDA context", own_bytes),
        ("largest step", peak_bytes),
        ("batch state and graphs", runner_bytes),
    ]
    if config.has_standby and lasting_bytes:  # otherwise none can stand by
        spare_bytes = _CUDA_CONTEXT_BYTES + peak_bytes + runner_bytes
        budget_terms.append(("a spare that stands by", spare_bytes))
    missing_bytes = share_bytes - own_bytes - memory.free
    if missing_bytes > 0:
        budget_terms.append(("used by others", missing_bytes))
    return budget_terms


class KVCache:
    """One contiguous tensor [2, layers, elements]; `layers` are (keys, values) views of it. It is
    zero at first, unless its memory is inherited. `memory`: where it lies, if that outlives this
    process.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        kernels: Kernels,
        num_blocks: int,
        num_kv_heads: int,
        device: torch.device,
        inherited_memory: LastingMemory | None = None,
        progress: Progress | None = None,
        *,
        outlives_ranks: bool = False,
    ) -> None:
        """`inherited_memory`: the cache of a rank of the same configuration, as it was left.
        `progress` counts the bytes of one that `outlives_ranks`, where that is possible.
        """
        self.num_blocks = num_blocks
        self.memory = inherited_memory
        shapes = kernels.kv_cache_shapes(
            num_blocks, config.block_size, num_kv_heads, config.model.head_dim
        )
        size = (2, config.model.num_hidden_layers, math.prod(shapes[0]))
        description = f"a KV cache of {num_blocks} blocks of {config.block_size} tokens"
        options_to_lower = (
            "num_kv_blocks, block_size, kv_cache_bytes or gpu_memory_utilization, whichever was"
            " given"
        )
        is_fp8 = config.kv_cache_dtype == "fp8_e4m3"
        dtype = torch.uint8 if is_fp8 else torch_dtype(config.kv_cache_dtype)
        num_bytes = math.prod(size) * dtype.itemsize
        with guard_allocation(description, num_bytes, options_to_lower):
            if self.memory is None and outlives_ranks:
                self.memory = _lasting_memory(device, num_bytes, progress)
            if self.memory is None:
                self.tensor = torch.zeros(size, dtype=dtype, device=device)
            else:
                self.tensor = self.memory.tensor()[:num_bytes].view(dtype).view(size)
        if inherited_memory is None:
            self.allow_writing()
            self.forget()
        self.layers: list[LayerCache] = [
            (keys.view(shapes[0]), values.view(shapes[1]))
            for keys, values in zip(*self.tensor, strict=True)
        ]

    def allow_writing(self) -> None:
        """Let this process write to an inherited cache, which others may have open."""
        if self.memory is not None:
            self.memory.allow_writing()

    def forget(self) -> None:
        """Nobody needs what it holds. Where it lies in memory of a GPU, it becomes zero: attention
        there reads to the end of a block and multiplies what is too much by 0, also a NaN. Kernels
        of CPUs do not read it.
        """
        if isinstance(self.memory, SharedGpuMemory):
            self.tensor.zero_()


def _lasting_memory(
    device: torch.device, num_bytes: int, progress: Progress | None
) -> LastingMemory | None:
    """New memory that outlives this process; None where the system has none."""
    if not lies_on_gpu(device):
        is_possible = has_memfds()
        return SharedMemfd.create("eagleray-kv-cache", num_bytes, progress) if is_possible else None
    try:
        memory = SharedGpuMemory.create(num_bytes)
        memory.tensor()  # so that an error comes here
        return memory
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        logger.warning("spares cannot share the KV cache: %s", error)
        return None


@contextmanager
def guard_allocation(description: str, num_bytes: int, options_to_lower: str) -> Iterator[None]:
    """Wraps an allocation of `num_bytes`: raises `ConfigError` if there is not enough memory."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        # torch has no dedicated error for CPU memory.
        is_out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
            error.errno in (errno.ENOMEM, errno.ENOSPC)
            if isinstance(error, OSError)
            else "alloc" in str(error)
        )
        if not is_out_of_memory:
            raise
        raise ConfigError(
            f"{description} needs {megabytes(num_bytes)}, which is not available: lower"
            f" {options_to_lower} ({error})"
        ) from error


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype with this name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
