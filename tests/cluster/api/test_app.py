"""The API on a real port, with real clients, over a scripted engine."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from cluster.api.admission import ApiLimits
from cluster.api.metrics import MetricFamily, merge, render
from configs.paths import SOURCE_ROOT
from scheduler.messages import Request
from tests.cluster.api.scripted import TOKENIZER, Server, serve, wait_until

USER: Any = {"role": "user", "content": "What is 47 + 38?"}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
THOUGHT = (
    "<think>\nhm\n</think>\n\nSure.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
)


def script(request: Request) -> str:
    prompt = TOKENIZER.decode(request.token_ids[: request.num_prompt_tokens])
    if "slow" in prompt:
        return "word " * 400
    return THOUGHT if "<tools>" in prompt else "It is 85."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script, step_s=0.002) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_models_are_listed(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        client.models.retrieve("other")


def test_a_chat_with_the_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[USER], n=2, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["It is 85."] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens > 10 and answer.usage.prompt_tokens_details.cached_tokens == 1


def test_a_streamed_chat_with_the_openai_client(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[USER],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "It is 85."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs and choice.logprobs.content
        for entry in choice.logprobs.content
    ]
    assert len(entries) == chunks[-1].usage.completion_tokens
    assert len(entries[0].top_logprobs) == 2


def test_reasoning_and_calls_come_apart_from_the_content(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[USER], tools=[ADD])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Sure."
    dumped = choice.message.model_dump()
    assert dumped["reasoning"] == dumped["reasoning_content"] == "hm"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert (call.function.name, call.function.arguments) == ("add", '{"a":  1}')
    # The answer is sent back unchanged, with the result of the call.
    tool: Any = {"role": "tool", "tool_call_id": call.id, "content": "85"}
    history: Any = [USER, choice.message.model_dump(), tool]
    client.chat.completions.create(model="tiny", messages=history, tools=[ADD])
    plain = client.chat.completions.create(
        model="tiny", messages=[USER], tools=[ADD], tool_choice="none"
    )
    assert plain.choices[0].message.content == "It is 85."


def test_the_openai_clients_own_stream_helper_puts_calls_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=[USER], tools=[ADD]) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.tool_calls is not None
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"a":  1}'


def test_completions_take_texts_and_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    prompts: list[Any] = [[65, 66], [[65, 66], [67]]]
    for prompt in prompts:
        answer = client.completions.create(model="tiny", prompt=prompt, echo=True)
        assert answer.choices[0].text == TOKENIZER.decode([65, 66]) + "It is 85."
    streamed = client.completions.create(
        model="tiny", prompt="one", stream=True, logprobs=1, stop=" 8"
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == "It is"


def test_langchains_chat_model_works(server: Server) -> None:
    from langchain_core.messages import AIMessageChunk
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    model = ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key=SecretStr("any"))
    assert model.invoke("What is 47 + 38?").content == "It is 85."
    with_tools = model.bind_tools([ADD])
    answer = with_tools.invoke("What is 47 + 38?")
    assert [(c["name"], c["args"]) for c in answer.tool_calls] == [("add", {"a": 1})]
    parts = [part for part in with_tools.stream("Hi") if isinstance(part, AIMessageChunk)]
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.content == "Sure." and whole.tool_calls[0]["args"] == {"a": 1}


def test_tokens_go_there_and_back(server: Server) -> None:
    text = "What is 1 + 1? ü"
    got = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()
    assert got["tokens"] == TOKENIZER.encode(text) and got["count"] == len(got["tokens"])
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": got["tokens"]}).json()
    assert back == {"prompt": text}
    chat = httpx.post(f"{server.url}/tokenize", json={"messages": [USER]}).json()
    assert chat["count"] > 10 and chat["max_model_len"] == 1024
    wrong = httpx.post(f"{server.url}/detokenize", json={"tokens": [5000]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize(
    ("path", "sent", "status", "parameter", "message"),
    [
        ("/v1/chat/completions", b"{", 400, None, "the body is not JSON"),
        ("/v1/chat/completions", {"messages": [USER], "topP": 1}, 400, "topP", "mean 'top_p'"),
        ("/v1/chat/completions", {"messages": [USER], "model": "b"}, 404, "model", "served is"),
        ("/v1/chat/completions", {"messages": [USER], "n": 0}, 400, "n", "between 1 and 128"),
        ("/v1/chat/completions", {"messages": [USER], "top_p": 2}, 400, "top_p", "between"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "top_logprobs": 1},
            400,
            "top_logprobs",
            "needs logprobs",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "stream_options": {}},
            400,
            "stream_options",
            "needs stream",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"mood": 1}},
            400,
            "mood",
            "does not use 'mood'",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "continue_final_message": True},
            400,
            "continue_final_message",
            "needs a last message of role assistant",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "add_generation_prompt": False},
            400,
            "add_generation_prompt",
            "leave it out",
        ),
        ("/v1/chat/completions", {"messages": [USER] * 3000}, 400, "messages", "at most 2048"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt", "at least one token"),
        ("/v1/completions", {"prompt": []}, 400, "prompt", "at least one token"),
        ("/v1/completions", {"prompt": "a " * 2000}, 400, "prompt", "at most 1023 are possible"),
        ("/v1/completions", {"prompt": [9999]}, 400, "prompt", "outside the vocabulary"),
        ("/v1/completions", {"prompt": ["a"] * 100, "n": 2}, 400, "n", "asks for 200 outputs"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "echo"),
        (
            "/v1/completions",
            {"prompt": "a", "prompt_logprobs": 1, "stream": True},
            400,
            "prompt_logprobs",
            "echo with logprobs",
        ),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "token id"),
        ("/v1/nothing", {}, 404, None, "there is nothing at '/v1/nothing'"),
        ("/v1/models", {}, 405, None, "takes GET, not POST"),
    ],
)
def test_mistakes_are_answered_in_openais_form(
    server: Server, path: str, sent: Any, status: int, parameter: str | None, message: str
) -> None:
    data = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    answer = httpx.post(f"{server.url}{path}", content=data)
    error = answer.json()["error"]
    assert answer.status_code == status and message in error["message"], error
    assert error["param"] == parameter and error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("num_words", [2_000, 20_000])  # also one that is not encoded to its end
@pytest.mark.parametrize(
    ("path", "field", "sent"),
    [
        ("/v1/chat/completions", "messages", lambda text: [USER | {"content": text}]),
        ("/v1/completions", "prompt", lambda text: text),
        ("/v1/responses", "input", lambda text: text),
    ],
)
def test_a_prompt_that_is_too_long_has_the_code_by_which_clients_shorten_it(
    server: Server, path: str, field: str, sent: Callable[[str], Any], num_words: int
) -> None:
    answer = httpx.post(f"{server.url}{path}", json={field: sent("a " * num_words)})
    error = answer.json()["error"]
    assert answer.status_code == 400 and "at most 1023 are possible" in error.pop("message")
    code = "context_length_exceeded"
    assert error == {"type": "invalid_request_error", "param": field, "code": code}


def test_other_mistakes_do_not_have_the_code_of_a_prompt_that_is_too_long(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [9999]})
    assert answer.status_code == 400 and answer.json()["error"]["code"] is None


def test_anthropics_api_has_no_code_for_a_prompt_that_is_too_long(server: Server) -> None:
    sent = {"model": "tiny", "max_tokens": 5, "messages": [USER | {"content": "a " * 2_000}]}
    answer = httpx.post(f"{server.url}/v1/messages", json=sent)
    error = answer.json()["error"]
    assert answer.status_code == 400 and "at most 1023 are possible" in error["message"]
    assert error.keys() == {"type", "message"} and error["type"] == "invalid_request_error"


def test_a_request_id_comes_back(server: Server) -> None:
    answer = httpx.get(f"{server.url}/live", headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert len(httpx.get(f"{server.url}/nothing").headers["x-request-id"]) == 32


def test_the_document_names_the_paths(server: Server) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/health"} <= document["paths"].keys()
    assert "temperature" in document["components"]["schemas"]["ChatRequest"]["properties"]
    assert httpx.get(f"{server.url}/docs").status_code == 404
    assert httpx.get(f"{server.url}/version").json() == {"version": "0"}


def post_and_leave(server: Server, sent: dict[str, Any], after: int) -> None:
    """Send a request, read `after` bytes of the answer, and close the connection."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    data = json.dumps(sent).encode()
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            + f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        while after > 0:
            after -= len(raw.recv(after))
        if after == 0 and not sent.get("stream"):
            wait_until(lambda: server.engine.num_active > 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server: Server, stream: bool) -> None:
    for _ in range(20):
        server.engine.aborted.clear()
        sent = {"prompt": "slow", "max_tokens": 500, "stream": stream}
        post_and_leave(server, sent, 300 if stream else 0)
        wait_until(lambda: len(server.engine.aborted) == 1, 1.0)
        wait_until(lambda: server.api.admission.num_open_outputs == 0, 1.0)
        assert server.engine.num_active == 0


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(server: Server) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    time.sleep(0.2)
    assert server.api.admission.num_open_outputs == 0 and server.engine.num_active == 0


