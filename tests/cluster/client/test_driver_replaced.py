"""A frontend whose driver dies, and whose owner starts another one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, OutOfDiskError

from cluster.client import driver_handle
from cluster.client.frontend import Frontend
from cluster.client.outputs import Chunk, Generation
from cluster.client.outstanding import OutstandingRequests
from cluster.client.requests import RequestBuilder
from cluster.client.tokenizer import Tokenizer
from cluster.ray_errors import DriverDiedError, LostCallError, NoAnswerError, NoRoomError
from scheduler.errors import (
    EaglerayError,
    EngineDeadError,
    EngineError,
    EngineLostError,
    OverloadedError,
)
from scheduler.messages import Request
from scheduler.params import SamplingParams
from tests.cluster.client.byte_tokenizer import ids
from tests.cluster.client.test_outputs import (
    LIMITS,
    MODEL,
    WAIT_S,
    FakeDriver,
    Remote,
    tokenizer,
    wait_until,
)

__all__ = ["tokenizer"]  # a fixture
DEAD = DriverDiedError("the driver has died")


class MortalDriver(FakeDriver):
    """A driver that can be killed, and whose end can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.end: Future[None] = Future()
        self.wait_for_end = self  # `.remote().future()`

    def remote(self, *arguments: Any) -> Any:
        return super().remote(*arguments) if arguments else self

    def future(self) -> Future[None]:
        return self.end

    def lose_the_call_that_waits_for_the_end(self) -> None:
        end, self.end = self.end, Future()
        end.set_exception(ActorUnavailableError("lost", None))

    def die(self) -> None:
        self.poll_failure = self.refusal = DEAD
        self.end.set_exception(DEAD)


class Owner:
    """Replaces drivers, as often as it is allowed to."""

    def __init__(self) -> None:
        self.drivers = [MortalDriver()]
        self.may_replace = True
        self.told: list[bool] = []
        self.go = threading.Event()
        self.go.set()

    def replace(self, driver: Any, error: EaglerayError, has_been_healthy: bool) -> Any:
        assert driver is self.drivers[-1]
        self.told.append(has_been_healthy)
        assert self.go.wait(WAIT_S)
        if not self.may_replace:
            raise EngineDeadError(f"no driver could be started: {error}")
        self.drivers.append(MortalDriver())
        return self.drivers[-1]


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Owner:
    monkeypatch.setattr(driver_handle, "result_of", lambda ref, what, limit_s=0.0: ref())
    monkeypatch.setattr(driver_handle, "RETRY_PAUSE_S", 0.01)
    return Owner()


@pytest.fixture
def frontend(owner: Owner) -> Iterator[Frontend]:
    made = Frontend(owner.drivers[0], replace=owner.replace)
    made.driver_handle.watch_end()
    yield made
    made.close()


@pytest.fixture
def builder(tokenizer: Tokenizer) -> RequestBuilder:
    return RequestBuilder(MODEL, tokenizer, SamplingParams(seed=7), LIMITS, None)


def ask(frontend: Frontend, builder: RequestBuilder, chunks: list[Chunk]) -> Generation:
    generation = builder.build([1, 2, 3], None, chunks.append)
    frontend.submit([generation])
    return generation


def tokens_of(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :].tolist()


