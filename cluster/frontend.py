"""A frontend of the driver: it sends requests, polls for what is new, and makes text and outputs of it.

One background thread polls while anything is outstanding. Each user request is a `Generation` of one or more outputs
(`n`), every output an engine request of its own; what is new goes to the generation's sink as `Chunk`s, on the polling
thread. `Generation.done` fires once, with an error or without.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import threading
import uuid
from array import array
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.mailbox import News, unpack
from cluster.text import TextStream, Tokenizer
from scheduler.errors import EaglerayError, EngineDeadError, EngineError
from scheduler.messages import Deltas, Request, TokenLogprobs
from scheduler.params import SamplingParams

logger = logging.getLogger("eagleray")

POLL_WAIT_S = 5.0
CALL_TIMEOUT_S = 30.0
MAX_LOST_POLLS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What is new of output `index`. The last one has a `finish_reason`: stop, length, abort or error."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None


class _Output:
    """Follows one engine request and cuts its news into chunks."""

    def __init__(
        self,
        request_id: str,
        index: int,
        num_prompt_tokens: int,
        stream: TextStream | None,
        sink: Callable[[Chunk], None] | None,
    ) -> None:
        self.request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self.completion = CompletionOutput(index)
        self._stream = stream
        self._sink = sink

    def take(self, news: News) -> bool:
        """Add news, without what is known already; True if a stop string ended the output here, not in the engine."""
        done = self.completion
        if done.finish_reason is not None:
            return False
        known = len(done.token_ids) - news.first_index
        if known < 0 and news.token_ids:
            raise EngineError(
                f"tokens {len(done.token_ids)} to {news.first_index - 1} of {self.request_id} are missing"
            )
        tokens = news.token_ids[known:] if news.token_ids else []
        stopped_at = self._push(tokens)
        tokens = tokens[:stopped_at] if stopped_at is not None else tokens
        logprobs = news.logprobs[known:][: len(tokens)] if news.logprobs is not None else None
        reason = "stop" if stopped_at is not None else news.finish_reason
        text = self._new_text(final=reason is not None)
        done.token_ids += tokens
        done.text += text
        if logprobs is not None:
            done.logprobs = (done.logprobs or []) + logprobs
        done.finish_reason = reason
        if self._sink is not None and (tokens or reason):
            self._sink(
                Chunk(
                    index=done.index,
                    text=text,
                    token_ids=tokens,
                    logprobs=logprobs,
                    finish_reason=reason,
                    num_prompt_tokens=self._num_prompt_tokens,
                    num_cached_tokens=news.num_cached_tokens,
                )
            )
        return stopped_at is not None and news.finish_reason is None

    def abort(self) -> None:
        """End here, with a last chunk that says so."""
        done = self.completion
        done.finish_reason = "abort"
        text = self._new_text(final=True)
        done.text += text
        if self._sink is not None:
            self._sink(
                Chunk(
                    index=done.index,
                    text=text,
                    token_ids=[],
                    finish_reason="abort",
                    num_prompt_tokens=self._num_prompt_tokens,
                )
            )

    def _push(self, tokens: list[int]) -> int | None:
        """Feed the text; the number of tokens up to the one that completed a stop string."""
        return self._stream.push(tokens) if self._stream is not None else None

    def _new_text(self, *, final: bool) -> str:
        if self._stream is None:
            return ""
        if final:
            self._stream.finish()
        return self._stream.text[len(self.completion.text) :]


class NoAnswerError(EngineError):
    """A call to the driver, or to where the ranks run, was not answered in time."""


class Generation:
    """One user request: its prompt, its outputs, and a future that ends with them."""

    def __init__(self, prompt: str | None, prompt_token_ids: list[int]) -> None:
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.outputs: list[_Output] = []
        self.num_cached_tokens = 0
        self.done: Future[None] = Future()

    @property
    def request_ids(self) -> list[str]:
        return [output.request_id for output in self.outputs]

    @property
    def completions(self) -> list[CompletionOutput]:
        return [output.completion for output in self.outputs]

    def take(self, output: _Output, news: News) -> bool:
        if output is self.outputs[0]:
            self.num_cached_tokens = news.num_cached_tokens
        stopped = output.take(news)
        if news.error is not None:
            self.fail(news.error)
        elif all(c.finish_reason is not None for c in self.completions):
            self.end()
        return stopped

    def end(self) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled, or ended before
            self.done.set_result(None)

    def fail(self, error: EaglerayError) -> None:
        with contextlib.suppress(InvalidStateError):
            self.done.set_exception(error)


class Frontend:
    """Requests of one process to one driver. Any thread may call; sinks run on the polling thread."""

    def __init__(
        self, driver: Any, tokenizer: Tokenizer | None, is_reachable: Callable[[], bool] = lambda: True
    ) -> None:
        """`is_reachable`: whether this process is still part of the driver's cluster. `tokenizer` may be set later."""
        self.tokenizer = tokenizer
        self._driver = driver
        self._is_reachable = is_reachable
        self._id = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._active: dict[str, tuple[Generation, _Output]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._acknowledged = 0
        self._thread = threading.Thread(target=self._poll_loop, name="eagleray-poll", daemon=True)
        self._thread.start()

    def prepare(
        self,
        generation: Generation,
        params: SamplingParams,
        *,
        seed: int,
        eos_token_ids: tuple[int, ...],
        cache_salt: str,
        sink: Callable[[Chunk], None] | None,
    ) -> list[Request]:
        """The engine requests of a generation, one an output; nothing is sent yet.

        Without a sink nobody reads before the end, and the driver sends nothing before it where that is possible.
        """
        final_only = sink is None and not params.stop_strings() and params.logprobs is None
        requests = []
        num_prompt_tokens = len(generation.prompt_token_ids)
        for index in range(params.n or 1):
            request_id = f"{self._id}-{next(self._numbers)}"
            sampling = params.resolve(seed=seed, index=index, eos_token_ids=eos_token_ids)
            stream = self._text_stream(params)
            generation.outputs.append(_Output(request_id, index, num_prompt_tokens, stream, sink))
            requests.append(
                Request(
                    request_id=request_id,
                    token_ids=array("i", generation.prompt_token_ids),
                    num_prompt_tokens=num_prompt_tokens,
                    sampling=sampling,
                    cache_salt=cache_salt,
                    final_only=final_only,
                )
            )
        return requests

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(self.tokenizer, params.stop_strings(), params.min_tokens or 0)

    def submit(self, generations: list[Generation], requests: list[Request]) -> None:
        """Send prepared requests, all or none. Raises `RequestError`, `EngineDeadError`."""
        with self._changed:
            self._check_reachable()
            for generation in generations:
                self._active.update({o.request_id: (generation, o) for o in generation.outputs})
        submitted: Any = None
        try:
            submitted = self._driver.submit.remote(self._id, requests)
            call(submitted, "submit requests")
        except BaseException as error:
            self._forget(generations)
            if isinstance(error, NoAnswerError) or not isinstance(error, EaglerayError):  # it may take them yet
                self._finish([request.request_id for request in requests], "abort", after=submitted)
            raise
        with self._changed:
            self._changed.notify_all()

    def abort(self, generations: list[Generation]) -> None:
        """End generations; what they have stays, with `finish_reason` "abort". Does not wait for the engine."""
        with self._changed:
            outputs = [o for g in generations for o in g.outputs if o.completion.finish_reason is None]
            ids = [output.request_id for output in outputs]
            for output in outputs:
                output.abort()
            for generation in generations:
                generation.end()
            self._forget(generations)
        self._finish(ids, "abort")

    def close(self) -> None:
        """Stop polling; what is outstanding fails."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._fail_all(EngineDeadError("the engine was shut down"))

    def stats(self) -> dict[str, float]:
        """The driver's counters. Raises `EngineDeadError`."""
        self._check_reachable()
        counters: dict[str, float] = call(self._driver.stats.remote(), "read the counters")
        return counters

    def join(self, limit_s: float) -> None:
        """Wait for the polling thread after `close`, once the driver is gone."""
        self._thread.join(limit_s)

    def _check_reachable(self) -> None:
        """A call to an actor would start a new Ray where ours has been shut down."""
        if self._closed or not self._is_reachable():
            raise EngineDeadError("the engine was shut down; start a new one")

    def _finish(self, request_ids: list[str], reason: str, after: Any = None) -> None:
        """Tell the driver that no more is needed of these requests, once the call `after` has ended. Does not wait."""
        if request_ids and not self._closed and self._is_reachable():
            self._driver.finish.remote(self._id, request_ids, reason, after)

    def _forget(self, generations: list[Generation]) -> None:
        with self._changed:
            for generation in generations:
                for request_id in generation.request_ids:
                    self._active.pop(request_id, None)

    # -- polling thread ---------------------------------------------------------------------------------------------

    def _poll_loop(self) -> None:
        try:
            self._poll_while_open()
        finally:  # whatever ended it: nobody waits for what no longer comes
            self.close()

    def _poll_while_open(self) -> None:
        num_lost = 0
        while self._wait_for_work():
            try:
                self._check_reachable()
                reply = self._driver.poll.remote(self._id, self._acknowledged, POLL_WAIT_S)
                deltas: Deltas = pickle.loads(call(reply, "poll the driver", POLL_WAIT_S + CALL_TIMEOUT_S))
                self._acknowledged = deltas.up_to
                self._take(deltas)
                num_lost = 0
            except NoAnswerError as error:
                num_lost += 1  # nothing is lost with a reply: the next poll brings it again
                if num_lost > MAX_LOST_POLLS:
                    self._fail_all(error)
            except EaglerayError as error:
                self._fail_all(error)
            except Exception as error:  # a fault of ours must not leave callers waiting
                logger.exception("the polling thread failed")
                self._fail_all(EngineError(f"the frontend failed: {type(error).__name__}: {error}"))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._active and not self._closed:
                self._changed.wait()
            return not self._closed

    def _take(self, deltas: Deltas) -> None:
        stopped: list[str] = []
        failed: list[str] = []
        for request_id, news in unpack(deltas):
            with self._changed:
                entry = self._active.get(request_id)
                if entry is None:
                    continue  # repeated, or aborted in the meantime
                generation, output = entry
                try:
                    if generation.take(output, news):
                        stopped.append(request_id)
                except Exception as error:  # of a sink or a tokenizer: it must not end the requests of others
                    logger.exception("request %s failed in the frontend", request_id)
                    generation.fail(EngineError(f"the frontend failed: {type(error).__name__}: {error}"))
                    failed += generation.request_ids
                    self._forget([generation])
                if output.completion.finish_reason is not None:
                    self._active.pop(request_id, None)
        self._finish(stopped, "stop")
        self._finish(failed, "abort")

    def _fail_all(self, error: EaglerayError) -> None:
        with self._changed:
            generations = {id(g): g for g, _ in self._active.values()}
            self._active.clear()
        for generation in generations.values():
            generation.fail(error)


def call(ref: Any, what: str, limit_s: float = CALL_TIMEOUT_S) -> Any:
    """The value of a call to the driver, with Ray's errors turned into ours."""
    try:
        return ray.get(ref, timeout=limit_s)
    except GetTimeoutError:
        raise NoAnswerError(f"could not {what}: no answer within {limit_s:g} s") from None
    except SystemExit as error:
        if not hasattr(error, "ray_terminate_msg"):  # the program's own
            raise
        raise EngineDeadError(f"could not {what}: Ray was shut down") from None
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, EaglerayError):
            raise cause from None
        raise EngineError(f"could not {what}: {cause or error}") from error
    except RayActorError as error:
        raise EngineDeadError(f"could not {what}: the driver has died ({error})") from error
    except RayError as error:
        raise EngineDeadError(f"could not {what}: {error}") from error
