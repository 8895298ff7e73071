"""When spares are made, under a clock that the test controls, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.recovery import spares as spares_module
from cluster.recovery.spares import Spares
from workers.memory.inheritance import RankMemoryHandles

MEMORIES = [RankMemoryHandles(weights_hash="a"), RankMemoryHandles(weights_hash="b")]


class World:
    """A maker that counts the spares of its two ranks."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.made_s: list[float] = []
        self.placement = SimpleNamespace(places=lambda: [0, 1])

    def create(
        self, place: int, places_if_spare: list[int], inherited_memory: RankMemoryHandles | None
    ) -> Any:
        assert place in places_if_spare and inherited_memory is MEMORIES[place]
        self.made_s.append(self.now_s - 100.0)
        warm = SimpleNamespace(remote=object)
        return SimpleNamespace(actor=SimpleNamespace(wait_until_warm=warm), process=None)

    def run(self, spares: Spares, *, until_s: float) -> None:
        while self.now_s < 100.0 + until_s:
            spares.prepare(MEMORIES)
            self.now_s += 0.5


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(spares_module, "time", SimpleNamespace(monotonic=lambda: world.now_s))
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: ([], refs))
    return world


def spares_in(world: World, kind: str = "warm") -> Spares:
    maker: Any = world
    return Spares(maker, kind)


def test_spares_are_made_after_2_s(world: World) -> None:
    world.run(spares_in(world), until_s=60.0)
    assert world.made_s == [2.0] * 2, "one per rank, once"


def test_the_next_spares_are_made_at_once_after_a_recovery(world: World) -> None:
    """One that comes before there were any takes none, and starts processes of its own."""
    spares = spares_in(world)
    assert spares.take() == []
    spares.prepare(MEMORIES)
    assert world.made_s == [0.0] * 2


def test_an_engine_without_spares_makes_none(world: World) -> None:
    spares = spares_in(world, "off")
    spares.take()
    world.run(spares, until_s=100.0)
    assert world.made_s == []
