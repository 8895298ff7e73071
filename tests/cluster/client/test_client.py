"""What a client does before it sends, with a builder and an engine that only record their calls."""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest

from cluster.client.client import NUM_KNOWN_GRAMMAR_SENDERS, NUM_SENDERS, Client
from cluster.client.outputs import Generation, OutputFollower
from cluster.grammar.compiler import MAX_SLOW_COMPILES, NewGrammarError
from scheduler.params import SamplingParams, StructuredOutputs
from tests.scheduler.helpers import make_request

CALLER: ContextVar[str] = ContextVar("CALLER", default="nobody")


class Notes:
    """A builder and a link."""

    def __init__(self) -> None:
        self.submitted: list[Generation] = []
        self.built: list[weakref.ref[Generation]] = []

    def build(
        self, prompt: Any, wanted: SamplingParams | None, sink: Any, *, compiles: bool = True
    ) -> Generation:
        follower = OutputFollower(make_request(str(prompt), [1, 2, 3]), 0, None, sink)
        generation = Generation(None, [follower])
        self.built.append(weakref.ref(generation))
        return generation

    def submit(self, generations: list[Generation]) -> None:
        self.submitted += generations

    def add_news_callback(self, callback: Any) -> None:
        pass


def test_requests_that_are_sent_on_the_loop_hold_no_thread_and_belong_to_no_call() -> None:
    """When a call is canceled, Ray cancels the calls that it has made."""
    notes: Any = Notes()
    may_go, callers = asyncio.Event(), list[str]()

    async def send(generations: list[Generation]) -> None:
        callers.append(CALLER.get())
        await may_go.wait()
        notes.submit(generations)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        CALLER.set("an HTTP request")
        client = Client(notes, notes, send)
        sending = [asyncio.create_task(client.submit_async([[number]])) for number in range(5)]
        while len(callers) < 5:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(lambda: "free") == "free" and not notes.submitted
        may_go.set()
        sent = [generation for each in await asyncio.gather(*sending) for generation in each]
        assert {id(each) for each in sent} == {id(each) for each in notes.submitted}

    asyncio.run(asyncio.wait_for(main(), 10))
    assert callers == ["nobody"] * 5


def test_requests_are_built_while_the_other_threads_of_the_process_are_busy() -> None:
    notes: Any = Notes()
    gate = threading.Event()

    async def send(generations: list[Generation]) -> None:
        notes.submit(generations)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, gate.wait)
        try:
            sent = await asyncio.wait_for(Client(notes, notes, send).submit_async([[1]]), 2)
        finally:
            gate.set()
        await busy
        assert sent == notes.submitted

    asyncio.run(main())


def test_an_engine_that_does_not_answer_leaves_the_other_threads_of_the_process_free() -> None:
    """They count tokens and check health."""
    notes: Any = Notes()
    answers = threading.Event()

    def submit(generations: list[Generation]) -> None:
        assert answers.wait(10)

    notes.submit = submit

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        client = Client(notes, notes)
        sending = [asyncio.create_task(client.submit_async([[number]])) for number in range(20)]
        await asyncio.sleep(0.1)
        free = asyncio.to_thread(lambda: "free")
        try:
            assert await asyncio.wait_for(free, 2) == "free"
        finally:
            answers.set()
        await asyncio.gather(*sending)

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("sends_on_the_loop", [False, True])
def test_a_request_whose_client_leaves_before_its_turn_is_never_built(
    sends_on_the_loop: bool,
) -> None:
    notes: Any = Notes()
    goes_on, built = threading.Event(), list[str]()
    build = notes.build

    def wait_and_build(prompt: Any, *rest: Any, compiles: bool) -> Generation:
        built.append(str(prompt))
        assert goes_on.wait(10)
        made: Generation = build(prompt, *rest)
        return made

    notes.build = wait_and_build

    async def send(generations: list[Generation]) -> None:
        notes.submit(generations)

    async def main() -> None:
        at_first = asyncio.all_tasks()
        client = Client(notes, notes, send if sends_on_the_loop else None)
        running = [asyncio.create_task(client.submit_async("runs")) for _ in range(NUM_SENDERS)]
        while len(built) < NUM_SENDERS:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(client.submit_async("waits"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        goes_on.set()
        await asyncio.gather(*running)
        await client.submit_async("comes later")
        assert asyncio.all_tasks() == at_first, "nothing waits for it any more"

    asyncio.run(asyncio.wait_for(main(), 20))
    assert built == ["runs"] * NUM_SENDERS + ["comes later"]
    assert len(notes.submitted) == NUM_SENDERS + 1


def test_a_request_whose_client_leaves_while_it_is_sent_is_sent_no_longer() -> None:
    """`wait_async` and `stream` give its admission back at once: the sending must end with it."""
    notes: Any = Notes()
    is_sending, ended = asyncio.Event(), list[str]()

    async def send(generations: list[Generation]) -> None:
        is_sending.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("canceled")
            raise

    async def main() -> None:
        at_first = asyncio.all_tasks()
        sending = asyncio.create_task(Client(notes, notes, send).submit_async([[1]]))
        await is_sending.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await asyncio.sleep(0)
        assert ended == ["canceled"] and asyncio.all_tasks() == at_first

    asyncio.run(asyncio.wait_for(main(), 10))


CONSTRAINED = SamplingParams(structured_outputs=StructuredOutputs(choice=["a"]))


def check_that_another_is_submitted(
    num_held: int, other: SamplingParams | None, *, in_second_attempt: bool
) -> None:
    """Of 20 requests with grammars, `num_held` take long to be built, in the first attempt or in
    the second one, which compiles. Another one must not wait for them.
    """
    notes: Any = Notes()
    goes_on, held = threading.Event(), list[str]()
    build = notes.build

    def hold_and_build(prompt: Any, *rest: Any, compiles: bool) -> Generation:
        if prompt == "slow":
            if in_second_attempt and not compiles:
                raise NewGrammarError
            held.append(prompt)
            assert goes_on.wait(20)
        made: Generation = build(prompt, *rest)
        return made

    notes.build = hold_and_build

    async def main() -> None:
        client = Client(notes, notes)
        slow = [asyncio.create_task(client.submit_async("slow", CONSTRAINED)) for _ in range(20)]
        while len(held) < num_held:
            await asyncio.sleep(0.01)
        try:
            await asyncio.wait_for(client.submit_async("other", other), 2)
            assert len(notes.submitted) == 1
        finally:
            goes_on.set()
        await asyncio.gather(*slow)
        assert len(notes.submitted) == 21

    asyncio.run(asyncio.wait_for(main(), 20))


def test_requests_with_known_grammars_do_not_wait_while_others_are_compiled() -> None:
    check_that_another_is_submitted(2 * MAX_SLOW_COMPILES, CONSTRAINED, in_second_attempt=True)


def test_requests_without_grammars_do_not_wait_while_schemas_are_rewritten() -> None:
    check_that_another_is_submitted(NUM_KNOWN_GRAMMAR_SENDERS, None, in_second_attempt=False)
