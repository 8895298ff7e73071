"""The calls that send one step to the ranks, and send it again if a call was lost.

A message is pickled once. A large one (long prompts, masks) goes through Ray's object store, so it
crosses to each node once. If the store is full, or a call is made again, the message travels within
the call, cut into pieces that Ray does not put into the store.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence as Seq
from typing import Any

import ray

from cluster.error_kinds import ErrorKind, kind_of, reason_of
from scheduler.messages import StepMask, StepPlan

MAX_INLINE_BYTES = 64 * 1024
# Ray's own limits for what travels within a call: 100 kB per argument, 10 MiB together.
PIECE_BYTES = 64 * 1024

logger = logging.getLogger("eagleray.driver")


def arguments_of(message: bytes) -> list[Any]:
    """The arguments of a call that carries a message: a ref, or bytes that the receiver joins."""
    if len(message) <= MAX_INLINE_BYTES:
        return [message]
    try:
        return [ray.put(message)]
    except Exception as error:
        if kind_of(error) is not ErrorKind.NO_ROOM:
            raise
        reason = reason_of(error).split("\n")[0]
        logger.warning("a message travels without the object store: %s", reason)
        return pieces_of(message)


def pieces_of(message: bytes) -> list[bytes]:
    """A message cut into arguments that need no object store."""
    return [message[i : i + PIECE_BYTES] for i in range(0, len(message), PIECE_BYTES)]


class StepCalls:
    """The calls of one step to the ranks of a group: its plan, and its mask if it has one."""

    def __init__(self, actors: Seq[Any]) -> None:
        self._actors = actors
        self._pickled_plan = self._pickled_mask = b""
        self.step_refs: list[ray.ObjectRef[Any]] = []  # by rank
        self._mask_refs: list[ray.ObjectRef[Any]] = []  # by rank

    def send_plan(self, plan: StepPlan) -> None:
        """Send the plan to every rank."""
        self._pickled_plan = pickle.dumps(plan, protocol=5)
        arguments = arguments_of(self._pickled_plan)
        self.step_refs = [actor.step.remote(*arguments) for actor in self._actors]

    def send_mask(self, step_mask: StepMask) -> None:
        """Send the mask to every rank. Pickle stores a mask that several rows share once."""
        self._pickled_mask = pickle.dumps(step_mask, protocol=5)
        arguments = arguments_of(self._pickled_mask)
        self._mask_refs = [actor.put_mask.remote(*arguments) for actor in self._actors]

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        """All calls: first the steps, by rank, then the masks."""
        return self.step_refs + self._mask_refs

    def repeat_call(self, index: int) -> None:
        """Make the call at this index of `refs` again. A rank does nothing twice."""
        rank = index % len(self._actors)
        actor = self._actors[rank]
        if index < len(self.step_refs):
            logger.warning("the call of a step to rank %d was lost and is made again", rank)
            self.step_refs[rank] = actor.step.remote(*pieces_of(self._pickled_plan))
        else:
            logger.warning("the call with a mask to rank %d was lost and is made again", rank)
            self._mask_refs[rank] = actor.put_mask.remote(*pieces_of(self._pickled_mask))
