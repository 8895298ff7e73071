"""What agents send to the Responses API, in the shapes of their requests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from cluster.api.parser import AnswerParser
from cluster.api.reading import read_request
from cluster.api.responses.adapter import responses_job
from cluster.api.responses.logprobs import MessageLogprobs
from cluster.api.responses.schema import ResponsesRequest
from cluster.grammar.markers import AnswerState
from scheduler.bounds import field_limit
from scheduler.errors import RequestError
from scheduler.messages import Request, TokenLogprobs
from tests.cluster.api.scripted import TOKENIZER, Server, serve

USER: Any = {"role": "user", "content": "Go"}
FUNCTION: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}
AGENTS: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Tools for agents.",
    "tools": [FUNCTION | {"name": "close"}, FUNCTION, {"type": "of_next_year", "name": "x"}],
}
GRAMMAR = 'start: "*** Begin Patch"'
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
CALLS = {
    "in a namespace": '{"name": "agents.close", "arguments": {"target": "a"}}',
    "custom": '{"name": "apply_patch", "arguments": {"input": "+ä\\n"}}',
    "custom, but wrong": '{"name": "apply_patch", "arguments": {"patch": 1}}',
}
PROMPTS: list[str] = []


def script(request: Request) -> str:
    PROMPTS.append(TOKENIZER.decode(request.token_ids[: request.num_prompt_tokens]))
    asked = PROMPTS[-1].rsplit("user\n", 1)[1]
    answers = [
        f"<tool_call>\n{call}\n</tool_call>"
        for name, call in CALLS.items()
        if f"Call {name}\n" in asked
    ]
    return "<think>\nI add, ä.\n</think>\n\n" + (answers[0] if answers else "It is 85.")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def post(server: Server, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json={"model": "tiny", "input": "Go"} | fields)


def prompt_for(server: Server, fields: dict[str, Any]) -> str:
    answer = post(server, fields)
    assert answer.status_code == 200, answer.text
    return PROMPTS[-1]


def ignored(answer: httpx.Response) -> list[str]:
    return answer.headers["x-eagleray-ignored"].split(", ")


@pytest.mark.parametrize(
    "fields",
    [
        {"client_metadata": {"session_id": "0"}, "prompt_cache_key": "0"},
        {"store": True},
        {"store": False, "include": ["reasoning.encrypted_content"]},
        {"include": ["web_search_call.action.sources", "code_interpreter_call.outputs"]},
        {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
        {"stream_options": {"include_obfuscation": True}, "stream": True},
        {"reasoning": {"effort": "max", "context": "all_turns"}},
        {"text": {"verbosity": "low"}, "service_tier": "auto", "max_tool_calls": 3},
    ],
)
def test_fields_that_change_nothing_here_are_accepted(
    server: Server, fields: dict[str, Any]
) -> None:
    assert post(server, fields).status_code == 200


def test_some_of_the_tools_may_be_allowed(server: Server) -> None:
    tools = [FUNCTION, FUNCTION | {"name": "subtract"}]
    choice: dict[str, Any] = {"type": "allowed_tools", "mode": "auto"}
    choice |= {"tools": [{"type": "function", "name": "subtract"}]}
    answer = post(server, {"tools": tools, "tool_choice": choice})
    assert answer.status_code == 200 and answer.json()["tool_choice"] == choice
    assert '"name": "subtract"' in PROMPTS[-1] and '"name": "add"' not in PROMPTS[-1]
    other = choice | {"tools": [{"type": "function", "name": "divide"}]}
    assert "allows 'divide'" in post(server, {"tools": tools, "tool_choice": other}).text


def test_nothing_is_stored_whatever_is_asked_and_the_answer_says_so(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="Go", store=True)
    assert answer.model_dump()["store"] is False
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as input"):
        client.responses.create(model="tiny", input="Go", previous_response_id=answer.id)


def test_tools_that_a_server_would_have_to_run_are_left_out_and_named(server: Server) -> None:
    kinds = [
        *("web_search", "local_shell", "image_generation", "mcp", "file_search", "tool_search"),
        *("code_interpreter", "of_next_year"),
    ]
    others = [{"type": kind, "name": "x", "external_web_access": True} for kind in kinds]
    answer = post(server, {"tools": [FUNCTION, *others]})
    assert answer.status_code == 200 and ignored(answer) == [f"tools.{kind}" for kind in kinds]
    assert PROMPTS[-1].count('"type": "function"') == 1 and '"name": "add"' in PROMPTS[-1]
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function"]


def test_a_namespace_offers_its_functions(server: Server) -> None:
    answer = post(server, {"tools": [FUNCTION, AGENTS]})
    assert ignored(answer) == ["tools.of_next_year"]
    prompt = PROMPTS[-1]
    assert all(f'"name": "{name}"' in prompt for name in ("add", "agents.close", "agents.add"))
    assert prompt.count("Tools for agents.") == 1


def test_a_custom_tool_is_offered_as_a_function_of_a_text(server: Server) -> None:
    prompt = prompt_for(server, {"tools": [PATCH]})
    assert '"name": "apply_patch"' in prompt and '"required": ["input"]' in prompt
    assert "Edits files." in prompt and json.dumps(GRAMMAR)[1:-1] in prompt


CALLED: dict[str, dict[str, Any]] = {
    "in a namespace": {
        "type": "function_call",
        "name": "close",
        "namespace": "agents",
        "arguments": '{"target": "a"}',
    },
    "custom": {"type": "custom_tool_call", "name": "apply_patch", "input": "+ä\n"},
    "custom, but wrong": {
        "type": "custom_tool_call",
        "name": "apply_patch",
        "input": '{"patch": 1}',
    },
}


@pytest.mark.parametrize("call", CALLED)
def test_a_call_says_what_the_request_said_and_can_be_sent_back(
    client: openai.OpenAI, call: str
) -> None:
    asked: Any = {"model": "tiny", "input": f"Call {call}", "tools": [AGENTS, PATCH]}
    with client.responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
        streamed: Any = stream.get_final_response().output[-1]
    item: Any = client.responses.create(**asked).output[-1]
    for made in (item, streamed):
        dumped = made.model_dump(exclude_none=True, exclude={"parsed_arguments"})
        assert dumped.pop("id") and dumped.pop("call_id") and dumped.pop("status") == "completed"
        assert dumped == CALLED[call]
    if item.type == "custom_tool_call":
        inside = [event for event in events if "custom_tool_call_input" in event.type]
        assert inside[0].delta == inside[1].input == item.input
    result = {"call_id": item.call_id, "output": [{"type": "input_text", "text": "Fine."}]}
    history = [USER, item.model_dump(), result | {"type": f"{item.type}_output"}]
    client.responses.create(**asked | {"input": history})
    if call != "custom, but wrong":
        assert f"<tool_call>\n{CALLS[call]}\n</tool_call>" in PROMPTS[-1]
    assert "<tool_response>\nFine.\n</tool_response>" in PROMPTS[-1]


def test_history_of_other_servers_is_left_out_and_named(server: Server) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "id": "x"}
    history = [
        USER,
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "x"}},
        {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec"}},
        {"type": "of_next_year", "content": [1, 2]},
        {
            "type": "message",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "So.", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "No."},
            ],
            "phase": "commentary",
        },
        call,
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
    ]
    answer = post(server, {"input": history})
    assert answer.status_code == 200, answer.text
    assert ignored(answer) == [
        "input.reasoning.encrypted_content",
        "input.web_search_call",
        "input.local_shell_call",
        "input.of_next_year",
        "output.input_image",
    ]
    assert "So.\nNo.\n<tool_call>" in PROMPTS[-1]
    line = "[input_image omitted: this model reads text only]"
    assert f"<tool_response>\n{line}\n</tool_response>" in PROMPTS[-1]


@pytest.mark.parametrize("kind", ["input_image", "input_file"])
def test_a_line_stands_for_what_a_user_shows_and_the_answer_names_it(
    server: Server, kind: str
) -> None:
    answer = post(server, {"input": [{"role": "user", "content": [{"type": kind}]}]})
    assert ignored(answer) == [f"input.{kind}"]
    assert f"user\n[{kind} omitted: this model reads text only]" in PROMPTS[-1]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "web_search"}]},
        {"input": [USER, {"type": "web_search_call"}, USER]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    ],
)
def test_a_server_can_refuse_what_the_model_cannot_get(fields: dict[str, Any]) -> None:
    with serve(script, refuse_unknown=True) as running:
        answer = post(running, fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and "the model cannot get this" in error["message"]
    assert error["param"] in fields


def test_reasoning_comes_as_a_summary_where_one_is_asked_for(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Go", "reasoning": {"summary": "auto"}}
    whole: Any = client.responses.create(**asked).output[0]
    assert [part.model_dump() for part in whole.summary] == [
        {"type": "summary_text", "text": "I add, ä."}
    ]
    assert not whole.content
    with client.responses.stream(**asked) as stream:
        events: list[Any] = [event for event in stream if getattr(event, "output_index", 1) == 0]
        streamed: Any = stream.get_final_response()
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:2] == ["output_item.added", "reasoning_summary_part.added"]
    assert names[-3:] == [
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done")
    ]
    assert set(names[2:-3]) == {"reasoning_summary_text.delta"}
    text = "".join(event.delta for event in events[2:-3])
    assert text == events[-3].text == events[-2].part.text == "I add, ä."
    assert {event.summary_index for event in events[1:-1]} == {0}
    assert streamed.output[0].summary == whole.summary
    assert streamed.reasoning.summary == "auto"
    Response.model_validate(json.loads(streamed.model_dump_json()), strict=False)


@pytest.mark.parametrize(
    "asked",
    [
        {"include": ["reasoning.encrypted_content"]},
        {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "concise"}},
        {"reasoning": {"summary": "detailed"}},
        {},
    ],
)
@pytest.mark.parametrize("dropped", [["content"], []])
def test_reasoning_is_read_from_wherever_a_client_leaves_it(
    server: Server, asked: dict[str, Any], dropped: list[str]
) -> None:
    """Codex drops the content and sends the rest back between the calls of tools."""
    item = post(server, asked).json()["output"][0]
    has_more = bool(asked)
    item = {name: value for name, value in item.items() if name not in dropped}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "85"}
    prompt = prompt_for(server, {"input": [USER, item, call, result]})
    assert ("<think>\nI add, ä.\n</think>" in prompt) == (has_more or not dropped)


def test_input_tokens_are_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="tiny", input="Go", tools=[FUNCTION])
    answer = client.responses.create(model="tiny", input="Go", tools=[FUNCTION])
    assert answer.usage is not None
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        answer.usage.input_tokens,
    )


LONG = {"enum": list(range(field_limit("schema values")))}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([AGENTS | {"tools": [FUNCTION] * 257}], "257 tools"),
        ([AGENTS | {"tools": [FUNCTION] * 200}] * 2, "400 tools"),
        ([AGENTS | {"name": "a" * 256}], "characters"),
        (
            [AGENTS | {"tools": [FUNCTION | {"parameters": LONG}]}],
            "tools.0.tools.0.parameters",
        ),
    ],
)
def test_namespaces_have_the_bounds_of_tools(
    server: Server, tools: list[Any], message: str
) -> None:
    body = json.dumps({"input": "x", "tools": tools}).encode()
    with pytest.raises(RequestError, match=message):
        responses_job(read_request(ResponsesRequest, body), server.api._served_model)


SPOKEN = (
    f"<think>\nnow\n</think>\n\nnöw <tool 😀\n\n<tool_call>\n{CALLS['custom']}\n</tool_call>\nBye"
)


@pytest.mark.parametrize("top", [0, 2])
def test_texts_have_the_log_probabilities_of_their_own_tokens(top: int) -> None:
    asked: Any = {"model": "tiny", "input": "Go", "tools": [PATCH], "top_logprobs": top}
    asked["include"] = ["message.output_text.logprobs"]
    with serve(lambda _: SPOKEN) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        whole: Any = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            events: list[Any] = list(stream)
            streamed: Any = stream.get_final_response()
    for answer in (whole, streamed):
        parts = [item.content[0] for item in answer.output if item.type == "message"]
        assert [part.text for part in parts] == ["nöw <tool 😀", "Bye"]
        for part in parts:
            assert bytes(b for entry in part.logprobs for b in entry.bytes).decode() == part.text
            assert all(len(entry.top_logprobs) == top for entry in part.logprobs)
            assert {entry.logprob for entry in part.logprobs} == {-0.25}
    places = [place for place, item in enumerate(whole.output) if item.type == "message"]
    for place in places:
        own = [e for e in events if getattr(e, "output_index", None) == place]
        deltas = [e for e in own if e.type == "response.output_text.delta"]
        [done] = [e for e in own if e.type == "response.output_text.done"]
        sent = [entry.token for event in deltas for entry in event.logprobs]
        assert sent == [entry.token for entry in done.logprobs]


def test_a_call_that_is_cut_off_has_no_log_probabilities() -> None:
    limit = len(TOKENIZER.encode(SPOKEN[: SPOKEN.index("</tool_call>")])) - 5
    asked: Any = {"model": "tiny", "input": "Go", "tools": [PATCH], "top_logprobs": 1}
    with serve(lambda _: SPOKEN) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        answer: Any = client.responses.create(**asked, max_output_tokens=limit)
    [part] = [item.content[0] for item in answer.output if item.type == "message"]
    assert bytes(b for entry in part.logprobs for b in entry.bytes).decode() == part.text


def test_without_being_asked_for_there_are_no_log_probabilities(client: openai.OpenAI) -> None:
    answer: Any = client.responses.create(model="tiny", input="Go", top_logprobs=0)
    assert answer.output[-1].content[0].logprobs == []


FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "\n\n", "l", "ll", "<", "ö😀"),
    *(" tool", '<tool_call>{"name": "add"}</tool_call>', "<tool_call>no</tool_call>", "\t"),
]


@pytest.mark.parametrize("seed", range(300))
def test_the_tokens_of_messages_are_found_in_any_answer(seed: int) -> None:
    randomness = random.Random(seed)
    text = "".join(randomness.choices(FRAGMENTS, k=randomness.randint(1, 12)))
    token_ids = TOKENIZER.encode(text)
    parser = AnswerParser(AnswerState.UNDECIDED, looks_for_calls=True)
    messages: list[str] = [""]
    for piece in [*parser.pieces(text), parser.finish()]:
        if piece.reasoning or piece.calls:
            messages.append("")
        messages[-1] += piece.content
    found = MessageLogprobs(TOKENIZER, AnswerState.UNDECIDED, looks_for_calls=True)
    for token_id in token_ids:
        found.push([token_id], [TokenLogprobs(logprob=-1.0)])
    found.finish(is_cut_off=False)
    texts = [bytes(b for entry in tokens for b in entry["bytes"]) for tokens in found.messages]
    for tokens, message in zip(texts, filter(None, messages), strict=True):
        # The first and last token may be partly in what is no message.
        assert message.encode() in tokens, (text, tokens)
        assert len(tokens) <= len(message.encode()) + 12
