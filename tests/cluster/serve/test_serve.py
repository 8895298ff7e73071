"""The application on Ray Serve: through its proxy, through a handle, and from the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
import yaml  # type: ignore[import-untyped]

from cluster.client.outputs import Chunk, RequestOutput
from cluster.commands import top
from configs.paths import CHECKOUT
from configs.serve import ServeConfig
from scheduler.errors import ConfigError
from scheduler.messages import EngineStats
from scheduler.params import SamplingParams
from tests.cluster.api.browser import Watched, browser
from tests.cluster.conftest import SmallModel
from tests.cluster.processes import family, wait_until

pytestmark = pytest.mark.engine
SUM: Any = {"role": "user", "content": "What is 47 + 38?"}
# Logprobs make every token an event, whether or not it has text.
LONG = {"prompt": "<|im_start|>user\n", "max_tokens": 900, "ignore_eos": True, "logprobs": 0}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def served(users_ray: None) -> Iterator[tuple[str, Any]]:
    """URL and handle of an application of two replicas in the user's Ray."""
    from ray import serve

    from cluster.serve.application import build

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    arguments = {
        "engine": {"device": "cpu", "kv_cache_bytes": 2**26, "stuck_after_s": 5},
        "replicas": 2,
        "served_model_name": "tiny",
    }
    handle = serve.run(build(arguments), name="eagleray")
    yield f"http://127.0.0.1:{port}", handle
    serve.shutdown()


def stats_of(url: str) -> dict[str, float]:
    """The numbers of all engines and of the API, added up."""
    return top.read(url).numbers


def num_leases() -> list[int]:
    """How many requests each engine has, as Ray Serve sees it."""
    import ray
    from ray.util import list_named_actors

    replicas = [
        ray.get_actor(each["name"], namespace=each["namespace"])
        for each in list_named_actors(all_namespaces=True)
        if each["name"].startswith("SERVE_REPLICA::eagleray#engine#")
    ]
    found: list[int] = ray.get(
        [replica.get_num_ongoing_requests.remote() for replica in replicas], timeout=10
    )
    return found


def wait_until_idle(url: str, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while True:
        numbers = stats_of(url)
        if numbers["eagleray_num_requests_running"] == numbers["eagleray_http_outputs_open"] == 0:
            assert numbers["eagleray_kv_blocks_free"] == numbers["eagleray_kv_blocks"]
            if not any(num_leases()):
                return
        assert time.monotonic() < until, (num_leases(), numbers)
        time.sleep(0.1)


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
    """Two hundred of them, streamed and whole, at a temperature at which the model wanders."""
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


def test_the_page_shows_the_engine_and_streams_a_chat(
    served: tuple[str, Any], tmp_path: Path
) -> None:
    """`make screenshots` keeps the pictures."""
    from playwright.sync_api import expect

    pictures = Path(os.environ.get("EAGLERAY_SCREENSHOTS", tmp_path))
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
        page.wait_for_timeout(2000)
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
    streaming: Any = handle.options(stream=True)
    chunks = list(streaming.stream_chat.remote([SUM], greedy))
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == "85"
    chunks = list(streaming.stream.remote("a", SamplingParams(max_tokens=3, ignore_eos=True)))
    assert chunks[-1].finish_reason == "length"


def test_metrics_speak_for_all_replicas(served: tuple[str, Any]) -> None:
    url, _ = served
    httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60).raise_for_status()
    numbers, engines = stats_of(url), engine_stats()
    assert len(engines) == 2 == numbers["eagleray_ready"]
    assert numbers["eagleray_kv_blocks"] == sum(each.num_blocks for each in engines)
    assert numbers["eagleray_num_requests_running"] == 0 < numbers["eagleray_steps_total"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(served: tuple[str, Any], stream: bool) -> None:
    """Ray cancels what a canceled call called; the news that the request has ended must arrive."""
    url, _ = served
    for _ in range(30):
        if stream:
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as got:
                assert next(got.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=LONG, timeout=0.1)
    wait_until_idle(url, 1.0)


def test_a_dropped_stream_of_a_handle_frees_its_blocks(served: tuple[str, Any]) -> None:
    url, handle = served
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    stream = handle.options(stream=True).stream.remote("a", params)
    next(iter(stream))
    stream.cancel()
    wait_until_idle(url, 3.0)


def engine_stats() -> list[EngineStats]:
    """The counters of each engine."""
    from ray import serve

    engines = serve.get_deployment_handle("engine", "eagleray")
    found: list[EngineStats] = engines.broadcast("stats").results(timeout_s=10)
    return found


def num_admitted() -> dict[str, int]:
    """How many requests each engine has had."""
    from ray import serve

    found = serve.get_app_handle("eagleray").describe.remote().result(timeout_s=10)
    return {each.replica: each.num_admitted for each in found}


def engine_of(url: str, session: str) -> str:
    """The engine that a session goes to."""
    before = num_admitted()
    headers = {"x-session-id": session}
    httpx.post(f"{url}/v1/completions", json={"prompt": session, "max_tokens": 1}, headers=headers)
    return next(name for name, count in num_admitted().items() if count != before[name])


def talk(url: str, salt: str, session_of: Callable[[int, int], str | None]) -> int:
    """Eight conversations of six turns, as many at once; how many tokens they found cached."""
    cached = [0] * 8

    def conversation(number: int) -> None:
        messages: list[Any] = []
        for turn in range(6):
            words = " ".join(f"{number * 100 + turn * 7 + i} apples and" for i in range(6))
            messages.append({"role": "user", "content": f"{words} what is 47 + 38?"})
            session = session_of(number, turn)
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={"messages": messages, "max_tokens": 20, "seed": 1, "cache_salt": salt},
                headers={"x-session-id": session} if session else {},
                timeout=60,
            ).json()
            cached[number] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            messages.append(answer["choices"][0]["message"])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(conversation, range(8)))
    return sum(cached)


