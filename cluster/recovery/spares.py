"""Processes that can take the place of a rank. They have imported everything and loaded the
compiled kernels, which is most of the work of a start. They hold no device, and weights only if
told to (`spares="loaded"`, on a CPU).
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.error_kinds import kind_of, reason_of
from cluster.ranks.group import RankHandle, RankMaker, end_ranks

# Spares are made when the engine has served for a while, because a program that generates once and
# ends needs none, and when it has no work, because starting processes takes time on the cores of
# the ranks.
DELAY_S = 5.0
PATIENCE_S = 30.0  # after that time they are made even while it works
ANSWER_S = 1.0

logger = logging.getLogger("eagleray.driver")


class Spares:
    """One spare per rank, made in the background. One thread."""

    def __init__(self, maker: RankMaker, kind: str) -> None:
        self._maker = maker
        self._wanted = kind != "off"
        self._spares: list[RankHandle] = []
        self._warming: dict[Any, RankHandle] = {}  # by the ref that is ready when the spare is
        self._due_s = time.monotonic() + DELAY_S  # if there is no work
        self._latest_s = self._due_s + PATIENCE_S

    def look(self, *, is_busy: bool) -> None:
        """Make spares if it is time, and see whether they are ready."""
        due_s = self._latest_s if is_busy else self._due_s
        if self._wanted and not self._spares and time.monotonic() >= due_s:
            try:
                self._make()
            except Exception as error:  # such as a node that is missing
                if not kind_of(error).may_pass:
                    raise
                why = reason_of(error).split("\n")[0]
                logger.warning("spares are made later: %s", why)
                self._due_s = self._latest_s = time.monotonic() + DELAY_S
        if self._warming:
            done, _ = ray.wait(list(self._warming), num_returns=len(self._warming), timeout=0)
            for ref in done:
                with contextlib.suppress(RayError):  # it has died; `take` will see
                    self._warming.pop(ref).process = ray.get(ref)

    def _make(self) -> None:
        places = self._maker.placement.places()
        spares = [self._maker.create(place, places) for place in places]
        self._warming = {spare.actor.wait_until_warm.remote(): spare for spare in spares}
        self._spares = spares

    def ready(self) -> list[RankHandle]:
        """The spares that could take over at once. Any thread."""
        return [spare for spare in self._spares if spare.process is not None]

    def take(self) -> list[RankHandle | None]:
        """The spares, by rank; None for one that does not answer. The next spares are made as soon
        as the engine serves again: what has failed once may fail again.
        """
        spares, self._spares = self._spares, []
        self._warming = {}
        self._due_s = self._latest_s = time.monotonic()
        asked = [spare.actor.identify.remote() for spare in spares]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
        taken: list[RankHandle | None] = []
        for spare, answer in zip(spares, asked, strict=True):
            try:
                spare.process, _ = ray.get(answer, timeout=0)
                taken.append(spare)
            except RayError as error:
                logger.warning("a spare does not answer: %s", str(error).split("\n")[0])
                end_ranks([spare])
                taken.append(None)
        return taken

    def close(self) -> None:
        """End the spares."""
        spares, self._spares = self._spares, []
        end_ranks(spares)
