"""Converts a request of the API to prompts and sampling parameters, and chooses the writer of its
answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.api.completion_replies import CompletionWriter
from cluster.api.errors import HttpError
from cluster.api.replies import ChatWriter, Writer
from cluster.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generate,
    TokenizeRequest,
)
from cluster.api.structure import structure_of
from cluster.client.outputs import Generation
from cluster.client.prompts import Prompt
from cluster.client.requests import RequestBuilder
from cluster.client.tokenizer import Tokenizer
from cluster.grammar.markers import THINKING_SWITCH, state_after
from scheduler.bounds import check, most
from scheduler.errors import RequestError
from scheduler.params import MAX_LOGPROBS, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model that is served."""

    name: str
    builder: RequestBuilder
    tokenizer: Tokenizer | None
    created: int = field(default_factory=lambda: int(time.time()))
    max_messages: int = most("messages")
    keep_billing_header: bool = False  # in system prompts of the Messages API
    refuse_unknown: bool = False  # what the model cannot get is refused, not left out

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

    prompts: list[Prompt]
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

    @property
    def num_alternatives(self) -> int:
        """How many log probabilities the outputs may have."""
        return self.num_outputs * (self.params.max_tokens or 1) * _num_scores(self.params.logprobs)

    def check(self, generations: list[Generation]) -> None:
        """Raise `RequestError` if the answer would repeat too much, once the prompts are tokens."""
        num_tokens = _num_prompt_tokens(generations)
        if self.repeats_prompt:
            check("repeated prompt", num_tokens, "prompts in each output", "n")
        num_scores = num_tokens * self.num_scores + self.num_alternatives
        check("alternatives", num_scores, "prompts and outputs together", "logprobs")

    def num_written(self, generations: list[Generation]) -> int:
        """How many tokens the finished answer has, with alternatives and repeated prompts."""
        alternatives = 1 + (self.params.logprobs or 0)
        num_tokens = sum(len(done.token_ids) for g in generations for done in g.completions)
        of_prompt = int(self.repeats_prompt) + self.num_scores
        return num_tokens * alternatives + _num_prompt_tokens(generations) * of_prompt


def chat_prompt(request: ChatRequest, served: Served) -> dict[str, Any]:
    """The conversation of a chat with its tools and variables. Raises as `chat_job`."""
    request = request.narrowed()
    served.check_name(request.model)
    prompt = _conversation(request, served, "a chat")
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    return prompt


