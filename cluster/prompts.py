"""The forms in which a program may give prompts and parameters, brought to one."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from cluster.text import Message
from scheduler.errors import RequestError
from scheduler.params import SamplingParams

FORMS = ("prompt", "prompt_token_ids", "messages")
Prompt = str | Seq[int] | Mapping[str, Any]


def as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. Raises `RequestError` for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Seq):
        raise RequestError(
            f"prompts are text, a list of token ids, a mapping, or a list of these; got {type(prompts).__name__}",
            "prompt",
        )
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def one_each(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    """Parameters for each prompt: the same for all, or a list as long as the prompts. Raises `RequestError`."""
    each: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * count
    wrong = [type(p).__name__ for p in each if not isinstance(p, SamplingParams | None)]
    if wrong:
        raise RequestError(
            f"sampling_params must be a SamplingParams or a list of one a prompt, got {wrong[0]}; "
            "SamplingParams.from_dict makes one of a dict",
            "sampling_params",
        )
    if len(each) != count:
        raise RequestError(f"got {len(each)} sampling_params for {count} prompts", "sampling_params")
    return each


def conversations(messages: Seq[Message] | Seq[Seq[Message]]) -> list[Prompt]:
    """One conversation or many, as prompts. Raises `RequestError` for what is neither."""
    if not isinstance(messages, list | tuple):
        raise RequestError(
            f"messages must be a list of {{role, content}}, or a list of such lists; got {type(messages).__name__}",
            "messages",
        )
    one = not messages or isinstance(messages[0], Mapping)
    return [{"messages": m} for m in ([messages] if one else messages)]


def form_of(prompt: Mapping[str, Any], other_keys: tuple[str, ...] = ("cache_salt",)) -> str:
    """The one form in which a mapping gives its prompt. Raises `RequestError`, for unknown keys as well."""
    known = (*FORMS, *other_keys)
    unknown = [key for key in prompt if key not in known]
    if unknown:
        raise RequestError(f"unknown key {unknown[0]!r}; known are {', '.join(known)}", "prompt")
    given = [form for form in FORMS if form in prompt]
    if len(given) != 1:
        raise RequestError(
            f"a prompt needs exactly one of {', '.join(FORMS)}; has {', '.join(given) or 'none'}", "prompt"
        )
    return given[0]


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` for a parameter that names a token id beyond the vocabulary."""
    for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids or ())):
        for token_id in ids:
            if token_id >= vocab_size:
                raise RequestError(f"{name}: token id {token_id} is outside the vocabulary of {vocab_size} ids", name)