def test_streams_of_one_step_wake_the_event_loop_once(server: Server) -> None:
    """The relay delivers a batch of news for all streams in one call."""
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": True})
    [relay] = server.api._client._relays.values()  # it exists since the first stream
    counted: list[int] = []
    deliver = relay._deliver

    def count() -> None:
        counted.append(len(relay._pending_items))
        deliver()

    relay._deliver = count  # type: ignore[method-assign]
    try:
        threads = [
            threading.Thread(
                target=httpx.post,
                args=(f"{server.url}/v1/completions",),
                kwargs={"json": {"prompt": "slow", "stream": True, "max_tokens": 200}},
            )
            for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        relay._deliver = deliver  # type: ignore[method-assign]
    # 200 steps and more, because the streams do not start together; never one wake per chunk.
    assert sum(counted) >= 16 * 200 and len([n for n in counted if n]) < 16 * 200 / 4


def test_what_does_not_fit_is_refused_at_once() -> None:
    with (
        serve(
            script, step_s=0.02, limits=ApiLimits(max_open_outputs=2, max_body_bytes=500)
        ) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        slow = {"prompt": "slow", "max_tokens": 100, "n": 2}
        running = threading.Thread(
            target=httpx.post,
            args=(f"{server.url}/v1/completions",),
            kwargs={"json": slow, "timeout": 60},
        )
        running.start()
        wait_until(lambda: server.engine.num_active == 2)
        with server.engine.held():  # what fills the room does not end, and no other gets there
            refused_s = []
            for _ in range(20):
                began = time.perf_counter()
                refused = http.post("/v1/completions", json={"prompt": "a"})
                refused_s.append(time.perf_counter() - began)
                assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
                limit = "2 outputs are running or waiting, of 2 possible (--max-open-requests"
                assert limit in refused.text
            assert sorted(refused_s)[-2] < 1.0
            assert http.get("/health").status_code == 200  # a busy server is not a dead one
            for path in ("chat/completions", "completions", "responses", "messages"):
                unparsed = http.post(f"/v1/{path}", content=b"not JSON")
                assert unparsed.status_code == 503, path
            large = http.post("/v1/completions", json={"prompt": "a" * 600})
            assert large.status_code == 413 and "at most 500 bytes" in large.text

            def chunked() -> Iterator[bytes]:
                yield from [b"a" * 100] * 10

            assert http.post("/v1/completions", content=chunked()).status_code == 413
        running.join(30)
        wait_until(lambda: server.api.admission.num_open_outputs == 0)
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_has_its_answer_can_send_the_next_request(streams: bool) -> None:
    """Even at once: the room of a request is free when the end of its answer is sent."""
    body = json.dumps({"prompt": "a", "stream": streams}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length:"
    request = f"{head} {len(body)}\r\n\r\n".encode() + body
    with serve(script, limits=ApiLimits(max_open_outputs=1)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(request * 5)
            answers = b""
            while answers.count(b"HTTP/1.1") < 5 or not answers.endswith((b"}", b"0\r\n\r\n")):
                answers += connection.recv(65536)
    assert answers.count(b"HTTP/1.1 200") == 5


def test_only_clients_with_the_key_are_served() -> None:
    with serve(script, api_key="secret") as server, httpx.Client(base_url=server.url) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            refused = http.get("/v1/models", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        good = {"authorization": "Bearer secret"}
        assert http.get("/v1/models", headers=good).status_code == 200
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200


def test_a_drained_server_finishes_what_runs_and_takes_nothing_new() -> None:
    with serve(script, step_s=0.01) as server, httpx.Client(base_url=server.url) as http:
        sent = {"prompt": "slow", "max_tokens": 50}
        answers: list[httpx.Response] = []
        running = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=sent))
        )
        running.start()
        wait_until(lambda: server.engine.num_active == 1)
        server.api.admission.is_draining = True
        assert http.post("/v1/completions", json=sent).status_code == 503
        assert http.get("/health").status_code == 503
        assert http.get("/live").status_code == 200
        running.join(30)
        assert answers[0].json()["usage"]["completion_tokens"] == 50


def test_the_death_of_the_engine_ends_requests_with_an_error() -> None:
    with serve(script, step_s=0.02) as server, httpx.Client(base_url=server.url) as http:
        sent = {"prompt": "slow", "max_tokens": 400, "stream": True}
        with http.stream("POST", "/v1/completions", json=sent) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.engine.die("rank 1 has died")
            rest = [line for line in lines if line]
        assert json.loads(rest[-2][6:])["error"]["message"] == "rank 1 has died"
        assert rest[-1] == "data: [DONE]"
        after = http.post("/v1/completions", json={"prompt": "a"})
        assert after.status_code == 503 and after.json()["error"]["code"] == "engine_dead"
        wait_until(lambda: http.get("/health").status_code == 503, 2.0)
        assert http.get("/live").status_code == 200
        wait_until(lambda: server.api.admission.num_open_outputs == 0)


def test_an_error_that_nobody_foresaw_has_a_body_and_no_words_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(request: Request) -> str:
        raise ZeroDivisionError("secret words")

    with serve(broken) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "in broken" in caplog.text  # the log has the place where it was raised


def test_a_reader_that_does_not_read_is_dropped() -> None:
    limits = ApiLimits(slow_reader_timeout_s=0.5)
    with serve(lambda _: "word " * 300, limits=limits) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        sent = {"prompt": ["a"] * 60, "max_tokens": 600, "stream": True, "logprobs": 20}
        data = json.dumps(sent).encode()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                + f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            wait_until(lambda: server.api.admission.num_open_outputs == 60)
            wait_until(lambda: server.api.admission.num_open_outputs == 0, 20.0)
        assert server.engine.num_active == 0


def test_metrics_tell_what_happened(server: Server, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="tiny", messages=[USER])
    httpx.get(f"{server.url}/nothing")
    leaves = {"prompt": "a", "stream": True, "max_tokens": 500}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=leaves) as answer:
        next(answer.iter_lines())
    wait_until(lambda: server.api.admission.num_open_outputs == 0)
    text = httpx.get(f"{server.url}/metrics").text
    assert 'eagleray_http_requests_total{path="/v1/chat/completions",status="200"}' in text
    assert 'status="499"' in text and 'path="other",status="404"' in text
    for name in (
        "eagleray_time_to_first_token_seconds_bucket",
        "eagleray_inter_token_seconds_count",
        "eagleray_kv_blocks_free 10.0",
        "eagleray_queue_seconds_sum 0.5",
        'eagleray_step_part_seconds_total{part="forward"} 1.5',
        'eagleray_rank_step_seconds_total{rank="1"} 1.8',
        "eagleray_http_outputs_open 0.0",
    ):
        assert name in text


def test_metrics_of_several_processes_add_up() -> None:
    def of(value: float) -> list[MetricFamily]:
        samples = [("a_total", (("path", "x"),), value), ("a_total", (), 1.0)]
        return [MetricFamily(name="a", kind="counter", help="A.", samples=samples)]

    text = render(merge([of(1.0), of(2.0), []])).decode()
    assert 'a_total{path="x"} 3.0' in text and "\na_total 2.0" in text


def test_the_api_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, cluster.api.app; "
        "print(sorted({'ray', 'torch', 'numba', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SOURCE_ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5}),
    ],
)
def test_the_session_of_a_request_reaches_the_engine(path: str, body: dict[str, Any]) -> None:
    with serve() as server:
        httpx.post(server.url + path, json=body).raise_for_status()
        names = ("X-Session-Id", "session-id", "X-Claude-Code-Session-Id")
        for name in names:
            httpx.post(server.url + path, json=body, headers={name: "s1"}).raise_for_status()
        num_prompts = len(server.engine.sessions) // (1 + len(names))
        with_session = ["s1"] * num_prompts * len(names)
        assert server.engine.sessions == [None] * num_prompts + with_session


