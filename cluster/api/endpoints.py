"""What a request of the API becomes: a job, of prompts, sampling parameters and the writer of the
answer. Completions are here; `chats.py` makes jobs of chats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cluster.api.completion_replies import CompletionWriter
from cluster.api.errors import HttpError
from cluster.api.replies import Writer
from cluster.api.schema import CompletionRequest, DetokenizeRequest, GenerationRequest
from cluster.client.outputs import Generation
from cluster.client.prompts import ParsedPrompt
from cluster.client.requests import RequestBuilder
from cluster.client.tokenizer import Tokenizer
from scheduler.bounds import check_bound, field_limit
from scheduler.errors import RequestError
from scheduler.params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that is served."""

    name: str
    builder: RequestBuilder
    tokenizer: Tokenizer | None
    created: int = field(default_factory=lambda: int(time.time()))
    max_messages: int = field_limit("messages")
    keep_billing_header: bool = False  # in system prompts of the Messages API
    refuse_unknown: bool = False  # unknown fields, and what the model cannot get, are refused

    def check_name(self, name: str | None) -> None:
        """Raise 404 for another model."""
        if name is not None and name != self.name:
            raise HttpError(
                404,
                f"the model {name[:200]!r} does not exist; served is {self.name!r}",
                parameter="model",
                code="model_not_found",
            )

    def tokenizer_for(self, purpose: str) -> Tokenizer:
        """The tokenizer. Raises `RequestError` for a checkpoint without one."""
        if self.tokenizer is None:
            raise RequestError(f"{purpose} needs a tokenizer; the checkpoint has none", "messages")
        return self.tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run for a request, and how to answer."""

    prompts: list[ParsedPrompt]
    params: SamplingParams
    is_streamed: bool
    includes_usage: bool  # in a stream of chat or text completions; other answers always have it
    make_writer: Callable[[list[Generation]], Writer]
    repeats_prompt: bool = False  # in each output
    # How many log probabilities of each token of the prompt are wanted, in each output.
    logprobs_per_prompt_token: int = 0
    ignored: tuple[str, ...] = ()  # names of what the request holds and the model does not get

    @property
    def num_outputs(self) -> int:
        return len(self.prompts) * (self.params.n or 1)

    @property
    def max_output_logprobs(self) -> int:
        """How many log probabilities the outputs may have."""
        return (
            self.num_outputs * (self.params.max_tokens or 1) * _num_logprobs(self.params.logprobs)
        )

    def with_session(self, session_id: str) -> Job:
        """The job, to be run where other requests of the session are."""
        prompts = [replace(prompt, session_id=session_id) for prompt in self.prompts]
        return replace(self, prompts=prompts)

    def check(self, generations: list[Generation]) -> None:
        """Raise `RequestError` if the answer would hold too much, once the prompts are tokens."""
        num_prompt_tokens = _num_prompt_tokens(generations)
        if self.repeats_prompt:
            check_bound("repeated prompt", num_prompt_tokens, "prompts in each output", "n")
        num_logprobs = num_prompt_tokens * self.logprobs_per_prompt_token + self.max_output_logprobs
        check_bound("alternatives", num_logprobs, "prompts and outputs together", "logprobs")

    def num_answer_tokens(self, generations: list[Generation]) -> int:
        """How many tokens the finished answer has, with alternatives and repeated prompts."""
        entries_per_token = 1 + (self.params.logprobs or 0)
        num_tokens = sum(len(c.token_ids) for g in generations for c in g.completions)
        entries_per_prompt_token = int(self.repeats_prompt) + self.logprobs_per_prompt_token
        num_prompt_entries = _num_prompt_tokens(generations) * entries_per_prompt_token
        return num_tokens * entries_per_token + num_prompt_entries


def completion_job(request: CompletionRequest, served_model: ServedModel) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    served_model.check_name(request.model)
    echo = bool(request.echo)
    num_echo_top_logprobs = (
        request.logprobs if echo and served_model.tokenizer is not None else None
    )
    max_tokens = first_not_none(
        request.max_tokens,
        served_model.builder.sampling_defaults.max_tokens,
        DEFAULT_COMPLETION_TOKENS,
    )
    is_only_prompt = echo and max_tokens == 0
    params = request.sampling_params(
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        structure=request.structure(),
        prompt_logprobs=(num_echo_top_logprobs or 0) if is_only_prompt else num_echo_top_logprobs,
    )
    prompt: Any = request.prompt
    is_single_prompt = isinstance(prompt, str) or isinstance(next(iter(prompt), 0), int)
    salt = request.cache_salt or ""
    prompts = [
        ParsedPrompt(text=content, cache_salt=salt)
        if isinstance(content, str)
        else ParsedPrompt(token_ids=content, cache_salt=salt)
        for content in ([prompt] if is_single_prompt else prompt)
    ]
    make_writer = partial(
        CompletionWriter,
        served_model.name,
        tokenizer=served_model.tokenizer,
        echo=echo,
        includes_token_ids=bool(request.return_token_ids),
        num_echo_top_logprobs=num_echo_top_logprobs,
        num_prompt_top_logprobs=request.prompt_logprobs,
    )
    return make_job(
        request,
        served_model,
        prompts,
        params,
        make_writer,
        echo=echo,
        num_echo_top_logprobs=num_echo_top_logprobs,
    )


def detokenize(request: DetokenizeRequest, served_model: ServedModel) -> dict[str, Any]:
    """The answer of `/detokenize`."""
    served_model.check_name(request.model)
    tokenizer = served_model.tokenizer_for("detokenizing")
    served_model.builder.check_ids("tokens", request.tokens)
    return {"prompt": tokenizer.decode(request.tokens)}


def model_card(served_model: ServedModel) -> dict[str, Any]:
    """The model in the form of `/v1/models`."""
    return {
        "id": served_model.name,
        "object": "model",
        "created": served_model.created,
        "owned_by": "eagleray",
        "max_model_len": served_model.builder.limits.max_model_len,
    }


def make_job(
    request: GenerationRequest,
    served_model: ServedModel,
    prompts: list[ParsedPrompt],
    params: SamplingParams,
    make_writer: Callable[[list[Generation]], Writer],
    *,
    echo: bool = False,
    num_echo_top_logprobs: int | None = None,
) -> Job:
    """`echo`: each output repeats its prompt, with `num_echo_top_logprobs` alternatives per token.
    Raises `RequestError`.
    """
    params = served_model.builder.parameters(params)
    job = Job(
        prompts=prompts,
        params=params,
        is_streamed=bool(request.stream),
        includes_usage=request.includes_usage,
        make_writer=make_writer,
        repeats_prompt=echo or bool(request.return_token_ids),
        logprobs_per_prompt_token=_num_logprobs(num_echo_top_logprobs)
        + _num_logprobs(request.prompt_logprobs),
    )
    requested_size = (
        f"{job.num_outputs} outputs of {params.max_tokens} tokens with {params.logprobs} others"
    )
    check_bound("alternatives", job.max_output_logprobs, requested_size, "logprobs")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs are not part of streams; leave out stream, or ask /v1/completions for"
            " echo with logprobs, which streams have",
            "prompt_logprobs",
        )
    return job


def _num_logprobs(num_top_logprobs: int | None) -> int:
    """Log probabilities of a token with `num_top_logprobs` alternatives; None for none at all."""
    return 0 if num_top_logprobs is None else 1 + num_top_logprobs


def _num_prompt_tokens(generations: list[Generation]) -> int:
    """Prompt tokens, those of each prompt once per output of it."""
    return sum(g.requests[0].num_prompt_tokens * len(g.outputs) for g in generations)


def first_not_none(*values: int | None) -> int:
    """The first that is not None."""
    return next(value for value in values if value is not None)
