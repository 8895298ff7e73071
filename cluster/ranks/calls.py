"""The calls that bring one step to the ranks, and bring it again if a call was lost.

A message is pickled once. A large one (long prompts, masks) goes through the object store, which
every rank of a node reads once; where that has no room, and for a call that is made again, it
travels within the call, cut into pieces that Ray does not put into the store.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence as Seq
from typing import Any

import ray

from cluster.error_kinds import Kind, kind_of, reason_of
from scheduler.messages import StepMask, StepPlan

INLINE_BYTES = 64 * 1024
# Ray's own limits for what travels within a call: 100 kB per argument, 10 MiB together.
PIECE_BYTES = 64 * 1024

logger = logging.getLogger("eagleray.driver")


def arguments_of(message: bytes) -> list[Any]:
    """The arguments of a call that brings this message, bytes or one ref; the receiver joins
    them.
    """
    if len(message) <= INLINE_BYTES:
        return [message]
    try:
        return [ray.put(message)]
    except Exception as error:
        if kind_of(error) is not Kind.NO_ROOM:
            raise
        logger.warning("a message travels without the object store: %s", _first_line(error))
        return pieces_of(message)


def pieces_of(message: bytes) -> list[bytes]:
    """A message cut into arguments that need no object store."""
    return [message[i : i + PIECE_BYTES] for i in range(0, len(message), PIECE_BYTES)]


class StepCalls:
    """The calls of one step to the ranks of a group: its plan, and its mask if it has one."""

    def __init__(self, actors: Seq[Any]) -> None:
        self._actors = actors
        self._plan = self._mask = b""
        self.steps: list[ray.ObjectRef[Any]] = []  # by rank
        self._masks: list[ray.ObjectRef[Any]] = []

    def send_plan(self, plan: StepPlan) -> None:
        """Send the plan to every rank."""
        self._plan = pickle.dumps(plan, protocol=5)
        arguments = arguments_of(self._plan)
        self.steps = [actor.step.remote(*arguments) for actor in self._actors]

    def send_mask(self, mask: StepMask) -> None:
        """Send the mask to every rank. Rows with the same mask share it in a pickle."""
        self._mask = pickle.dumps(mask, protocol=5)
        arguments = arguments_of(self._mask)
        self._masks = [actor.mask.remote(*arguments) for actor in self._actors]

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        """All calls: first the steps, by rank, then the masks."""
        return self.steps + self._masks

    def rank_of(self, index: int) -> int:
        """The rank that the call at this index of `refs` goes to."""
        return index % len(self._actors)

    def make_again(self, index: int) -> None:
        """Make the call at this index of `refs` again. A rank does nothing twice."""
        rank = self.rank_of(index)
        actor = self._actors[rank]
        if index < len(self.steps):
            logger.warning("the call of a step to rank %d was lost and is made again", rank)
            self.steps[rank] = actor.step.remote(*pieces_of(self._plan))
        else:
            logger.warning("the call with a mask to rank %d was lost and is made again", rank)
            self._masks[rank] = actor.mask.remote(*pieces_of(self._mask))


def _first_line(error: Exception) -> str:
    return reason_of(error).split("\n")[0]
