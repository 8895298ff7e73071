"""The forms of prompts and parameters, each checked once and converted to a common one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from scheduler.bounds import check_bound, short_repr
from scheduler.errors import RequestError
from scheduler.params import SamplingParams, is_token_id

PROMPT_FORMS = {
    "prompt": (str, "text"),
    "prompt_token_ids": (list | tuple, "a list of token ids"),
    "messages": (list | tuple, "a list of {role, content}"),
}
Message = dict[str, Any]

# What a mapping may have beside its prompt; the last three go with messages.
_CONVERSATION_KEYS = ("tools", "chat_template_kwargs", "continue_final_message")
EXTRA_KEYS = ("cache_salt", "session_id", *_CONVERSATION_KEYS)
# Variables of templates that have another place in a prompt, or in this server.
_RESERVED_VARIABLES = (
    *("messages", "tools", "documents", "add_generation_prompt"),
    *("tokenize", "chat_template"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages and everything else that the chat template gets: tools (JSON schemas of functions,
    as in OpenAI's API) and variables of the template, such as `enable_thinking`.

    continues_last_message: the last message is the beginning of the answer, which continues it.
    Raises `RequestError` for variables that have another place, and for what cannot be continued.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)
    continues_last_message: bool = False

    def __post_init__(self) -> None:
        if any(name in self.template_variables for name in _RESERVED_VARIABLES):
            raise _variables_error(self.template_variables)
        if self.continues_last_message:
            last_message = self.messages[-1]
            text = last_message["content"] if last_message["role"] == "assistant" else None
            if not (isinstance(text, str) and text.strip()):
                raise RequestError(
                    "continue_final_message needs a last message of role assistant with text, got"
                    f" {short_repr(last_message)}",
                    "continue_final_message",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedPrompt:
    """A prompt in exactly one of three forms (a rendered conversation has its text too); only the
    form has been checked. session_id: where there are several engines, the requests of one session
    go to the same one.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    conversation: Conversation | None = None
    cache_salt: str = ""
    session_id: str | None = None


Prompt = str | Seq[int] | Mapping[str, Any] | ParsedPrompt


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """Raises `RequestError` for a prompt in no known form, and for unknown keys."""
    if isinstance(prompt, ParsedPrompt):
        return prompt
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(token_ids=_token_ids(prompt))
    form = form_of(prompt)
    value: Any = prompt[form]
    expected_type, description = PROMPT_FORMS[form]
    if not isinstance(value, expected_type):
        raise RequestError(f"{form} must be {description}, got {type(value).__name__}", form)
    salt = prompt.get("cache_salt", "")
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be text, got {type(salt).__name__}", "cache_salt")
    check_bound("cache_salt", len(salt), "cache_salt")
    session = prompt.get("session_id")
    if not isinstance(session, str | None):
        raise RequestError(f"session_id must be text, got {type(session).__name__}", "session_id")
    options: dict[str, Any] = {"cache_salt": salt, "session_id": session}
    if form == "messages":
        return ParsedPrompt(conversation=_conversation(prompt), **options)
    for key in _CONVERSATION_KEYS:
        if key in prompt:
            raise RequestError(f"{key} needs messages, and this prompt gives {form}", key)
    if isinstance(value, str):
        return ParsedPrompt(text=value, **options)
    return ParsedPrompt(token_ids=_token_ids(value), **options)


def form_of(prompt: Mapping[str, Any], other_keys: tuple[str, ...] = EXTRA_KEYS) -> str:
    """The form in which a mapping has its prompt. Raises `RequestError`, for unknown keys too."""
    possible_keys = (*PROMPT_FORMS, *other_keys)
    unknown_keys = [key for key in prompt if key not in possible_keys]
    if unknown_keys:
        raise RequestError(
            f"unknown key {short_repr(unknown_keys[0])}; known are {', '.join(possible_keys)}",
            "prompt",
        )
    forms = [form for form in PROMPT_FORMS if form in prompt]
    if len(forms) != 1:
        raise RequestError(
            f"a prompt needs exactly one of {', '.join(PROMPT_FORMS)}; has"
            f" {', '.join(forms) or 'none'}",
            "prompt",
        )
    return forms[0]


