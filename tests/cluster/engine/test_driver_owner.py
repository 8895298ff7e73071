"""How a driver that has died is replaced, without processes."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RaySystemError

from cluster.engine import start as start_module
from cluster.engine.start import DriverOwner
from cluster.ray_errors import DriverDiedError, NoAnswerError
from cluster.timeouts import GIVE_UP_AFTER_S
from configs.engine import EngineConfig
from scheduler.errors import ConfigError, EngineDeadError, WorkerError

DEAD = DriverDiedError("the driver has died")
DEFAULT_SAMPLING_PARAMS = EngineConfig()


class World:
    """What fails next, and what was done."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.end_failures: deque[Exception] = deque()
        self.start_failures: deque[Exception] = deque()
        self.checkpoint_fault: Exception | None = None
        self.while_asleep: Callable[[], None] = lambda: None
        self.done: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.while_asleep()
        self.now_s += seconds

    def end_marked_processes(self, *_: Any) -> None:
        if self.end_failures:
            raise self.end_failures.popleft()
        self.done.append("end")

    def recheck_checkpoint(self, config: Any) -> None:
        assert isinstance(config.engine, EngineConfig)
        if self.checkpoint_fault is not None:
            raise self.checkpoint_fault

    def start_driver(self, *_: Any) -> str:
        if self.start_failures:
            raise self.start_failures.popleft()
        self.done.append("start")
        return "driver"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(ray, "kill", lambda driver: None)
    monkeypatch.setattr(start_module, "end_marked_processes", world.end_marked_processes)
    monkeypatch.setattr(start_module, "start_driver", world.start_driver)
    monkeypatch.setattr(start_module, "recheck_checkpoint", world.recheck_checkpoint)
    clock = SimpleNamespace(monotonic=lambda: world.now_s, sleep=world.sleep)
    monkeypatch.setattr(start_module, "time", clock)
    return world


def owner_in(world: World, engine: EngineConfig = DEFAULT_SAMPLING_PARAMS) -> DriverOwner:
    """An owner whose first driver has served."""
    config: Any = SimpleNamespace(engine=engine)
    placement: Any = SimpleNamespace(
        node_ids=set,
        fence_stale_copies=lambda: None,
        restore=lambda *_: None,
        places=list,
        missing_resources="",
    )
    owner = DriverOwner(config, placement, "engine")
    report: Any = SimpleNamespace(limits=SimpleNamespace(num_blocks=7), checkpoint_id="")
    owner._first_report = report
    owner.start = lambda: report  # type: ignore[method-assign]
    world.done.clear()
    return owner


PASSING = [
    OSError(errno.ENOMEM, "out of memory"),
    NoAnswerError("no answer within 150 s"),
    RaySystemError("the connection to the head was lost"),
    WorkerError("bundles without a node"),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_an_end_that_cannot_be_confirmed_now_is_confirmed_before_the_next_start(
    world: World, error: Exception
) -> None:
    owner = owner_in(world)
    world.end_failures = deque([error] * 3)
    assert owner.replace("driver", DEAD, has_been_healthy=True) == "driver"
    assert world.done == ["end", "start"]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_a_start_that_fails_for_a_passing_reason_is_tried_again(
    world: World, error: Exception
) -> None:
    owner = owner_in(world)
    world.start_failures = deque([error] * 3)
    assert owner.replace("driver", DEAD, has_been_healthy=True) == "driver"
    assert world.done == ["end"] * 4 + ["start"]


def test_an_end_that_is_never_confirmed_ends_the_engine_with_the_reason(world: World) -> None:
    owner = owner_in(world)
    world.end_failures = deque(PASSING[:1] * 10_000)
    with pytest.raises(EngineDeadError, match=r"no driver could be started: .*out of memory"):
        owner.replace("driver", DEAD, has_been_healthy=True)
    assert world.done == [] and GIVE_UP_AFTER_S < world.now_s < GIVE_UP_AFTER_S + 5


@pytest.mark.parametrize("wait_s", [0, 900])
def test_a_driver_is_tried_to_be_replaced_for_300_s_or_as_long_as_nodes_are_waited_for(
    world: World, wait_s: int
) -> None:
    owner = owner_in(world, EngineConfig(wait_for_nodes_s=wait_s))
    limits_s: list[float] = []

    def restore(limit_s: float, is_wanted: Any) -> None:
        limits_s.append(limit_s)
        raise WorkerError("bundles without a node")

    owner.placement.restore = restore  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineDeadError, match="bundles without a node"):
        owner.replace("driver", DEAD, has_been_healthy=True)
    expected_s = max(300, wait_s)
    assert set(limits_s) == {expected_s}, "so long is waited for one placement"
    assert expected_s < world.now_s < expected_s + 20


def test_no_driver_is_started_whose_ranks_could_not_load_the_checkpoint(world: World) -> None:
    owner = owner_in(world)
    world.checkpoint_fault = ConfigError("it holds no *.safetensors file")
    with pytest.raises(EngineDeadError, match="holds no"):
        owner.replace("driver", DEAD, has_been_healthy=True)
    assert world.done == ["end"]


def test_each_failed_start_is_said_while_another_one_follows(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    owner = owner_in(world)
    waited_for: list[str] = []
    world.while_asleep = lambda: waited_for.append(owner.recovery_waits_for())
    world.start_failures = deque([WorkerError("no memory"), WorkerError("no room\nat all")])
    owner.replace("driver", DEAD, has_been_healthy=True)
    expected = ["start 1 failed after 0.0 s: no memory", "start 2 failed after 0.5 s: no room"]
    assert list(dict.fromkeys(waited_for)) == expected
    said = [record.message for record in caplog.records if "not replaced yet" in record.message]
    assert said == [f"the driver is not replaced yet: {why}" for why in expected]
    assert owner.recovery_waits_for() == "", "it serves"


@pytest.mark.parametrize(
    "error", [ConfigError("another checkpoint"), KeyError("a bug")], ids=lambda e: type(e).__name__
)
def test_what_would_happen_again_ends_the_engine_at_once(world: World, error: Exception) -> None:
    owner = owner_in(world)
    world.start_failures = deque([error])
    with pytest.raises(EngineDeadError, match=str(error).strip("'")):
        owner.replace("driver", DEAD, has_been_healthy=True)
    assert world.done == ["end"]
