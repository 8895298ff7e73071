"""From news of the driver to chunks and finished outputs, without a driver."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError

from cluster.client import driver_handle
from cluster.client.frontend import Frontend
from cluster.client.outputs import Chunk, Generation, OutputFollower
from cluster.client.requests import RequestBuilder
from cluster.client.text_stream import TextStream
from cluster.client.tokenizer import Tokenizer
from cluster.engine.mailbox import Mailbox
from cluster.news import News
from configs.model import ModelConfig
from configs.paths import SOURCE_ROOT
from scheduler.errors import EngineDeadError, EngineError, RequestError
from scheduler.limits import SchedulerLimits
from scheduler.messages import Request, TokenLogprobs, int32_array
from scheduler.params import ResolvedSampling, SamplingParams
from tests.cluster.client.byte_tokenizer import END_ID, NUM_IDS, ids, write_tokenizer

WAIT_S = 10.0
MODEL = ModelConfig.from_dict(
    {
        "model_type": "qwen3",
        "vocab_size": NUM_IDS,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "eos_token_id": END_ID,
    }
)
LIMITS = SchedulerLimits(
    num_blocks=100,
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=1000,
    vocab_size=NUM_IDS,
)
Ask = Callable[..., Generation]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Follower:
    """One output of a prompt of three tokens, and its chunks."""

    def __init__(self, tokenizer: Tokenizer | None, *stop: str, index: int = 0) -> None:
        self.chunks: list[Chunk] = []
        stream = TextStream(tokenizer, stop) if tokenizer is not None else None
        request = Request(
            request_id=f"request-{index}",
            token_ids=int32_array([1, 2, 3]),
            num_prompt_tokens=3,
            sampling=ResolvedSampling(seed=0, max_tokens=100),
        )
        self.output = OutputFollower(request, index, stream, self.chunks.append)

    def take(self, first_index: int, *token_ids: int, **fields: Any) -> bool:
        return self.output.take(News(first_index=first_index, token_ids=list(token_ids), **fields))


def logprob(value: float) -> TokenLogprobs:
    return TokenLogprobs(logprob=value)


# Chunks


def test_news_become_a_chunk_with_its_text_and_tokens(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer, index=2)
    assert not follower.take(0, *ids("Hello", " wor"), num_cached_tokens=2)
    assert follower.chunks == [
        Chunk(
            index=2,
            text="Hello wor",
            token_ids=ids("Hello", " wor"),
            num_prompt_tokens=3,
            num_cached_tokens=2,
        )
    ]


def test_the_last_chunk_has_the_reason(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer)
    follower.take(0, *ids("Hello"))
    assert not follower.take(1, *ids(" wor"), finish_reason="length")
    assert [chunk.finish_reason for chunk in follower.chunks] == [None, "length"]
    assert follower.output.completion.finish_reason == "length"


def test_an_end_without_tokens_is_a_chunk_too(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer)
    follower.take(0, *ids("Hello"))
    follower.take(1, finish_reason="abort")
    assert (follower.chunks[-1].token_ids, follower.chunks[-1].finish_reason) == ([], "abort")


def test_tokens_whose_text_is_held_come_in_a_chunk_without_text(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer, "END")
    follower.take(0, *ids("EN"))
    assert (follower.chunks[0].text, follower.chunks[0].token_ids) == ("", ids("EN"))


def test_text_held_at_the_end_comes_with_the_last_chunk(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer, "END")
    follower.take(0, *ids("EN"))
    follower.take(1, *ids("a"), finish_reason="length")
    assert [chunk.text for chunk in follower.chunks] == ["", "ENa"]


def test_an_end_of_sequence_token_is_among_the_tokens_and_gives_no_text(
    tokenizer: Tokenizer,
) -> None:
    follower = Follower(tokenizer)
    follower.take(0, *ids("Hello"), END_ID, finish_reason="stop")
    assert follower.output.completion.text == "Hello"
    assert follower.output.completion.token_ids == [*ids("Hello"), END_ID]


def test_a_checkpoint_without_tokenizer_gives_tokens_without_text() -> None:
    follower = Follower(None)
    follower.take(0, 5, 6, finish_reason="length")
    assert (follower.output.completion.text, follower.output.completion.token_ids) == ("", [5, 6])


@settings(deadline=None)
@given(
    text=st.text(alphabet="aEND ü🦅", max_size=20),
    sizes=st.lists(st.integers(1, 4), min_size=80, max_size=80),
    repeats=st.lists(st.integers(0, 3), min_size=80, max_size=80),
)
def test_chunks_concatenate_to_the_whole_output_however_news_come(
    tokenizer: Tokenizer, text: str, sizes: list[int], repeats: list[int]
) -> None:
    token_ids = list(text.encode())
    follower, start = Follower(tokenizer, "END"), 0
    for size, repeat in zip(sizes, repeats, strict=True):
        again = max(0, start - repeat)
        last = start + size >= len(token_ids)
        if (
            follower.take(
                again, *token_ids[again : start + size], finish_reason="length" if last else None
            )
            or last
        ):
            break
        start += size
    done = follower.output.completion
    assert "".join(chunk.text for chunk in follower.chunks) == done.text == text.partition("END")[0]
    end = text.find("END")
    expected = token_ids if end < 0 else list(text[: end + 3].encode())
    assert (
        [token for chunk in follower.chunks for token in chunk.token_ids]
        == done.token_ids
        == expected
    )
    assert done.finish_reason == ("length" if end < 0 else "stop")


# News that arrives again


def test_tokens_that_are_known_are_left_out(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer)
    follower.take(0, *ids("Hello"))
    follower.take(0, *ids("Hello", " wor"))
    assert [chunk.text for chunk in follower.chunks] == ["Hello", " wor"]
    assert follower.chunks[1].token_ids == ids(" wor")


def test_news_with_nothing_new_give_no_chunk(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer)
    follower.take(0, *ids("Hello"))
    assert not follower.take(0, *ids("Hello"))
    assert len(follower.chunks) == 1


def test_news_after_the_end_are_ignored(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer)
    follower.take(0, *ids("Hello"), finish_reason="length")
    assert not follower.take(0, *ids("Hello", "END"), finish_reason="stop")
    assert len(follower.chunks) == 1 and follower.output.completion.finish_reason == "length"


# Stop strings


def test_a_stop_string_ends_the_output_before_the_engine_does(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer, "END")
    assert follower.take(0, *ids("Hello", "END", " wor"))
    done = follower.output.completion
    assert (done.text, done.token_ids, done.finish_reason) == ("Hello", ids("Hello", "END"), "stop")
    assert (follower.chunks[-1].finish_reason, follower.chunks[-1].token_ids) == (
        "stop",
        ids("Hello", "END"),
    )


def test_the_engine_need_not_be_told_of_a_stop_string_in_its_last_news(
    tokenizer: Tokenizer,
) -> None:
    follower = Follower(tokenizer, "END")
    assert not follower.take(0, *ids("Hello", "END", " wor"), finish_reason="length")
    assert follower.output.completion.finish_reason == "stop"
    assert follower.output.completion.token_ids == ids("Hello", "END")


# Logprobs


def test_logprobs_come_with_their_tokens(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer)
    follower.take(0, *ids("Hello"), logprobs=[logprob(-1)])
    follower.take(0, *ids("Hello", " wor"), logprobs=[logprob(-1), logprob(-2)])
    assert [chunk.logprobs for chunk in follower.chunks] == [[logprob(-1)], [logprob(-2)]]
    assert follower.output.completion.logprobs == [logprob(-1), logprob(-2)]


def test_logprobs_end_with_the_token_that_completed_a_stop_string(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer, "END")
    follower.take(0, *ids("a", "END", "b"), logprobs=[logprob(-1), logprob(-2), logprob(-3)])
    assert follower.output.completion.logprobs == [logprob(-1), logprob(-2)]


def test_without_logprobs_there_are_none(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer)
    follower.take(0, *ids("a"), finish_reason="length")
    assert follower.output.completion.logprobs is None and follower.chunks[0].logprobs is None


# Generations


def generation_of(*followers: Follower) -> Generation:
    return Generation("Hi!", [follower.output for follower in followers])


def test_a_generation_is_done_with_its_last_output(tokenizer: Tokenizer) -> None:
    first, second = Follower(tokenizer), Follower(tokenizer, index=1)
    generation = generation_of(first, second)
    generation.take(second.output, News(first_index=0, token_ids=ids("a"), finish_reason="length"))
    assert not generation.done_future.done()
    generation.take(
        first.output,
        News(first_index=0, token_ids=ids("b"), finish_reason="stop", num_cached_tokens=2),
    )
    assert generation.done_future.result(timeout=0) is None
    assert [completion.text for completion in generation.completions] == ["b", "a"]
    assert generation.num_cached_tokens == 2
    assert generation.request_ids == ["request-0", "request-1"]


def test_cached_tokens_are_those_of_the_first_output(tokenizer: Tokenizer) -> None:
    first, second = Follower(tokenizer), Follower(tokenizer, index=1)
    generation = generation_of(first, second)
    generation.take(second.output, News(first_index=0, token_ids=ids("a"), num_cached_tokens=2))
    assert generation.num_cached_tokens == 0


def test_an_error_of_the_engine_fails_the_generation_with_its_words(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer)
    generation = generation_of(follower)
    generation.take(follower.output, News(first_index=0, token_ids=ids("a")))
    generation.take(
        follower.output,
        News(first_index=0, finish_reason="error", error=EngineError("rank 1 died")),
    )
    with pytest.raises(EngineError, match="rank 1 died"):
        generation.done_future.result(timeout=0)
    assert follower.chunks[-1].finish_reason == "error"
    assert follower.output.completion.text == "a"


def test_a_generation_fails_once(tokenizer: Tokenizer) -> None:
    generation = generation_of(Follower(tokenizer))
    generation.fail(EngineDeadError("first"))
    generation.fail(EngineDeadError("second"))
    with pytest.raises(EngineDeadError, match="first"):
        generation.done_future.result(timeout=0)


# The frontend, with a driver that is an object of this process


class Remote:
    """A method that looks like an actor's: `remote` returns what `result_of` waits for."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = lambda *arguments: lambda: method(*arguments)


