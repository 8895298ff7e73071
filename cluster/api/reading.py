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

from cluster.api.schema import RequestModel
from cluster.api.unknown import UnknownFields
from scheduler.bounds import JSON_BOUNDS, check_bound, check_schema_bounds, field_limit, short_repr
from scheduler.errors import RequestError

Request = TypeVar("Request", bound=RequestModel)

SLICE_BYTES = 65_536  # bytes that are counted at a time; other threads may run in between
_BACKSLASH = b"\\"
# Top-level fields that are lists or objects, with their bounds.
_COLLECTION_BOUND_NAMES = {
    "tools": "tools",
    "stop": "stop",
    "stop_sequences": "stop",
    "stop_token_ids": "stop_token_ids",
    "logit_bias": "logit_bias",
    "metadata": "metadata",
    "chat_template_kwargs": "chat_template_kwargs",
}
_STRING_BOUND_NAMES = {
    "model": "model",
    "cache_salt": "cache_salt",
    "user": "user",
    "safety_identifier": "user",
    "prompt_cache_key": "user",
}


def read_request(
    model: type[Request],
    body: bytes,
    max_messages: int | None = None,
    unknown_fields: UnknownFields | None = None,
) -> Request:
    """A request from the bytes of its JSON. `unknown_fields` gets the names of the fields that are
    ignored. Raises `RequestError` naming the field at fault, and `HttpError`.
    """
    values = parse(body)
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object")
    check_bounds(values, field_limit("messages") if max_messages is None else max_messages)
    unknown_fields = UnknownFields() if unknown_fields is None else unknown_fields
    unknown_fields.remove_unknown(
        values,
        model.field_names(),
        fields_without_effect=model.fields_without_effect(),
        refused_fields=model.refused_fields(),
    )
    try:
        return model.model_validate(values, context=unknown_fields)
    except pydantic.ValidationError as error:
        raise _request_error(error) from None


def parse(body: bytes) -> Any:
    """The value of a JSON text. Raises `RequestError` if it is none, or exceeds a bound."""
    check_counts(count_json(body))
    try:
        # The texts that the parser caches by default stay, strewn over 10 MiB of a large body's.
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        if "recursion limit" in str(error):  # the parser's own, above ours
            raise RequestError(
                f"the body has more than {JSON_BOUNDS['depth'].maximum} levels of lists and objects"
            ) from None
        raise RequestError(f"the body is not JSON: {error}") from None


def count_json(text: bytes) -> dict[str, int]:
    """How much a JSON text holds, by the names of the bounds; too much rather than too little. Text
    that is not JSON is counted up to where a parser would notice.
    """
    num_commas, num_quotes, num_containers, num_pairs, num_bytes_outside = 0, 0, 0, 0, 0
    is_in_string, trailing_backslash = False, b""
    for start in range(0, len(text), SLICE_BYTES):
        part = trailing_backslash + text[start : start + SLICE_BYTES]
        if _BACKSLASH in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        # A backslash at the end escapes the first byte of the next slice.
        trailing_backslash = _BACKSLASH if part.endswith(_BACKSLASH) else b""
        quote_separated_parts = part.removesuffix(trailing_backslash).split(b'"')
        bytes_outside_strings = b"".join(quote_separated_parts[is_in_string::2])
        is_in_string ^= len(quote_separated_parts) % 2 == 0
        num_quotes += len(quote_separated_parts) - 1
        num_bytes_outside += len(bytes_outside_strings)
        num_commas += bytes_outside_strings.count(b",")
        num_containers += bytes_outside_strings.count(b"[") + bytes_outside_strings.count(b"{")
        num_pairs += bytes_outside_strings.count(b":")
    # A value is the first one of its container, or follows a comma.
    return {
        "values": 1 + num_commas + num_containers,
        "texts": num_quotes // 2,
        "containers": num_containers,
        "pairs": num_pairs,
        "bare": num_bytes_outside,
    }


def check_counts(counts: Mapping[str, int], place: str = "the body") -> None:
    """Raise `RequestError` for more than the bounds allow."""
    for name, count in counts.items():
        bound = JSON_BOUNDS[name]
        if count > bound.maximum:
            raise RequestError(
                f"{place}: {count} {bound.unit} are too many; at most {bound.maximum} are possible"
            )


