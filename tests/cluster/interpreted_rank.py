"""Ranks whose kernels run in Triton's interpreter, in less time than by itself."""

from __future__ import annotations

from typing import Any

from cluster.engine.driver import Driver
from cluster.ranks.actor import RankActor


class InterpretedRank(RankActor):
    def __init__(self, *arguments: Any) -> None:
        import tests.kernels.triton_interpreter  # noqa: F401

        super().__init__(*arguments)


class InterpretingDriver(Driver):
    """A driver of such ranks."""

    rank_actor_class = InterpretedRank
