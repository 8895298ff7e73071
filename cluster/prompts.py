"""The forms in which a program may give prompts and parameters, brought to one."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from cluster.text import Message
from scheduler.errors import RequestError
from scheduler.params import SamplingParams

Prompt = str | Seq[int] | Mapping[str, Any]


def as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def one_each(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    """Parameters for each prompt: the same for all, or a list as long as the prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"got {len(params)} sampling_params for {count} prompts", "sampling_params")
    return list(params)


def conversations(messages: Seq[Message] | Seq[Seq[Message]]) -> list[Prompt]:
    """One conversation or many, as prompts."""
    one = not messages or isinstance(messages[0], Mapping)
    return [{"messages": m} for m in ([messages] if one else messages)]


def only_form(prompt: Mapping[str, Any]) -> Any:
    """What stands under the one key that a mapping must have. Raises `RequestError`."""
    forms = ("prompt", "prompt_token_ids", "messages")
    unknown = [key for key in prompt if key not in (*forms, "cache_salt")]
    if unknown:
        raise RequestError(
            f"unknown key {unknown[0]!r} in a prompt; known are {', '.join(forms)}, cache_salt", "prompt"
        )
    given = [form for form in forms if form in prompt]
    if len(given) != 1:
        raise RequestError(
            f"a prompt has exactly one of {', '.join(forms)}; got {', '.join(given) or 'none'}", "prompt"
        )
    return prompt[given[0]]


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` for a parameter that names a token id beyond the vocabulary."""
    for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids or ())):
        for token_id in ids:
            if token_id >= vocab_size:
                raise RequestError(f"{name}: token id {token_id} is outside the vocabulary of {vocab_size} ids", name)