def test_conversations_find_what_they_have_cached(served: tuple[str, Any]) -> None:
    url, _ = served
    one = talk(url, "one", lambda number, turn: "one")
    names = {engine_of(url, f"session {number}"): f"session {number}" for number in range(6)}
    sessions = list(names.values())
    assert len(sessions) == 2
    alternating = talk(url, "in turn", lambda number, turn: sessions[(number + turn) % 2])
    routed = talk(url, "routed", lambda number, turn: None)
    print(f"cached tokens: one engine {one}, two {routed}, in turn {alternating}")
    assert one > 3000 and routed >= 0.9 * one, (one, routed, alternating)
    assert alternating < 0.9 * one, "otherwise this shows nothing"


def test_no_engine_gets_much_more_than_the_others(served: tuple[str, Any]) -> None:
    url, _ = served
    before = num_admitted()

    def ask(number: int) -> None:
        body = {"prompt": f"{number} is a number " * 10, "max_tokens": 10}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(ask, range(100)))
    counts = [count - before[name] for name, count in num_admitted().items()]
    print(f"requests per engine: {counts}")
    assert sum(counts) == 100 and max(counts) <= 1.5 * 50, counts
    wait_until_idle(url, 3.0)


@pytest.mark.parametrize("lost", ["replica", "driver", "driver that hangs", "every driver"])
def test_requests_of_a_lost_engine_go_on_at_another(served: tuple[str, Any], lost: str) -> None:
    """With the tokens they have: nobody notices more than a pause."""
    import ray
    from ray.util import list_named_actors

    url, _ = served
    body = LONG | {"max_tokens": 200, "temperature": 1.0}
    texts: dict[int, list[str]] = {number: [] for number in range(8)}

    def stream(number: int) -> None:
        asked = body | {"stream": True, "seed": number}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=90) as got:
            for line in got.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    logprobs = event["choices"][0]["logprobs"]
                    texts[number] += logprobs["tokens"] if logprobs else []

    def expected(number: int) -> list[str]:
        asked = body | {"seed": number}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=90).json()
        tokens: list[str] = answer["choices"][0]["logprobs"]["tokens"]
        return tokens

    with ThreadPoolExecutor(8) as threads:
        wanted = dict(enumerate(threads.map(expected, range(8))))
        streams = [threads.submit(stream, number) for number in range(8)]
        wait_until(lambda: all(len(parts) > 3 for parts in texts.values()), "streaming", 30)
        assert min(num_leases()) > 0, "both are in use"
        if lost == "replica":
            [*_, name] = [
                each
                for each in list_named_actors(all_namespaces=True)
                if each["name"].startswith("SERVE_REPLICA::eagleray#engine#")
            ]
            ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]))
        else:
            found = subprocess.run(["pgrep", "-f", "^ray::Driver"], capture_output=True, check=True)
            drivers = list(map(int, found.stdout.split()))
            for driver in drivers if lost == "every driver" else drivers[-1:]:
                os.kill(driver, signal.SIGSTOP if lost.endswith("hangs") else signal.SIGKILL)
        had = {number: len(parts) for number, parts in texts.items()}
        began = time.monotonic()
        is_served = lost != "every driver"
        assert httpx.get(f"{url}/health", timeout=5).status_code == (200 if is_served else 503)
        assert stats_of(url)["eagleray_ready"] >= is_served
        assert time.monotonic() - began < 5
        for each in streams:
            each.result(90)
    assert texts == wanted
    assert sum(len(parts) > had[number] for number, parts in texts.items()) > 4
    wait_until(lambda: stats_of(url)["eagleray_ready"] == 2, "a new engine", 60)
    wait_until_idle(url, 10.0)