def as_prompt_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. Raises `RequestError` for anything else."""
    if isinstance(prompts, str | Mapping | ParsedPrompt):
        return [prompts]
    if not isinstance(prompts, Seq):
        raise RequestError(
            "prompts are text, a list of token ids, a mapping, or a list of these; got"
            f" {type(prompts).__name__}",
            "prompt",
        )
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def broadcast_params(
    params: SamplingParams | Seq[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    """Parameters per prompt: the same, or a list of as many. Raises `RequestError`."""
    params_list: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * count
    wrong_params = [p for p in params_list if not isinstance(p, SamplingParams | None)]
    if wrong_params:
        raise RequestError(
            "sampling_params must be a SamplingParams or a list with one per prompt, got"
            f" {type(wrong_params[0]).__name__}; use SamplingParams.from_dict to make one from a"
            " dict",
            "sampling_params",
        )
    if len(params_list) != count:
        raise RequestError(
            f"got {len(params_list)} sampling_params for {count} prompts", "sampling_params"
        )
    return params_list


def conversations(messages: Seq[Message] | Seq[Seq[Message]]) -> list[Prompt]:
    """One conversation or many, as prompts. Raises `RequestError` for anything else."""
    if not isinstance(messages, list | tuple):
        raise RequestError(
            "messages must be a list of {role, content}, or a list of such lists; got"
            f" {type(messages).__name__}",
            "messages",
        )
    is_single = not messages or isinstance(messages[0], Mapping)
    return [{"messages": m} for m in ([messages] if is_single else messages)]


def _conversation(prompt: Mapping[str, Any]) -> Conversation:
    """The messages of a prompt with all else that the template gets. Raises `RequestError`."""
    tools, variables = prompt.get("tools"), prompt.get("chat_template_kwargs") or {}
    is_list_of_objects = isinstance(tools, list | tuple) and all(
        isinstance(tool, Mapping) for tool in tools
    )
    if tools is not None and not is_list_of_objects:
        raise RequestError(
            f"tools must be a list of JSON objects, got {short_repr(tools)}", "tools"
        )
    if not isinstance(variables, Mapping):
        raise _variables_error(variables)
    messages = check_messages(prompt["messages"])
    continues_flag = prompt.get("continue_final_message")
    if not isinstance(continues_flag, bool | None):
        raise RequestError(
            f"continue_final_message must be true or false, got {short_repr(continues_flag)}",
            "continue_final_message",
        )
    return Conversation(
        messages=messages,
        tools=list(tools) if tools else None,
        template_variables=dict(variables),
        continues_last_message=bool(continues_flag),
    )


def _variables_error(variables: object) -> RequestError:
    return RequestError(
        f"chat_template_kwargs must be an object without {', '.join(_RESERVED_VARIABLES)};"
        f" got {short_repr(variables)}",
        "chat_template_kwargs",
    )


def check_messages(messages: object) -> list[Message]:
    """The messages as a list, each content a text or None. Raises `RequestError` unless each has a
    role and content.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a non-empty list of {role, content}", "messages")
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not is_message or "content" not in message:
            raise RequestError(
                f"each message needs a role and content, got {short_repr(message)}", "messages"
            )
    return [{**message, "content": _content_text(message["content"])} for message in messages]


def _content_text(content: object) -> str | None:
    """The content of a message as text, for templates write anything else as Python does, or leave
    it out. Raises `RequestError`.
    """
    if isinstance(content, str | None):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    wrong_parts = [part for part in parts if not _is_text_part(part)]
    if parts is not content or wrong_parts:
        raise RequestError(
            'the content of a message must be text, None, or a list of {"type": "text", "text":'
            f" ...}}; got {short_repr(wrong_parts[0] if wrong_parts else content)}",
            "messages",
        )
    return join_parts(part["text"] for part in parts)


def _is_text_part(part: object) -> bool:
    if not isinstance(part, Mapping):
        return False
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def join_parts(texts: Iterable[str]) -> str:
    """The content of a message that comes in parts, from Python or over HTTP."""
    return "\n".join(texts)


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list | tuple):
        raise RequestError(
            f"a prompt is text or a list of token ids, got {type(value).__name__}", "prompt"
        )
    for token in value:
        if type(token) is not int:
            raise RequestError(
                "a prompt is text or a list of token ids, got a list that holds"
                f" {short_repr(token)}",
                "prompt",
            )
    return list(value)


def check_token_ids(token_ids: Seq[object], key: str) -> None:
    """Raise `RequestError` naming `key` for a value that cannot be a token id of any vocabulary."""
    wrong_ids = [value for value in token_ids if not is_token_id(value)]
    if wrong_ids:
        raise RequestError(f"{key} holds {short_repr(wrong_ids[0])}, which is not a token id", key)