def chat_job(request: ChatRequest, served: Served) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    request = request.narrowed()
    prompt = chat_prompt(request, served)
    tokenizer = served.tokenizer_for("a chat")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    if not 0 <= (request.top_logprobs or 0) <= MAX_LOGPROBS:
        reason = f"must be between 0 and {MAX_LOGPROBS}, got {request.top_logprobs}"
        raise RequestError(f"top_logprobs {reason}", "top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    defaults, longest = served.builder.defaults, served.builder.limits.max_total_tokens
    if logprobs is not None:  # a client that names no length gets as many as are possible
        num_outputs = request.n or defaults.n or 1
        longest = max(1, min(longest, most("alternatives") // (num_outputs * (1 + logprobs))))
    max_tokens = _first(
        request.max_completion_tokens, request.max_tokens, defaults.max_tokens, longest
    )
    params = request.sampling(
        max_tokens=max_tokens, logprobs=logprobs, structure=structure_of(request)
    )

    def make_writer(generations: list[Generation]) -> Writer:
        return ChatWriter(
            served.name,
            generations,
            tokenizer,
            state=state_after(generations[0].prompt or ""),
            tools=bool(request.tools),
            token_ids=bool(request.return_token_ids),
            prompt_top=request.prompt_logprobs,
        )

    return _job(request, served, [prompt], params, make_writer)


def completion_job(request: CompletionRequest, served: Served) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    served.check_name(request.model)
    echo = bool(request.echo)
    echo_top = request.logprobs if echo and served.tokenizer is not None else None
    max_tokens = _first(
        request.max_tokens, served.builder.defaults.max_tokens, DEFAULT_COMPLETION_TOKENS
    )
    is_only_prompt = echo and max_tokens == 0
    params = request.sampling(
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        structure=request.structure(),
        prompt_logprobs=0 if is_only_prompt and echo_top is None else echo_top,
    )
    prompt: Any = request.prompt
    is_one = isinstance(prompt, str) or isinstance(next(iter(prompt), 0), int)
    salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
    prompts: list[Prompt] = [
        {"prompt" if isinstance(content, str) else "prompt_token_ids": content} | salt
        for content in ([prompt] if is_one else prompt)
    ]
    make_writer = partial(
        CompletionWriter,
        served.name,
        tokenizer=served.tokenizer,
        echo=echo,
        token_ids=bool(request.return_token_ids),
        echo_top=echo_top,
        prompt_top=request.prompt_logprobs,
    )
    return _job(request, served, prompts, params, make_writer, echo=echo, echo_top=echo_top)


def tokenize(request: TokenizeRequest, served: Served) -> dict[str, Any]:
    """The answer of `/tokenize`."""
    served.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if request.prompt is None:
        token_ids = served.builder.encode(_conversation(request, served, "tokenizing"))
    else:
        for name in ("tools", "chat_template_kwargs", "continue_final_message"):
            if getattr(request, name):
                raise RequestError(f"{name} needs messages", name)
        token_ids = served.builder.encode(request.prompt)
    return {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": served.builder.limits.max_model_len,
    }


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


def _job(
    request: Generate,
    served: Served,
    prompts: list[Prompt],
    params: SamplingParams,
    make_writer: Callable[[list[Generation]], Writer],
    *,
    echo: bool = False,
    echo_top: int | None = None,
) -> Job:
    """`echo`: each output repeats its prompt, with `echo_top` alternatives per token."""
    params = served.builder.parameters(params)
    job = Job(
        prompts=prompts,
        params=params,
        streamed=bool(request.stream),
        includes_usage=request.includes_usage,
        make_writer=make_writer,
        repeats_prompt=echo or bool(request.return_token_ids),
        num_scores=_num_scores(echo_top) + _num_scores(request.prompt_logprobs),
    )
    place = f"{job.num_outputs} outputs of {params.max_tokens} tokens with {params.logprobs} others"
    check("alternatives", job.num_alternatives, place, "logprobs")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs are not part of streams; leave out stream, or ask /v1/completions for"
            " echo with logprobs, which streams have",
            "prompt_logprobs",
        )
    return job


def _num_scores(num_top: int | None) -> int:
    """Log probabilities of a token with `num_top` alternatives; None for none at all."""
    return 0 if num_top is None else 1 + num_top


def _num_prompt_tokens(generations: list[Generation]) -> int:
    """Those of all outputs together."""
    return sum(g.requests[0].num_prompt_tokens * len(g.outputs) for g in generations)


def _conversation(
    request: ChatRequest | TokenizeRequest, served: Served, purpose: str
) -> dict[str, Any]:
    """The prompt. Raises `RequestError` for too many messages, and for fields that disagree."""
    tokenizer, messages = served.tokenizer_for(purpose), request.messages or []
    check("messages", len(messages), "messages", most=served.max_messages)
    if request.add_generation_prompt is bool(request.continue_final_message):
        raise RequestError(
            "add_generation_prompt is false where continue_final_message is true, and true"
            " otherwise; leave it out",
            "add_generation_prompt",
        )
    as_text = tokenizer.takes_arguments_as_text
    prompt: dict[str, Any] = {
        "messages": [message.for_template(arguments_as_text=as_text) for message in messages],
        "chat_template_kwargs": _variables(request, tokenizer),
    }
    if request.tools:
        prompt["tools"] = [tool.model_dump(exclude_unset=True) for tool in request.tools]
    if request.continue_final_message:
        prompt["continue_final_message"] = True
    return prompt


def _variables(request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The variables of the template. Thinking is a hint where the template cannot switch it. Raises
    `RequestError` if it is to be off and the model always thinks.
    """
    variables, source = dict(request.chat_template_kwargs or {}), "chat_template_kwargs"
    if THINKING_SWITCH not in variables:
        if request.enable_thinking is not None:
            variables[THINKING_SWITCH], source = request.enable_thinking, "enable_thinking"
        elif request.reasoning_effort is not None:
            variables[THINKING_SWITCH] = request.reasoning_effort != "none"
            source = "reasoning_effort"
    if THINKING_SWITCH in tokenizer.template_variables:
        return variables
    if variables.pop(THINKING_SWITCH, None) is False and tokenizer.always_thinks:
        raise RequestError(f"{source}: this model always thinks; leave the field out", source)
    return variables


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
