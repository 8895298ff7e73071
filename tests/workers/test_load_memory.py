"""Loading adds only the memory of a rank's own slices: never the whole checkpoint, not even
temporarily.

A smaller stand-in for `benchmarks/load_memory.py`, large enough that the weights are much larger
than anything else a rank allocates.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.rank_pool import WorkerPool
from configs.engine import ResolvedConfig
from configs.model import ModelConfig
from kernels.cpu.capabilities import has_int8
from kernels.cpu.linear import packs_dtype
from tests.workers.conftest import config_of
from workers.models.checkpoint import expected_tensors
from workers.models.random_checkpoint import write_random_checkpoint

MIB = 2**20
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 40_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "num_hidden_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}
# Threads of gloo and torch, and the rotary table, take less than 2 MiB. The smallest fault, what
# packing leaves in the heap, takes 8 to 21 MiB.
SLACK_BYTES = 6 * MIB
# What quantizing 256 rows takes in float32, less than an embedding in 8 bits (19.5 MiB).
QUANTIZING_BYTES = 10 * MIB


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints by their stored dtype."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("float32", "bfloat16")}
    for name, model_dir in found.items():
        write_random_checkpoint(model_dir, CONFIG | {"dtype": name}, getattr(torch, name))
    return found


@pytest.mark.parametrize("spares", ["off", "warm"])
@pytest.mark.parametrize("dtype", ["float32", "mixed", "bfloat16", "int8"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rank_holds_its_share_and_no_more(
    pool: WorkerPool, checkpoints: dict[str, Path], size: int, dtype: str, spares: str
) -> None:
    """mixed: weights in bfloat16, products in float32. Where spares are to follow, weights move to
    memory that outlives the rank, and the largest matrix is held twice for a moment.
    """
    if dtype == "int8" and not has_int8():
        pytest.skip("no dot products of 8-bit numbers here")
    checkpoint = checkpoints["bfloat16" if dtype == "mixed" else "float32"]
    options = {"mixed": {"dtype": "float32"}, "int8": {"quantization": "int8"}}
    held = getattr(torch, "bfloat16" if dtype == "mixed" else dtype)
    config = config_of(
        checkpoint,
        tensor_parallel_size=size,
        spares=spares,
        **options.get(dtype, {"dtype": dtype}),
    )
    load(pool, config)  # the first time also loads numba and compiled kernels, some 40 MiB
    measured = load(pool, config)
    shapes = expected_tensors(ModelConfig.from_dir(checkpoint)).values()
    stored = sum(map(math.prod, shapes)) * held.itemsize
    # A tied embedding is held twice where it is packed: as rows, and for the product.
    if dtype == "int8" or (dtype != "mixed" and packs_dtype(held)):
        stored += held.itemsize * 40_000 * 512
    for sizes in measured:
        print(
            {name: f"{value / MIB:.1f} MiB" for name, value in sizes.items()},
            f"of {stored / MIB:.1f} MiB, tp {size}",
        )
        assert abs(sizes["weights"] - stored / size) < 0.02 * stored
        slack = SLACK_BYTES + (QUANTIZING_BYTES if dtype == "int8" else 0)
        slack += held.itemsize * 40_000 * 512 // size if spares == "warm" else 0
        assert sizes["peak_added"] < sizes["weights"] + slack
        assert sizes["added"] > 0.5 * sizes["weights"], (
            "the weights must be memory of the rank, not a mapped file"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "features"), [(1, 256), (2, 256), (1, 260), (2, 264)])
def test_rank_of_a_model_with_experts_holds_its_share_and_no_more(
    pool: WorkerPool, tmp_path: Path, size: int, features: int, dtype: str
) -> None:
    """A layer's experts are 24 MiB, which packing must not hold twice. Where gate and up do not
    fill whole panels, those of one layer are, while they are packed.
    """
    experts = EXPERTS | {"moe_intermediate_size": features}
    write_random_checkpoint(tmp_path, CONFIG | experts | {"dtype": "bfloat16"}, torch.bfloat16)
    config = config_of(tmp_path, tensor_parallel_size=size, spares="off", dtype=dtype)
    load(pool, config)
    row_bytes, num_rows = 2 * 32 * 512, 2 * features // size  # of gate and up of a layer's experts
    padding = -num_rows % (16 if dtype == "float32" else 64)
    # What one layer holds twice, and the rows that each of two layers has more.
    packing_bytes = row_bytes * (num_rows + 2 * padding) if padding else 0
    for sizes in load(pool, config):
        print({name: f"{value / MIB:.1f} MiB" for name, value in sizes.items()}, f"tp {size}")
        assert sizes["weights"] > 2 * 24 * MIB / size
        assert sizes["peak_added"] < sizes["weights"] + SLACK_BYTES + packing_bytes


def load(pool: WorkerPool, config: ResolvedConfig) -> list[dict[str, int]]:
    """The result of `measure_load` on each rank."""
    size = config.engine.tensor_parallel_size
    for rank in range(size):
        pool.call(rank, "create", config, rank)
    try:
        address = pool.call(0, "open_rendezvous") if size > 1 else None
        measured: list[dict[str, int]] = pool.call_all(size, "measure_load", address)
    finally:
        pool.call_all(size, "close")
    return measured
