"""Sums through the symmetric memory of GPUs, with a stand-in for CPUs. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scheduler.errors import WorkerError
from workers.parallel import segment, symmetric_memory
from workers.parallel.backend import TorchTransport, open_rendezvous
from workers.parallel.group import TensorParallelGroup
from workers.parallel.symmetric_memory import MAX_TENSOR_BYTES

TIMEOUT_S = 10.0
SHARED = "symmetric memory up to 1 MiB, nccl above"
HERE = threading.local()  # a thread's rank, and the groups that its process knows


class NcclBetweenThreads(TorchTransport):
    """gloo under another name, which counts its sums."""

    name = "nccl"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        HERE.num_nccl_sums += 1
        return super().all_reduce(tensor)


class SymmetricMemoryStandIn:
    """torch's symmetric memory between threads that are ranks. It checks what torch checks: the
    ranks that meet, the memory that is shared, and the shape, dtype, layout and alignment of each
    operand.
    """

    def __init__(self) -> None:
        self.num_sums = 0
        self.has_switch = True
        self.fault: Callable[[int, torch.Tensor], None] = lambda rank, result: None
        self.rendezvous_fails_on: int | None = None
        self._memory: dict[int, SimpleNamespace] = {}  # by address
        self._met: dict[str, dict[int, torch.Tensor]] = {}  # by group: each rank's memory
        self._barriers: dict[str, threading.Barrier] = {}
        self._lock = threading.Lock()
        self._SymmetricMemory = SimpleNamespace(set_group_info=self._set_group_info)

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        room = torch.empty(size, dtype=dtype)
        with self._lock:
            self._memory[room.data_ptr()] = SimpleNamespace(device=device, tensor=room, group=None)
        return room

    def rendezvous(self, tensor: torch.Tensor, group: str) -> SimpleNamespace:
        found = self._memory[tensor.data_ptr()]
        if self.rendezvous_fails_on == HERE.rank:
            raise RuntimeError("CUDA driver error: invalid device ordinal")
        rank, size, _ = HERE.groups[group]
        with self._lock:
            met = self._met.setdefault(group, {})
            met[rank] = tensor
            barrier = self._barriers.setdefault(group, threading.Barrier(size, timeout=TIMEOUT_S))
        if self.rendezvous_fails_on is None:
            barrier.wait()
            assert len({each.nbytes for each in met.values()}) == 1
            devices = {self._memory[each.data_ptr()].device.index for each in met.values()}
            assert len(devices) == size, "allocations from overlapping devices"
        found.group = group
        return SimpleNamespace(multicast_ptr=4096 if self.has_switch else 0)

    def one_shot(
        self, shared: torch.Tensor, mine: torch.Tensor, how: str, group: str, out: torch.Tensor
    ) -> torch.Tensor:
        assert shared.shape == mine.shape == out.shape and out.is_contiguous()
        assert mine.is_contiguous() and mine.dtype == shared.dtype == out.dtype
        assert shared.data_ptr() % 16 == mine.data_ptr() % 16, "the same alignment"
        assert len(self._met[group]) in (2, 4)
        shared.copy_(mine)
        return out.copy_(self._sum(shared, how, group))

    def through_switch(self, shared: torch.Tensor, how: str, group: str) -> torch.Tensor:
        assert self.has_switch
        total = self._sum(shared, how, group)
        shared.copy_(total)
        self._barriers[group].wait()
        return shared

    def _set_group_info(self, group: str, rank: int, size: int, store: Any) -> None:
        assert group not in HERE.groups, "a group is made known once"
        store.set(f"rank {rank}", "here")
        HERE.groups[group] = rank, size, store

    def _sum(self, shared: torch.Tensor, how: str, group: str) -> torch.Tensor:
        assert how == "sum" and shared.is_contiguous() and shared.storage_offset() == 0
        assert shared.dtype in (torch.bfloat16, torch.float32)
        assert shared.data_ptr() % 4 == shared.nbytes % 4 == 0
        assert self._memory[shared.untyped_storage().data_ptr()].group == group, "after rendezvous"
        barrier, parts = self._barriers[group], self._met[group]
        barrier.wait()
        each = [
            parts[rank][: shared.nbytes].view(shared.dtype).view(shared.shape)
            for rank in sorted(parts)
        ]
        total = each[0].clone()
        for part in each[1:]:
            total += part
        with self._lock:
            self.num_sums += 1
        barrier.wait()  # no rank writes before all have read
        self.fault(HERE.rank, total)
        return total


@pytest.fixture
def torch_has(monkeypatch: pytest.MonkeyPatch) -> Iterator[SymmetricMemoryStandIn]:
    """torch's own operators, which the stand-in runs on CPUs."""
    stand_in = SymmetricMemoryStandIn()
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy_out", stand_in.one_shot, "CPU")
    library.impl("multimem_all_reduce_", stand_in.through_switch, "CPU")
    monkeypatch.setattr(symmetric_memory, "_library", lambda: stand_in)
    monkeypatch.setattr("workers.parallel.group.TorchTransport", NcclBetweenThreads)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    monkeypatch.setattr(segment, "host_id", lambda: HERE.host)
    yield stand_in
    library._destroy()


