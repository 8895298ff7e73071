"""All-reduce through shared memory. Ranks are processes here, forked from one that has torch and
numba loaded, so that they can be killed one at a time; or threads where only the outcome of `join`
matters.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.errors import WorkerError
from tests.cluster.processes import opened_by
from workers.parallel import advance, segment
from workers.parallel.advance import PART_BYTES
from workers.parallel.backend import open_rendezvous
from workers.parallel.group import TensorParallelGroup
from workers.parallel.shared_memory import SharedMemoryReducer

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32]
ANSWER_TIMEOUT_S = 60.0
pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="watches and inspects processes as on Linux"
)


class Ranks:
    """`size` processes that are the ranks of one group; each runs `function(group, *args)` when
    told to.
    """

    def __init__(
        self, size: int, timeout_s: float = 20.0, before: Callable[[int], None] | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._rendezvous = open_rendezvous("127.0.0.1", timeout_s)
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (theirs, rank, size, self._rendezvous.address, timeout_s, before)
            process = context.Process(target=_rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        self.transports = [self.answer(rank) for rank in range(size)]

    def tell(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        self._pipes[rank].send((function, args))

    def answer(self, rank: int) -> Any:
        """The result of the oldest function that has not been answered yet. Raises the error that
        it raised.
        """
        assert self._pipes[rank].poll(ANSWER_TIMEOUT_S), f"rank {rank} did not answer"
        answer = self._pipes[rank].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for rank in range(len(self._pipes)):
            self.tell(rank, function, *args)
        return [self.answer(rank) for rank in range(len(self._pipes))]

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*range(len(self.processes)))
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            process.join(5)
            pipe.close()


def _rank_main(
    pipe: Any, rank: int, size: int, address: Any, timeout_s: float, before: Any
) -> None:
    torch.set_num_threads(1)
    if before is not None:
        before(rank)
    group = TensorParallelGroup(rank, size, CPU)
    group.join(address, timeout_s)
    group.share_memory(timeout_s)
    pipe.send(group.transport)
    while True:
        function, args = pipe.recv()
        try:
            answer = function(group, *args)
        except Exception as error:
            answer = error
        pipe.send(answer)


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        assert ranks.transports == ["shared memory"] * request.param
        yield ranks


@pytest.fixture
def three() -> Iterator[Ranks]:
    """Three ranks that may be killed."""
    with Ranks(3) as ranks:
        yield ranks


def in_threads(size: int, run: Callable[[Any], Any], timeout_s: float = 5.0) -> list[Any]:
    """Apply `run` to what `join` returned, on each of `size` ranks that are threads."""
    texts, barrier = [""] * size, threading.Barrier(size)

    def exchange(rank: int, text: str) -> list[str]:
        barrier.wait(timeout_s)
        texts[rank] = text
        barrier.wait(timeout_s)
        return list(texts)

    def rank_main(rank: int) -> Any:
        rank_label = f"rank {rank} of {size}"
        joined = SharedMemoryReducer.join(
            rank, range(size), partial(exchange, rank), timeout_s, rank_label
        )
        try:
            return run(joined)
        finally:
            if isinstance(joined, SharedMemoryReducer):
                joined.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_main, range(size)))


# -- what comes out --------------------------------------------------------------------------------


def input_of(rank: int, dtype: torch.dtype, length: int) -> torch.Tensor:
    """Random integers; or floats of which every other one is large on rank 0 and its opposite on
    rank 1, so that the small ones of later ranks survive only if these two are added first.
    """
    generator = torch.Generator().manual_seed(1000 * rank + length)
    if not dtype.is_floating_point:
        return torch.randint(-(2**30) + 1, 2**30, (length,), generator=generator).to(dtype)
    tensor = torch.randn(length, generator=generator)
    if rank < 2:
        large = torch.randn(length, generator=generator.manual_seed(length)) * 2.0**12
        tensor[::2] = large[::2] if rank == 0 else -large[::2]
    return tensor.to(dtype)


def sum_in_order(inputs: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.float32 if inputs[0].dtype.is_floating_point else torch.int64
    total = inputs[0].to(wide)
    for tensor in inputs[1:]:
        total = total + tensor.to(wide)
    return total.to(inputs[0].dtype)


def check_operations(group: TensorParallelGroup, dtype: torch.dtype, length: int) -> str:
    """Compare a sum, a maximum and a gather with the expected values; returns a digest of their
    bits.
    """
    inputs = [input_of(rank, dtype, length) for rank in range(group.size)]
    mine, digest = inputs[group.rank], hashlib.sha256()
    total = mine.clone()
    assert group.all_reduce(total) is total
    largest, gathered_R = group.all_reduce_max(mine.clone()), group.all_gather(mine)
    assert torch.equal(mine, input_of(group.rank, dtype, length)), "a gather has changed its input"
    for got, expected in (
        (total, sum_in_order(inputs)),
        (largest, torch.stack(inputs).amax(0)),
        (gathered_R, torch.stack(inputs)),
    ):
        assert got.dtype == dtype and torch.equal(got, expected)
        digest.update(got.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_gets_the_bits_of_the_sum_in_rank_order(
    ranks: Ranks, dtype: torch.dtype
) -> None:
    part = PART_BYTES // dtype.itemsize
    for length in (
        0,
        1,
        7,
        1023,
        1025,
        part - 1,
        part,
        part + 1,
        2 * part,
        2 * part + 1,
        5 * part + 1025,
    ):
        assert len(set(ranks.all(check_operations, dtype, length))) == 1, length


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_these_inputs_tell_one_order_of_addition_from_another(dtype: torch.dtype) -> None:
    inputs = [input_of(rank, dtype, 1025) for rank in range(3)]
    assert not torch.equal(sum_in_order(inputs), sum_in_order(inputs[1:] + inputs[:1]))
    assert not torch.equal(sum_in_order(inputs), sum_in_order(inputs[::-1]))
    if dtype != torch.float32:
        assert not torch.equal(sum_in_order(inputs), inputs[0] + inputs[1] + inputs[2]), (
            "rounded more than once"
        )


def check_strided(group: TensorParallelGroup) -> None:
    matrix = torch.arange(12, dtype=torch.float32).view(3, 4).t()[1:]
    assert not matrix.is_contiguous()
    expected = matrix * group.size
    gathered_R = group.all_gather(matrix)
    assert torch.equal(gathered_R, matrix.expand(group.size, 3, 3))
    assert group.all_reduce(matrix) is matrix
    assert torch.equal(matrix, expected)


def test_tensors_that_are_not_contiguous_are_reduced_in_place(ranks: Ranks) -> None:
    ranks.all(check_strided)


def check_refusal(group: TensorParallelGroup) -> int:
    with pytest.raises(
        ValueError, match=r"all_reduce of torch\.float64 .* possible are .*torch\.bfloat16"
    ):
        group.all_reduce(torch.zeros(3, dtype=torch.float64))
    return int(group.all_reduce(torch.tensor(1)))


def test_other_dtype_is_refused_and_harms_nothing(ranks: Ranks) -> None:
    assert set(ranks.all(check_refusal)) == {len(ranks.processes)}


def run_thousands(group: TensorParallelGroup, seed: int) -> None:
    """3000 random operations, the same on all ranks, with random delays that differ per rank."""
    common, own = random.Random(seed), random.Random(1000 * seed + group.rank)
    ranks_R = torch.arange(group.size)
    for number in range(3000):
        lengths = (
            common.randint(1, 64),
            common.randint(1, 4096),
            common.randint(1, 5 * PART_BYTES // 8),
        )
        length = common.choices(lengths, weights=(60, 35, 5))[0]
        mine = torch.arange(length) + 1_000_003 * number + group.rank
        match common.randrange(3):
            case 0:
                expected = (mine - group.rank) * group.size + ranks_R.sum()
                got = group.all_reduce(mine)
            case 1:
                expected = mine - group.rank + group.size - 1
                got = group.all_reduce_max(mine)
            case _:
                expected = (mine - group.rank) + ranks_R[:, None]
                got = group.all_gather(mine)
        assert torch.equal(got, expected), f"operation {number} of {length} elements"
        delay = own.random()
        if delay < 0.01:
            time.sleep(delay / 5)
        elif delay < 0.1:
            until = time.perf_counter() + delay / 500
            while time.perf_counter() < until:
                pass


def test_thousands_of_operations_in_a_row_never_mix(ranks: Ranks) -> None:
    ranks.all(run_thousands, 7)


def run_long_ones(group: TensorParallelGroup) -> None:
    mine = torch.empty(40 * PART_BYTES // 8, dtype=torch.int64)
    for number in range(10):
        torch.arange(number, number + len(mine), out=mine)
        expected = mine * group.size
        assert torch.equal(group.all_reduce(mine), expected)


def test_parts_of_long_tensors_never_mix(ranks: Ranks) -> None:
    """Parts follow each other without a pause: a rank that is one part behind still reads while the
    others write the next part.
    """
    ranks.all(run_long_ones)


# -- peers that fail -------------------------------------------------------------------------------


def wait_and_fail(group: TensorParallelGroup, timeout_s: float = 20.0) -> tuple[str, float, str]:
    """(what an all-reduce raises, when, and what the next one raises)"""
    group.set_timeout(timeout_s)
    with pytest.raises(WorkerError) as first:
        group.all_reduce(torch.zeros(8))
    failed = time.monotonic()
    with pytest.raises(WorkerError) as second:
        group.all_gather(torch.zeros(8))
    return str(first.value), failed, str(second.value)


def test_killed_peer_fails_the_ranks_that_wait_for_it(three: Ranks) -> None:
    three.tell(0, wait_and_fail)
    three.tell(2, wait_and_fail)
    time.sleep(0.3)
    killed = time.monotonic()
    three.kill(1)
    for rank in (0, 2):
        first, failed, second = three.answer(rank)
        assert (
            first
            == f"rank {rank} of 3: all_reduce failed: rank 1 (process {three.processes[1].pid}) has"
            " died"
        )
        assert second == f"rank {rank} of 3 has failed before: {first}"
        assert failed - killed < 5.0


def test_peer_killed_before_fails_the_next_operation(three: Ranks) -> None:
    three.kill(1)
    three.processes[1].join(5)
    started = time.monotonic()
    three.tell(0, wait_and_fail)
    three.tell(2, wait_and_fail)
    for rank in (0, 2):
        first, failed, _ = three.answer(rank)
        assert "rank 1 (process" in first
        assert failed - started < 5.0


def test_stopped_peer_fails_the_others_after_the_limit(three: Ranks) -> None:
    os.kill(three.processes[1].pid or 0, signal.SIGSTOP)
    started = time.monotonic()
    three.tell(0, wait_and_fail, 0.5)
    three.tell(2, wait_and_fail, 0.5)
    for rank in (0, 2):
        first, failed, _ = three.answer(rank)
        assert "part 1 of rank 1 did not come in 0.5 s: it is gone or stuck" in first
        assert 0.4 < failed - started < 5.0


def wait_often(group: TensorParallelGroup) -> float:
    """Of the time that rank 0 waits for rank 1, which comes 3 ms late each time, the share in which
    it held a core.
    """
    waited_s, began = 0.0, time.thread_time()
    for _ in range(50):
        if group.rank == 1:
            time.sleep(0.003)
        before = time.perf_counter()
        group.all_reduce(torch.ones(8))
        waited_s += time.perf_counter() - before
    return (time.thread_time() - began) / waited_s


def test_waiting_rank_soon_leaves_its_core_to_others(three: Ranks) -> None:
    assert three.all(wait_often)[0] < 0.4


def leave(group: TensorParallelGroup) -> None:
    group.close()


def test_peer_that_leaves_fails_who_waits_and_who_comes_later(three: Ranks) -> None:
    three.tell(0, wait_and_fail)
    time.sleep(0.1)
    left = time.monotonic()
    three.tell(1, leave)
    first, failed, _ = three.answer(0)
    assert first == "rank 0 of 3: all_reduce failed: rank 1 has left the group"
    assert failed - left < 5.0
    three.tell(2, wait_and_fail)
    assert "rank 1 has left the group" in three.answer(2)[0]


def leave_after_one(group: TensorParallelGroup) -> int:
    total = int(group.all_reduce(torch.tensor(1)))
    group.close()
    return total


def test_peer_that_leaves_after_an_operation_fails_nobody_in_it() -> None:
    for _ in range(200):
        assert in_threads(4, leave_after_one) == [4] * 4


def test_peer_that_dies_after_its_part_came_fails_nobody() -> None:
    """Rank 0 learns that rank 1 is dead just after rank 1 has completed the operation for which
    rank 0 waits.
    """
    found_dead, ended = threading.Event(), threading.Event()

    def run(reducer: SharedMemoryReducer) -> list[int]:
        def dead_peer() -> int | None:
            if found_dead.is_set():
                return None
            found_dead.set()
            assert ended.wait(5.0)
            return 1

        if reducer.rank == 0:
            reducer._dead_peer = dead_peer  # type: ignore[method-assign]
        else:
            assert found_dead.wait(5.0)
        totals = [int(reducer.all_reduce(torch.tensor(1)))]
        ended.set()
        return [*totals, int(reducer.all_reduce(torch.tensor(10)))]

    assert in_threads(2, run) == [[2, 20], [2, 20]]


def disagree(group: TensorParallelGroup, lengths: list[int]) -> str:
    with pytest.raises(WorkerError) as error:
        group.all_reduce(torch.zeros(lengths[group.rank]))
    return str(error.value)


def test_ranks_that_ask_for_different_sizes_are_told(three: Ranks) -> None:
    for message in three.all(disagree, [8, 9, 8]):
        assert "runs another operation, or one of another size" in message


def test_ranks_that_ask_for_different_operations_of_one_size_are_told() -> None:
    def run(reducer: SharedMemoryReducer) -> str:
        operations = (reducer.all_reduce, reducer.all_reduce_max, reducer.all_gather)
        with pytest.raises(WorkerError) as error:
            operations[reducer.rank](torch.zeros(2, dtype=torch.int64))
        return str(error.value)

    for message in in_threads(3, run):
        assert "runs another operation" in message


def test_closing_from_another_thread_ends_a_wait() -> None:
    done = threading.Event()

    def run(reducer: SharedMemoryReducer) -> str:
        if reducer.rank == 1:
            done.wait(20)
            return ""
        threading.Timer(0.1, reducer.close).start()
        try:
            with pytest.raises(WorkerError) as error:
                reducer.all_reduce(torch.zeros(8))
        finally:
            done.set()
        return str(error.value)

    assert in_threads(2, run)[0] == "rank 0 of 2 has left its tensor-parallel group"


def test_closing_leaves_the_state_of_an_operation_to_the_thread_inside() -> None:
    def run(reducer: SharedMemoryReducer) -> int:
        reducer._state[advance.OFFSET_INDEX] = PART_BYTES  # as in the second part
        reducer.close()
        return int(reducer._state[advance.OFFSET_INDEX])

    assert in_threads(2, run) == [PART_BYTES] * 2


def test_interrupted_operation_is_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def interrupt() -> None:
        raise KeyboardInterrupt

    def run(reducer: SharedMemoryReducer) -> str:
        if reducer.rank == 1:
            done.wait(20)
            return ""
        try:
            with pytest.raises(KeyboardInterrupt):
                reducer.all_reduce(torch.zeros(8))
            with pytest.raises(WorkerError) as error:
                reducer.all_reduce(torch.zeros(8))
        finally:
            done.set()
        return str(error.value)

    # One that has waited for longer sleeps, and would not be interrupted.
    monkeypatch.setattr("workers.parallel.shared_memory._MAX_YIELD_S", 20.0)
    monkeypatch.setattr(os, "sched_yield", interrupt)
    assert in_threads(2, run)[0] == "rank 0 of 2 has failed before: KeyboardInterrupt"


# -- what waiting costs ----------------------------------------------------------------------------


def test_a_rank_that_waits_for_a_late_peer_leaves_its_core_to_others() -> None:
    def run(reducer: SharedMemoryReducer) -> float:
        if reducer.rank == 1:
            time.sleep(1)
        before_s = time.thread_time()
        reducer.all_reduce(torch.zeros(8))
        return time.thread_time() - before_s

    assert in_threads(2, run)[0] < 0.2


def test_a_rank_whose_peer_is_often_late_soon_stops_to_yield(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_yields, sched_yield = 0, os.sched_yield

    def count_yield() -> None:
        nonlocal num_yields
        num_yields += 1
        sched_yield()

    def run(reducer: SharedMemoryReducer) -> None:
        nonlocal num_yields
        for num_before in range(20):
            if reducer.rank == 1:
                time.sleep(0.005)
            elif num_before == 10:
                num_yields = 0
            reducer.all_reduce(torch.zeros(8))

    monkeypatch.setattr(os, "sched_yield", count_yield)
    in_threads(2, run)
    assert num_yields < 100  # where each yields for 0.2 ms, there are hundreds


# -- what is left ----------------------------------------------------------------------------------


def traces() -> list[str]:
    """Named files of ours, and segments and watches that this process has mapped or open."""
    # an error in a reference cycle keeps its frames alive, and what they have mapped
    gc.collect()
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    files = [str(path) for place in places for path in place.glob("*eagleray-all-reduce*")]
    mapped = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "eagleray-all-reduce" in line
    ]
    opened = [
        name for name in opened_by(os.getpid()) if "eagleray-all-reduce" in name or "pidfd" in name
    ]
    return files + mapped + opened


def test_nothing_is_left_after_closing() -> None:
    def run(reducer: SharedMemoryReducer) -> int:
        assert len(traces()) > 0
        return int(reducer.all_reduce(torch.tensor(1)))

    assert in_threads(3, run) == [3, 3, 3]
    assert traces() == []


def test_nothing_is_left_after_all_ranks_are_killed() -> None:
    with Ranks(2) as ranks:
        ranks.tell(0, wait_and_fail)
        time.sleep(0.1)
        assert traces() == []  # segments have no name even while ranks run
    assert traces() == []


def test_without_nameless_files_a_named_one_is_removed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(reducer: SharedMemoryReducer) -> tuple[int, list[Path]]:
        return int(reducer.all_reduce(torch.tensor(1))), list(tmp_path.iterdir())

    assert in_threads(2, run) == [(2, []), (2, [])]


# -- when it cannot be -----------------------------------------------------------------------------


def forbid_files(rank: int) -> None:
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def add_one(group: TensorParallelGroup) -> tuple[int, str]:
    group.barrier()
    return int(group.all_reduce(torch.tensor(1))), group.transport


def test_no_room_for_the_segment_leads_every_rank_to_gloo() -> None:
    with Ranks(3, before=forbid_files) as ranks:
        assert ranks.all(add_one) == [(3, "gloo")] * 3


def fail_to_map(rank: int) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("no")

    if rank == 1:
        segment.open_segment = refuse  # type: ignore[assignment]


def test_one_rank_that_cannot_map_leads_every_rank_to_gloo() -> None:
    with Ranks(3, before=fail_to_map) as ranks:
        assert ranks.all(add_one) == [(3, "gloo")] * 3


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (
            "host_id",
            lambda: str(threading.get_ident()),
            "runs on another host or in another container",
        ),
        (
            "create",
            lambda *_: (os.open("/dev/zero", os.O_RDWR), "/dev/zero"),
            "/dev/zero is not the segment of the first rank",
        ),
        ("create", lambda *_: (os.open("/dev/zero", os.O_RDWR), "/proc/none"), "No such file"),
    ],
    ids=["another host", "another file", "no file"],
)
def test_every_rank_knows_why_not(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, reason: str
) -> None:
    monkeypatch.setattr(segment, name, value)
    monkeypatch.setattr(segment, "remove", lambda path: None)
    reasons = in_threads(3, lambda joined: joined)
    assert all(isinstance(said, str) and reason in said for said in reasons)
    assert len(set(reasons)) == 1
    assert traces() == []


def test_rank_0_logs_what_it_came_to(caplog: pytest.LogCaptureFixture) -> None:
    def transports(*wanted: bool) -> list[str]:
        rendezvous = open_rendezvous("127.0.0.1", 10.0)

        def rank_main(rank: int) -> str:
            group = TensorParallelGroup(rank, 2, CPU)
            group.join(rendezvous.address, 10.0)
            group.share_memory(10.0, wanted[rank])
            group.close()
            return group.transport

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(rank_main, range(2)))

    with caplog.at_level(logging.INFO, "workers.parallel.group"):
        transports(True, True)
        assert transports(True, False) == ["gloo", "gloo"]
    assert [record.getMessage() for record in caplog.records] == [
        "all-reduce: shared memory",
        "all-reduce: gloo, because rank 1 was told not to share memory",
    ]
