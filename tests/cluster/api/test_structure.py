"""What an answer must match, given tools, tool choice and response format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.api.chats import rules_of
from cluster.api.reading import read_request
from cluster.api.schema import ChatRequest
from cluster.api.structure import structure_of
from cluster.grammar.calls import CallStructure, candidate_formats
from scheduler.errors import RequestError
from scheduler.params import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ODD = {"type": "object", "not": {}}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


ADD, STRICT = tool("add", parameters=SCHEMA), tool("sub", parameters=SCHEMA, strict=True)
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "add"}}


def structure(**fields: Any) -> StructuredOutputs | None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]} | fields).encode()
    request = read_request(ChatRequest, body)
    return structure_of(rules_of(request), request.structure())


def tag(**fields: Any) -> Any:
    """The tightest format of the answer."""
    calls = structure(**fields)
    assert isinstance(calls, CallStructure)
    return next(candidate_formats(calls)).format


def test_response_formats() -> None:
    assert structure() is None
    assert structure(response_format={"type": "text"}) is None
    assert structure(response_format={"type": "json_object"}) == StructuredOutputs(json_object=True)
    assert structure(response_format=FORMAT) == StructuredOutputs(json=SCHEMA)
    assert structure(structured_outputs={"regex": "a+"}) == StructuredOutputs(regex="a+")
    with pytest.raises(RequestError, match="either response_format or structured_outputs"):
        structure(response_format=FORMAT, structured_outputs={"regex": "a+"})


def test_free_tools_stay_free() -> None:
    assert structure(tools=[ADD]) is None
    assert structure(tools=[ADD], tool_choice="auto", parallel_tool_calls=True) is None


@pytest.mark.parametrize(
    ("parallel", "ends_after_one_call"), [(None, False), (True, False), (False, True)]
)
def test_required_tools(parallel: bool | None, ends_after_one_call: bool) -> None:
    required = tag(tools=[ADD, STRICT], tool_choice="required", parallel_tool_calls=parallel)
    assert required["type"] == "tags_with_separator" and required["at_least_one"]
    assert len(required["tags"]) == 2 and required["stop_after_first"] is ends_after_one_call


def test_a_named_tool_is_called_once() -> None:
    named = tag(tools=[STRICT, ADD], tool_choice=NAMED, response_format=FORMAT)
    assert len(named["tags"]) == 1 and named["stop_after_first"]
    assert '"name": "add"' in named["tags"][0]["begin"]


def test_strict_tools_and_single_calls_in_free_text() -> None:
    for fields in ({"tools": [ADD, STRICT]}, {"tools": [ADD], "parallel_tool_calls": False}):
        assert tag(**fields)["type"] == "triggered_tags"
    assert tag(tools=[ADD], parallel_tool_calls=False)["stop_after_first"]


def test_a_format_beside_tools_is_either() -> None:
    either = tag(tools=[ADD], response_format=FORMAT)
    assert [element["type"] for element in either["elements"]] == [
        "json_schema",
        "tags_with_separator",
    ]


def test_a_schema_that_is_not_possible_is_refused_of_strict_tools_alone() -> None:
    required = tag(tools=[tool("odd", parameters=ODD)], tool_choice="required")
    assert required["tags"][0]["content"]["json_schema"] == {
        "type": "object",
        "additionalProperties": True,
    }
    with pytest.raises(RequestError, match=r"the parameters of odd\.not: this keyword"):
        tag(tools=[tool("odd", parameters=ODD, strict=True)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": NAMED}, "there are no tools"),
        ({"tool_choice": NAMED, "tools": [STRICT]}, "'add', which is not among the tools sub"),
    ],
)
def test_a_choice_without_its_tool_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        structure(**fields)
    assert refused.value.parameter == "tool_choice"