def test_a_driver_is_not_dead_because_the_call_that_waits_for_its_end_was_lost(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    for _ in range(3):
        owner.drivers[0].lose_the_call_that_waits_for_the_end()
    generation = ask(frontend, builder, [])
    owner.drivers[0].put(generation.request_ids[0], 0, *ids("a"), finish_reason="length")
    assert generation.done_future.result(WAIT_S) is None
    assert len(owner.drivers) == 1
    owner.drivers[0].die()  # it is still followed
    wait_until(lambda: len(owner.drivers) == 2)


def test_unfinished_requests_are_sent_again_with_their_tokens_in_order_of_arrival(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    chunks: list[list[Chunk]] = [[], [], []]
    generations = [ask(frontend, builder, each) for each in chunks]
    first, second, third = (generation.request_ids[0] for generation in generations)
    owner.drivers[0].put(first, 0, *ids("Hello", " wor"))
    owner.drivers[0].put(second, 0, *ids("Hello"), finish_reason="length")
    wait_until(lambda: bool(chunks[0]) and generations[1].done_future.done())
    owner.drivers[0].die()
    wait_until(lambda: len(owner.drivers) == 2 and len(owner.drivers[1].requests) == 2)
    again = owner.drivers[1].requests
    assert [request.request_id for request in again] == [first, third]
    assert [tokens_of(request) for request in again] == [ids("Hello", " wor"), []]
    assert owner.told == [True]
    owner.drivers[1].put(first, 2, *ids("ld"), finish_reason="length")
    owner.drivers[1].put(third, 0, *ids("a"), finish_reason="length")
    for generation in generations:
        generation.done_future.result(timeout=WAIT_S)
    assert [token for chunk in chunks[0] for token in chunk.token_ids] == ids("Hello", " wor", "ld")
    assert generations[0].completions[0].text == "Hello world"


def test_a_driver_that_does_not_know_the_frontend_gets_what_it_has_accepted_and_nothing_fails(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    [driver], chunks = owner.drivers, list[Chunk]()
    generation = ask(frontend, builder, chunks)
    driver.put(generation.request_ids[0], 0, *ids("Hello"))
    wait_until(lambda: bool(chunks))
    driver.registration_number += 1  # this process was silent for long
    driver.knows_frontend = False
    wait_until(lambda: len(driver.requests) == 2)
    assert driver.requests[1].request_id == generation.request_ids[0]
    assert tokens_of(driver.requests[1]) == [*ids("Hello")]
    driver.put(generation.request_ids[0], 1, *ids(" wor"), finish_reason="length")
    assert generation.done_future.result(WAIT_S) is None and len(owner.drivers) == 1
    assert generation.completions[0].text == "Hello wor"


def test_a_request_that_comes_while_the_driver_is_replaced_goes_to_the_next(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    owner.go.clear()
    owner.drivers[0].die()
    submitted = threading.Thread(target=ask, args=(frontend, builder, []), daemon=True)
    submitted.start()
    submitted.join(0.1)
    assert submitted.is_alive()
    owner.go.set()
    submitted.join(WAIT_S)
    assert len(owner.drivers[1].requests) == 1 and not owner.drivers[0].requests


def test_who_asks_while_the_driver_is_replaced_hears_what_that_waits_for(owner: Owner) -> None:
    def refuse() -> None:
        raise DEAD

    why = "start 1 failed after 3.0 s: no memory"
    frontend = Frontend(owner.drivers[0], replace=owner.replace, recovery_waits_for=lambda: why)
    frontend.driver_handle.watch_end()
    owner.drivers[0].stats = Remote(refuse)  # type: ignore[attr-defined]
    owner.drivers[0].records = Remote(lambda seconds: refuse())  # type: ignore[attr-defined]
    for ask in (frontend.stats, lambda: frontend.records(1.0)):
        with pytest.raises(OverloadedError, match=f"being replaced; .* will continue. {why}"):
            ask()  # nobody else has noticed yet
    owner.may_replace = False
    owner.drivers[0].die()
    wait_until(lambda: frontend.driver_handle.death_error is not None)
    with pytest.raises(DriverDiedError):
        frontend.stats()
    frontend.close()


def test_the_end_of_an_engine_whose_driver_was_replaced_meanwhile_is_not_that_of_the_next(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    first = owner.drivers[0]
    first.poll_failure = first.refusal = NoAnswerError("no answer within 20 s")
    ask(frontend, builder, [])
    assert len(owner.drivers) == 2
    first.end.set_exception(EngineDeadError("the engine has stopped"))
    assert frontend.driver_handle.death_error is None


def test_an_engine_that_stops_for_good_is_dead_although_its_driver_answers(
    owner: Owner, frontend: Frontend
) -> None:
    owner.drivers[0].end.set_exception(EngineDeadError("the engine has stopped"))
    for ask_for_driver in (frontend.driver_handle.check, frontend.driver_handle.live_actor):
        with pytest.raises(EngineDeadError, match="the engine has stopped"):
            ask_for_driver()
    assert len(owner.drivers) == 1


def test_a_driver_that_dies_while_idle_is_replaced_before_a_request_comes(
    owner: Owner, frontend: Frontend
) -> None:
    owner.drivers[0].die()
    wait_until(lambda: len(owner.drivers) == 2)


def test_a_request_that_was_accepted_just_before_the_death_is_sent_again(
    owner: Owner,
    frontend: Frontend,
    builder: RequestBuilder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept = frontend.driver_handle._accept

    def accept_late(driver: Any, requests: list[Request], registration_number: int) -> bool:
        if len(owner.drivers) == 1:
            owner.drivers[0].die()
            wait_until(lambda: frontend.driver_handle.actor is not driver)
        return accept(driver, requests, registration_number)

    monkeypatch.setattr(frontend.driver_handle, "_accept", accept_late)
    generation = ask(frontend, builder, [])
    assert [r.request_id for r in owner.drivers[1].requests] == generation.request_ids


def test_a_request_that_was_aborted_meanwhile_does_not_run_on(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    generation = ask(frontend, builder, [])
    owner.go.clear()
    owner.drivers[0].die()
    wait_until(lambda: bool(owner.told))
    frontend.abort([generation])
    owner.go.set()
    wait_until(lambda: len(owner.drivers) == 2)
    later = ask(frontend, builder, [])
    running = {r.request_id for r in owner.drivers[1].requests}
    ended = {i for request_ids, _ in owner.drivers[1].told for i in request_ids}
    assert running - ended == set(later.request_ids)


def test_without_a_new_driver_requests_fail_with_the_reason(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    owner.may_replace = False
    generation = ask(frontend, builder, [])
    owner.drivers[0].die()
    with pytest.raises(EngineDeadError, match="no driver could be started: the driver has died"):
        generation.done_future.result(timeout=WAIT_S)
    assert generation.output().finish_reason == "error"


def test_a_call_that_is_lost_is_made_again(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    driver = owner.drivers[0]
    chunks: list[Chunk] = []
    generation = ask(frontend, builder, chunks)
    driver.poll_failure = LostCallError("the connection was lost")
    wait_until(lambda: frontend._thread.is_alive() and not generation.done_future.done())
    driver.put(generation.request_ids[0], 0, *ids("Hello"), finish_reason="length")
    driver.poll_failure = None
    generation.done_future.result(timeout=WAIT_S)
    assert generation.completions[0].text == "Hello" and len(owner.drivers) == 1


def test_requests_whose_sending_is_lost_are_sent_again(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    driver = owner.drivers[0]
    driver.refusal = LostCallError("the connection was lost")
    threading.Timer(0.1, lambda: setattr(driver, "refusal", None)).start()
    generation = ask(frontend, builder, [])
    assert [r.request_id for r in driver.requests] == generation.request_ids


def aborted(driver: MortalDriver) -> set[str]:
    return {each for ids, reason in driver.told for each in ids if reason == "abort"}


def test_requests_of_an_engine_that_gives_no_answer_are_aborted_there_before_they_move(
    owner: Owner, builder: RequestBuilder
) -> None:
    """It may go on later, and would compute them for nobody."""
    driver, aborted_before_move = owner.drivers[0], list[set[str]]()

    def move(generations: list[Generation], error: EaglerayError) -> None:
        made.close()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: bool(driver.told))
        aborted_before_move.append(aborted(driver))

    made = Frontend(driver, on_dead=move)
    generation = ask(made, builder, [])
    driver.poll_failure = NoAnswerError("no answer within 20 s")
    wait_until(lambda: bool(aborted_before_move))
    assert aborted_before_move == [set(generation.request_ids)]


def test_requests_of_an_engine_that_is_lost_move_although_its_driver_answers(
    owner: Owner, builder: RequestBuilder
) -> None:
    driver, moved, chunks = owner.drivers[0], list[Generation](), list[Chunk]()
    made = Frontend(driver, on_dead=lambda generations, error: moved.extend(generations))
    generations = [ask(made, builder, chunks) for _ in range(2)]
    driver.put(generations[0].request_ids[0], 0, *ids("Hello"))
    loss = EngineLostError("the engine has stopped: the checkpoint is damaged")
    for generation in generations:  # as `FrontendRecords.fail_all` does
        driver.put(generation.request_ids[0], 0, finish_reason="error", error=loss)
    wait_until(lambda: len(moved) == 2)
    assert moved == generations and not any(each.done_future.done() for each in generations)
    assert [tokens_of(each.outputs[0].continued_request()) for each in moved] == [ids("Hello"), []]
    assert not any(chunk.finish_reason for chunk in chunks)
    made.close()


def test_requests_that_may_have_stopped_an_engine_do_not_move_to_the_next(
    owner: Owner, builder: RequestBuilder
) -> None:
    driver, moved = owner.drivers[0], list[Generation]()
    made = Frontend(driver, on_dead=lambda generations, error: moved.extend(generations))
    generation = ask(made, builder, [])
    death = EngineDeadError("the engine has stopped: a bug")
    driver.put(generation.request_ids[0], 0, finish_reason="error", error=death)
    with pytest.raises(EngineDeadError, match="a bug"):
        generation.done_future.result(WAIT_S)
    assert not moved
    made.close()


def test_a_request_whose_sending_ends_after_the_close_is_aborted_too(
    owner: Owner, builder: RequestBuilder
) -> None:
    driver = owner.drivers[0]
    made = Frontend(driver, on_dead=lambda generations, error: None)

    def lose_the_answer(frontend_id: str, requests: list[Request]) -> None:
        driver.requests += requests
        made.close()
        raise NoAnswerError("no answer within 20 s")

    driver.submit = Remote(lose_the_answer)
    generation = builder.build([1, 2, 3], None, None)
    with pytest.raises(EaglerayError):
        made.submit([generation])
    wait_until(lambda: aborted(driver) == set(generation.request_ids))


def test_a_request_that_is_accepted_while_its_engine_is_lost_is_left_to_whoever_sent_it(
    owner: Owner, builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not among those that move: the driver had answered, but the frontend did not know."""
    driver, moved, is_lost, is_sent = owner.drivers[0], [], threading.Event(), threading.Event()

    def move(generations: list[Generation], error: EaglerayError) -> None:
        moved.extend(generations)
        is_lost.set()
        assert is_sent.wait(WAIT_S)
        made.close()

    made = Frontend(driver, on_dead=move)
    take = made._outstanding_requests.take

    def take_after_close(**options: bool) -> list[Generation]:
        assert made.driver_handle.is_closed, "it would miss what is accepted later"
        return take(**options)

    monkeypatch.setattr(made._outstanding_requests, "take", take_after_close)
    first = ask(made, builder, [])
    submit = driver.submit.remote

    def answer_late(*arguments: Any) -> Any:
        answer = submit(*arguments)()
        driver.poll_failure = DEAD
        assert is_lost.wait(WAIT_S)
        return answer

    driver.submit = Remote(answer_late)
    second = builder.build([1, 2, 3], None, None)
    with pytest.raises(EngineDeadError, match="the driver has died"):
        made.submit([second])
    is_sent.set()
    made.join(WAIT_S)
    assert moved == [first] and not second.done_future.done()
    wait_until(lambda: aborted(driver) >= set(second.request_ids))


def test_requests_that_fail_here_do_not_run_on_there(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    generation = ask(frontend, builder, [])
    owner.drivers[0].poll_failure = ValueError("a bug of the polling thread")
    with pytest.raises(EngineError, match="a bug of the polling thread"):
        generation.done_future.result(timeout=WAIT_S)
    owner.drivers[0].poll_failure = None
    wait_until(lambda: aborted(owner.drivers[0]) == set(generation.request_ids))


def test_a_health_check_that_is_lost_on_the_way_replaces_no_driver(
    owner: Owner, frontend: Frontend
) -> None:
    num_calls = 0

    def lost_once() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise LostCallError("the connection was lost")

    owner.drivers[0].stats = Remote(lost_once)  # type: ignore[attr-defined]
    frontend.driver_handle.check()
    assert num_calls == 2 and len(owner.drivers) == 1


class Forgetful:
    """A method whose first answers are lost."""

    def __init__(self, num_lost: int) -> None:
        self.num_lost = num_lost

    def remote(self, *arguments: Any) -> Any:
        def answer() -> str:
            if self.num_lost:
                self.num_lost -= 1
                raise LostCallError("the connection was lost")
            return "an answer"

        return answer


@pytest.mark.parametrize("question", ["stats", "records", "check"])
def test_a_question_that_is_lost_is_asked_again_and_the_driver_stays(
    owner: Owner, frontend: Frontend, question: str
) -> None:
    driver: Any = owner.drivers[0]
    driver.stats, driver.records = Forgetful(2), Forgetful(2)
    arguments = [1.0] if question == "records" else []
    asked = frontend.driver_handle if question == "check" else frontend
    assert getattr(asked, question)(*arguments) in ("an answer", None)
    assert len(owner.drivers) == 1


FULL = OutOfDiskError("store and disk are full")


class FullStore:
    """A method that is not called while there is no room for its arguments."""

    def __init__(self, method: Any) -> None:
        self.method = method
        self.is_full = True
        self.num_tries = 0

    def remote(self, *arguments: Any) -> Any:
        self.num_tries += 1
        if self.is_full:
            raise FULL
        return self.method.remote(*arguments)


def test_requests_for_which_there_is_no_room_now_are_sent_later(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    driver = owner.drivers[0]
    store = driver.submit = FullStore(driver.submit)  # type: ignore[assignment]
    threading.Timer(0.1, lambda: setattr(store, "is_full", False)).start()
    generation = ask(frontend, builder, [])
    assert [r.request_id for r in driver.requests] == generation.request_ids
    assert store.num_tries > 1 and len(owner.drivers) == 1


def test_requests_for_which_there_is_no_room_for_long_are_refused_and_the_driver_serves_on(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    driver = owner.drivers[0]
    store = driver.submit = FullStore(driver.submit)  # type: ignore[assignment]
    frontend.driver_handle._answer_limit_s = 0.1
    with pytest.raises(OverloadedError, match=r"could not submit requests: .* try again later"):
        ask(frontend, builder, [])
    assert not frontend._outstanding_requests and len(owner.drivers) == 1
    store.is_full = False
    generation = ask(frontend, builder, [])
    driver.put(generation.request_ids[0], 0, *ids("a"), finish_reason="length")
    assert generation.done_future.result(WAIT_S) is None


def test_requests_that_cannot_be_sent_to_the_next_driver_fail_and_later_ones_run(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    generation = ask(frontend, builder, [])
    frontend.driver_handle._answer_limit_s = 0.1
    second = MortalDriver()
    store = second.submit = FullStore(second.submit)  # type: ignore[assignment]
    frontend.driver_handle._replace = lambda *_: second
    owner.drivers[0].die()
    with pytest.raises(OverloadedError, match="try again later"):
        generation.done_future.result(WAIT_S)
    store.is_full = False
    later = ask(frontend, builder, [])
    second.put(later.request_ids[0], 0, *ids("a"), finish_reason="length")
    assert later.done_future.result(WAIT_S) is None


def test_requests_that_another_thread_could_not_send_to_the_next_driver_are_sent_by_the_next_poll(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    generation = ask(frontend, builder, [])
    handle, second = frontend.driver_handle, MortalDriver()
    store = second.submit = FullStore(second.submit)  # type: ignore[assignment]
    handle._answer_limit_s, handle._replace = 0.1, lambda *_: second
    handle._replace_lock = threading.RLock()  # type: ignore[assignment]
    with handle._replace_lock:  # so that the polling thread does not come first
        handle.replace_driver(owner.drivers[0], DEAD)
        assert store.num_tries > 1 and not second.requests
        store.is_full = False
    wait_until(lambda: bool(second.requests))
    second.put(generation.request_ids[0], 0, *ids("a"), finish_reason="length")
    assert generation.done_future.result(WAIT_S) is None
    assert [r.request_id for r in second.requests] == generation.request_ids


def test_requests_that_a_lost_engine_has_forgotten_move(
    owner: Owner, builder: RequestBuilder
) -> None:
    moved: list[tuple[list[Generation], EaglerayError]] = []
    [driver], loss = owner.drivers, EngineLostError("the checkpoint is gone")
    frontend = Frontend(driver, on_dead=lambda *arguments: moved.append(arguments))
    generation = ask(frontend, builder, [])
    driver.refusal, driver.knows_frontend = loss, False
    wait_until(lambda: moved == [([generation], loss)])
    frontend.close()
    assert not generation.done_future.done()


def test_requests_that_the_driver_has_forgotten_are_sent_again_with_their_tokens(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    chunks: list[Chunk] = []
    first, [driver] = ask(frontend, builder, chunks), owner.drivers
    driver.put(first.request_ids[0], 0, *ids("Hello"))
    wait_until(lambda: bool(chunks))
    driver.registration_number += 1  # this process was silent for long
    second = ask(frontend, builder, [])
    wait_until(lambda: len(driver.requests) == 3)
    assert [r.request_id for r in driver.requests[1:]] == [*second.request_ids, *first.request_ids]
    assert tokens_of(driver.requests[2]) == [*ids("Hello")] and len(owner.drivers) == 1
    num_polls = len(driver.acknowledged)
    wait_until(lambda: len(driver.acknowledged) >= num_polls + 3)
    assert len(driver.requests) == 3  # once is enough


def test_an_answer_under_an_earlier_number_that_is_read_late_is_that_of_a_lost_request(
    builder: RequestBuilder,
) -> None:
    outstanding = OutstandingRequests(changed := threading.Condition())
    changed.acquire()  # whoever changes it holds it
    generations = [builder.build([1, 2, 3], None, None) for _ in range(3)]
    outstanding.add(generations)
    early, late, last = ([o.request for o in g.unfinished_outputs] for g in generations)
    outstanding.accept(early, 4)
    outstanding.accept(last, 5)
    outstanding.accept(late, 4)
    assert outstanding.lost_requests() == [*early, *late]
    outstanding.accept([*early, *late], 5)
    assert outstanding.lost_requests() == []
    outstanding.note_lost()
    outstanding.accept(last, 5)  # another thread was told so before
    outstanding.accept(early, 6)
    assert outstanding.lost_requests() == [*late, *last]
    outstanding.note_new_driver()
    outstanding.accept(late, 0)
    assert outstanding.lost_requests() == [*early, *last]


def test_answers_for_which_there_is_no_room_now_are_asked_for_later(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    driver = owner.drivers[0]
    driver.poll_failure = NoRoomError("no room")
    generation = ask(frontend, builder, [])
    driver.put(generation.request_ids[0], 0, *ids("a"), finish_reason="length")
    threading.Timer(0.1, lambda: setattr(driver, "poll_failure", None)).start()
    assert generation.done_future.result(WAIT_S) is None and len(owner.drivers) == 1


def test_requests_whose_answers_find_no_room_for_long_fail_and_do_not_run_on(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    driver = owner.drivers[0]
    frontend.driver_handle._answer_limit_s = 0.1
    driver.poll_failure = NoRoomError("no room; try again later")
    generation = ask(frontend, builder, [])
    with pytest.raises(OverloadedError, match="no room"):
        generation.done_future.result(WAIT_S)
    wait_until(lambda: driver.told == [(generation.request_ids, "abort")])
    assert len(owner.drivers) == 1 and frontend._thread.is_alive()


def test_an_owner_that_fails_to_replace_the_driver_does_not_end_the_polling_thread(
    owner: Owner, frontend: Frontend, builder: RequestBuilder
) -> None:
    generation = ask(frontend, builder, [])

    def fail(*_: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    frontend.driver_handle._replace = fail
    owner.drivers[0].die()
    with pytest.raises(EngineError, match="Resource temporarily unavailable"):
        generation.done_future.result(WAIT_S)
    frontend.driver_handle._replace = owner.replace
    again = ask(frontend, builder, [])
    assert [r.request_id for r in owner.drivers[1].requests] == again.request_ids