class FakeDriver:
    """Takes requests, answers polls from a mailbox, records what it was told to finish."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.requests: list[Request] = []
        self.registration_number = 0
        self.knows_frontend = True
        self.refusal: Exception | None = None
        self.poll_failure: BaseException | None = None
        self.lost_polls = 0
        self.last_sent = 0
        self.acknowledged: list[tuple[int, int]] = []  # with the number of the previous reply
        self.told: list[tuple[list[str], str]] = []
        self.lost_finishes = 0
        self.changed = threading.Condition()
        self.submit, self.poll = Remote(self._submit), Remote(self._poll)
        self.finish = self  # `finish.remote` is not waited for

    def remote(self, request_ids: list[str], reason: str, frontend_id: str, *after: object) -> Any:
        ended: Future[None] = Future()
        if self.lost_finishes:
            self.lost_finishes -= 1
            ended.set_exception(ActorUnavailableError("the connection was lost", None))
        else:
            self.told.append((request_ids, reason))
            ended.set_result(None)
        return SimpleNamespace(future=lambda: ended)

    def put(self, request_id: str, first_index: int, *token_ids: int, **fields: Any) -> None:
        with self.changed:
            self.mailbox.put(
                request_id, News(first_index=first_index, token_ids=list(token_ids), **fields)
            )
            self.changed.notify_all()

    def _submit(self, frontend_id: str, requests: list[Request]) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.requests += requests
        self.knows_frontend = True
        return self.registration_number

    def _poll(self, arguments: bytes) -> bytes:
        _, acknowledged, _ = pickle.loads(arguments)
        with self.changed:
            self.changed.wait_for(lambda: self.mailbox.has_news, timeout=0.02)
            if self.poll_failure is not None:
                raise self.poll_failure
            if not self.knows_frontend:
                return pickle.dumps(None)
            while self.lost_polls and self.mailbox.has_news:
                self.lost_polls -= 1
                self.mailbox.collect(acknowledged)
            self.acknowledged.append((acknowledged, self.last_sent))
            reply = self.mailbox.collect(acknowledged)
            self.last_sent = reply.reply_number
            return pickle.dumps(reply)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(driver_handle, "result_of", lambda ref, what, limit_s=0.0: ref())
    return FakeDriver()


@pytest.fixture
def frontend(driver: FakeDriver) -> Iterator[Frontend]:
    made = Frontend(driver)
    yield made
    made.close()


@pytest.fixture
def ask(frontend: Frontend, tokenizer: Tokenizer) -> Ask:
    """Submits one prompt of three tokens."""
    builder = RequestBuilder(MODEL, tokenizer, SamplingParams(seed=7), LIMITS, None)

    def submit(
        params: SamplingParams | None = None, sink: Callable[[Chunk], None] | None = lambda _: None
    ) -> Generation:
        generation = builder.build(
            {"prompt_token_ids": [1, 2, 3], "cache_salt": "salt"}, params, sink
        )
        frontend.submit([generation])
        return generation

    return submit


def test_a_request_carries_complete_sampling_and_the_prompt(ask: Ask, driver: FakeDriver) -> None:
    generation = ask(SamplingParams(max_tokens=5, stop_token_ids=[9]))
    [request] = driver.requests
    assert (request.token_ids.tolist(), request.num_prompt_tokens, request.cache_salt) == (
        [1, 2, 3],
        3,
        "salt",
    )
    assert (request.sampling.max_tokens, request.sampling.seed) == (5, 7)
    assert request.sampling.stop_token_ids == {9, END_ID}
    assert [request.request_id] == generation.request_ids


def test_the_outputs_of_a_request_share_their_prompt_also_once_they_are_sent(
    ask: Ask, driver: FakeDriver
) -> None:
    ask(SamplingParams(n=3))
    for requests in (driver.requests, pickle.loads(pickle.dumps(driver.requests))):
        assert len({request.request_id for request in requests}) == 3
        assert len({id(request.token_ids) for request in requests}) == 1


@pytest.mark.parametrize(
    ("params", "whole", "streamed"),
    [
        (SamplingParams(max_tokens=5), 0, 1),
        (SamplingParams(max_tokens=5, stream_interval=4), 0, 4),
        (SamplingParams(stop=["END"]), 1, 1),  # the frontend has to search for it
        (SamplingParams(stop=["END"], stream_interval=4), 1, 4),
        (SamplingParams(logprobs=0), 1, 1),
    ],
)
def test_without_a_sink_the_driver_may_wait_for_the_end(
    ask: Ask, driver: FakeDriver, params: SamplingParams, whole: int, streamed: int
) -> None:
    ask(params, sink=None)
    ask(params)
    assert [request.num_tokens_per_news for request in driver.requests] == [whole, streamed]


def test_an_output_without_a_sink_is_whole(ask: Ask, driver: FakeDriver) -> None:
    generation = ask(sink=None)
    driver.put(
        generation.request_ids[0],
        0,
        *ids("Hello", " wor"),
        finish_reason="length",
        num_cached_tokens=1,
    )
    generation.done_future.result(WAIT_S)
    assert generation.completions[0].text == "Hello wor" and generation.num_cached_tokens == 1


def test_n_outputs_are_n_requests_with_seeds_of_their_own(ask: Ask, driver: FakeDriver) -> None:
    generation = ask(SamplingParams(n=3))
    assert [request.request_id for request in driver.requests] == generation.request_ids
    assert len(set(generation.request_ids)) == 3
    assert len({request.sampling.seed for request in driver.requests}) == 3


def test_polled_news_finish_the_generation(ask: Ask, driver: FakeDriver) -> None:
    generation = ask()
    driver.put(generation.request_ids[0], 0, *ids("Hello"))
    driver.put(generation.request_ids[0], 1, *ids("a"), finish_reason="length")
    generation.done_future.result(timeout=WAIT_S)
    assert generation.completions[0].text == "Helloa"
    assert driver.told == []


def test_replies_that_are_lost_lose_nothing(ask: Ask, driver: FakeDriver) -> None:
    driver.lost_polls = 2
    generation = ask()
    driver.put(generation.request_ids[0], 0, *ids("Hello"))
    driver.put(generation.request_ids[0], 1, *ids(" wor", "ld"), finish_reason="length")
    generation.done_future.result(timeout=WAIT_S)
    assert generation.completions[0].text == "Hello world"


def test_a_poll_acknowledges_the_reply_before_it(ask: Ask, driver: FakeDriver) -> None:
    generation = ask()
    driver.put(generation.request_ids[0], 0, *ids("Hello"))
    wait_until(lambda: len(driver.acknowledged) > 3)
    assert all(acknowledged == sent for acknowledged, sent in driver.acknowledged)


def test_the_driver_is_told_of_a_stop_string(ask: Ask, driver: FakeDriver) -> None:
    generation = ask(SamplingParams(stop="END"))
    driver.put(generation.request_ids[0], 0, *ids("Hello", "END"))
    generation.done_future.result(timeout=WAIT_S)
    wait_until(lambda: driver.told == [(generation.request_ids, "stop")])


def test_an_abort_tells_the_driver_and_keeps_what_there_is(
    ask: Ask, frontend: Frontend, driver: FakeDriver
) -> None:
    came = threading.Event()
    generation = ask(sink=lambda _: came.set())
    driver.put(generation.request_ids[0], 0, *ids("Hello"))
    assert came.wait(WAIT_S)
    wait_until(lambda: generation.completions[0].token_ids == ids("Hello"))
    frontend.abort([generation])
    generation.done_future.result(timeout=WAIT_S)
    assert generation.completions[0].finish_reason == "abort"
    assert generation.completions[0].text == "Hello"
    wait_until(lambda: driver.told == [(generation.request_ids, "abort")])


def test_the_driver_hears_of_an_abort_although_the_call_was_lost(
    ask: Ask, frontend: Frontend, driver: FakeDriver
) -> None:
    driver.lost_finishes = 3
    generation = ask()
    frontend.abort([generation])
    wait_until(lambda: driver.told == [(generation.request_ids, "abort")])


def test_an_abort_after_the_end_changes_nothing(
    ask: Ask, frontend: Frontend, driver: FakeDriver
) -> None:
    generation = ask()
    driver.put(generation.request_ids[0], 0, *ids("Hello"), finish_reason="length")
    generation.done_future.result(timeout=WAIT_S)
    frontend.abort([generation])
    assert generation.completions[0].finish_reason == "length"
    assert driver.told == []


def test_a_refused_submission_raises_and_leaves_nothing_to_poll_for(
    ask: Ask, frontend: Frontend, driver: FakeDriver
) -> None:
    driver.refusal = RequestError("too long", "prompt")
    with pytest.raises(RequestError, match="too long"):
        ask()
    assert frontend._outstanding_requests == {} and driver.told == []


def test_a_driver_that_fails_to_answer_fails_what_is_outstanding(
    ask: Ask, driver: FakeDriver
) -> None:
    generation = ask()
    driver.poll_failure = EngineError("could not poll the driver")
    with pytest.raises(EngineError, match="could not poll the driver"):
        generation.done_future.result(timeout=WAIT_S)


def test_when_one_of_n_outputs_fails_the_others_are_ended_in_the_driver(
    ask: Ask, frontend: Frontend, driver: FakeDriver
) -> None:
    generation = ask(SamplingParams(n=3))
    first, second, third = generation.request_ids
    driver.put(first, 0, *ids("Hello"), finish_reason="length")
    driver.put(second, 0, finish_reason="error", error=EngineError("its grammar failed"))
    with pytest.raises(EngineError, match="its grammar failed"):
        generation.done_future.result(timeout=WAIT_S)
    wait_until(lambda: driver.told == [([third], "abort")])
    assert frontend._outstanding_requests == {}


def test_a_request_that_fails_alone_is_not_ended_again(ask: Ask, driver: FakeDriver) -> None:
    failed, other = ask(), ask()
    driver.put(failed.request_ids[0], 0, finish_reason="error", error=EngineError("no"))
    driver.put(other.request_ids[0], 0, *ids("a"), finish_reason="length")
    other.done_future.result(timeout=WAIT_S)
    assert driver.told == []


@pytest.mark.parametrize("failure", [EngineError("could not poll"), KeyError("a bug")])
def test_requests_that_fail_because_a_poll_did_do_not_run_on_in_the_driver(
    ask: Ask, driver: FakeDriver, failure: Exception
) -> None:
    generation = ask(SamplingParams(n=2))
    driver.poll_failure = failure
    with pytest.raises(EngineError):
        generation.done_future.result(timeout=WAIT_S)
    wait_until(lambda: driver.told == [(generation.request_ids, "abort")])


def test_nobody_waits_on_when_the_polling_thread_ends(
    ask: Ask, frontend: Frontend, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # pytest's own hook would complain
    generation = ask()
    driver.poll_failure = SystemExit(0)
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        generation.done_future.result(timeout=WAIT_S)
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        ask()
    frontend.join(WAIT_S)


PROGRAM = """
import time
import ray
from cluster.client.frontend import Frontend
from tests.cluster.client.test_outputs import LIMITS, MODEL
from cluster.client.requests import RequestBuilder
from cluster.resources.local_ray import minimal_local_ray
from scheduler.params import SamplingParams

