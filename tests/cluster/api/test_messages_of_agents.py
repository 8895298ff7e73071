"""What agents send to the Messages API, in the shapes of their requests."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from cluster.api.messages.adapter import count_tokens, messages_job
from cluster.api.messages.schema import CountTokensRequest, MessagesRequest
from cluster.api.reading import read_request
from scheduler.messages import Request
from tests.cluster.api.scripted import TOKENIZER, Server, serve
from tests.cluster.api.test_thinking_switch import ALWAYS, TURNS, served_with

USER: Any = {"role": "user", "content": "What is 47 + 38?"}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
IMAGE = {"type": "image", "source": PIXEL}
ADD: Any = {"name": "add", "input_schema": {"type": "object"}}
CALL: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
PROMPTS: list[str] = []


def script(request: Request) -> str:
    PROMPTS.append(TOKENIZER.decode(request.token_ids[: request.num_prompt_tokens]))
    return "<think>\nI add, ä.\n</think>\n\nIt is 85."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)


def post(server: Server, fields: dict[str, Any], path: str = "") -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 50, "messages": [USER]} | fields
    return httpx.post(f"{server.url}/v1/messages{path}", json=body)


def prompt_for(server: Server, fields: dict[str, Any]) -> str:
    answer = post(server, fields)
    assert answer.status_code == 200, answer.text
    return PROMPTS[-1]


def after_tool(*content: dict[str, Any]) -> dict[str, Any]:
    """A conversation that ends with the result of a tool."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": list(content)}
    called = {"role": "assistant", "content": [CALL]}
    return {"messages": [USER, called, {"role": "user", "content": [result]}]}


def job_for(server: Server, fields: dict[str, Any]) -> Any:
    body = {"model": "tiny", "max_tokens": 50, "messages": [USER]} | fields
    request = read_request(MessagesRequest, json.dumps(body).encode())
    return messages_job(request, server.api._served_model)


@pytest.mark.parametrize("path", ["", "/count_tokens"])
@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"cache_control": {"type": "ephemeral"}},
        {"metadata": {"user_id": "u" * 150}},
        {"betas": ["effort-2025-11-24"]},
        {"service_tier": "auto"},
        {"container": "c"},
        {"temperature": 0.5, "stop_sequences": ["zz"]},
    ],
)
def test_fields_that_change_nothing_here_are_accepted(
    server: Server, fields: dict[str, Any], path: str
) -> None:
    assert post(server, fields, path).status_code == 200


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, False),
        ({"output_config": {"effort": "max"}}, True),
        ({"output_config": {"effort": "none"}}, False),
        ({"output_config": {}}, False),
    ],
)
def test_thinking_or_else_an_effort_switches_thinking(
    server: Server, fields: dict[str, Any], thinks: bool
) -> None:
    [prompt] = job_for(server, fields).prompts
    assert prompt.conversation.template_variables == {"enable_thinking": thinks}


@pytest.mark.parametrize(
    "nest", [lambda form: {"output_config": {"format": form}}, lambda form: {"output_format": form}]
)
def test_a_format_constrains_the_output(server: Server, nest: Any) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    structure = job_for(server, nest({"type": "json_schema", "schema": schema})).params
    assert structure.structured_outputs.json == schema


def test_a_message_of_role_system_stands_where_it_is(server: Server) -> None:
    said = {"role": "system", "content": [{"type": "text", "text": "Now be brief."}]}
    more = {"role": "user", "content": "And 1 + 1?"}
    prompt = prompt_for(server, {"system": "Add.", "messages": [USER, said, more]})
    assert "system\nNow be brief." in prompt
    places = [prompt.index(t) for t in ("Add.", "47 + 38", "Now be brief.", "And 1 + 1?")]
    assert places == sorted(places)
    assert "system\nNow be brief.\nassistant" in prompt_for(server, {"messages": [USER, said]})


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (IMAGE, "[image omitted: this model reads text only]"),
        (
            {"type": "document", "source": {**PIXEL, "media_type": "application/pdf"}},
            "[document omitted: this model reads text only]",
        ),
        (
            {"type": "document", "source": {"type": "text", "data": "Sums."}, "title": "Book"},
            "Book\nSums.",
        ),
        (
            {
                "type": "search_result",
                "title": "Sums",
                "source": "a page",
                "content": [{"type": "text", "text": "85"}],
            },
            "Sums\na page\n85",
        ),
        ({"type": "tool_reference", "tool_name": "add"}, "add"),
        ({"type": "of_next_year", "x": [1]}, "[of_next_year omitted: this model reads text only]"),
    ],
)
def test_a_tool_result_is_given_as_text(server: Server, part: dict[str, Any], text: str) -> None:
    first = {"type": "text", "text": "Seen:", "citations": [{"type": "char_location"}]}
    prompt = prompt_for(server, after_tool(first, part))
    assert f"<tool_response>\nSeen:\n{text}\n</tool_response>" in prompt


