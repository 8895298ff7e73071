"""How large the KV cache of one rank may be, and its memory.

Owns the ledger, which states where every byte goes, and the one tensor all layers see views of. Never decides which
block holds what: that is the scheduler's. The driver takes the minimum of `num_blocks` over the ranks.
Legend: none; the layout of one layer's keys and values is the backend's (`Kernels.kv_cache_shapes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from configs.engine import ResolvedConfig
from kernels.backend import Kernels
from scheduler.errors import ConfigError
from workers.device import Device
from workers.models.qwen3 import LayerCache

# What CUDA and NCCL hold of a device beside torch's allocator; no call says it for one process alone.
_CUDA_CONTEXT_BYTES = 768 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLedger:
    """How `num_blocks` came about. `parts` are named bytes: the budget's source first, then what was taken off it."""

    rank: int
    num_blocks: int
    block_size: int
    block_bytes: int
    wanted_blocks: int
    budget_bytes: int
    parts: tuple[tuple[str, int], ...]

    def line(self) -> str:
        """One line for the log."""
        parts = ", ".join(f"{name} {_megabytes(size)}" for name, size in self.parts)
        return (
            f"KV cache of rank {self.rank}: {self.num_blocks} blocks of {self.block_size} tokens, "
            f"{_megabytes(self.num_blocks * self.block_bytes)} ({self.block_bytes} bytes a block; the longest batch "
            f"would use {self.wanted_blocks}; {parts})"
        )


def block_bytes(config: ResolvedConfig, kernels: Kernels) -> int:
    """Bytes one block takes on one rank: keys and values of every layer, of the KV heads this rank holds."""
    model = config.model
    kv_heads = max(1, model.num_key_value_heads // config.engine.tensor_parallel_size)
    elements = math.prod(kernels.kv_cache_shapes(1, config.block_size, kv_heads, model.head_dim)[0])
    return 2 * model.num_hidden_layers * elements * torch_dtype(config.dtype).itemsize


def plan_kv_cache(
    config: ResolvedConfig, kernels: Kernels, rank: int, measure_budget: Callable[[], list[tuple[str, int]]]
) -> KVCacheLedger:
    """Number of blocks this rank can hold: `num_kv_blocks`, or what fits the budget, and never more than a full batch
    of longest sequences uses. `measure_budget` is called only on a GPU without `num_kv_blocks` (`gpu_budget`).

    Raises `ConfigError` with the numbers when not one block fits.
    """
    engine, size = config.engine, block_bytes(config, kernels)
    wanted = engine.max_num_seqs * config.blocks_per_sequence
    if engine.num_kv_blocks is not None:
        parts = [("num_kv_blocks", engine.num_kv_blocks * size)]
        wanted = engine.num_kv_blocks
    elif config.device == "cpu":
        ranks = engine.tensor_parallel_size
        parts = [(f"kv_cache_bytes over {ranks} ranks", engine.kv_cache_bytes // ranks)]
    else:
        parts = measure_budget()
    budget = parts[0][1] - sum(taken for _, taken in parts[1:])
    if budget < size:
        raise ConfigError(_too_little(config, size, budget, parts))
    return KVCacheLedger(
        rank=rank,
        num_blocks=min(budget // size, wanted),
        block_size=config.block_size,
        block_bytes=size,
        wanted_blocks=wanted,
        budget_bytes=budget,
        parts=tuple(parts),
    )


def gpu_budget(
    config: ResolvedConfig, device: Device, run_step: Callable[[], None], make_runner: Callable[[], object]
) -> list[tuple[str, int]]:
    """Parts of a GPU's budget: its share of the total, what this process holds, the peak of the largest step
    (`run_step`), and what a runner over a throw-away cache of one block holds, its graphs above all (`make_runner`).

    Only this process's own use is counted. Others on the device matter as far as memory must be free: what is not is
    taken off as well.
    """
    peak = device.peak_during(run_step)
    before = device.memory()
    runner = make_runner()
    after = device.memory()
    # What graphs hold of the driver shows in the free memory alone, which others may change meanwhile: take the larger.
    held_by_runner = max(after.reserved - before.reserved, before.free - after.free)
    del runner
    memory = device.memory()
    share = int(memory.total * config.engine.gpu_memory_utilization)
    own = memory.reserved + _CUDA_CONTEXT_BYTES
    parts = [("share of the device", share), ("weights", own), ("largest step", peak)]
    parts.append(("batch state and graphs", held_by_runner))
    not_free = share - own - memory.free
    if not_free > 0:
        parts.append(("used by others", not_free))
    return parts


class KVCache:
    """One contiguous zeroed tensor [2, layers, elements]; `layers` are (keys, values) views of it."""

    def __init__(
        self, config: ResolvedConfig, kernels: Kernels, num_blocks: int, num_kv_heads: int, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        shapes = kernels.kv_cache_shapes(num_blocks, config.block_size, num_kv_heads, config.model.head_dim)
        size = (2, config.model.num_hidden_layers, math.prod(shapes[0]))
        what = f"a KV cache of {num_blocks} blocks of {config.block_size} tokens"
        lower = "num_kv_blocks, block_size, kv_cache_bytes or gpu_memory_utilization, whichever was given"
        with room_for(what, math.prod(size) * torch_dtype(config.dtype).itemsize, lower):
            self.tensor = torch.zeros(size, dtype=torch_dtype(config.dtype), device=device)
        self.layers: list[LayerCache] = [
            (keys.view(shapes[0]), values.view(shapes[1])) for keys, values in zip(*self.tensor, strict=True)
        ]


@contextmanager
def room_for(what: str, num_bytes: int, lower: str) -> Iterator[None]:
    """Where tensors of `num_bytes` in all are made: raises `ConfigError` if the memory cannot be had."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has no error of its own for the memory of a CPU.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "alloc" not in str(error):
            raise
        raise ConfigError(f"{what} needs {_megabytes(num_bytes)}, which cannot be had: lower {lower}") from error


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a configuration's name for it."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _too_little(config: ResolvedConfig, size: int, budget: int, parts: list[tuple[str, int]]) -> str:
    tokens = max(0, budget) * config.block_size // size
    spelled = " less ".join(f"{num_bytes} bytes ({name})" for name, num_bytes in parts)
    fits = f"lower block_size to at most {tokens}, or" if tokens else "not one token fits;"
    if config.device == "cpu":
        remedy = f"raise kv_cache_bytes to at least {size * config.engine.tensor_parallel_size}"
    else:
        remedy = "raise gpu_memory_utilization or tensor_parallel_size, or use a smaller model"
    return (
        f"the KV cache of a rank needs at least one block of {config.block_size} tokens, {size} bytes, but gets "
        f"{spelled}: {fits} {remedy}"
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
