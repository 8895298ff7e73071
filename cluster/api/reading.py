"""From the bytes of a body to a request, within the bounds of `scheduler/bounds.py`.

The order is what keeps a hostile body from hurting other requests: its values are counted in the
bytes, before the parser makes an object of each; lists and texts are measured in the plain objects,
before pydantic makes models of them; and pydantic stops at the first error of a list. Each step
holds the interpreter for at most about 30 ms, so that in a thread it does not stall an event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic
from pydantic_core import from_json

from cluster.api.schema import Model
from cluster.api.unknown import Unknown
from scheduler.bounds import JSON_BOUNDS, check, check_schema, most, shown
from scheduler.errors import RequestError

Request = TypeVar("Request", bound=Model)

SLICE = 65_536  # bytes that are counted at a time; other threads may run in between
_BACKSLASH = b"\\"
# Top-level fields that are lists or objects, with their bounds.
_COUNTED = {
    "tools": "tools",
    "stop": "stop",
    "stop_sequences": "stop",
    "stop_token_ids": "stop_token_ids",
    "logit_bias": "logit_bias",
    "metadata": "metadata",
    "chat_template_kwargs": "chat_template_kwargs",
}
_LENGTHS = {
    "model": "model",
    "cache_salt": "cache_salt",
    "user": "user",
    "safety_identifier": "user",
    "prompt_cache_key": "user",
}


def read(
    model: type[Request],
    body: bytes,
    max_messages: int | None = None,
    unknown: Unknown | None = None,
) -> Request:
    """A request from the bytes of its JSON. `unknown` gets the names of the fields that are
    ignored. Raises `RequestError` naming the field at fault, and `HttpError`.
    """
    values = parse(body)
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object")
    check_bounds(values, most("messages") if max_messages is None else max_messages)
    unknown = Unknown() if unknown is None else unknown
    unknown.remove_unknown(
        values,
        model.names(),
        without_effect=model.without_effect(),
        refused=model.refused(),
    )
    try:
        return model.model_validate(values, context=unknown)
    except pydantic.ValidationError as error:
        raise _refused(error) from None


def parse(body: bytes) -> Any:
    """The value of a JSON text. Raises `RequestError` if it is none, or exceeds a bound."""
    check_counts(count_json(body))
    try:
        # The texts that the parser caches by default stay, strewn over 10 MiB of a large body's.
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        if "recursion limit" in str(error):  # the parser's own, above ours
            raise RequestError(
                f"the body has more than {JSON_BOUNDS['depth'].most} levels of lists and objects"
            ) from None
        raise RequestError(f"the body is not JSON: {error}") from None


def count_json(text: bytes) -> dict[str, int]:
    """How much a JSON text holds, by the names of the bounds; too much rather than too little. Text
    that is not JSON is counted up to where a parser would notice.
    """
    commas, quotes, containers, pairs, bare = 0, 0, 0, 0, 0
    is_in_text, carried = False, b""
    for start in range(0, len(text), SLICE):
        part = carried + text[start : start + SLICE]
        if _BACKSLASH in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        # A backslash at the end escapes the first byte of the next slice.
        carried = _BACKSLASH if part.endswith(_BACKSLASH) else b""
        between_quotes = part.removesuffix(carried).split(b'"')
        outside = b"".join(between_quotes[is_in_text::2])
        is_in_text ^= len(between_quotes) % 2 == 0
        quotes += len(between_quotes) - 1
        bare += len(outside)
        commas += outside.count(b",")
        containers += outside.count(b"[") + outside.count(b"{")
        pairs += outside.count(b":")
    # A value is the first one of its container, or follows a comma.
    return {
        "values": 1 + commas + containers,
        "texts": quotes // 2,
        "containers": containers,
        "pairs": pairs,
        "bare": bare,
    }


def check_counts(counts: Mapping[str, int], path: str = "the body") -> None:
    """Raise `RequestError` for more than the bounds allow."""
    for name, count in counts.items():
        bound = JSON_BOUNDS[name]
        if count > bound.most:
            raise RequestError(
                f"{path}: {count} {bound.unit} are too many; at most {bound.most} are possible"
            )


def check_bounds(values: dict[str, Any], max_messages: int) -> None:
    """Raise `RequestError` for a body in which something is too long, too many or too deep."""
    for name, bound in _COUNTED.items():
        if isinstance(field := values.get(name), list | dict):
            check(bound, len(field), name)
    for name, bound in _LENGTHS.items():
        if isinstance(text := values.get(name), str):
            check(bound, len(text), name)
    prompt = values.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        check("prompt", len(prompt), "prompt")
    _check_metadata(values.get("metadata"))
    if isinstance(tools := values.get("tools"), list):
        for index, tool in enumerate(tools):
            _check_tool(tool, f"tools.{index}")
    for name, limit in (
        ("messages", max_messages),
        ("input", max(most("input"), 4 * max_messages)),
    ):
        if isinstance(turns := values.get(name), list):
            check(name, len(turns), name, most=limit)
            for index, turn in enumerate(turns):
                _check_turn(turn, f"{name}.{index}", name)
    _check_nesting(values)


def _check_metadata(metadata: object) -> None:
    for item in metadata.items() if isinstance(metadata, dict) else ():
        for text in item:
            if isinstance(text, str):
                check("metadata text", len(text), "metadata")


def _check_tool(tool: object, path: str) -> None:
    """Check the schema of a tool in the form of any of the APIs, and those of a namespace."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    for name in ("parameters", "input_schema"):
        if isinstance(inner, dict) and inner.get(name) is not None:
            check_schema(inner[name], f"{path}.{name}", "tools")
    if isinstance(tool, dict) and isinstance(tools := tool.get("tools"), list):
        check("tools", len(tools), f"{path}.tools", "tools")
        for number, member in enumerate(tools):
            if isinstance(member, dict) and member.get("parameters") is not None:
                check_schema(member["parameters"], f"{path}.tools.{number}.parameters", "tools")


