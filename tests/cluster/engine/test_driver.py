"""The driver as a plain object: what its frontends are told when the engine dies or when they fall
silent.

`FakeGroup` stands in for the ranks: it starts at once, and each step fails when the test says so.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.engine import driver as driver_module
from cluster.engine import frontends as frontends_module
from cluster.engine.driver import Driver
from cluster.engine.loop import Finish
from cluster.engine.mailbox import Mailbox
from cluster.news import News
from cluster.ranks.group import GroupReport
from cluster.recovery.states import Convictions, Recovery
from cluster.scheduler_limits import limits_of
from scheduler.errors import (
    EaglerayError,
    EngineDeadError,
    EngineLostError,
    RequestError,
)
from scheduler.messages import Deltas, Request, StepPlan, StepResult, int32_array
from scheduler.params import ResolvedSampling
from tests.cluster.conftest import SHAPE
from tests.workers.conftest import config_of

LIMIT_S = 20.0


class FakeGroup:
    """Launches nothing; `result` waits for `fail`, then raises an error that is no rank's fault."""

    def __init__(self) -> None:
        self.epoch = 0
        self.fail = threading.Event()
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def result(self, step_id: int) -> StepResult:
        assert self.fail.wait(LIMIT_S)
        raise RuntimeError(f"a bug in step {step_id}")

    def close(self) -> None:
        self.fail.set()


class CountingGroup(FakeGroup):
    """Every row of step k samples token k."""

    def result(self, step_id: int) -> StepResult:
        rows = sum(self.plans[step_id].sampling_flags)
        return StepResult(
            step_id=step_id,
            epoch=self.plans[step_id].epoch,
            token_ids=int32_array([step_id]) * rows,
        )


class NoConvictions(Convictions):
    def note(self) -> None:
        raise AssertionError("no rank was lost")


class FakeSupervisor:
    """Provides one group, which it does not watch."""

    is_ready = True

    def __init__(self, *_: Any, **__: Any) -> None:
        self.group: Any = FakeGroup()
        self.recovery = Recovery(time.monotonic)

    def start(self, ranks: Any, num_kv_blocks: int | None) -> tuple[Any, GroupReport]:
        return self.group, GroupReport(num_blocks=64, seconds={}, log_lines=())

    def watch(self) -> None:
        pass

    def note_failed_step(self, epoch: int, why: str) -> None:
        raise AssertionError(f"epoch {epoch}: {why}")

    def note_applied_result(self, epoch: int) -> None:
        assert epoch == 0

    @property
    def convictions(self) -> Convictions:
        return NoConvictions()

    def end(self) -> None:
        self.group.close()

    def stop(self) -> None:
        self.group.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.checkpoints import make_checkpoint

    path = tmp_path_factory.mktemp("driver")
    make_checkpoint(path, SHAPE)
    return path


