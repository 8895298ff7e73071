"""Ranks that find less memory at every start, as on a GPU, where what is free is never the same."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from cluster.resources.placement import Place
from tests.cluster.recovery.poison import PoisonedDriver, PoisonedRank
from workers import faults
from workers.memory.inheritance import RankMemoryHandles
from workers.report import WorkerReport


class ForgetfulRank(PoisonedRank):
    """Has room for one KV block fewer than the rank that it replaces. The starts are counted in
    the folder of the faults.
    """

    def start(
        self,
        rendezvous_address: tuple[str, int],
        place: Place,
        epoch: int,
        gpus: list[str],
        num_kv_blocks: int | None = None,
        *,
        is_standby: bool = False,
    ) -> WorkerReport:
        folder, worker = Path(os.environ[faults.FAULTS_VARIABLE]), self._wait_for_worker()
        num_starts = len(list(folder.glob(f"started.{self._rank}.*")))
        (folder / f"started.{self._rank}.{num_starts}").touch()
        options = worker.config.engine
        assert options.num_kv_blocks is not None
        options = dataclasses.replace(options, num_kv_blocks=options.num_kv_blocks - num_starts)
        worker.config = dataclasses.replace(worker.config, engine=options)
        return super().start(
            rendezvous_address, place, epoch, gpus, num_kv_blocks, is_standby=is_standby
        )

    def allocate_cache(self, num_blocks: int) -> RankMemoryHandles:
        """Once for each file `no_memory.RANK`, there is no memory for the cache."""
        asked = Path(os.environ[faults.FAULTS_VARIABLE]) / f"no_memory.{self._rank}"
        if asked.exists():
            asked.unlink()
            num_blocks = 10**11  # more than any machine has
        return super().allocate_cache(num_blocks)


class ForgetfulDriver(PoisonedDriver):
    """A driver of such ranks."""

    rank_actor_class = ForgetfulRank