def check_bounds(values: dict[str, Any], max_messages: int) -> None:
    """Raise `RequestError` for a body in which something is too long, too many or too deep."""
    for name, bound_name in _COLLECTION_BOUND_NAMES.items():
        if isinstance(collection := values.get(name), list | dict):
            check_bound(bound_name, len(collection), name)
    for name, bound_name in _STRING_BOUND_NAMES.items():
        if isinstance(text := values.get(name), str):
            check_bound(bound_name, len(text), name)
    prompt = values.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        check_bound("prompt", len(prompt), "prompt")
    _check_metadata(values.get("metadata"))
    if isinstance(tools := values.get("tools"), list):
        for index, tool in enumerate(tools):
            _check_tool(tool, f"tools.{index}")
    for name, limit in (
        ("messages", max_messages),
        ("input", max(field_limit("input"), 4 * max_messages)),
    ):
        if isinstance(turns := values.get(name), list):
            check_bound(name, len(turns), name, configured_maximum=limit)
            for index, turn in enumerate(turns):
                _check_turn(turn, f"{name}.{index}", name)
    _check_nesting(values)


def _check_metadata(metadata: object) -> None:
    for item in metadata.items() if isinstance(metadata, dict) else ():
        for text in item:
            if isinstance(text, str):
                check_bound("metadata text", len(text), "metadata")


def _check_tool(tool: object, path: str) -> None:
    """Check the schema of a tool in the form of any of the APIs, and those of a namespace."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    for name in ("parameters", "input_schema"):
        if isinstance(function, dict) and function.get(name) is not None:
            check_schema_bounds(function[name], f"{path}.{name}", "tools")
    if isinstance(tool, dict) and isinstance(tools := tool.get("tools"), list):
        check_bound("tools", len(tools), f"{path}.tools", "tools")
        for number, member in enumerate(tools):
            if isinstance(member, dict) and member.get("parameters") is not None:
                check_schema_bounds(
                    member["parameters"], f"{path}.tools.{number}.parameters", "tools"
                )


def _check_turn(turn: object, path: str, field: str) -> None:
    """Check a message, or an item of a response's input."""
    if not isinstance(turn, dict):
        return
    for name in ("content", "output", "summary"):
        if isinstance(parts := turn.get(name), list):
            check_bound("parts", len(parts), f"{path}.{name}", field)
            for part in parts:
                inner_parts = part.get("content") if isinstance(part, dict) else None
                if isinstance(inner_parts, list):
                    check_bound("parts", len(inner_parts), f"{path}.{name}", field)
    if isinstance(calls := turn.get("tool_calls"), list):
        check_bound("tool_calls", len(calls), f"{path}.tool_calls", field)


def _check_nesting(values: dict[str, Any]) -> None:
    """Check depth, keys of each object, and the arguments of all calls, JSON in texts, together."""
    argument_counts: Counter[str] = Counter()
    level: list[Any] = [values]
    depth = 0
    while level:
        depth += 1
        check_bound("depth", depth, "the body", "")
        next_level: list[Any] = []
        for container in level:
            if isinstance(container, list):
                next_level += [item for item in container if type(item) in (list, dict)]
                continue
            check_bound("keys", len(container), "an object in the body", "")
            next_level += [item for item in container.values() if type(item) in (list, dict)]
            if isinstance(arguments := container.get("arguments"), str):
                argument_counts.update(count_json(arguments.encode()))
        level = next_level
    check_counts(argument_counts, "the arguments of all calls in the body")


def _request_error(error: pydantic.ValidationError) -> RequestError:
    """The error of a body that pydantic refuses."""
    errors = error.errors(include_url=False, include_context=False)
    field = errors[0]["loc"][:1]
    # For a union, pydantic lists the errors of every alternative. The one that was meant is most
    # likely the one whose error lies deepest.
    deepest_error = max((e for e in errors if e["loc"][:1] == field), key=lambda e: len(e["loc"]))
    # Names of kinds, "str" or "list[...]", are no part of the path.
    path = [str(part) for part in deepest_error["loc"] if part != "str" and "[" not in str(part)]
    return RequestError(
        f"{'.'.join(path)[:500]}: {deepest_error['msg']}; got {short_repr(deepest_error['input'])}",
        path[0] if path else None,
    )
