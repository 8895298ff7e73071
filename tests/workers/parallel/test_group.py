"""The tensor-parallel group. Ranks are threads here, which works because nothing in a group is
global.

Tests of shared memory alone are in test_shared_memory.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.errors import WorkerError
from workers.parallel import segment
from workers.parallel.backend import TorchTransport, open_rendezvous
from workers.parallel.group import TensorParallelGroup

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32]


HIERARCHICAL = "shared memory within hosts, gloo between them"
TRANSPORTS = ["shared memory", "gloo", HIERARCHICAL]
HERE = threading.local()  # the host of the rank that runs in a thread
HOSTS = ("a", "b", "a", "a")  # of ranks that are not all on one


@pytest.fixture(autouse=True)
def threads_have_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "host_id", lambda: HERE.host)


def on_ranks(
    size: int,
    run: Callable[[TensorParallelGroup], Any],
    timeout_s: float = 10.0,
    transport: str = "shared memory",
) -> list[Any]:
    """The results of `run` on each rank of a new group."""
    rendezvous = open_rendezvous("127.0.0.1", timeout_s)

    def rank_main(rank: int) -> Any:
        HERE.host = HOSTS[rank] if transport == HIERARCHICAL else "a"
        group = TensorParallelGroup(rank, size, CPU)
        group.join(rendezvous.address, timeout_s)
        group.share_memory(timeout_s, transport != "gloo")
        assert group.transport == (transport if size > 1 else "none")
        try:
            return run(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_main, range(size)))


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_dtype_is_summed_maximized_and_gathered(
    transport: str, dtype: torch.dtype, size: int
) -> None:
    def run(group: TensorParallelGroup) -> tuple[Any, Any, Any]:
        mine = torch.arange(6).view(2, 3).to(dtype) + group.rank
        total = mine.clone()
        assert group.all_reduce(total) is total
        return (
            total.tolist(),
            group.all_reduce_max(mine.clone()).tolist(),
            group.all_gather(mine).tolist(),
        )

    base = torch.arange(6).view(2, 3)
    for total, largest, gathered in on_ranks(size, run, transport=transport):
        assert total == (size * base + sum(range(size))).tolist()
        assert largest == (base + size - 1).tolist()
        assert gathered == [(base + rank).tolist() for rank in range(size)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bfloat16_sums_have_the_same_bits_on_every_rank(transport: str) -> None:
    def run(group: TensorParallelGroup) -> torch.Tensor:
        generator = torch.Generator().manual_seed(group.rank)
        return group.all_reduce(torch.randn(1000, generator=generator).to(torch.bfloat16))

    first, *others = on_ranks(4, run, transport=transport)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gather_takes_tensors_that_are_not_contiguous(transport: str) -> None:
    gathered = on_ranks(
        3, lambda group: group.all_gather(torch.arange(6).view(2, 3).t()), transport=transport
    )
    assert gathered[0][1].tolist() == torch.arange(6).view(2, 3).t().tolist()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize(
    ("transport", "num_left"), [("shared memory", 0), ("gloo", 4), (HIERARCHICAL, 2)]
)
def test_ranks_leave_gloo_once_loaded_where_they_do_not_need_it(
    transport: str, num_left: int
) -> None:
    all_here = threading.Barrier(4)
    before = threads_of_gloo()  # threads of earlier tests, which may be ending

    def run(group: TensorParallelGroup) -> tuple[int, int]:
        time.sleep(0.05 * group.rank)  # one leaves early, the others still meet
        group.wait_until_loaded()
        all_here.wait(10)
        found = len(threads_of_gloo() - before)
        all_here.wait(10)
        return found, int(group.all_reduce(torch.tensor([group.rank])))

    assert on_ranks(4, run, transport=transport) == [(num_left, 6)] * 4


def threads_of_gloo() -> set[str]:
    """This process's threads that gloo started."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if (task / "comm").read_text().startswith("gloo"):
                found.add(task.name)
    return found


def test_two_groups_at_once_do_not_touch() -> None:

    def engine(number: int) -> list[Any]:
        return on_ranks(2, lambda group: int(group.all_reduce(torch.tensor([number]))))

    with ThreadPoolExecutor(2) as engines:
        assert list(engines.map(engine, (1, 10))) == [[2, 2], [20, 20]]


def test_default_process_group_is_left_alone() -> None:
    on_ranks(2, lambda group: group.barrier())
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_leaves_fails_the_others_at_once(transport: str) -> None:
    def run(group: TensorParallelGroup) -> float:
        if group.rank == 1:
            group.close()
            return 0.0
        started = time.monotonic()
        with pytest.raises(WorkerError, match=rf"rank {group.rank} of 3: \w+ failed"):
            group.all_reduce(torch.zeros(4))
        return time.monotonic() - started

    # Not the timeout of 10 s. A rank that still joins may wait 5 s for a name server to answer.
    assert max(on_ranks(3, run, transport=transport)) < 9.0


