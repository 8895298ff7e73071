"""Chats, whichever API asks for them. OpenAI's chat completions are here; `messages/` and
`responses/` are adapters. Each makes a `Chat` of its requests, whose conversation has the form that
the chat template reads, and `job_of` makes a job of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.api.endpoints import Job, ServedModel, first_not_none, make_job
from cluster.api.replies import ChatWriter, Writer
from cluster.api.schema import (
    AllowedTools,
    ChatRequest,
    Function,
    GenerationRequest,
    NamedTool,
    TokenizeRequest,
)
from cluster.api.structure import CallRules, call_rules, structure_of
from cluster.client.outputs import Generation
from cluster.client.prompts import Conversation, Message, ParsedPrompt
from cluster.client.tokenizer import Tokenizer
from cluster.grammar.markers import THINKING_SWITCH, answer_state_after
from scheduler.bounds import check_bound, field_limit
from scheduler.errors import RequestError
from scheduler.params import MAX_LOGPROBS, StructuredOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a chat asks for. structure: what an answer without calls must match. max_tokens: None
    for the server's default, or else as many as possible. logprobs: how many alternatives of each
    token to report, None for no log probabilities. options: how to sample and to send the answer.
    """

    conversation: Conversation
    rules: CallRules
    structure: StructuredOutputs | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    options: GenerationRequest

    @property
    def prompt(self) -> ParsedPrompt:
        salt = self.options.cache_salt or ""
        return ParsedPrompt(conversation=self.conversation, cache_salt=salt)


def conversation_of(
    messages: list[Message],
    tools: Sequence[Function],
    variables: dict[str, Any],
    served_model: ServedModel,
    *,
    continues_last_message: bool = False,
) -> Conversation:
    """Raises `RequestError`, as `Conversation` and for too many messages."""
    check_bound("messages", len(messages), "messages", configured_maximum=served_model.max_messages)
    return Conversation(
        messages=messages,
        tools=[tool.for_template() for tool in tools] or None,
        template_variables=variables,
        continues_last_message=continues_last_message,
    )


def template_values(
    tokenizer: Tokenizer,
    template_kwargs: dict[str, Any] | None,
    *,
    enable_thinking: bool | None = None,
    reasoning_effort: str | None = None,
) -> dict[str, Any]:
    """Values of the template's variables: those that are given, and the one that switches thinking.
    Thinking is a hint where the template cannot switch it. Raises `RequestError` if it is to be off
    and the model always thinks.
    """
    variables, field = dict(template_kwargs or {}), "chat_template_kwargs"
    if THINKING_SWITCH not in variables:
        if enable_thinking is not None:
            variables[THINKING_SWITCH], field = enable_thinking, "enable_thinking"
        elif reasoning_effort is not None:
            variables[THINKING_SWITCH] = reasoning_effort != "none"
            field = "reasoning_effort"
    if THINKING_SWITCH in tokenizer.template_variables:
        return variables
    # Without a switch, a model that thinks by default always does.
    if variables.pop(THINKING_SWITCH, None) is False and tokenizer.thinks_by_default:
        raise RequestError(f"{field}: this model always thinks; leave the field out", field)
    return variables


def chat_job(request: ChatRequest, served_model: ServedModel) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    return job_of(chat_of(request, served_model), served_model)


def chat_of(request: ChatRequest, served_model: ServedModel) -> Chat:
    """Raises as `chat_job`."""
    served_model.check_name(request.model)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    rules = rules_of(request)
    max_tokens = request.max_completion_tokens
    return Chat(
        conversation=_conversation(request, rules.tools, served_model, "a chat"),
        rules=rules,
        structure=request.structure(),
        max_tokens=request.max_tokens if max_tokens is None else max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        options=request,
    )


def rules_of(request: ChatRequest) -> CallRules:
    """Raises `RequestError`."""
    tools = [tool.function for tool in request.tools or ()]
    choice, parallel_tool_calls = request.tool_choice, request.parallel_tool_calls
    if isinstance(choice, NamedTool):
        return call_rules(
            tools, None, named_tool=choice.function.name, parallel_tool_calls=parallel_tool_calls
        )
    if isinstance(choice, AllowedTools):
        allowed = choice.allowed_tools
        names = {tool.function.name for tool in allowed.tools}
        return call_rules(
            tools, allowed.mode, allowed_names=names, parallel_tool_calls=parallel_tool_calls
        )
    return call_rules(tools, choice, parallel_tool_calls=parallel_tool_calls)


def job_of(chat: Chat, served_model: ServedModel) -> Job:
    """Raises `RequestError`."""
    tokenizer, options = served_model.tokenizer_for("a chat"), chat.options
    structure = structure_of(chat.rules, chat.structure)
    default_max_tokens = served_model.builder.limits.max_total_tokens
    if chat.logprobs is not None:
        if not 0 <= chat.logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {chat.logprobs}",
                "top_logprobs",
            )
        # A client that names no length gets as many tokens as are possible.
        num_outputs = options.n or served_model.builder.sampling_defaults.n or 1
        max_tokens_with_logprobs = field_limit("alternatives") // (
            num_outputs * (1 + chat.logprobs)
        )
        default_max_tokens = max(1, min(default_max_tokens, max_tokens_with_logprobs))
    params = options.sampling_params(
        max_tokens=first_not_none(
            chat.max_tokens, served_model.builder.sampling_defaults.max_tokens, default_max_tokens
        ),
        logprobs=chat.logprobs,
        structure=structure,
    )

    def make_writer(generations: list[Generation]) -> Writer:
        return ChatWriter(
            served_model.name,
            generations,
            tokenizer,
            state=answer_state_after(generations[0].prompt or ""),
            looks_for_calls=bool(chat.rules.tools),
            includes_token_ids=bool(options.return_token_ids),
            num_prompt_top_logprobs=options.prompt_logprobs,
        )

    return make_job(options, served_model, [chat.prompt], params, make_writer)


def tokenize(request: TokenizeRequest, served_model: ServedModel) -> dict[str, Any]:
    """The answer of `/tokenize`."""
    served_model.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if request.prompt is not None:
        for name in ("tools", "chat_template_kwargs", "continue_final_message"):
            if getattr(request, name):
                raise RequestError(f"{name} needs messages", name)
        prompt = ParsedPrompt(text=request.prompt)
    else:
        tools = [tool.function for tool in request.tools or ()]
        conversation = _conversation(request, tools, served_model, "tokenizing")
        prompt = ParsedPrompt(conversation=conversation)
    token_ids = served_model.builder.encode(prompt)
    return {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": served_model.builder.limits.max_model_len,
    }


def _conversation(
    request: ChatRequest | TokenizeRequest,
    tools: Sequence[Function],
    served_model: ServedModel,
    purpose: str,
) -> Conversation:
    """The conversation of a request, which must have one. Raises `RequestError`."""
    tokenizer = served_model.tokenizer_for(purpose)
    variables = template_values(
        tokenizer,
        request.chat_template_kwargs,
        enable_thinking=request.enable_thinking,
        reasoning_effort=request.reasoning_effort,
    )
    continues_last_message = bool(request.continue_final_message)
    if request.add_generation_prompt is continues_last_message:
        raise RequestError(
            "add_generation_prompt is false where continue_final_message is true, and true"
            " otherwise; leave it out",
            "add_generation_prompt",
        )
    as_text = tokenizer.takes_arguments_as_text
    messages = [m.for_template(arguments_as_text=as_text) for m in request.messages or ()]
    return conversation_of(
        messages, tools, variables, served_model, continues_last_message=continues_last_message
    )
