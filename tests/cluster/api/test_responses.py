"""The Responses API with OpenAI's own client, over a scripted engine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from cluster.api.reading import read_request
from cluster.api.responses.adapter import responses_job
from cluster.api.responses.schema import ResponsesRequest
from cluster.api.responses.writer import ResponseWriter
from cluster.grammar.markers import AnswerState
from scheduler.messages import Request
from scheduler.params import SamplingParams
from tests.cluster.api.scripted import TOKENIZER, Server, serve
from tests.cluster.api.test_replies import run

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Add numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
THOUGHT = f"<think>\nhm, ä\n</think>\n\nSure.\n{CALL}\nAnd again.\n{CALL}"
PROMPTS: list[str] = []  # without special tokens


def script(request: Request) -> str:
    PROMPTS.append(TOKENIZER.decode(request.token_ids[: request.num_prompt_tokens]))
    return THOUGHT if "<tools>" in PROMPTS[-1] else "It is 85."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script, step_s=0.002) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="tiny",
        input="What is 47 + 38?",
        instructions="Be brief.",
        temperature=0.5,
        metadata={"trace": "7"},
        store=False,
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        extra_body={"top_k": 5, "seed": 1},
    )
    [item] = answer.output
    assert item.type == "message" and item.status == "completed"
    assert answer.output_text == "It is 85."
    assert (answer.object, answer.status, answer.error) == ("response", "completed", None)
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.temperature, answer.metadata) == (0.5, {"trace": "7"})
    assert "Be brief." in PROMPTS[-1] and "What is 47 + 38?" in PROMPTS[-1]
    Response.model_validate(json.loads(answer.model_dump_json()), strict=False)


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="Hi", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 2
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    *_, last = client.responses.create(model="tiny", input="Hi", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete" and last.response.status == "incomplete"
    assert last.response.output_text == answer.output_text


def parts(response: Response) -> list[Any]:
    """The items without the fields that differ between two answers."""
    ids = {"id", "call_id", "parsed_arguments"}
    dumped = [item.model_dump(exclude=ids) for item in response.output]
    for item in dumped:
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return dumped


def test_reasoning_text_and_calls_in_the_order_of_the_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="Go", tools=[ADD])
    kinds = ["reasoning", "message", "function_call", "message", "function_call"]
    assert [item.type for item in answer.output] == kinds
    thought, said, call, more, _ = answer.output
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text == "hm, ä" and thought.summary == []
    assert said.type == "message" and said.content[0].type == "output_text"
    assert said.content[0].text == "Sure."
    assert call.type == "function_call" and (call.name, call.arguments) == ("add", '{"a":  1}')
    assert more.type == "message" and more.content[0].type == "output_text"
    assert more.content[0].text == "And again." and answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len(TOKENIZER.encode("hm, ä"))


def test_events_come_in_order_and_add_up(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="Go", tools=[ADD]) as stream:
        events: list[Any] = list(stream)
        streamed: Any = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"] and names[-1] == "completed"
    assert events[0].response.output == [] and events[0].response.usage is None
    whole = client.responses.create(model="tiny", input="Go", tools=[ADD])
    assert parts(streamed) == parts(whole)
    assert streamed.usage == whole.usage and len(streamed.output) == 5
    for index, item in enumerate(streamed.output):
        own = [e for e in events if getattr(e, "output_index", None) == index]
        named = [event.type.removeprefix("response.") for event in own]
        assert (named[0], named[-1]) == ("output_item.added", "output_item.done")
        assert own[0].item.status == "in_progress" and own[-1].item.id == own[0].item.id == item.id
        assert {e.item_id for e in own[1:-1]} == {item.id}
        if item.type == "function_call":
            inside = ["function_call_arguments.delta", "function_call_arguments.done"]
            assert named[1:-1] == inside and own[0].item.arguments == ""
            assert own[2].arguments == item.arguments and own[2].name == "add"
            continue
        part = "reasoning_text" if item.type == "reasoning" else "output_text"
        assert named[1] == "content_part.added" and named[-2] == "content_part.done"
        assert set(named[2:-3]) == {f"{part}.delta"} and named[-3] == f"{part}.done"
        text = "".join(e.delta for e in own[2:-3])
        assert text == own[-3].text == own[-2].part.text == item.content[0].text
        assert own[1].part.text == ""
    order: list[Any] = [event.output_index for event in events[2:-1]]
    assert order == sorted(order)


def test_a_whole_conversation_reaches_the_template(client: openai.OpenAI) -> None:
    """Items of an answer are sent back unchanged, as agents that keep the conversation do."""
    first = client.responses.create(model="tiny", input="Go", tools=[ADD])
    call = first.output[2]
    assert call.type == "function_call"
    history: list[Any] = [
        {"role": "developer", "content": "Add."},
        {"role": "user", "content": [{"type": "input_text", "text": "What is 47 + 38?"}]},
        *(item.model_dump(exclude_none=index % 2 == 0) for index, item in enumerate(first.output)),
        {"type": "function_call_output", "call_id": call.call_id, "output": "85"},
        {"type": "message", "role": "user", "content": "So?"},
    ]
    client.responses.create(model="tiny", input=history, tools=[ADD])
    prompt = PROMPTS[-1]
    wanted = [
        *("Add.", "What is 47 + 38?", "hm, ä", "Sure.\nAnd again.", '"arguments": {"a":  1}'),
        *("<tool_response>\n85", "So?"),
    ]
    places = [prompt.find(part) for part in wanted]
    assert places == sorted(places) and places[0] >= 0, prompt
    assert prompt.count("\nassistant\n") == 2, "one turn, and the one to come"


@pytest.mark.parametrize("kind", ["input_text", "output_text", "text"])
def test_text_is_read_under_the_name_of_either_api(server: Server, kind: str) -> None:
    parts = [{"type": kind, "text": "What is 47 + 38?"}]
    result = {"type": "function_call_output", "call_id": "1", "output": parts}
    body = {"input": [{"role": "user", "content": parts}, result]}
    answer = httpx.post(f"{server.url}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-eagleray-ignored" not in answer.headers
    assert PROMPTS[-1].count("What is 47 + 38?") == 2


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True)])
def test_effort_switches_thinking(server: Server, effort: str, thinks: bool) -> None:
    asked = {"input": "Hi", "reasoning": {"effort": effort, "summary": "auto"}}
    request = read_request(ResponsesRequest, json.dumps(asked).encode())
    [prompt] = responses_job(request, server.api._served_model).prompts
    assert prompt.conversation is not None
    assert prompt.conversation.template_variables == {"enable_thinking": thinks}


def test_langchain_speaks_it(server: Server) -> None:
    from langchain_openai import ChatOpenAI

    asked: Any = {"base_url": f"{server.url}/v1", "api_key": "any", "use_responses_api": True}
    model = ChatOpenAI(model="tiny", **asked)
    assert model.invoke("Hi").text == "It is 85."
    assert "".join(chunk.text for chunk in model.stream("Hi")) == "It is 85."
    tools = model.bind_tools([ADD])
    answer: Any = tools.invoke("Go")
    assert [call["args"] for call in answer.tool_calls] == [{"a": 1}] * 2


@pytest.mark.parametrize(
    ("fields", "parameter", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "c"}, "conversation", "nothing is stored"),
        ({"prompt": {"id": "p"}}, "prompt", "stored prompts"),
        ({"store": 1}, "store", "true or false"),
        ({"background": True}, "background", "in the background"),
        ({"truncation": "auto"}, "truncation", "not shortened"),
        ({"top_logprobs": 300}, "top_logprobs", "must be between 0 and"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0"),
        ({"input": []}, "input", "the last item must"),
        ({"input": 7}, "input", "input: Input should be"),
        ({"input": None}, "input", "input: Input should be"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "nothing is stored"),
        ({"input": [{"role": "assistant", "content": "It"}]}, "input", "the last item must"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"max_output_tokens": 0}, "max_tokens", "max_tokens must be"),
        ({"messages": [{}]}, "messages", "messages: of another API"),
        ({"modalities": ["audio"]}, "modalities", "only"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(
    server: Server, fields: dict[str, Any], parameter: str, message: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"model": "tiny", "input": "x"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, parameter), error
    assert re.search(message, error["message"]), error["message"]


def test_a_stored_answer_cannot_be_asked_for(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nothing at '/v1/responses/resp_1'"):
        client.responses.retrieve("resp_1")


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    with serve(script, step_s=0.05) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        stream = client.responses.create(model="tiny", input="Hi", stream=True)
        numbers = [next(stream).sequence_number for _ in range(4)]
        running.engine.die("rank 1 is gone")
        with pytest.raises(openai.APIError, match="rank 1 is gone"):
            numbers += [event.sequence_number for event in stream]
        raw = httpx.post(f"{running.url}/v1/responses", json={"input": "x", "stream": True})
    assert numbers == list(range(len(numbers)))
    assert raw.status_code == 503 and raw.json()["error"]["code"] == "engine_dead"


def test_long_reasoning_is_counted_in_parts_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    thought = "What is forty-seven plus thirty-eight? " * 1000
    expected, encode, lengths = len(TOKENIZER.encode(thought.strip())), TOKENIZER.encode, [0]

    def noted(text: str, most: int | None = None) -> list[int]:
        if not text.startswith("<"):  # not the script itself, nor the prompt
            lengths.append(len(text))
        return encode(text, most)

    monkeypatch.setattr(TOKENIZER, "encode", noted)
    generation, _ = run(
        f"<think>\n{thought.strip()}\n</think>\n\n85", random.Random(0), SamplingParams()
    )
    writer = ResponseWriter({}, generation, TOKENIZER, state=AnswerState.UNDECIDED, tools=None)
    usage = writer.body()["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == expected
    assert 0 < max(lengths) <= 4096 < len(thought)
