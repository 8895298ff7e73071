"""Memory that loading the 0.6B shape adds to each rank: `python -m benchmarks.load_memory` from the
checkout.

Writes a random bfloat16 checkpoint to a temporary directory and loads it at tp 1, 2 and 4 in fresh
processes. Per size: the memory (RssAnon and RssShmem) that start added to each rank, its peak on
the way, the weights the rank owns, and the seconds of loading. The limit: a rank cannot hold less
than its weights.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import QWEN3_0_6B, write_result
from benchmarks.rank_pool import WorkerPool
from configs.engine import EngineConfig
from configs.model import ModelConfig
from workers.configuration import resolve_config
from workers.models.random_checkpoint import write_random_checkpoint

SIZES = (1, 2, 4)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory)
        checkpoint_bytes = write_random_checkpoint(model_dir, QWEN3_0_6B, torch.bfloat16)
        results = {f"tp{size}": measure(model_dir, size) for size in SIZES}
    record = {
        "shape": "Qwen3-0.6B",
        "dtype": "bfloat16",
        "checkpoint_mib": to_mib(checkpoint_bytes),
        **results,
    }
    write_result("load_memory", "weights_mib: a rank cannot hold less than its weights", record)


def measure(model_dir: Path, size: int) -> dict[str, Any]:
    """Start `size` ranks in processes that have loaded nothing before."""
    engine = EngineConfig(model=str(model_dir), tensor_parallel_size=size, max_model_len=4096)
    config = resolve_config(engine, ModelConfig.from_dir(model_dir), model_dir, "cpu")
    pool = WorkerPool(size)
    try:
        for rank in range(size):
            pool.call(rank, "create", config, rank)
        address = pool.call(0, "open_rendezvous") if size > 1 else None
        started = time.perf_counter()
        ranks = pool.call_all(size, "measure_load", address)
        seconds = time.perf_counter() - started
    finally:
        pool.close()
    columns = {
        f"{name}_mib": [to_mib(rank[name]) for rank in ranks]
        for name in ("added", "peak_added", "weights")
    }
    return {**columns, "seconds": round(seconds, 2)}


def to_mib(num_bytes: int) -> float:
    """Mebibytes to one decimal."""
    return round(num_bytes / 2**20, 1)


if __name__ == "__main__":
    main()
