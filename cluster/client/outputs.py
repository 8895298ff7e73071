"""What a caller gets: chunks while a request runs, a `RequestOutput` at the end."""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace

from cluster.client.prompt_entries import PromptEntries
from cluster.client.text_stream import TextStream
from cluster.news import News
from scheduler.errors import EaglerayError, EngineError
from scheduler.messages import PromptLogprobs, Request, TokenLogprobs

# Tokens of a prompt whose log probabilities are written together: a few ms of work.
PROMPT_ENTRIES_PER_CHUNK = 64
# Pieces of an output's text that are kept apart: to add each to the text would copy all of it.
_MAX_PIECES = 64


@dataclass(slots=True, kw_only=True)  # not frozen: that would take most of the time of making one
class Chunk:
    """What is new in output `index`. The first one has the `prompt_logprobs`, if they were asked
    for, as in `RequestOutput`. The last one has a `finish_reason`: stop, length, abort, or error if
    the driver says so; an output that fails in the client's process ends without another chunk.
    num_cached_tokens: of the prompt, in the prefix cache; 0 where the engine has not said it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: Seq[TokenLogprobs | None] | None = None

    def split_prompt_logprobs(self) -> Iterator[Chunk]:
        """The same in chunks with a part of the prompt each, and one without it."""
        entries = self.prompt_logprobs
        if entries is None:
            yield self
            return
        for start in range(0, len(entries), PROMPT_ENTRIES_PER_CHUNK):
            some_entries = entries[start : start + PROMPT_ENTRIES_PER_CHUNK]
            yield Chunk(index=self.index, text="", token_ids=[], prompt_logprobs=some_entries)
        yield replace(self, prompt_logprobs=None)


Sink = Callable[[Chunk], None]


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request, so far or complete. stop_string: the one that ended it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_string: str | None = None

    @property
    def is_cut_off(self) -> bool:
        """Whether it has ended before the model ended it: at a limit, or a stop string."""
        return self.finish_reason == "length" or self.stop_string is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request. `outputs` holds `n` completions; `text` and the like are those of the
    first. `prompt_logprobs`, if they were asked for, has one entry per token of the prompt; the
    first is None. If it failed, `error` says why, and the rest holds what had arrived by then,
    with the `finish_reason` "error".
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    error: EaglerayError | None = None
    prompt_logprobs: PromptEntries | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason


class OutputFollower:
    """Cuts the news of one engine request into chunks. completion: has its text once it ends."""

    def __init__(
        self,
        request: Request,
        index: int,
        stream: TextStream | None,
        sink: Sink | None,
        *,
        is_prompt_only: bool = False,
        scored_output: OutputFollower | None = None,
    ) -> None:
        """`is_prompt_only`: the engine's only token is dropped, since no output was asked for.
        `scored_output`: another one, which gets the log probabilities of the prompt for all.
        """
        self.request = request
        self.completion = CompletionOutput(index)
        self._stream = stream
        self._pieces: list[str] = []  # of the text so far
        self._sink = sink
        self._is_prompt_only = is_prompt_only
        num_top_logprobs = request.sampling.prompt_logprobs
        self._prompt_logprobs = (
            PromptLogprobs.empty(num_top_logprobs) if num_top_logprobs >= 0 else None
        )
        self._scored_output = scored_output
        self._has_begun_or_failed = False
        self._held_chunks: list[tuple[OutputFollower, Chunk]] = []  # of others, for this to begin

    @property
    def prompt_logprobs(self) -> PromptEntries | None:
        """Those that have arrived; all of them have before the first token of the output that gets
        them comes.
        """
        if self._scored_output is not None:
            return self._scored_output.prompt_logprobs
        return None if self._prompt_logprobs is None else PromptEntries(self._prompt_logprobs)

    @property
    def has_ended(self) -> bool:
        return self.completion.finish_reason is not None

    def fail(self) -> None:
        """End here, without another chunk."""
        self._end("error")

    def _end(self, reason: str) -> None:
        self.completion.text, self._pieces = "".join(self._pieces), []
        self.completion.finish_reason = reason

    def take(self, news: News) -> bool:
        """Add news, skipping tokens that are already known. True if a stop string has ended the
        output here while the engine still runs it.
        """
        completion = self.completion
        if completion.finish_reason is not None:
            return False
        if self._prompt_logprobs is not None and news.prompt_logprobs is not None:
            self._prompt_logprobs = self._prompt_logprobs.followed_by(news.prompt_logprobs)
        if self._is_prompt_only:
            reason = "length" if news.token_ids else news.finish_reason
            self._add([], None, reason, news.num_cached_tokens)
            return False
        num_known_tokens = len(completion.token_ids) - news.first_index
        if num_known_tokens < 0 and news.token_ids:
            raise EngineError(
                f"tokens {len(completion.token_ids)} to {news.first_index - 1} of"
                f" {self.request.request_id} are missing"
            )
        tokens = news.token_ids[num_known_tokens:] if num_known_tokens > 0 else news.token_ids
        text, num_tokens_to_stop = "", None
        if self._stream is not None:
            text, num_tokens_to_stop = self._stream.push(tokens), self._stream.num_tokens_to_stop
        if num_tokens_to_stop is not None:
            tokens = tokens[:num_tokens_to_stop]
        logprobs = (
            news.logprobs[num_known_tokens:][: len(tokens)] if news.logprobs is not None else None
        )
        reason = "stop" if num_tokens_to_stop is not None else news.finish_reason
        self._add(tokens, logprobs, reason, news.num_cached_tokens, text)
        return num_tokens_to_stop is not None and news.finish_reason is None

    def continued_request(self) -> Request:
        """The request with the tokens that have been received."""
        request, received_ids = self.request, self.completion.token_ids
        if not received_ids:
            return request
        prompt = request.token_ids[: request.num_prompt_tokens]
        sampling = dataclasses.replace(request.sampling, prompt_logprobs=-1)  # they came before
        return dataclasses.replace(
            request, token_ids=prompt + array("i", received_ids), sampling=sampling
        )

    def abort(self) -> None:
        """End here, unless it has ended; the last chunk says "abort"."""
        if not self.has_ended:
            self._add([], None, "abort", 0)

    def _add(
        self,
        tokens: list[int],
        logprobs: list[TokenLogprobs | None] | None,
        finish_reason: str | None,
        num_cached_tokens: int,
        text: str = "",
    ) -> None:
        completion = self.completion
        completion.token_ids += tokens
        if finish_reason is not None and self._stream is not None:
            text += self._stream.finish()
            completion.stop_string = self._stream.stop_string
        self._pieces.append(text)
        if finish_reason is not None:
            self._end(finish_reason)
        elif len(self._pieces) == _MAX_PIECES:
            self._pieces = ["".join(self._pieces)]
        if logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + logprobs
        if self._sink is not None and (tokens or finish_reason):
            self._send(
                Chunk(
                    index=completion.index,
                    text=text,
                    token_ids=tokens,
                    logprobs=logprobs,
                    finish_reason=finish_reason,
                    num_prompt_tokens=self.request.num_prompt_tokens,
                    num_cached_tokens=num_cached_tokens,
                )
            )

    def _send(self, chunk: Chunk) -> None:
        """Pass a chunk on, or hold it until the log probabilities of the prompt are complete, which
        are part of the first one.
        """
        scored_output = self._scored_output
        if scored_output is not None and not scored_output._has_begun_or_failed:
            scored_output._held_chunks.append((self, chunk))
            return
        if not self._has_begun_or_failed:
            self._has_begun_or_failed = True
            chunk.prompt_logprobs = self.prompt_logprobs
        assert self._sink is not None
        self._sink(chunk)
        self.release_held_chunks()

    def release_held_chunks(self) -> None:
        """Pass on what others hold until this one has begun: it has, or never will."""
        self._has_begun_or_failed = True
        held_chunks, self._held_chunks = self._held_chunks, []
        for output, held_chunk in held_chunks:
            output._send(held_chunk)


class Generation:
    """One user request: its prompt, its outputs, and a future that completes with them."""

    def __init__(
        self,
        prompt: str | None,
        outputs: list[OutputFollower],
        session_id: str | None = None,
        loosened_tools: tuple[str, ...] = (),
    ) -> None:
        """`prompt`: its text (of a conversation, rendered), None for token ids. `session_id`: of
        several engines, one is preferred for all requests of a session. `loosened_tools`: the tools
        whose calls may have arguments that do not match their schemas, although calls follow a
        grammar.
        """
        self.prompt = prompt
        self.loosened_tools = loosened_tools
        self.session_id = session_id
        self.outputs = outputs
        self.num_cached_tokens = 0
        self.done_future: Future[None] = Future()
        self.has_failed = False  # it has ended with an error

    @property
    def requests(self) -> list[Request]:
        """The engine requests, one per output."""
        return [output.request for output in self.outputs]

    @property
    def request_ids(self) -> list[str]:
        return [output.request.request_id for output in self.outputs]

    @property
    def unfinished_outputs(self) -> list[OutputFollower]:
        return [output for output in self.outputs if not output.has_ended]

    def rename(self, suffix: str) -> None:
        """Give the engine requests other ids, before they are sent to another engine: one that they
        left may still run them under the old ids when they come back to it.
        """
        for output in self.outputs:
            base = output.request.request_id.partition("~")[0]
            output.request = replace(output.request, request_id=f"{base}~{suffix}")

    @property
    def prompt_token_ids(self) -> list[int]:
        request = self.outputs[0].request
        return request.token_ids[: request.num_prompt_tokens].tolist()

    @property
    def prompt_logprobs(self) -> PromptEntries | None:
        """See `RequestOutput`."""
        return self.outputs[0].prompt_logprobs

    @property
    def completions(self) -> list[CompletionOutput]:
        return [output.completion for output in self.outputs]

    def take(self, output: OutputFollower, news: News) -> bool:
        """Pass news to one of the outputs; see `OutputFollower.take`."""
        if output is self.outputs[0]:
            self.num_cached_tokens = news.num_cached_tokens
        is_stopped = output.take(news)
        if news.error is not None:
            self.fail(news.error)
        elif output.has_ended and not self.unfinished_outputs:
            self.end()
        return is_stopped

    def result(self) -> RequestOutput:
        """Wait for the finished request. Raises the error that it failed with."""
        self.done_future.result()
        return self.output()

    def output(self) -> RequestOutput:
        """The request with what has arrived so far."""
        error = self.done_future.exception() if self.done_future.done() else None
        assert error is None or isinstance(error, EaglerayError)
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self.completions,
            num_cached_tokens=self.num_cached_tokens,
            error=error,
            prompt_logprobs=self.prompt_logprobs,
        )

    def abort(self, error: EaglerayError | None = None) -> None:
        """End early, with the reason "abort" or with an error; does nothing if it has ended."""
        if error is not None:
            self.fail(error)
        for output in self.unfinished_outputs:
            output.abort()
        self.end()

    def end(self) -> None:
        """Complete the future; does nothing if it is complete."""
        with contextlib.suppress(InvalidStateError):
            self.done_future.set_result(None)

    def fail(self, error: EaglerayError) -> None:
        """Complete the future with an error; does nothing if it is complete."""
        for output in self.unfinished_outputs:
            output.fail()
        self.outputs[0].release_held_chunks()
        with contextlib.suppress(InvalidStateError):
            self.done_future.set_exception(error)
            self.has_failed = True
