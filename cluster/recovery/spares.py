"""Spares: processes that can take the place of a rank. They have imported everything and loaded the
compiled kernels, which is most of the work of a start. They hold the memory of their rank where it
outlives that, but no device.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.error_kinds import reason_of
from cluster.ranks.group import RankHandle, RankMaker, end_ranks
from cluster.ray_errors import cause_of
from scheduler.errors import EngineError, WorkerError
from workers.memory.inheritance import RankMemoryHandles

# Spares are made when the engine has served for a moment: a program that generates once and ends
# needs none. They warm up with the lowest priority, so they are made beside the work.
SPARES_DELAY_S = 2.0
SPARE_ANSWER_TIMEOUT_S = 1.0
SPARE_END_TIMEOUT_S = 1.0  # requests wait for it

logger = logging.getLogger("eagleray.driver")


class Spares:
    """One spare per rank, made in the background. One thread."""

    def __init__(self, rank_maker: RankMaker) -> None:
        self._rank_maker = rank_maker
        self._is_enabled = rank_maker.config.engine.spares != "off"
        self._spares: list[RankHandle] = []
        # By the ref that is ready when the spare is.
        self._warming_spares: dict[Any, RankHandle] = {}
        self._due_s = time.monotonic() + SPARES_DELAY_S
        self._end_executor = ThreadPoolExecutor(1, "end-spares")

    def prepare(self, memories: Seq[RankMemoryHandles | None], makes_spares: bool = True) -> None:
        """Make spares if they are due and `makes_spares`, and note those that are ready.
        `memories`: where that of each rank is, which its spare opens.
        Raises what keeps spares from being made, such as a node that is missing, and `WorkerError`
        if one cannot warm up.
        """
        is_due = makes_spares and time.monotonic() >= self._due_s
        if self._is_enabled and not self._spares and is_due:
            self._create(memories)
        if warming_refs := list(self._warming_spares):
            ready_refs, _ = ray.wait(warming_refs, num_returns=len(warming_refs), timeout=0)
            for ref in ready_refs:
                try:
                    self._warming_spares[ref].process = ray.get(ref)
                except RayError as error:
                    reason = reason_of(cause_of(error)).split("\n")[0]
                    raise WorkerError(f"a spare cannot be used: {reason}") from error
                del self._warming_spares[ref]

    def delay(self, seconds: float) -> None:
        """Make the next spares a while from now."""
        self._due_s = time.monotonic() + seconds

    def _create(self, memories: Seq[RankMemoryHandles | None]) -> None:
        places = self._rank_maker.placement.places()
        spares = [
            self._rank_maker.create(place, places, memory)
            for place, memory in zip(places, memories, strict=True)
        ]
        for spare in spares:  # first: nothing is answered while it warms up
            call = spare.actor.identify.remote().future()
            call.add_done_callback(functools.partial(_note_process, spare))
        self._warming_spares = {spare.actor.wait_until_warm.remote(): spare for spare in spares}
        self._spares = spares

    def warm_spares(self) -> list[RankHandle]:
        """The spares that could take the places of ranks, and load weights then. Any thread."""
        warming_spares = list(self._warming_spares.values())
        return [spare for spare in self._spares if spare not in warming_spares]

    @property
    def are_warm(self) -> bool:
        """Whether there are spares, and all of them are warm."""
        return bool(self._spares) and not self._warming_spares

    def hand_over(self) -> list[RankHandle]:
        """The spares, which are no longer kept here."""
        spares, self._spares = self._spares, []
        return spares

    def take(self) -> list[RankHandle | None]:
        """The spares by rank, or None for one that is not warm soon or does not answer, which is
        killed: as far as its process is known and ends in time, the memory that it held is free.
        The next spares are made as soon as the engine serves again: a rank that failed once may
        fail again.
        """
        spares, self._spares = self._spares, []
        self._warming_spares = {}
        self._due_s = time.monotonic()
        refs = [spare.actor.identify.remote() for spare in spares]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=SPARE_ANSWER_TIMEOUT_S)
        ready_spares = []
        for spare, ref in zip(spares, refs, strict=True):
            try:
                spare.process, _ = ray.get(ref, timeout=0)
                ready_spares.append(spare)
            except RayError as error:
                logger.warning("a spare does not answer: %s", str(error).split("\n")[0])
        if late_spares := [spare for spare in spares if spare not in ready_spares]:
            end_call = self._end_executor.submit(end_ranks, late_spares, grace_s=0.0)
            try:
                end_call.result(SPARE_END_TIMEOUT_S)
            except TimeoutError:
                logger.warning("a spare has not ended within %g s", SPARE_END_TIMEOUT_S)
            except EngineError as error:
                logger.warning("a spare does not end: %s", error)
        return [spare if spare in ready_spares else None for spare in spares]

    def close(self) -> None:
        """End the spares."""
        spares, self._spares = self._spares, []
        self._warming_spares = {}
        end_ranks(spares)


def _note_process(spare: RankHandle, ended_call: Future[Any]) -> None:
    if ended_call.exception() is None:
        spare.process, _ = ended_call.result()
