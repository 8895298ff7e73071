"""Ranks on a GPU that is made up: see `tests/workers/memory/fake_cuda.py`."""

from __future__ import annotations

from typing import Any

from cluster.engine.driver import Driver
from cluster.ranks.actor import RankActor


class RankOnFakeGpu(RankActor):
    def __init__(self, *arguments: Any) -> None:
        from tests.workers.memory.fake_cuda import running_on_fake_gpu

        self._gpu = running_on_fake_gpu()
        self._gpu.__enter__()
        super().__init__(*arguments)


class DriverOfFakeGpus(Driver):
    """A driver of such ranks."""

    rank_actor_class = RankOnFakeGpu
