"""A spare of a rank on a GPU that stands by: it has the rank's weights and KV cache and graphs of
its own, and goes on where the rank was killed. The GPU is a stand-in (`fake_gpu.py`, with the
memory of `memory/fake_cuda.py`); rank and spare are processes. `tests/gpu/test_gpu_standby.py` does
the same on a GPU.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from configs.engine import ResolvedConfig
from tests.checkpoints import Shape, make_checkpoint
from tests.workers.conftest import config_of
from tests.workers.fake_gpu import FakeGpu
from tests.workers.memory import fake_cuda
from tests.workers.planner import Planner, Row
from workers.memory.inheritance import InheritedMemory
from workers.worker import Worker

pytestmark = pytest.mark.skipif(not fake_cuda.is_possible, reason="needs gcc and Linux")
NUM_BLOCKS = 40
NUM_STEPS = 12
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3, 1, 4, 1, 5], [2, 7])
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int4": {"quantization": "int4"},
}
SERVER: Any = multiprocessing.get_context("forkserver")


def config_for(model_dir: Path, **options: Any) -> ResolvedConfig:
    options |= {"spares": "standby", "num_kv_blocks": NUM_BLOCKS}
    config = config_of(model_dir, attention_backend="reference", **options)
    return dataclasses.replace(config, device="cuda")


def admit(rows: list[Row], planner: Planner, blocks: list[list[int]], computed: list[int]) -> None:
    for slot, (row, shared, num_stored) in enumerate(zip(rows, blocks, computed, strict=True)):
        planner.admit(row, slot, shared, num_stored)


def run(worker: Worker, rows: list[Row], planner: Planner, num_steps: int) -> None:
    for _ in range(num_steps):
        plan = planner.step([(row, 64) for row in rows])
        worker.launch(plan)
        planner.take(plan.step_id, worker.result(plan.step_id, plan.epoch).token_ids)


@pytest.mark.parametrize(
    "refused",
    [
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "READ",
    ],
)
def test_a_rank_whose_driver_refuses_serves_and_says_so(
    refused: str,
    small_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_CUDA_REFUSES", refused)
    with fake_cuda.running_on_fake_gpu():
        config = config_for(small_checkpoint)
        rank = Worker(config, rank=0)
        rank.start(None)
        rank.allocate_cache(NUM_BLOCKS)
        rows, planner = new_rows(), Planner(config.block_size)
        admit(rows, planner, [[]] * 3, [0] * 3)
        run(rank, rows, planner, 3)
        memory = rank.memory()
        rank.close()
    assert memory.weights is None and (memory.cache is None) == (refused != "READ")
    assert "spares cannot share the weights: [Errno 5] CUDA driver error: cuMem" in caplog.text
    assert ("spares cannot share the KV cache" in caplog.text) == (refused != "READ")


def test_a_cache_that_is_not_kept_is_zero(small_checkpoint: Path) -> None:
    """A NaN that a stray write has left would spoil rows that end in its block."""
    with fake_cuda.running_on_fake_gpu():
        config = config_for(small_checkpoint, enforce_eager=True)
        rank = Worker(config, rank=0)
        rank.start(None)
        rank.allocate_cache(NUM_BLOCKS)
        assert rank._runner is not None
        cache = rank._runner.cache.tensor
        for keeps_cache, is_standby in ((True, True), (False, True), (False, False)):
            cache.fill_(float("nan"))
            spare = Worker(config, 0, InheritedMemory.open(rank.memory()))
            spare.start(None, num_kv_blocks=NUM_BLOCKS)
            spare.allocate_cache(NUM_BLOCKS, is_standby=is_standby)
            if is_standby:
                assert cache.isnan().all()
                spare.take_over(1, keeps_cache=keeps_cache)
            assert cache.isnan().all() if keeps_cache else not cache.any()
            spare.close()
        rank.close()


def new_rows() -> list[Row]:
    return [Row(list(prompt), len(prompt)) for prompt in PROMPTS]


def serve(pipe: Connection, config: ResolvedConfig) -> None:
    """A rank: starts, and runs as many steps as it is told."""
    rank = Worker(config, rank=0)
    rank.start(None)
    rank.allocate_cache(NUM_BLOCKS)
    pipe.send(rank.memory())
    rows, planner = new_rows(), Planner(config.block_size)
    admit(rows, planner, [[]] * len(rows), [0] * len(rows))
    while True:
        run(rank, rows, planner, pipe.recv())
        pipe.send([(row.tokens, row.blocks) for row in rows])


def _serve_on_fake_gpu(pipe: Connection, config: ResolvedConfig) -> None:
    with fake_cuda.running_on_fake_gpu():
        serve(pipe, config)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_spare_goes_on_with_the_cache_and_the_graphs_that_it_has(
    form: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, Shape(name="small"))
    check_that_a_spare_goes_on(
        config_for(tmp_path, **form), _serve_on_fake_gpu, fake_cuda.running_on_fake_gpu
    )


def check_that_a_spare_goes_on(
    config: ResolvedConfig,
    serve: Callable[..., None],
    running: Callable[[], AbstractContextManager[FakeGpu | None]],
) -> None:
    """It takes over from a rank, a process that does `serve` and is killed, and samples what a rank
    alone does. Workers of this process are `running` on a GPU.
    """
    with running():
        alone = Worker(config, rank=0)
        alone.start(None)
        alone.allocate_cache(NUM_BLOCKS)
        undisturbed, planner = new_rows(), Planner(config.block_size)
        admit(undisturbed, planner, [[]] * 3, [0] * 3)
        run(alone, undisturbed, planner, NUM_STEPS)
        alone.close()
    pipe, theirs = SERVER.Pipe()
    rank = SERVER.Process(target=serve, args=(theirs, config), daemon=True)
    rank.start()
    theirs.close()
    memories = pipe.recv()
    inherited = InheritedMemory.open(memories)
    pipe.send(2)
    pipe.recv()  # it has run some steps before anybody stands by
    with running() as gpu:
        spare = Worker(config, 0, inherited)
        spare.warm_up_spare()
        assert spare.has_weights
        assert not spare.start(None, num_kv_blocks=NUM_BLOCKS).ledger.budget_terms[1:]
        spare.allocate_cache(NUM_BLOCKS, is_standby=True)
        pipe.send(4)
        states = pipe.recv()
        rank.kill()
        rank.join()
        spare.take_over(1, keeps_cache=True)
        rows = [
            Row(list(tokens), len(prompt))
            for (tokens, _), prompt in zip(states, PROMPTS, strict=True)
        ]
        planner = Planner(config.block_size, epoch=1)
        planner._block_ids = count(30)
        admit(rows, planner, [list(b) for _, b in states], [len(t) - 1 for t, _ in states])
        num_replays = 0 if gpu is None else sum(graph.num_replays for graph in gpu.graphs)
        run(spare, rows, planner, NUM_STEPS - 6)
        if gpu is not None:
            assert gpu.graphs and sum(graph.num_replays for graph in gpu.graphs) > num_replays
        assert [row.tokens for row in rows] == [row.tokens for row in undisturbed]
        own_memories = spare.memory()  # for its own spare
        assert own_memories.weights is not None and own_memories.cache is not None
        assert own_memories.weights.identity == memories.weights.identity
        assert own_memories.cache.identity == memories.cache.identity
        spare.close()
