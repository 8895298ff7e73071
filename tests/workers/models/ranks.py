"""Several ranks of one model in threads of this process, to look at what each of them does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from workers.parallel.group import TensorParallelGroup

T = TypeVar("T")
_TIMEOUT_S = 60.0


class Meeting:
    """Where the ranks put their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.tensors: list[torch.Tensor | None] = [None] * size


class ThreadGroup(TensorParallelGroup):
    """A group whose sums are taken in the order of the ranks, so that all get the same bits."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size, torch.device("cpu"))
        self.meeting = meeting

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        meeting = self.meeting
        meeting.tensors[self.rank] = tensor.clone()
        meeting.barrier.wait(_TIMEOUT_S)
        parts = [part for part in meeting.tensors if part is not None]
        total = torch.stack(parts).to(torch.float32).sum(0).to(tensor.dtype)
        meeting.barrier.wait(_TIMEOUT_S)
        return tensor.copy_(total)


def on_every_rank(size: int, run: Callable[[TensorParallelGroup], T]) -> list[T]:
    """What `run` returns on each of `size` ranks, which run at the same time."""
    meeting = Meeting(size)
    groups = [ThreadGroup(rank, size, meeting) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, groups))