def test_a_silent_stream_is_kept_alive_with_comments() -> None:
    with serve(step_s=0.4, limits=ApiLimits(ping_interval_s=0.1)) as server:
        asked = {"messages": [USER], "stream": True, "max_tokens": 3}
        began_s = time.monotonic()
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked) as answer:
            times_and_lines = [
                (time.monotonic(), line) for line in answer.iter_lines() if line not in ("", ":")
            ]
        lines = [line for _, line in times_and_lines]
        assert lines[-1] == "data: [DONE]"
        most = (times_and_lines[-1][0] - began_s) / 0.1
        assert 3 <= lines.count(": waiting") <= most, lines
        pauses_s = [
            later_s - earlier_s
            for (earlier_s, earlier), (later_s, later) in itertools.pairwise(times_and_lines)
            if earlier == later == ": waiting"
        ]
        assert min(pauses_s) < 0.15, pauses_s
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        chunks = list(client.chat.completions.create(model="tiny", **asked))  # type: ignore[call-overload]
        assert chunks[-1].choices[0].finish_reason == "length"
    with serve(step_s=0.02, limits=ApiLimits(ping_interval_s=0.3)) as server:
        asked = {"prompt": "a", "stream": True, "max_tokens": 20, "logprobs": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked)
        assert ": waiting" not in answer.text