class Program:
    """`launch.py serve` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "launch.py", "serve", "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready on"):
                return
        raise AssertionError("it ended")


def test_sigterm_finishes_what_runs_and_leaves_nothing() -> None:
    program = Program("--kv-cache-bytes", str(2**26), "--ray-address", "local")
    program.wait_until_ready()
    assert len(family(program.process.pid)) > 5
    started: list[str] = []
    finished: list[str] = []

    def stream() -> None:
        sent = LONG | {"stream": True, "max_tokens": 100}
        with httpx.stream("POST", f"{program.url}/v1/completions", json=sent, timeout=60) as got:
            each = (line for line in got.iter_lines() if line)
            started.append(next(each))
            lines = list(each)
        finished.append(json.loads(lines[-2][6:])["choices"][0]["finish_reason"] + lines[-1])

    threads = [threading.Thread(target=stream) for _ in range(32)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(started) == 32, "the first token of each stream", 20.0)
    program.process.send_signal(signal.SIGTERM)
    until = time.monotonic() + 10
    while (status := httpx.get(f"{program.url}/health").status_code) != 503:
        assert status == 200 and time.monotonic() < until
    refused = httpx.post(f"{program.url}/v1/completions", json=LONG)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    for thread in threads:
        thread.join(60)
    assert finished == ["lengthdata: [DONE]"] * 32
    assert program.process.wait(30) == 0
    wait_until(lambda: not family(program.process.pid), "the end of all its processes", 5.0)


def test_a_second_sigterm_ends_everything_within_five_seconds() -> None:
    program = Program("--kv-cache-bytes", str(2**26), "--ray-address", "local")
    program.wait_until_ready()
    with httpx.stream(
        "POST", f"{program.url}/v1/completions", json=LONG | {"stream": True}, timeout=60
    ) as got:
        assert next(got.iter_lines()).startswith("data: ")
        program.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert program.process.poll() is None
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(5) == 130
    wait_until(lambda: not family(program.process.pid), "the end of all its processes", 5.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--tp", "3"], "tensor_parallel_size"),
        (["--replicas", "0"], "replicas must be a whole number of at least 1"),
        (["--api-key", ""], "api_key must not be empty"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--name", "a#b"], "--name 'a#b' must consist of letters"),
        (["--route-prefix", "chat/"], "--route-prefix 'chat/' must be a path such as /chat"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(arguments: list[str], message: str) -> None:
    command = [sys.executable, "launch.py", "serve", *arguments]
    done = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "8", "--replicas", "2"], "does not have the resources for 2 replicas"),
        (["--tp", "1"], "an application named 'eagleray' runs in this Ray cluster already"),
    ],
)
def test_a_cluster_that_is_joined_is_looked_at_first(
    served: tuple[str, Any], arguments: list[str], message: str
) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "launch.py", "serve", "--port", str(free_port())]
    done = subprocess.run(
        [*command, "--ray-address", address, "--device", "cpu", *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_two_engines_are_started_listed_asked_and_ended_apart(
    served: tuple[str, Any], small_model: SmallModel
) -> None:
    import ray

    url, _ = served
    address = ray.get_runtime_context().gcs_address
    other = ["--name", "other", "--model", str(small_model.path), "--device", "cpu", "--tp", "2"]

    def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "launch.py", *arguments, "--ray-address", address]
        return subprocess.run(
            command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False
        )

    taken = launch("serve", *other, "--port", url.rpartition(":")[2], "--detach")
    assert taken.returncode == 2 and "Choose another --route-prefix" in taken.stderr, taken.stderr
    started = launch("serve", *other, "--route-prefix", "/other", "--detach")
    assert started.returncode == 0, started.stderr
    listed = launch("status")
    rows = [line.split() for line in listed.stdout.splitlines() if "RUNNING" in line]
    assert [row[1] for row in rows] == ["eagleray", "eagleray", "other"], listed.stdout
    assert "tiny" in rows[0] and small_model.path.name in rows[2] and "serving" in rows[2]
    asked = {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{url}/other/v1/completions", json=asked, timeout=20)
    assert answer.status_code == 200, answer.text
    assert httpx.get(f"{url}/other/v1/models").json()["data"][0]["id"] == small_model.path.name
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
    unknown = launch("down", "another")
    assert unknown.returncode == 2 and "running: eagleray, other" in unknown.stderr
    assert launch("down", "other").returncode == 0
    assert "other" not in launch("status").stdout
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "launch.py", "serve", "--port", port]
        done = subprocess.run(
            command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_the_file_for_serve_deploy_builds_the_application_it_says() -> None:
    file = yaml.safe_load((CHECKOUT / "configs" / "serve.yaml").read_text())
    [application] = file["applications"]
    assert application["import_path"] == "cluster.serve.application:build"
    config = ServeConfig.from_dict(application["args"])
    assert config.engine.tensor_parallel_size == 2 and config.model_name == "default_model"
    with pytest.raises(ConfigError, match="unknown serving option 'tensor_parallel_size'"):
        ServeConfig.from_dict({"tensor_parallel_size": 2})