def test_a_failure_between_hosts_ends_the_wait_within_one() -> None:
    """Rank 2 waits for rank 0, which has lost rank 1 but does not leave."""
    told = threading.Event()

    def run(group: TensorParallelGroup) -> bool:
        if group.rank == 1:
            group.close()
            return True
        with pytest.raises(WorkerError):
            group.all_reduce(torch.zeros(4))
        if group.rank == 2:
            told.set()
        return told.wait(8.0)

    assert all(on_ranks(3, run, transport=HIERARCHICAL))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_task_is_one_ranks_and_a_slow_rank_gets_fewer(size: int) -> None:
    others_are_done = threading.Barrier(size)

    def run(group: TensorParallelGroup) -> list[str]:
        mine = []
        for task in group.claim_tasks("letters", "abcdefgh"):
            mine.append(task)
            if len(mine) == 1:
                group.barrier()
                if group.rank == 1:
                    others_are_done.wait(10.0)
        if group.rank != 1:
            others_are_done.wait(10.0)
        return mine

    parts = on_ranks(size, run)
    assert sorted(task for part in parts for task in part) == list("abcdefgh")
    assert all(part == sorted(part) for part in parts)
    assert [len(part) for part in parts[1:2]] == [1] * (size > 1)


@pytest.mark.parametrize("operation", ["all_reduce", "barrier"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_is_stuck_fails_the_others_after_the_timeout(
    transport: str, operation: str
) -> None:
    started: list[float] = []
    all_start = threading.Barrier(3, lambda: started.append(time.monotonic()))
    others_have_failed = threading.Barrier(3)

    def run(group: TensorParallelGroup) -> float:
        group.set_timeout(0.5)
        all_start.wait(20)
        waited = 0.5
        try:
            if group.rank != 1:
                with pytest.raises(WorkerError, match=r"gone or stuck|has left the group"):
                    group.barrier() if operation == "barrier" else group.all_reduce(torch.zeros(4))
                waited = time.monotonic() - started[0]
        except BaseException:
            others_have_failed.abort()
            raise
        with suppress(threading.BrokenBarrierError):  # the rank that broke it tells why
            others_have_failed.wait(20)
        return waited

    waited = on_ranks(3, run, transport=transport)
    assert min(waited) > 0.3
    assert max(waited) < 5


def test_a_group_that_never_completes_is_an_error_in_time() -> None:
    rendezvous = open_rendezvous("127.0.0.1", 5.0)
    started = time.monotonic()
    with pytest.raises(
        WorkerError,
        match=rf"rank 1 of 2 did not find all of its peers at 127.0.0.1:{rendezvous.port}",
    ):
        TensorParallelGroup(1, 2, CPU).join(rendezvous.address, 1.0)
    assert time.monotonic() - started < 4.0


def test_nobody_at_the_rendezvous_is_an_error_in_time() -> None:
    closed = open_rendezvous("127.0.0.1", 5.0).address  # its store is gone too
    with pytest.raises(WorkerError, match="rank 1 of 2"):
        TensorParallelGroup(1, 2, CPU).join(closed, 1.0)


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"192\.0\.2\.1"):
        open_rendezvous("192.0.2.1", 1.0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closed_group_refuses_work(transport: str) -> None:
    def run(group: TensorParallelGroup) -> None:
        group.barrier()
        group.close()
        with pytest.raises(WorkerError, match="has left"):
            group.all_reduce(torch.zeros(1))
        with pytest.raises(WorkerError, match="has left"):
            group.barrier()

    on_ranks(3, run, transport=transport)


class NcclStandIn:
    """Behaves like NCCL for two ranks with equal tensors: if the call runs in the current stream,
    there is nothing to wait for.
    """

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        assert not options.asyncOp, "a stream other than the step's"
        (tensor,) = tensors
        if options.reduceOp == torch.distributed.ReduceOp.SUM:
            tensor *= 2
        else:
            assert options.reduceOp == torch.distributed.ReduceOp.MAX

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp, "a stream other than the step's"
        output[...] = tensor


def test_what_runs_in_the_stream_of_the_step_has_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TorchTransport(NcclStandIn(), None, 2, CPU, "rank 0 of 2")
    monkeypatch.setattr(TorchTransport, "connect", lambda *_: backend)
    group = TensorParallelGroup(0, 2, CPU)
    group.join(("127.0.0.1", 1), 10.0)
    assert group.all_reduce(torch.tensor([3.0])).item() == 6
    assert group.all_reduce_max(torch.tensor([3.0])).item() == 3
    assert group.all_gather(torch.tensor([3.0, 4.0])).tolist() == [[3, 4], [3, 4]]
    group.barrier()


def test_group_of_one_needs_no_rendezvous() -> None:
    group = TensorParallelGroup(0, 1, CPU)
    group.join(None, 1.0)
    tensor = torch.tensor([3.0])
    assert group.all_reduce(tensor) is tensor
    group.barrier()
    group.close()
