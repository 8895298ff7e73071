"""`Worker`: order and epochs of steps, errors kept until they are read, reports."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue
from types import SimpleNamespace

import pytest
import torch

from benchmarks.rank_pool import WorkerPool, executor_of
from configs.paths import SOURCE_ROOT
from kernels.cpu import pool
from scheduler.errors import ConfigError, StepTimeoutError, WorkerError
from scheduler.messages import StepMask, StepPlan, int32_array
from tests.scheduler.fake_model import mask_bytes
from tests.workers.conftest import config_of
from tests.workers.fake_gpu import LateEvent
from tests.workers.planner import GREEDY, Planner, Row
from workers import step_mailbox
from workers.device import Device, open_device
from workers.memory.lasting import has_memfds
from workers.model_runner import PendingStep
from workers.worker import Worker


@pytest.fixture
def worker(small_checkpoint: Path) -> Iterator[Worker]:
    worker = Worker(config_of(small_checkpoint, step_timeout_s=1.0), rank=0)
    worker.start(None)
    worker.allocate_cache(32)
    yield worker
    worker.close()


@pytest.mark.skipif(not has_memfds(), reason="memory files need Linux")
def test_all_memory_that_outlives_the_rank_counts_as_progress(worker: Worker) -> None:
    handles = worker.memory()
    assert handles.weights is not None and handles.cache is not None
    taken_bytes = handles.weights.num_bytes + handles.cache.num_bytes
    assert worker.progress.allocated_bytes == taken_bytes


def plans(number: int, epoch: int = 0, row: Row | None = None) -> list[StepPlan]:
    """A prompt of three tokens and decode steps after it."""
    row = row or Row([1, 2, 3], 3)
    planner = Planner(4, epoch)
    planner.admit(row, slot=0)
    return [planner.step([(row, 3)]) for _ in range(number)]


def test_results_carry_step_epoch_rank_and_digest(worker: Worker) -> None:
    for plan in plans(2):
        worker.launch(plan)
    for step_id in range(2):
        result = worker.result(step_id, 0)
        assert (result.step_id, result.epoch, result.rank) == (step_id, 0, 0)
        assert len(result.token_ids) == 1 and result.token_ids.typecode == "i"
        assert result.digest == zlib.crc32(result.token_ids.tobytes())
        assert {"prepare", "forward", "sample", "wait"} <= result.seconds.keys()
    worker.check()


def test_result_waits_for_its_launch_on_another_thread(worker: Worker) -> None:
    launcher = threading.Timer(0.2, worker.launch, plans(1))
    launcher.start()
    assert len(worker.result(0, 0).token_ids) == 1
    launcher.join()


def test_an_error_that_the_device_reports_late_is_the_ranks(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of torch's would make the driver import torch."""

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(PendingStep, "finish", fail)
    [plan] = plans(1)
    worker.launch(plan)
    with pytest.raises(WorkerError, match="rank 0: step 0: AcceleratorError: CUDA error: an illeg"):
        worker.result(0, 0)