def on_ranks(
    size: int,
    run: Callable[[TensorParallelGroup], Any],
    *,
    wanted: bool = True,
    gpus: list[int] | None = None,
    hosts: str = "aaaaaaaa",
) -> list[Any]:
    """The results of `run` on each rank of a new group."""
    rendezvous = open_rendezvous("127.0.0.1", TIMEOUT_S)

    def rank_main(rank: int) -> Any:
        HERE.rank, HERE.host, HERE.groups, HERE.num_nccl_sums = rank, hosts[rank], {}, 0
        device = torch.device("cpu", (gpus or range(size))[rank])
        group = TensorParallelGroup(rank, size, device)
        group.join(rendezvous.address, TIMEOUT_S)
        group.share_memory(TIMEOUT_S, wanted or rank != 1)
        HERE.num_nccl_sums = 0
        try:
            return run(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_main, range(size)))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_sums_have_the_same_bits_on_every_rank_and_never_mix(
    torch_has: SymmetricMemoryStandIn, dtype: torch.dtype, size: int
) -> None:
    def run(group: TensorParallelGroup) -> tuple[int, list[torch.Tensor]]:
        assert group.transport == SHARED
        generator = torch.Generator().manual_seed(group.rank)
        mine = [torch.randn(n, 8, generator=generator).to(dtype) for n in (1, 30, 1, 64, 3) * 10]
        results = [group.all_reduce(each.clone()) for each in mine]
        parts = [group.all_gather(each) for each in mine]
        for result, of_ranks in zip(results, parts, strict=True):
            total = of_ranks[0].clone()
            for part in of_ranks[1:]:
                total += part
            assert torch.equal(result, total)
        return HERE.num_nccl_sums, results

    first, *others = on_ranks(size, run)
    assert first[0] == 0 and torch_has.num_sums > 50 * size
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first[1], other[1], strict=True))


def test_what_is_large_or_unusual_goes_through_nccl(torch_has: SymmetricMemoryStandIn) -> None:
    largest = MAX_TENSOR_BYTES // 4

    def tensors() -> list[tuple[torch.Tensor, bool]]:
        return [
            (torch.ones(largest), True),
            (torch.ones(largest + 4), False),
            (torch.ones(3), False),  # 12 bytes
            (torch.ones(9)[1:], False),  # begins at 4 bytes
            (torch.ones(0), False),
            (torch.ones(16, dtype=torch.float16), False),
            (torch.ones(16, dtype=torch.int64), False),
        ]

    def run(group: TensorParallelGroup) -> list[bool]:
        shared = []
        for mine, _ in tensors():
            before = HERE.num_nccl_sums
            assert group.all_reduce(mine) is mine and bool((mine == 2).all())
            shared.append(HERE.num_nccl_sums == before)
        assert group.all_reduce_max(torch.tensor([group.rank])).item() == 1
        return shared

    assert on_ranks(2, run) == [[shared for _, shared in tensors()]] * 2


def no_switch(stand_in: SymmetricMemoryStandIn) -> None:
    stand_in.has_switch = False


def fails(stand_in: SymmetricMemoryStandIn) -> None:
    stand_in.rendezvous_fails_on = 1


def wrong(stand_in: SymmetricMemoryStandIn) -> None:
    def one_number_on_one_rank(rank: int, result: torch.Tensor) -> None:
        if rank == 1:
            result.view(-1)[-1] += 1

    stand_in.fault = one_number_on_one_rank


@pytest.mark.parametrize(
    ("size", "options", "prepare", "reason"),
    [
        (3, {}, None, "3 ranks are not 2, 4 or 8"),
        (2, {"wanted": False}, None, "rank 1 was told not to share memory"),
        (2, {"hosts": "ab"}, None, "the ranks are on several hosts"),
        (2, {"gpus": [0, 0]}, None, "the ranks do not see each other's GPUs"),
        (2, {}, fails, "CUDA driver error: invalid device ordinal"),
        (8, {}, no_switch, "the GPUs have no switch that adds"),
        (4, {}, wrong, "wrong sums of 8 numbers in torch.bfloat16, 1000"),
    ],
)
def test_every_rank_uses_nccl_where_memory_cannot_be_shared_and_the_log_says_why(
    torch_has: SymmetricMemoryStandIn,
    caplog: pytest.LogCaptureFixture,
    size: int,
    options: dict[str, Any],
    prepare: Callable[[SymmetricMemoryStandIn], None] | None,
    reason: str,
) -> None:
    if prepare is not None:
        prepare(torch_has)

    def run(group: TensorParallelGroup) -> tuple[str, float]:
        return group.transport, float(group.all_reduce(torch.ones(64)).sum())

    with caplog.at_level("INFO"):
        assert on_ranks(size, run, **options) == [("nccl", 64.0 * size)] * size
    assert f"all-reduce: nccl, because {reason}" in caplog.text


def test_a_gpu_that_another_cannot_reach_is_named(
    torch_has: SymmetricMemoryStandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reaches(device: torch.device, peer: int) -> bool:
        return (device.index, peer) != (2, 1)

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    with caplog.at_level("INFO"):
        assert on_ranks(4, lambda group: group.transport) == ["nccl"] * 4
    assert "GPU 2 cannot reach the memory of GPU 1" in caplog.text


def test_a_kernel_that_fails_is_an_error_that_names_the_rank(
    torch_has: SymmetricMemoryStandIn,
) -> None:
    def run(group: TensorParallelGroup) -> None:
        def fault(rank: int, result: torch.Tensor) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        torch_has.fault = fault
        with pytest.raises(WorkerError, match=rf"rank {group.rank} of 2: all_reduce failed: CUDA"):
            group.all_reduce(torch.ones(64))

    on_ranks(2, run)