def test_comments_do_not_hold_up_a_client_that_strips_what_it_reads() -> None:
    """For example `vllm bench serve` 0.32, which takes the rest of an event if that is JSON."""
    asked = {"prompt": "a", "stream": True, "max_tokens": 4}
    with serve(step_s=0.4, limits=ApiLimits(ping_interval_s=0.1)) as server:
        left, num_comments, num_events = "", 0, 0
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked) as answer:
            for part in answer.iter_raw():
                *whole, left = (left + part.decode().strip()).split("\n\n")
                whole.append(left)
                events = [event for event in whole if event.startswith("data: ")]
                assert len(events) == part.count(b"data: "), (part, whole)
                num_comments += part.startswith(b": waiting")
                num_events += len(events)
                left = "" if events else left
    assert num_comments >= 3
    assert num_events >= 3


def test_an_answer_goes_on_where_the_last_message_ends(server: Server) -> None:
    path, wanted = server.url + "/v1/chat/completions", {"return_token_ids": True}
    begun = [USER, {"role": "assistant", "content": "That makes"}]
    asked = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    prompts = [
        httpx.post(path, json=body | wanted).json()["prompt_token_ids"]
        for body in ({"messages": [USER]}, asked)
    ]
    last = httpx.post(server.url + "/v1/completions", json={"prompt": "That makes"} | wanted)
    ids = last.json()["choices"][0].get("prompt_token_ids") or last.json()["prompt_token_ids"]
    assert prompts[1][: len(prompts[0])] == prompts[0] and prompts[1][-len(ids) :] == ids
    assert httpx.post(server.url + "/tokenize", json=asked).json()["tokens"] == prompts[1]
    for body in (asked | {"add_generation_prompt": True}, {"prompt": "a"} | {"tools": [ADD]}):
        assert httpx.post(server.url + "/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("n", [1, 2])
def test_token_ids_are_returned_where_they_are_asked_for(server: Server, n: int) -> None:
    """Whole and streamed they add up to the same, including tokens whose text is held back or that
    have none.
    """
    for path, asked in (
        ("/v1/chat/completions", {"messages": [USER], "tools": [ADD]}),
        ("/v1/completions", {"prompt": ["What is", "Hi"], "max_tokens": 30}),
    ):
        body: dict[str, Any] = asked | {"return_token_ids": True, "n": n, "seed": 1}
        whole = httpx.post(server.url + path, json=body).json()
        prompts: dict[int, list[int]] = {}
        streamed: dict[int, list[int]] = {}
        text = httpx.post(server.url + path, json=body | {"stream": True}).text
        for line in text.splitlines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            [choice] = event["choices"]
            index = choice["index"]
            streamed.setdefault(index, []).extend(choice.get("token_ids", []))
            for place in (event, choice):
                if "prompt_token_ids" in place:
                    assert index not in prompts
                    prompts[index] = place["prompt_token_ids"]
        assert len(streamed) == len(whole["choices"]) == n * (1 if "messages" in asked else 2)
        for choice in whole["choices"]:
            index = choice["index"]
            assert choice["token_ids"] == streamed[index] and len(streamed[index]) > 3
            prompt = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
            assert prompt == prompts[index] and len(prompt) > 0
        plain = httpx.post(server.url + path, json=asked).json()
        assert "token_ids" not in json.dumps(plain)
