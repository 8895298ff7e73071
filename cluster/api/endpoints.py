"""What a request of the API becomes: a job, of prompts, sampling parameters and the writer of the
answer. Completions are here; `chats.py` makes jobs of chats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster.api.completion_replies import CompletionWriter
from cluster.api.errors import HttpError
from cluster.api.replies import Writer
from cluster.api.schema import CompletionRequest, DetokenizeRequest, Generate
from cluster.client.outputs import Generation
from cluster.client.prompts import ParsedPrompt
from cluster.client.requests import RequestBuilder
from cluster.client.tokenizer import Tokenizer
from scheduler.bounds import check
from scheduler.errors import RequestError
from scheduler.params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model that is served."""

    name: str
    created: int
    builder: RequestBuilder
    tokenizer: Tokenizer | None
    keep_billing_header: bool = False  # in system prompts of the Messages API
    refuse_unknown: bool = False  # what the model cannot get is refused, not left out

    def tokenizer_for(self, purpose: str) -> Tokenizer:
        """Raises `RequestError` if there is none."""
        if self.tokenizer is None:
            raise RequestError(
                f"{purpose} needs a tokenizer, and this checkpoint has none", "messages"
            )
        return self.tokenizer

    def check_name(self, name: str | None) -> None:
        """Raise 404 for another model."""
        if name is not None and name != self.name:
            raise HttpError(
                404,
                f"the model {name[:200]!r} does not exist; served is {self.name!r}",
                parameter="model",
                code="model_not_found",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run for a request, and how to answer."""

    prompts: list[ParsedPrompt]
    params: SamplingParams
    streamed: bool
    includes_usage: bool
    make_writer: Callable[[list[Generation]], Writer]
    repeats_prompt: bool = False  # in each output
    num_scores: int = 0  # log probabilities of each token of the prompt, in each output
    ignored: tuple[str, ...] = ()  # names of what the request holds and the model does not get

    @property
    def num_outputs(self) -> int:
        return len(self.prompts) * (self.params.n or 1)

    def of_session(self, session_id: str) -> Job:
        """The job, to be run where other requests of the session are."""
        prompts = [replace(prompt, session_id=session_id) for prompt in self.prompts]
        return replace(self, prompts=prompts)

    def check(self, generations: list[Generation]) -> None:
        """Raise `RequestError` if the answer would repeat too much, once the prompts are tokens."""
        if self.repeats_prompt:
            count = _num_prompt_tokens(generations)
            check("repeated prompt", count, "prompts in each output", "n")
        if self.num_scores:
            count = _num_prompt_tokens(generations) * self.num_scores
            count += _num_alternatives(self.num_outputs, self.params)
            check("alternatives", count, "prompts and outputs together", "logprobs")

    def num_written(self, generations: list[Generation]) -> int:
        """How many tokens the finished answer has, with alternatives and repeated prompts."""
        alternatives = 1 + (self.params.logprobs or 0)
        num_tokens = sum(len(done.token_ids) for g in generations for done in g.completions)
        of_prompt = int(self.repeats_prompt) + self.num_scores
        return num_tokens * alternatives + _num_prompt_tokens(generations) * of_prompt


def completion_job(request: CompletionRequest, served: Served) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    served.check_name(request.model)
    echo_top = request.logprobs if request.echo and served.tokenizer is not None else None
    max_tokens = first_of(
        request.max_tokens, served.builder.defaults.max_tokens, DEFAULT_COMPLETION_TOKENS
    )
    is_only_prompt = bool(request.echo) and max_tokens == 0
    params = request.sampling(
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        structure=request.structure(),
        prompt_logprobs=0 if is_only_prompt and echo_top is None else echo_top,
    )
    many: list[Any] = [request.prompt]
    if isinstance(request.prompt, list) and not isinstance(next(iter(request.prompt), 0), int):
        many = list(request.prompt)
    salt = request.cache_salt or ""
    prompts = [
        ParsedPrompt(text=prompt, cache_salt=salt)
        if isinstance(prompt, str)
        else ParsedPrompt(token_ids=prompt, cache_salt=salt)
        for prompt in many
    ]

    def make_writer(generations: list[Generation]) -> Writer:
        echo, ids = bool(request.echo), bool(request.return_token_ids)
        return CompletionWriter(
            served.name,
            generations,
            served.tokenizer,
            echo=echo,
            token_ids=ids,
            echo_top=echo_top,
            prompt_top=request.prompt_logprobs,
        )

    params = served.builder.parameters(params)
    repeats_prompt = bool(request.echo or request.return_token_ids)
    num_scores = num_scores_of(echo_top) + num_scores_of(request.prompt_logprobs)
    return make_job(prompts, params, request, make_writer, repeats_prompt, num_scores)


def detokenize(request: DetokenizeRequest, served: Served) -> dict[str, Any]:
    """The answer of `/detokenize`."""
    served.check_name(request.model)
    tokenizer = served.tokenizer_for("detokenizing")
    served.builder.check_ids("tokens", request.tokens)
    return {"prompt": tokenizer.decode(request.tokens)}


def model_card(served: Served) -> dict[str, Any]:
    """The model in the form of `/v1/models`."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "eagleray",
        "max_model_len": served.builder.limits.max_model_len,
    }


def make_job(
    prompts: list[ParsedPrompt],
    params: SamplingParams,
    request: Generate,
    make_writer: Callable[[list[Generation]], Writer],
    repeats_prompt: bool,
    num_scores: int,
) -> Job:
    """See `Job`. Raises `RequestError` if the answer may have too many log probabilities, and for
    options that need another one.
    """
    _check_alternatives(len(prompts) * (params.n or 1), params)
    streamed = bool(request.stream)
    if request.stream_options is not None and not streamed:
        raise RequestError("stream_options needs stream: true", "stream_options")
    if streamed and request.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs are not part of streams; leave out stream, or ask /v1/completions for"
            " echo with logprobs, which streams have",
            "prompt_logprobs",
        )
    return Job(
        prompts=prompts,
        params=params,
        streamed=streamed,
        includes_usage=request.includes_usage,
        make_writer=make_writer,
        repeats_prompt=repeats_prompt,
        num_scores=num_scores,
    )


def _check_alternatives(num_outputs: int, params: SamplingParams) -> None:
    """Raise `RequestError` if the answer may have too many log probabilities."""
    place = f"{num_outputs} outputs of {params.max_tokens} tokens with {params.logprobs} others"
    check("alternatives", _num_alternatives(num_outputs, params), place, "logprobs")


def _num_alternatives(num_outputs: int, params: SamplingParams) -> int:
    """How many log probabilities outputs may have."""
    if params.logprobs is None:
        return 0
    return num_outputs * (params.max_tokens or 1) * (1 + params.logprobs)


def num_scores_of(num_top: int | None) -> int:
    """Log probabilities of a token with `num_top` alternatives; None for none at all."""
    return 0 if num_top is None else 1 + num_top


def _num_prompt_tokens(generations: list[Generation]) -> int:
    """Those of all outputs together."""
    return sum(g.requests[0].num_prompt_tokens * len(g.outputs) for g in generations)


def first_of(*values: int | None) -> int:
    """The first that is not None."""
    return next(value for value in values if value is not None)
