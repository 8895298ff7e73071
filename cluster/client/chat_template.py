"""A checkpoint's chat template, rendered as transformers would, whose import takes seconds."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.client.prompts import Conversation, Message


class ChatTemplate:
    """variables: the names that the template reads. takes_arguments_as_text: whether the arguments
    of a call may be JSON text, so that a prompt repeats exactly what was generated, or are objects.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """`special_tokens`: their texts by name, such as `eos_token`. Raises jinja2's errors."""
        environment = _environment()
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        self.takes_arguments_as_text = bool(re.search(r"arguments\s+is\s+string", source))

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation, up to where the assistant answers; all of it if the answer
        continues its last message. Raises whatever the template, a program, raises.
        """
        return self._template.render(
            messages=[_template_message(message) for message in conversation.messages],
            tools=conversation.tools,
            documents=None,
            add_generation_prompt=not conversation.continues_last_message,
            **self._special_tokens | conversation.template_variables,
        )


def _template_message(message: Message) -> Message:
    """A message without null fields, and with its reasoning under each name that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in message:
            return {"thinking": message[name]} | message | {"reasoning_content": message[name]}
    return message


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model was trained on. It changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
    """Set up as in transformers: a sandbox, for the template is code of the checkpoint."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