class SilentDriver:
    def submit(self, *_):
        return 0

    def poll(self, *_):
        time.sleep(60)

with minimal_local_ray():
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
        logging_level="error",
    )
builder = RequestBuilder(MODEL, None, SamplingParams(), LIMITS, None)
frontend = Frontend(ray.remote(SilentDriver).remote())
generation = builder.build([1, 2, 3], None, None)
frontend.submit([generation])
time.sleep(0.5)
ray.shutdown()
print(type(generation.done_future.exception(timeout=10)).__name__)
"""


@pytest.mark.engine
def test_a_program_that_stops_ray_while_requests_are_out_hears_that_the_engine_is_dead() -> None:
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=60
    )
    assert program.stdout == "EngineDeadError\n", program.stderr


def test_closing_fails_what_is_outstanding_and_ends_the_thread(
    ask: Ask, frontend: Frontend
) -> None:
    generation = ask()
    frontend.close()
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        generation.done_future.result(timeout=WAIT_S)
    frontend._thread.join(WAIT_S)
    assert not frontend._thread.is_alive()


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until this holds, because the polling thread may not be done yet."""
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s, "did not come to hold"
        time.sleep(0.005)


def test_the_last_chunk_of_an_aborted_stream_says_so(
    ask: Ask, frontend: Frontend, driver: FakeDriver
) -> None:
    chunks: list[Chunk] = []
    generation = ask(sink=chunks.append)
    driver.put(generation.request_ids[0], 0, *ids("Hello"))
    wait_until(lambda: bool(chunks))
    frontend.abort([generation])
    assert chunks[-1].finish_reason == "abort"