def _check_turn(turn: object, path: str, field: str) -> None:
    """Check a message, or an item of a response's input."""
    if not isinstance(turn, dict):
        return
    for name in ("content", "output", "summary"):
        if isinstance(parts := turn.get(name), list):
            check("parts", len(parts), f"{path}.{name}", field)
            for part in parts:
                inner = part.get("content") if isinstance(part, dict) else None
                if isinstance(inner, list):
                    check("parts", len(inner), f"{path}.{name}", field)
    if isinstance(calls := turn.get("tool_calls"), list):
        check("tool_calls", len(calls), f"{path}.tool_calls", field)


def _check_nesting(values: dict[str, Any]) -> None:
    """Check depth, the keys of each object, and all arguments of calls, which are JSON in a text,
    together.
    """
    total: Counter[str] = Counter()
    level: list[Any] = [values]
    depth = 0
    while level:
        depth += 1
        check("depth", depth, "the body", "")
        deeper: list[Any] = []
        for container in level:
            if isinstance(container, list):
                deeper += [item for item in container if type(item) in (list, dict)]
                continue
            check("keys", len(container), "an object in the body", "")
            deeper += [item for item in container.values() if type(item) in (list, dict)]
            if isinstance(arguments := container.get("arguments"), str):
                total.update(count_json(arguments.encode()))
        level = deeper
    check_counts(total, "the arguments of all calls in the body")


def _refused(error: pydantic.ValidationError) -> RequestError:
    """The error of a body that pydantic refuses."""
    errors = error.errors(include_url=False, include_context=False)
    field = errors[0]["loc"][:1]
    # For a union, pydantic lists the errors of every alternative. The one that was meant is most
    # likely the one whose error lies deepest.
    deepest = max((e for e in errors if e["loc"][:1] == field), key=lambda e: len(e["loc"]))
    # Names of kinds, "str" or "list[...]", are no part of the path.
    path = [str(part) for part in deepest["loc"] if part != "str" and "[" not in str(part)]
    return RequestError(
        f"{'.'.join(path)[:500]}: {deepest['msg']}; got {shown(deepest['input'])}",
        path[0] if path else None,
    )