@pytest.fixture
def driver(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    supervisor = FakeSupervisor()
    monkeypatch.setattr(Driver, "make_supervisor", lambda *_, **__: supervisor)
    monkeypatch.setattr(driver_module, "mark_this_process", lambda _: None)
    placement: Any = SimpleNamespace(missing_resources="")
    driver = Driver(config_of(model_dir, frontend_timeout_s=1.0), placement, "test")
    driver._supervisor = supervisor  # type: ignore[assignment]
    return driver


def request(name: str) -> Request:
    sampling = ResolvedSampling(seed=0, max_tokens=5)
    return Request(
        request_id=name, token_ids=array("i", [1, 2, 3]), num_prompt_tokens=3, sampling=sampling
    )


async def poll(driver: Driver, acknowledged: int, wait_s: float) -> Any:
    """What the driver answers to a poll of the frontend: `Deltas`, or None."""
    return pickle.loads(await driver.poll(pickle.dumps(("frontend", acknowledged, wait_s))))


async def errors_of(driver: Driver, count: int) -> dict[str, EaglerayError]:
    """Poll until this many requests have failed; their errors."""
    errors: dict[str, EaglerayError] = {}
    acknowledged = 0
    for _ in range(20):
        deltas = await poll(driver, acknowledged, 0.2)
        acknowledged = deltas.reply_number
        errors |= deltas.errors
        if len(errors) >= count:
            break
    return errors


def test_a_request_that_comes_while_the_failing_step_runs_fails_with_the_others(
    driver: Driver,
) -> None:
    async def main() -> dict[str, EaglerayError]:
        await driver.start()
        await driver.submit("frontend", [request("early")])
        group: Any = driver._supervisor.group  # type: ignore[union-attr]
        while not group.plans:
            await asyncio.sleep(0.01)
        await driver.submit("frontend", [request("late")])
        group.fail.set()
        errors = await errors_of(driver, 2)
        with pytest.raises(EngineDeadError, match="a bug in step 0"):
            await driver.submit("frontend", [request("after")])
        await driver.shutdown()
        return errors

    errors = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert set(errors) == {"early", "late"}
    assert all(
        type(error) is EngineDeadError and "a bug in step 0" in str(error)
        for error in errors.values()
    )


def test_news_that_cannot_be_put_into_a_mailbox_ends_the_engine_with_an_error(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver._supervisor.group = CountingGroup()  # type: ignore[union-attr]
    put = Mailbox.put

    def put_or_fail(mailbox: Mailbox, request_id: str, news: News) -> None:
        if request_id == "a" and news.token_ids:
            raise KeyError("a bug in the mailbox")
        put(mailbox, request_id, news)

    monkeypatch.setattr(Mailbox, "put", put_or_fail)

    async def main() -> dict[str, EaglerayError]:
        await driver.start()
        whole = [replace(request(name), num_tokens_per_news=0) for name in "ab"]
        await driver.submit("frontend", whole)  # the news of both comes with one step
        errors = await errors_of(driver, 2)
        with pytest.raises(EngineDeadError, match="a bug in the mailbox"):
            await driver.wait_for_end()
        await driver.shutdown()
        return errors

    errors = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert set(errors) == {"a", "b"}


def test_requests_whose_ranks_are_lost_for_good_hear_that_they_may_go_on_elsewhere(
    driver: Driver,
) -> None:
    async def main() -> dict[str, EaglerayError]:
        await driver.start()
        await driver.submit("frontend", [request("a")])
        driver._die(EngineDeadError("the checkpoint is gone"))  # as the supervisor does
        errors = await errors_of(driver, 1)
        with pytest.raises(EngineLostError, match="the checkpoint is gone"):
            await driver.submit("frontend", [request("later")])
        with pytest.raises(EngineDeadError, match="the checkpoint is gone"):
            await driver.wait_for_end()
        await driver.shutdown()
        return errors

    errors = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert type(errors["a"]) is EngineLostError and "the checkpoint is gone" in str(errors["a"])


def test_a_frontend_that_stops_polling_is_forgotten_and_its_requests_end(driver: Driver) -> None:
    async def main() -> tuple[Any, int]:
        await driver.start()
        await driver.submit("frontend", [request("a")])
        await asyncio.sleep(2.6)  # silent for longer than 1 s, with a second between checks
        unknown = await poll(driver, 0, LIMIT_S)
        assert driver._step_loop is not None  # whose thread waits for the first step
        assert list(driver._step_loop._inbox) == [Finish(request_ids=["a"], reason="abort")]
        await driver.shutdown()
        return unknown, len(driver._frontends._registration_numbers)

    unknown, num_known = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert unknown is None and num_known == 0


def test_a_frontend_that_was_forgotten_learns_it_when_it_submits_and_may_send_all_again(
    driver: Driver,
) -> None:
    group: Any = CountingGroup()
    driver._supervisor.group = group  # type: ignore[union-attr]

    async def main() -> tuple[list[int], dict[str, str]]:
        await driver.start()
        numbers = [
            await driver.submit("frontend", [replace(request("old"), num_tokens_per_news=0)])
        ]
        numbers.append(await driver.submit("frontend", []))
        forget(driver, numbers[0])
        numbers.append(await driver.submit("frontend", [request("new")]))
        numbers.append(await driver.submit("frontend", [request("old"), request("new")]))
        finished: dict[str, str] = {}
        while len(finished) < 2:
            deltas: Deltas = await poll(driver, 0, LIMIT_S)
            finished |= deltas.finish_reasons
        await driver.shutdown()
        return numbers, finished

    numbers, finished = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert numbers[0] == numbers[1] < numbers[2] == numbers[3]
    assert finished == {"old": "length", "new": "length"}


def test_a_jump_of_the_wall_clock_changes_neither_the_time_in_the_queue_nor_the_steps_of_a_trace(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = CountingGroup()
    driver._supervisor.group = group  # type: ignore[union-attr]

    async def main() -> tuple[float, int, int]:
        await driver.start()
        started_s, arrived_s = time.time(), time.time() + 7200
        monkeypatch.setattr(time, "time", lambda: arrived_s)
        await driver.submit("frontend", [replace(request("a"), num_tokens_per_news=0)])
        monkeypatch.setattr(time, "time", lambda: started_s)
        while not (await poll(driver, 0, LIMIT_S)).finish_reasons:
            pass
        of_a_minute, of_no_time = await driver.records(60.0), await driver.records(-1.0)
        assert driver._step_loop is not None
        queue_s = driver._step_loop.engine.scheduler.snapshot().queue_s
        await driver.shutdown()
        return queue_s, len(of_a_minute), len(of_no_time)

    queue_s, num_steps, num_later_steps = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert 0 < queue_s < LIMIT_S and num_steps >= 5 and num_later_steps == 0


def test_late_news_reaches_no_request_that_was_sent_again_after_it_was_forgotten(
    driver: Driver,
) -> None:
    frontends, limits = driver._frontends, limits_of(driver._config, 64)
    old_number, _ = frontends.register_requests("frontend", [request("a")], limits)
    assert forget(driver, old_number) == {"frontend": ["a"]}
    new_number, _ = frontends.register_requests("frontend", [request("a")], limits)
    frontends.deliver({old_number: {"a": News(first_index=7, token_ids=[1])}})
    frontends.deliver({new_number: {"a": News(first_index=2, token_ids=[5, 6])}})
    deltas = asyncio.run(frontends.collect("frontend", 0, LIMIT_S))
    assert deltas is not None and deltas.token_ids.tolist() == [5, 6]


def test_late_news_of_a_request_that_its_frontend_has_ended_is_dropped(driver: Driver) -> None:
    frontends, limits = driver._frontends, limits_of(driver._config, 64)
    number, _ = frontends.register_requests("frontend", [request("a")], limits)
    frontends.remove("frontend", ["a"])
    frontends.deliver({number: {"a": News(first_index=7, token_ids=[1])}})
    assert not frontends._frontends[number].mailbox.has_news


def mailbox_of(driver: Driver, frontend_id: str) -> Mailbox:
    frontend = driver._frontends._frontend(frontend_id)
    assert frontend is not None
    return frontend.mailbox


def forget(driver: Driver, registration_number: int) -> dict[str, list[str]]:
    """Forget a frontend as after a long silence, and end its requests."""
    frontends = driver._frontends
    frontends._frontends[registration_number].silent_since_s -= 10
    forgotten = frontends.forget_silent_frontends()
    for request_ids in forgotten.values():
        if driver._step_loop is not None:
            driver._step_loop.post(Finish(request_ids=request_ids, reason="abort"))
    return forgotten


@pytest.mark.parametrize("names", [["a"], ["b", "b"]])
def test_a_request_id_in_use_is_refused_and_harms_nobody(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    group: Any = CountingGroup()
    driver._supervisor.group = group  # type: ignore[union-attr]

    async def main() -> Deltas:
        await driver.start()
        await driver.submit("frontend", [replace(request("a"), num_tokens_per_news=0)])
        with pytest.raises(RequestError, match=f"request_id '{names[0]}' is in use"):
            await driver.submit("other", [request("new"), *map(request, names)])
        deltas: Deltas = await poll(driver, 0, LIMIT_S)
        await driver.submit("other", [request("a")])  # it has ended
        await driver.shutdown()
        return deltas

    deltas = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert (deltas.finish_reasons, deltas.errors) == ({"a": "length"}, {})
    assert group.plans[0].admitted_rows is not None and len(group.plans[0].admitted_rows.slots) == 1


def test_a_prompt_that_requests_of_a_call_share_is_checked_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(
        frontends_module, "check_request", lambda request, _: checked.append(request.request_id)
    )
    first = request("a")
    requests = [first, replace(first, request_id="b"), request("c")]
    _, accepted = driver._frontends.register_requests(
        "frontend", requests, limits_of(driver._config, 64)
    )
    assert (checked, accepted) == (["a", "c"], requests)


def test_requests_that_are_sent_twice_run_once(driver: Driver) -> None:
    group: Any = CountingGroup()
    driver._supervisor.group = group  # type: ignore[union-attr]

    async def main() -> Deltas:
        await driver.start()
        both = [request("a"), replace(request("b"), num_tokens_per_news=0)]
        await driver.submit("frontend", both)
        await driver.submit("frontend", both)  # while they run
        while sum(map(len, mailbox_of(driver, "frontend")._unsent_news)) < 2:
            await asyncio.sleep(0.01)
        await driver.submit("frontend", both)  # after they have ended, but before that is known
        deltas: Deltas = await poll(driver, 0, LIMIT_S)
        await driver.shutdown()
        return deltas

    deltas = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert sum(len(p.admitted_rows.slots) for p in group.plans if p.admitted_rows is not None) == 2
    assert deltas.num_tokens.tolist() == [5, 5]


def test_what_a_frontend_has_ended_is_not_mixed_with_what_it_sends_again(driver: Driver) -> None:
    group: Any = CountingGroup()
    driver._supervisor.group = group  # type: ignore[union-attr]

    async def main() -> Deltas:
        await driver.start()
        await driver.submit("frontend", [request("a")])
        while not mailbox_of(driver, "frontend").has_news:
            await asyncio.sleep(0.01)
        await driver.finish(["a"], "stop", "frontend")
        tokens = array("i", [1, 2, 3, 7])
        again = replace(request("a"), token_ids=tokens)
        await driver.submit("frontend", [again])
        await asyncio.sleep(0.2)
        deltas: Deltas = await poll(driver, 0, LIMIT_S)
        await driver.shutdown()
        return deltas

    deltas = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert (deltas.first_indices.tolist(), deltas.num_tokens.tolist()) == ([1], [4])


def test_a_frontend_that_waits_for_news_is_not_silent(driver: Driver) -> None:
    async def main() -> int:
        await driver.start()
        await driver.submit("frontend", [request("a")])
        deltas: Deltas = await poll(driver, 0, 3.5)
        await driver.shutdown()
        return len(deltas.request_ids)

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == 0


def test_a_driver_that_was_stopped_does_not_blame_its_frontends(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontends = driver._frontends
    frontends.register_requests("frontend", [request("a")], limits_of(driver._config, 64))
    now_s = time.monotonic()
    for later_s, dropped in ((0.9, []), (60.0, []), (61.5, ["frontend"])):
        monkeypatch.setattr(time, "monotonic", lambda at=now_s + later_s: at)
        assert list(frontends.forget_silent_frontends()) == dropped


def test_a_request_sent_again_with_tokens_that_end_it_is_answered_at_once(driver: Driver) -> None:
    async def main() -> dict[str, str]:
        await driver.start()
        sampling = ResolvedSampling(seed=0, max_tokens=2)
        tokens = array("i", [1, 2, 3, 8, 9])
        done = Request(request_id="done", token_ids=tokens, num_prompt_tokens=3, sampling=sampling)
        await driver.submit("frontend", [done])
        deltas: Deltas = await poll(driver, 0, 0.5)
        await driver.shutdown()
        return deltas.finish_reasons

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == {"done": "length"}


def test_the_laws_are_checked_once_in_an_idle_time_and_not_between_requests(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = CountingGroup()
    driver._supervisor.group = group  # type: ignore[union-attr]

    async def main() -> list[int]:
        await driver.start()
        assert driver._step_loop is not None
        counts, checks = [], 0

        def check() -> None:
            nonlocal checks
            checks += 1

        monkeypatch.setattr(driver._step_loop.engine, "check", check)
        for i in range(5):
            await driver.submit("frontend", [request(str(i))])
            await asyncio.sleep(0.05)
        counts.append(checks)
        while not checks:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)
        counts.append(checks)
        await driver.shutdown()
        return counts

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == [0, 1]


def test_a_final_only_request_is_heard_of_once_with_all_its_tokens(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = CountingGroup()
    driver._supervisor.group = group  # type: ignore[union-attr]
    heard: list[dict[str, Any]] = []
    deliver = driver._deliver_soon

    def overhear(news: dict[int, Any]) -> None:
        heard.extend(news.values())
        deliver(news)

    monkeypatch.setattr(driver, "_deliver_soon", overhear)

    async def main() -> Deltas:
        await driver.start()
        streamed = request("streamed")
        await driver.submit(
            "frontend", [streamed, replace(request("whole"), num_tokens_per_news=0)]
        )
        while not any("whole" in news for news in heard):
            await asyncio.sleep(0.01)
        deltas: Deltas = await poll(driver, 0, 0.5)
        await driver.shutdown()
        return deltas

    deltas = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert sum("streamed" in news for news in heard) == 5
    assert [news["whole"].token_ids for news in heard if "whole" in news] == [[0, 1, 2, 3, 4]]
    assert deltas.finish_reasons == {"streamed": "length", "whole": "length"}
    assert deltas.token_ids.tolist() == [0, 1, 2, 3, 4] * 2
    loop = driver._step_loop
    assert loop is not None and not loop._open_requests
