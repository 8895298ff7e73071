"""OpenAI's Responses API: requests become `Chat`s, and nothing is kept between them."""

from __future__ import annotations

import dataclasses
from typing import Any

from cluster.api.chats import Chat, conversation_of, job_of, template_values
from cluster.api.endpoints import Job, ServedModel
from cluster.api.omissions import Omissions
from cluster.api.replies import Writer
from cluster.api.responses.items import messages_of
from cluster.api.responses.schema import (
    AllowedTools,
    NamedTool,
    ResponseFormat,
    ResponsesRequest,
    SchemaFormat,
)
from cluster.api.responses.tools import ToolTable
from cluster.api.responses.writer import ResponseWriter
from cluster.api.schema import GenerationRequest, JsonObjectFormat, RequestModel, schema_structure
from cluster.api.structure import CallRules, call_rules
from cluster.client.outputs import Generation
from cluster.grammar.markers import answer_state_after
from scheduler.params import StructuredOutputs

# Fields that have the name and the meaning of those of `GenerationRequest`.
_COPIED_FIELDS = (
    *("stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "cache_salt"),
)


def responses_job(request: ResponsesRequest, served_model: ServedModel) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    omissions = Omissions(refuse=served_model.refuse_unknown)
    tool_table = ToolTable(request.tools or [], omissions)
    job = job_of(_chat(request, tool_table, served_model, omissions), served_model)
    looks_for_calls = bool(tool_table.functions) and request.tool_choice != "none"

    def make_writer(generations: list[Generation]) -> Writer:
        [generation] = generations
        assert served_model.tokenizer is not None
        return ResponseWriter(
            _echo(request, tool_table, job, served_model.name),
            generation,
            served_model.tokenizer,
            state=answer_state_after(generation.prompt or ""),
            tools=tool_table if looks_for_calls else None,
            summarizes=request.reasoning is not None and request.reasoning.wants_summary,
            includes_encrypted_content=request.includes_encrypted_content,
            logprobs=request.num_top_logprobs is not None,
        )

    return dataclasses.replace(job, make_writer=make_writer, ignored=omissions.names)


def count_input(request: ResponsesRequest, served_model: ServedModel) -> dict[str, Any]:
    """The answer of `/v1/responses/input_tokens`."""
    omissions = Omissions(refuse=served_model.refuse_unknown)
    tool_table = ToolTable(request.tools or [], omissions)
    chat = _chat(request, tool_table, served_model, omissions)
    num_tokens = len(served_model.builder.encode(chat.prompt))
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _chat(
    request: ResponsesRequest,
    tool_table: ToolTable,
    served_model: ServedModel,
    omissions: Omissions,
) -> Chat:
    served_model.check_name(request.model)
    tokenizer = served_model.tokenizer_for("a chat")
    arguments_as_text = tokenizer.takes_arguments_as_text
    messages = messages_of(request.input, omissions, arguments_as_text=arguments_as_text)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    rules = _rules(request, tool_table)
    effort = request.reasoning.effort if request.reasoning is not None else None
    variables = template_values(tokenizer, request.chat_template_kwargs, reasoning_effort=effort)
    return Chat(
        conversation=conversation_of(messages, rules.tools, variables, served_model),
        rules=rules,
        structure=_structure(request),
        max_tokens=request.max_output_tokens,
        logprobs=request.num_top_logprobs,
        options=GenerationRequest.model_construct(
            **{name: getattr(request, name) for name in _COPIED_FIELDS}
        ),
    )


def _rules(request: ResponsesRequest, tool_table: ToolTable) -> CallRules:
    tools, choice = tool_table.functions, request.tool_choice
    parallel_tool_calls = request.parallel_tool_calls
    if isinstance(choice, NamedTool):
        return call_rules(
            tools, None, named_tool=choice.name, parallel_tool_calls=parallel_tool_calls
        )
    if isinstance(choice, AllowedTools):
        names = {tool.name for tool in choice.tools}
        return call_rules(
            tools, choice.mode, allowed_names=names, parallel_tool_calls=parallel_tool_calls
        )
    return call_rules(tools, choice, parallel_tool_calls=parallel_tool_calls)


def _structure(request: ResponsesRequest) -> StructuredOutputs | None:
    text_format = request.text.format if request.text is not None else None
    if not isinstance(text_format, JsonObjectFormat | SchemaFormat):
        return None
    return schema_structure(text_format.schema_)


def _echo_of_format(text_format: ResponseFormat | None) -> dict[str, Any]:
    if text_format is None:
        return {"type": "text"}
    return text_format.model_dump(
        by_alias=True, exclude_unset=not isinstance(text_format, SchemaFormat)
    )


def _echo(request: ResponsesRequest, tool_table: ToolTable, job: Job, model: str) -> dict[str, Any]:
    """What an answer repeats of its request, with the defaults that were used. Of the tools, it has
    those that the model may be offered."""
    choice, text, reasoning = request.tool_choice, request.text, request.reasoning
    text_format = text.format if text is not None else None
    return {
        "model": model,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "store": False,
        "temperature": job.params.temperature,
        "top_p": job.params.top_p,
        "text": {"format": _echo_of_format(text_format)},
        "tool_choice": choice.model_dump()
        if isinstance(choice, RequestModel)
        else choice or "auto",
        "tools": [tool.model_dump() for tool in tool_table.tools],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "background": False,
    }