@pytest.mark.parametrize("kind", ["image", "document", "container_upload"])
def test_a_line_stands_for_what_a_user_shows_and_the_answer_names_it(
    server: Server, kind: str
) -> None:
    """Claude Code repeats a picture with every request of the session, so a refusal ends it."""
    shown = {"type": kind, "source": PIXEL}
    message = {"role": "user", "content": [shown, {"type": "text", "text": "What is it?"}]}
    answer = post(server, {"messages": [message]})
    assert answer.headers["x-eagleray-ignored"] == f"messages.{kind}"
    assert f"[{kind} omitted: this model reads text only]\nWhat is it?" in PROMPTS[-1]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.image"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.bash_20250124"),
        (after_tool(IMAGE), "tool_result.image"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ],
)
def test_a_server_can_refuse_what_the_model_cannot_get(fields: dict[str, Any], name: str) -> None:
    with serve(script, refuse_unknown=True) as running:
        answer = post(running, fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{name}: the model cannot get this")


def test_tools_that_only_other_servers_know_are_left_out_and_named(server: Server) -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        ADD | {"type": "custom", "defer_loading": True, "input_examples": [{}]},
    ]
    answer = post(server, {"tools": tools, "mcp_servers": [{"type": "url", "name": "x"}]})
    assert answer.status_code == 200, answer.text
    assert '"name": "add"' in PROMPTS[-1] and "bash" not in PROMPTS[-1]
    assert answer.headers["x-eagleray-ignored"].split(", ") == [
        *("tools.defer_loading", "tools.input_examples", "mcp_servers"),
        *("tools.web_search_20250305", "tools.bash_20250124", "tools.mcp_toolset"),
    ]
    refused = post(server, {"tools": tools[:1], "tool_choice": {"type": "any"}})
    assert refused.status_code == 400 and "there are no tools" in refused.text


def test_blocks_that_other_servers_have_sent_are_left_out_and_named(server: Server) -> None:
    content = [
        {"type": "redacted_thinking", "data": "abc"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "x"}]},
        {"type": "thinking", "thinking": "I add.", "signature": "of another server"},
        {"type": "text", "text": "85."},
        CALL | {"caller": {"type": "direct"}},
    ]
    messages = after_tool()["messages"]
    messages[1] = {"role": "assistant", "content": content}
    answer = post(server, {"messages": messages, "thinking": {"type": "adaptive"}})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-eagleray-ignored"].split(", ") == [
        "messages.redacted_thinking",
        "messages.server_tool_use",
        "messages.web_search_tool_result",
    ]
    assert "<think>\nI add.\n</think>\n\n85.\n<tool_call>" in PROMPTS[-1]


def test_a_turn_of_nothing_but_such_blocks_is_no_turn(server: Server) -> None:
    redacted = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    assert prompt_for(server, {"messages": [USER, redacted, USER]}).count("assistant\n") == 1


def test_a_summary_of_earlier_messages_is_read(server: Server) -> None:
    summary = {"role": "assistant", "content": [{"type": "compaction", "content": "We added."}]}
    assert "assistant\nWe added." in prompt_for(server, {"messages": [USER, summary, USER]})


def test_thinking_is_signed_whole_and_streamed(client: anthropic.Anthropic) -> None:
    """Without a signature, clients do not send it back between the calls of tools."""
    asked: Any = {"model": "tiny", "max_tokens": 50, "messages": [USER]}
    whole = client.messages.create(**asked).content[0]
    assert whole.type == "thinking" and whole.thinking == "I add, ä."
    signature = base64.b64encode(hashlib.sha256("I add, ä.".encode()).digest()).decode()
    assert whole.signature == signature
    with client.messages.stream(**asked) as stream:
        raw: list[Any] = [e for e in stream if e.type.startswith("content_block")]
        streamed = stream.get_final_message().content[0]
    assert streamed == whole
    before_stop = next(place for place, e in enumerate(raw) if e.type == "content_block_stop") - 1
    assert raw[before_stop].delta.signature == signature
    history = [USER, {"role": "assistant", "content": [whole.model_dump(), CALL]}]
    history += after_tool({"type": "text", "text": "x"})["messages"][2:]
    client.messages.create(**asked | {"messages": history}, thinking={"type": "adaptive"})
    assert "<think>\nI add, ä.\n</think>" in PROMPTS[-1]


def billed(session: str) -> dict[str, Any]:
    """The system prompt of a session of Claude Code."""
    line = (
        f"x-anthropic-billing-header: cc_version=2.1.{session}; cc_entrypoint=cli; cch={session};"
    )
    texts = (line, "You are an agent.", "Instructions. " * 20)
    return {"system": [{"type": "text", "text": text} for text in texts]}


def test_the_line_about_billing_is_left_out(server: Server) -> None:
    first, second = (prompt_for(server, billed(session)) for session in ("1a", "2b"))
    assert first == second and "system\nYou are an agent.\nInstructions." in first
    later = [{"type": "text", "text": "Say x-anthropic-billing-header: x"}]
    assert "Say x-anthropic-billing-header: x" in prompt_for(server, {"system": later})


def test_the_line_about_billing_can_be_kept(server: Server) -> None:
    with serve(script, keep_billing_header=True) as running:
        assert "system\nx-anthropic-billing-header: cc_ver" in prompt_for(running, billed("1a"))


@pytest.mark.parametrize("thinking", ["adaptive", "enabled", "disabled"])
@pytest.mark.parametrize("ending", ["", ALWAYS])
def test_a_model_whose_thinking_cannot_be_switched_answers_all_the_same(
    tmp_path: Path, ending: str, thinking: str
) -> None:
    served_model = served_with(tmp_path, TURNS + ending)
    effort = {"effort": "high"}
    body = {"messages": [USER], "thinking": {"type": thinking}, "output_config": effort}
    request = read_request(CountTokensRequest, json.dumps(body).encode())
    assert count_tokens(request, served_model)["input_tokens"] > 0