@pytest.mark.parametrize("when", ["before its launch", "while it runs"])
def test_a_masked_step_takes_a_mask_that_comes(worker: Worker, when: str) -> None:
    [plan] = plans(1)
    plan = dataclasses.replace(plan, mask_flags=plan.sampling_flags)
    bits = bytearray(mask_bytes(worker.config.model.vocab_size))
    bits[77 // 8] |= 1 << 77 % 8
    step_mask = StepMask(step_id=0, epoch=0, rows=int32_array([0]), masks=(bytes(bits),))
    if when == "before its launch":
        worker.put_mask(step_mask)
    with ThreadPoolExecutor() as threads:
        launched = threads.submit(worker.launch, plan)
        if when == "while it runs":
            time.sleep(0.1)
            assert not launched.done()
            worker.put_mask(step_mask)
    result = worker.result(0, 0)
    assert list(result.token_ids) == [77] and "mask" in result.seconds


def test_a_mask_that_never_comes_fails_the_step(small_checkpoint: Path) -> None:
    worker = Worker(config_of(small_checkpoint, step_timeout_s=0.2), rank=0)
    worker.start(None)
    worker.allocate_cache(32)
    [plan] = plans(1)
    worker.launch(dataclasses.replace(plan, mask_flags=plan.sampling_flags))
    with pytest.raises(StepTimeoutError, match=r"the mask of step 0 of epoch 0 did not come"):
        worker.result(0, 0)
    worker.close()


def test_result_of_a_step_that_never_comes_times_out(small_checkpoint: Path) -> None:
    worker = Worker(config_of(small_checkpoint, step_timeout_s=0.1), rank=0)
    with pytest.raises(StepTimeoutError, match=r"rank 0: step 5 of epoch 0 did not run in 0\.1 s"):
        worker.result(5, 0)


def test_the_limit_of_a_step_begins_when_the_one_before_has_run(
    small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_mailbox, "STEP_GRACE_S", 0.0)
    worker = Worker(config_of(small_checkpoint, step_timeout_s=1.5), rank=0)
    launchers = [
        threading.Timer(0.9 * (i + 1), worker.launch, [plan]) for i, plan in enumerate(plans(2))
    ]
    for launcher in launchers:
        launcher.start()
    with pytest.raises(
        WorkerError, match="step 1 of epoch 0 was not run"
    ):  # it was never started, but it is not late
        worker.result(1, 0)


def test_the_limit_of_a_step_on_the_device_begins_when_the_one_before_is_done(
    small_checkpoint: Path,
) -> None:
    worker = Worker(config_of(small_checkpoint, step_timeout_s=1.5), rank=0)
    events = [LateEvent(), LateEvent()]
    for i, (plan, event) in enumerate(zip(plans(2), events, strict=True)):
        pending = PendingStep(
            device=Device(torch.device("cpu")),
            token_ids_R=torch.tensor([i]),
            end_event=event,
        )
        worker._mailbox.put_outcome(plan, pending)
    with ThreadPoolExecutor() as threads:
        results = []
        for i in range(2):
            results.append(threads.submit(worker.result, i, 0))
            time.sleep(0.05)
        for i in range(2):
            time.sleep(0.9)
            events[i].passed = True
        assert [result.result().token_ids.tolist() for result in results] == [[0], [1]]


@pytest.mark.parametrize(("skip", "due"), [(1, 0), (0, 1)])
def test_step_out_of_turn_is_refused(worker: Worker, skip: int, due: int) -> None:
    """A step that was skipped, and a step sent twice."""
    made = plans(2)
    if skip == 0:
        worker.launch(made[0])
        worker.result(0, 0)
    worker.launch(made[skip])
    with pytest.raises(WorkerError, match=f"step {skip} of epoch 0 came when step {due} was due"):
        worker.result(skip, 0)


def test_first_error_ends_the_epoch_and_each_step_says_so(worker: Worker) -> None:
    made = plans(3)
    broken = dataclasses.replace(made[1], slots=made[1].slots * 2)
    for plan in (made[0], broken, made[2]):
        worker.launch(plan)
    assert len(worker.result(0, 0).token_ids) == 1
    with pytest.raises(WorkerError, match="batch state"):
        worker.result(1, 0)
    with pytest.raises(
        WorkerError, match=r"step 2 of epoch 0 was not run: step 1 failed with WorkerError"
    ):
        worker.result(2, 0)


def test_error_of_another_kind_becomes_a_worker_error_with_its_cause(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker._runner is not None

    def fail(plan: StepPlan, wait_for_mask: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(worker._runner, "run", fail)
    worker.launch(plans(1)[0])
    with pytest.raises(WorkerError, match="rank 0: step 0: MemoryError: no room") as caught:
        worker.result(0, 0)
    assert isinstance(caught.value.__cause__, MemoryError)


def test_step_of_a_past_epoch_is_refused_and_harms_nothing(small_checkpoint: Path) -> None:
    worker = Worker(config_of(small_checkpoint), rank=0)
    worker.start(None, epoch=1)
    worker.allocate_cache(32)
    worker.launch(plans(1, epoch=0)[0])
    with pytest.raises(WorkerError, match="step 0 of epoch 0 came in epoch 1"):
        worker.result(0, 0)
    worker.launch(plans(1, epoch=1)[0])
    assert len(worker.result(0, 1).token_ids) == 1
    worker.close()


def test_step_without_rows_only_changes_the_batch(worker: Worker) -> None:
    planner, row = Planner(4), Row([1, 2, 3], 3)
    planner.admit(row, slot=0)
    worker.launch(planner.step([(row, 3)]))
    planner.release(row)
    worker.launch(planner.step([]))
    again = Row([1, 2, 3], 3)
    planner.admit(again, slot=0)
    worker.launch(planner.step([(again, 3)]))
    tokens = [worker.result(step_id, 0).token_ids.tolist() for step_id in range(3)]
    assert tokens[1] == [] and tokens[0] == tokens[2]


def test_chunk_that_ends_before_the_prompt_samples_nothing(worker: Worker) -> None:
    planner, row = Planner(4), Row(list(range(10)), 10)
    planner.admit(row, slot=0)
    for _ in range(2):
        worker.launch(planner.step([(row, 5)]))
    assert [len(worker.result(step_id, 0).token_ids) for step_id in range(2)] == [0, 1]


def test_only_rank_0_brings_logprobs(pool: WorkerPool, small_checkpoint: Path) -> None:
    sampling = dataclasses.replace(GREEDY, logprobs=2)
    made = plans(1, row=Row([1, 2, 3], 3, sampling=sampling))
    with executor_of(pool, config_of(small_checkpoint, tensor_parallel_size=2)) as executor:
        executor.pool.call_all(2, "launch", made[0])
        first, second = executor.pool.call_all(2, "result", 0, 0)
    assert (first.rank, second.rank) == (0, 1) and first.token_ids == second.token_ids
    assert second.logprobs is None and first.logprobs is not None
    (logprobs,) = first.logprobs
    assert (
        logprobs.top_token_ids[0] == first.token_ids[0]
        and logprobs.logprob == logprobs.top_logprobs[0]
    )


def test_seeded_tokens_are_the_same_at_every_size(pool: WorkerPool, small_checkpoint: Path) -> None:
    sampling = dataclasses.replace(
        GREEDY, temperature=0.8, top_p=0.9, top_k=40, seed=11, repetition_penalty=1.2
    )
    outputs = []
    for size in (1, 2, 4):
        with executor_of(pool, config_of(small_checkpoint, tensor_parallel_size=size)) as executor:
            made = plans(12, row=Row([1, 2, 3], 3, sampling=sampling))
            for plan in made:
                executor.launch(plan)
            outputs.append([executor.result(plan.step_id).token_ids[0] for plan in made])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(set(outputs[0])) > 6


def test_report_has_phases_blocks_and_ledger(pool: WorkerPool, small_checkpoint: Path) -> None:
    config = config_of(
        small_checkpoint, tensor_parallel_size=2, num_kv_blocks=None, kv_cache_bytes=2**20
    )
    with executor_of(pool, config) as executor:
        assert [report.rank for report in executor.reports] == [0, 1]
        for report in executor.reports:
            assert report.seconds.keys() == {
                "rendezvous",
                "compile",
                "load",
                "kv_cache",
                "wait_for_peers",
            }
            assert report.backend == "cpu (numba and oneDNN)"
            assert (
                report.num_kv_blocks
                == report.ledger.num_blocks
                == min(8 * 16, 2**19 // report.ledger.block_bytes)
            )
        memory = executor.pool.call(0, "memory_by_purpose")
        assert memory["kv_cache"] == report.num_kv_blocks * report.ledger.block_bytes
        whole = (small_checkpoint / "model.safetensors").stat().st_size
        assert whole * 0.48 < memory["weights"] < whole * 0.6


def test_rank_without_peers_fails_in_time_and_says_where(small_checkpoint: Path) -> None:
    worker = Worker(
        config_of(small_checkpoint, tensor_parallel_size=2, start_timeout_s=0.5), rank=0
    )
    address = worker.open_rendezvous()
    with pytest.raises(
        WorkerError, match=f"rank 0 of 2 did not find all of its peers at 127.0.0.1:{address[1]}"
    ):
        worker.start(address)
    worker.close()


def test_backend_that_cannot_run_here_is_a_config_error(
    small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: str, name: str, **_: object) -> None:
        raise ValueError(f"kernel backend {name!r} cannot run on device {device!r}")

    worker = Worker(config_of(small_checkpoint), 0)
    monkeypatch.setattr("workers.configuration.select_backend", refuse)
    with pytest.raises(ConfigError, match="kernel backend 'cpu' cannot run on device 'cpu'"):
        worker.start(None)


def test_threads_are_set_where_start_is_called_and_may_change(small_checkpoint: Path) -> None:
    before = torch.get_num_threads()
    try:
        worker = Worker(config_of(small_checkpoint), 0)
        worker.start(None, num_threads=1)
        assert torch.get_num_threads() == pool.get_num_threads() == 1
        worker.set_num_threads(2)
        assert torch.get_num_threads() == 2
        assert pool.get_num_threads() == min(2, os.cpu_count() or 1)
    finally:
        worker.set_num_threads(before)


def test_ranks_share_memory_unless_the_user_says_no(
    small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        "workers.worker.TensorParallelGroup.share_memory",
        lambda group, timeout_s, wanted: asked.append(wanted),
    )
    for shared in (True, False):
        worker = Worker(config_of(small_checkpoint, shared_memory=shared), 0)
        worker.start(None)
        worker.close()
    assert asked == [True, False]


def test_the_first_setting_of_threads_in_a_process_counts() -> None:
    """Importing the kernels starts no threads of torch."""
    program = (
        "import torch; from kernels.select import select_backend;"
        " select_backend('cpu', 'cpu').set_num_threads(1); print(torch.get_num_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=SOURCE_ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"


def test_importing_kernels_leaves_the_threads_of_torch_alone() -> None:
    program = (
        "import torch; torch.set_num_threads(1); from kernels.select import select_backend;"
        " select_backend('cpu', 'cpu'); print(torch.get_num_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=SOURCE_ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"


def test_graphs_end_before_the_group_whose_operations_they_hold(worker: Worker) -> None:
    runner, held = weakref.ref(worker._runner), []
    worker._group = SimpleNamespace(close=lambda: held.append(runner()))  # type: ignore[assignment]
    worker.close()
    assert held == [None]


@pytest.mark.skipif(not has_memfds(), reason="memory files need Linux")
def test_whoever_runs_steps_gives_weights_and_cache_huge_pages_until_it_is_closed(
    small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: Queue[tuple[int, threading.Event]] = Queue()
    standby = Worker(config_of(small_checkpoint), rank=0)

    def note(
        _: int, num_bytes: int, is_idle: Callable[[], bool], stop_event: threading.Event
    ) -> None:
        if stop_event is standby._idle_collapse._stop_event:  # not by a worker of another test
            began.put((num_bytes, stop_event))
            stop_event.wait(0.0 if began.qsize() == 1 else 60.0)

    monkeypatch.setattr("workers.memory.idle_collapse.collapse_when_idle", note)
    standby.start(None)
    standby.allocate_cache(32, is_standby=True)
    with pytest.raises(Empty):
        began.get(timeout=0.2)
    standby.take_over(1, keeps_cache=True)
    handles, thread = standby.memory(), standby._idle_collapse._thread
    assert handles.weights is not None and handles.cache is not None and thread is not None
    deadline_s = time.monotonic() + 20.0
    while began.qsize() < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (weights_bytes, _), (cache_bytes, stop_event) = began.get(), began.get()
    assert (weights_bytes, cache_bytes) == (handles.weights.num_bytes, handles.cache.num_bytes)
    assert not stop_event.is_set() and thread.is_alive()
    standby.close()
    assert stop_event.is_set() and not thread.is_alive()


def test_a_rank_that_runs_a_step_or_has_run_one_is_not_idle(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._idle_collapse.stop()  # its thread asks too
    is_idle, seen = worker._idle_collapse.is_idle, []
    is_idle()
    assert is_idle()

    def note(*_: object) -> None:
        seen.append((is_idle(), is_idle()))

    monkeypatch.setattr("workers.worker.faults.reach", note)
    first, second, out_of_turn = plans(3)
    worker.launch(first)
    assert seen and not any(map(any, seen))
    monkeypatch.undo()
    assert is_idle()
    worker.launch(second)
    assert not is_idle() and is_idle()
    worker.launch(out_of_turn)
    worker.launch(out_of_turn)  # which fails
    assert not is_idle() and is_idle()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_cannot_use_is_a_config_error() -> None:
    with pytest.raises(
        ConfigError, match=r"device 'cuda': torch .* cannot use a GPU here\. Install"
    ):
        open_device("cuda")


def test_workers_import_neither_ray_nor_transformers() -> None:
    program = (
        "import json, sys, workers.worker\n"
        "print(json.dumps([m for m in ('ray', 'transformers', 'cluster') if m in sys.modules]))"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=root, check=True, timeout=60, capture_output=True
    )
    assert json.loads(out.stdout) == []
