"""Anthropic's Messages API: requests become `Chat`s, and nothing is kept between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cluster.api.chats import Chat, conversation_of, job_of
from cluster.api.endpoints import Job, ServedModel
from cluster.api.messages.blocks import text_of, turns_of
from cluster.api.messages.schema import (
    AnyTool,
    ConversationRequest,
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    TextBlock,
)
from cluster.api.messages.writer import MessageWriter
from cluster.api.omissions import Omissions
from cluster.api.replies import Writer
from cluster.api.schema import Function, GenerationRequest
from cluster.api.structure import CallRules, call_rules
from cluster.client.outputs import Generation
from cluster.client.prompts import Message
from cluster.client.tokenizer import Tokenizer
from cluster.grammar.markers import THINKING_SWITCH, answer_state_after
from scheduler.errors import RequestError
from scheduler.params import StructuredOutputs

# How the line begins that Claude Code puts first in its system prompt. It differs between sessions,
# so that nothing behind it would be cached for the next one.
BILLING_HEADER = "x-anthropic-billing-header:"


def messages_job(request: MessagesRequest, served_model: ServedModel) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    omissions = Omissions(refuse=served_model.refuse_unknown)
    options = GenerationRequest.model_construct(
        stream=request.stream,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )
    chat = _chat(request, served_model, omissions)
    job = job_of(
        dataclasses.replace(chat, max_tokens=request.max_tokens, options=options), served_model
    )

    def make_writer(generations: list[Generation]) -> Writer:
        state = answer_state_after(generations[0].prompt or "")
        looks_for_calls = bool(chat.rules.tools)
        return MessageWriter(
            served_model.name, generations[0], state=state, looks_for_calls=looks_for_calls
        )

    return dataclasses.replace(job, make_writer=make_writer, ignored=omissions.names)


def count_tokens(request: CountTokensRequest, served_model: ServedModel) -> dict[str, Any]:
    """The answer of `/v1/messages/count_tokens`."""
    omissions = Omissions(refuse=served_model.refuse_unknown)
    chat = _chat(request, served_model, omissions)
    return {"input_tokens": len(served_model.builder.encode(chat.prompt))}


def _chat(request: ConversationRequest, served_model: ServedModel, omissions: Omissions) -> Chat:
    served_model.check_name(request.model)
    if request.messages[-1].role == "assistant":
        raise RequestError(
            "the last message must be of role user: continuing the beginning of an answer is not"
            " supported",
            "messages",
        )
    for name in ("container", "mcp_servers"):
        if getattr(request, name):
            omissions.add(name)
    tokenizer = served_model.tokenizer_for("a chat")
    arguments_as_text = tokenizer.takes_arguments_as_text
    system = _system(request.system or "", served_model.keep_billing_header)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages += turns_of(request.messages, omissions, arguments_as_text=arguments_as_text)
    rules = _rules(request, omissions)
    variables = _template_values(request, tokenizer)
    return Chat(
        conversation=conversation_of(messages, rules.tools, variables, served_model),
        rules=rules,
        structure=_structure(request),
        options=GenerationRequest.model_construct(),
    )


def _system(content: str | Sequence[TextBlock], keep_billing_header: bool) -> str:
    """The system prompt, by default without a first line about billing."""
    text = text_of(content)
    if keep_billing_header or not text.startswith(BILLING_HEADER):
        return text
    return text.partition("\n")[2]


def _rules(request: ConversationRequest, omissions: Omissions) -> CallRules:
    tools, choice = _functions(request.tools or (), omissions), request.tool_choice
    if choice is None:
        return call_rules(tools, None)
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("tool_choice: a name goes with type 'tool'", "tool_choice")
    return call_rules(
        tools,
        "required" if choice.type == "any" else choice.type,
        named_tool=choice.name,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
    )


def _functions(tools: Sequence[AnyTool], omissions: Omissions) -> list[Function]:
    """The tools with a schema; others only Anthropic's models know, or would be run here."""
    functions = []
    for tool in tools:
        if isinstance(tool, CustomTool):
            functions.append(
                Function.model_construct(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=tool.strict,
                )
            )
        else:
            omissions.add(f"tools.{tool.type}")
    return functions


def _structure(request: ConversationRequest) -> StructuredOutputs | None:
    output_format = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        if output_format is not None:
            raise RequestError("give either output_config.format or output_format", "output_config")
        output_format = request.output_config.format
    return None if output_format is None else StructuredOutputs(json=output_format.schema_)


def _template_values(request: ConversationRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """Whether the model thinks, for templates that can switch it. `thinking` decides; without it,
    an effort other than `none` asks for it; with neither, it is off.
    """
    effort = request.output_config.effort if request.output_config is not None else None
    thinks = effort not in (None, "none")
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
    return {THINKING_SWITCH: thinks} if THINKING_SWITCH in tokenizer.template_variables else {}
