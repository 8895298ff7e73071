"""An application on Ray Serve, through its proxy and through a handle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest

from cluster.client.outputs import Chunk, RequestOutput
from scheduler.params import SamplingParams
from tests.cluster.api.browser import Watched, browser
from tests.cluster.serve.served import LONG, wait_until_idle
from tests.cluster.test_examples import run

pytestmark = [pytest.mark.engine, pytest.mark.programs]
SUM: Any = {"role": "user", "content": "What is 47 + 38?"}


def test_the_openai_client_works_through_serve(served: tuple[str, Any]) -> None:
    url, _ = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    assert client.models.list().data[0].id == "tiny"
    answer = client.chat.completions.create(model="tiny", messages=[SUM])
    assert answer.choices[0].message.content == "85"
    chunks = client.chat.completions.create(model="tiny", messages=[SUM], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "85"
    answer = client.chat.completions.create(
        model="tiny",
        messages=[SUM],
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.choices[0].message.content == "85"
    with pytest.raises(openai.BadRequestError, match="top_p must be"):
        client.chat.completions.create(model="tiny", messages=[SUM], top_p=2)
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/nothing").json()["error"]["message"].startswith("there is nothing")


ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def test_every_required_call_is_well_formed(served: tuple[str, Any]) -> None:
    """Two hundred of them, streamed and whole, at a temperature at which the model often goes
    astray.
    """
    client = openai.OpenAI(base_url=f"{served[0]}/v1", api_key="any", max_retries=0)
    asked: Any = {
        "model": "tiny",
        "messages": [SUM],
        "tools": [ADD],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "max_tokens": 120,
        "n": 100,
    }
    calls = []
    for choice in client.chat.completions.create(**asked, seed=1).choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
        assert choice.message.tool_calls is not None and len(choice.message.tool_calls) == 1
        calls.append(choice.message.tool_calls[0].function)
    for chunk in client.chat.completions.create(**asked, seed=2, stream=True):
        for delta in (choice.delta for choice in chunk.choices):
            assert not delta.content, delta
            calls += [call.function for call in delta.tool_calls or []]
    assert len(calls) == 200
    for call in calls:
        assert call.name == "add"
        jsonschema.validate(json.loads(call.arguments), ADD["function"]["parameters"])


def test_the_example_of_an_agent_calls_a_tool_and_answers(
    served: tuple[str, Any], tmp_path: Path
) -> None:
    url = f"{served[0]}/v1"
    shown = run("tool_agent.py", "What is 47 + 38?", "--url", url, "--force", cwd=tmp_path)
    assert ") = " in shown


def test_langchain_gets_objects_and_calls(served: tuple[str, Any]) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, SecretStr

    class Sum(BaseModel):
        """The sum of two numbers."""

        total: int
        sure: bool

    model = ChatOpenAI(model="tiny", base_url=f"{served[0]}/v1", api_key=SecretStr("any"))
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Sum, method=method).invoke("What is 47 + 38?")
        assert isinstance(found, Sum), (method, found)
    answer = model.bind_tools([ADD], tool_choice="any").invoke("What is 47 + 38?")
    assert [call["name"] for call in answer.tool_calls] and {*answer.tool_calls[0]["args"]} == {
        *("a", "b")
    }


def test_responses_and_messages_follow_a_schema_and_call(served: tuple[str, Any]) -> None:
    from pydantic import BaseModel

    class Sum(BaseModel):
        """The sum of two numbers."""

        total: int
        sure: bool

    url, _ = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    asked: Any = {"model": "tiny", "input": "What is 47 + 38?"}
    assert client.responses.create(**asked).output_text == "85"
    assert isinstance(client.responses.parse(**asked, text_format=Sum).output_parsed, Sum)
    tool: Any = {"type": "function"} | ADD["function"]
    with client.responses.stream(**asked, tools=[tool], tool_choice="required") as stream:
        call = stream.get_final_response().output[0]
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), ADD["function"]["parameters"])
    messages = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0).messages
    message = messages.create(
        model="tiny",
        max_tokens=200,
        messages=[SUM],
        tools=[{"name": "add", "input_schema": ADD["function"]["parameters"]}],
        tool_choice={"type": "any"},
    )
    [block] = message.content
    assert block.type == "tool_use" and message.stop_reason == "tool_use"
    jsonschema.validate(block.input, ADD["function"]["parameters"])


def test_a_second_session_of_claude_code_finds_its_prefix_cached(served: tuple[str, Any]) -> None:
    url, _ = served
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    usages = []
    for session in ("1a", "2b"):
        line = f"x-anthropic-billing-header: cc_version=2.1.0.{session}; cch={session};"
        texts = (line, "You add. " * 100)
        system: Any = [{"type": "text", "text": text} for text in texts]
        ask = SUM | {"content": f"This is session {session}."}
        answer = client.messages.create(model="tiny", max_tokens=3, system=system, messages=[ask])
        usages.append(answer.usage)
    first, second = usages
    assert first.cache_read_input_tokens == 0 and first.input_tokens > 250
    assert second.cache_read_input_tokens is not None
    assert second.cache_read_input_tokens > 0.7 * first.input_tokens


def test_the_page_shows_the_engine_and_streams_a_chat(
    served: tuple[str, Any], tmp_path: Path
) -> None:
    """`make screenshots` keeps the pictures."""
    from playwright.sync_api import expect

    kept_in = os.environ.get("EAGLERAY_SCREENSHOTS")
    pictures = Path(kept_in or tmp_path)
    with browser() as chromium:
        watched = Watched(chromium, served[0])
        page = watched.page
        expect(page.locator("#model")).to_have_text("tiny")
        for place, question in enumerate(("What is 47 + 38?", "Count on from 17.")):
            watched.send(question)
            expect(page.locator(".assistant small").nth(place)).to_contain_text("tokens in")
        answers = page.locator(".assistant > span:last-of-type").all_inner_texts()
        assert answers[0] == "85" and answers[1] == "18, 19, 20, 21, 22", answers
        grown = [text for text in watched.seen() if "18" in text]
        assert len(set(grown)) > 5 and sorted(grown, key=len) == grown, "the answer streams"
        expect(page.locator("#ranks tr")).to_have_count(1)
        expect(page.locator("#parts tr").first).to_be_visible()
        page.wait_for_timeout(2000 if kept_in else 0)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=pictures / f"page-{scheme}.png")
            assert (pictures / f"page-{scheme}.png").stat().st_size > 10_000
        assert watched.faults == []


def test_a_schema_that_is_not_possible_is_a_400_by_name(served: tuple[str, Any]) -> None:
    client = openai.OpenAI(base_url=f"{served[0]}/v1", api_key="any", max_retries=0)
    schema: Any = {"name": "x", "schema": {"type": "object", "not": {}}}
    with pytest.raises(openai.BadRequestError, match=r"json\.not: this keyword"):
        client.chat.completions.create(
            model="tiny",
            messages=[SUM],
            response_format={"type": "json_schema", "json_schema": schema},
        )


def test_a_handle_takes_and_gives_what_llm_does(served: tuple[str, Any]) -> None:
    from ray import serve

    handle = serve.get_app_handle("eagleray")
    greedy = SamplingParams(temperature=0)
    [output] = handle.chat.remote([SUM], greedy).result(timeout_s=30)
    assert isinstance(output, RequestOutput) and output.text == "85"
    one, two = handle.generate.remote([{"messages": [SUM]}, "a"], greedy).result(timeout_s=30)
    assert one.text == "85" and two.prompt == "a"
    each = [greedy, SamplingParams(n=2, max_tokens=1)]
    one, two = handle.generate.remote([{"messages": [SUM]}, "a"], each).result(timeout_s=30)
    assert one.text == "85" and len(two.outputs) == 2
    streaming: Any = handle.options(stream=True)
    chunks = list(streaming.stream_chat.remote([SUM], greedy))
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == "85"
    chunks = list(streaming.stream.remote("a", SamplingParams(max_tokens=3, ignore_eos=True)))
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(served: tuple[str, Any], stream: bool) -> None:
    """Ray cancels the calls of a canceled call, but the message that the request has ended must
    arrive.
    """
    url, _ = served
    soon = httpx.Timeout(30, read=0.1)  # it is connected, and has sent its request
    for _ in range(30):
        if stream:
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as got:
                assert next(got.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=LONG, timeout=soon)
    wait_until_idle(url, 10.0)


def test_a_dropped_stream_of_a_handle_frees_its_blocks(served: tuple[str, Any]) -> None:
    url, handle = served
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    stream = handle.options(stream=True).stream.remote("a", params)
    next(iter(stream))
    stream.cancel()
    wait_until_idle(url, 10.0)
