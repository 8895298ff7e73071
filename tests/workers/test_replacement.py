"""A rank of a later epoch: it gets as many KV blocks as the engine began with, without measuring.

The GPU is a stand-in: how much of its memory is free is what a test says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.reference.backend import REFERENCE_KERNELS
from scheduler.errors import ConfigError, WorkerError
from tests.workers.conftest import config_of
from tests.workers.fake_gpu import FakeGpu
from workers import worker as worker_module
from workers.batch.kv_plan import block_bytes
from workers.model_runner import ModelRunner, run_largest_step
from workers.worker import Worker

MIB = 2**20
MORE_THAN_THERE_IS = 2**40  # blocks
RankMaker = Callable[..., Worker]


@pytest.fixture
def rank_on_a_gpu(small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> RankMaker:
    """A rank on a GPU of which nearly everything is in use, but `free` bytes."""
    config = config_of(
        small_checkpoint,
        attention_backend="reference",
        num_kv_blocks=None,
        max_num_seqs=64,
        max_model_len=256,
    )
    config = dataclasses.replace(config, device="cuda")
    monkeypatch.setattr(worker_module, "_launch_test_kernel", lambda *_: None)

    def make(free: int) -> Worker:
        gpu = FakeGpu(total=10_000 * MIB, free=free)
        kernels = gpu.recordable(REFERENCE_KERNELS)
        monkeypatch.setattr(worker_module, "open_device", lambda *_: gpu)
        monkeypatch.setattr(worker_module, "find_kernels", lambda _: kernels)
        return Worker(config, rank=0)

    return make


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran only to measure memory; it does its work all the same."""
    ran: list[str] = []

    def note_step(*arguments: Any) -> None:
        ran.append("the largest step")
        run_largest_step(*arguments)

    def note_runner(*arguments: Any, **options: Any) -> ModelRunner:
        runner = ModelRunner(*arguments, **options)
        if runner.cache.num_blocks == 1:
            ran.append("a runner to throw away")
        return runner

    monkeypatch.setattr(worker_module, "run_largest_step", note_step)
    monkeypatch.setattr(worker_module, "ModelRunner", note_runner)
    return ran


def test_a_later_epoch_has_the_blocks_of_the_first_where_less_memory_is_free(
    rank_on_a_gpu: RankMaker, measurements: list[str]
) -> None:
    first = rank_on_a_gpu(free=6 * MIB)
    num_blocks = first.start(None).num_kv_blocks
    assert num_blocks == 6 * MIB // block_bytes(first.config)
    assert measurements == ["the largest step", "a runner to throw away"]
    first.close()
    measurements.clear()

    later = rank_on_a_gpu(free=3 * MIB)
    report = later.start(None, epoch=1, num_kv_blocks=num_blocks)
    assert report.num_kv_blocks == report.ledger.num_blocks == num_blocks
    later.allocate_cache(report.num_kv_blocks)
    assert later._runner is not None
    assert later._runner.cache.tensor.nbytes == num_blocks * block_bytes(later.config)
    assert measurements == []
    assert f"{num_blocks} blocks of 4 tokens" in report.ledger.line()
    assert "as at the start of the engine 6.0 MiB" in report.ledger.line()


def test_memory_that_only_a_later_epoch_lacks_is_the_ranks_error_and_says_what_holds_it(
    rank_on_a_gpu: RankMaker,
) -> None:
    """A `ConfigError` would end the engine: the options were good when it began, and another
    attempt may find the memory free.
    """
    first = rank_on_a_gpu(free=6 * MIB)
    first.start(None)
    with pytest.raises(ConfigError, match=r"lower num_kv_blocks, block_size"):
        first.allocate_cache(MORE_THAN_THERE_IS)
    first.close()

    later = rank_on_a_gpu(free=6 * MIB)
    later.start(None, epoch=1, num_kv_blocks=MORE_THAN_THERE_IS)
    with pytest.raises(WorkerError) as caught:
        later.allocate_cache(MORE_THAN_THERE_IS)
    for part in (
        "rank 0",
        f"a KV cache of {MORE_THAN_THERE_IS} blocks of 4 tokens needs",
        "something else uses the device now",
    ):
        assert part in str(caught.value)


def test_a_rank_that_has_no_memory_to_warm_up_in_a_later_epoch_says_the_same(
    rank_on_a_gpu: RankMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros

    def refuse_caches(size: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if isinstance(size, tuple) and len(size) == 3 and size[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(size, *arguments, **options)

    monkeypatch.setattr(torch, "zeros", refuse_caches)
    monkeypatch.setattr("workers.batch.kv_cache.has_memfds", lambda: False)  # as on a GPU
    with pytest.raises(WorkerError, match=r"rank 0: a KV cache of 1 blocks .* something else uses"):
        rank_on_a_gpu(free=6 * MIB).start(None, epoch=1, num_kv_blocks=9)
