"""LiteLLM's proxy in front of the server, asked with OpenAI's client and for a message."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checks import ADD, KEY, MODEL, SUM, V1, equal, run
from openai import OpenAI

START_LIMIT_S = 90
PROXY_KEY = "sk-7f3a9c2e5b8d1064"  # it refuses to start without one, and with a plain one
TOOLS: Any = [{"type": "function", "function": ADD}]


@contextlib.contextmanager
def proxy() -> Iterator[str]:
    """The address of a proxy that knows one model."""
    options = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": KEY, "max_retries": 0}
    models = [{"model_name": MODEL, "litellm_params": options}]
    Path("config.yaml").write_text(json.dumps({"model_list": models}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", port]
    variables = os.environ | {"LITELLM_MASTER_KEY": PROXY_KEY}
    with subprocess.Popen(command, env=variables) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_for(f"{url}/health/liveliness", process)
            yield url
        finally:
            process.terminate()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > until_s or process.poll() is not None:
                raise
            time.sleep(0.5)


def ask(url: str, messages: list[Any], **options: Any) -> Any:
    """The answer to a streamed turn, which is added to the messages."""
    client = OpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0)
    asked = {"model": MODEL, "messages": messages} | options
    with client.chat.completions.stream(**asked) as events:
        message = events.get_final_completion().choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message


with proxy() as address:

    def stream() -> None:
        equal(ask(address, [{"role": "user", "content": "[[say One.]]"}]).content, "One.")

    def tool() -> None:
        messages: list[Any] = [{"role": "user", "content": SUM}]
        [call] = ask(address, messages, tools=TOOLS).tool_calls
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "85"})
        equal(ask(address, messages, tools=TOOLS).content, "It is 85.")

    def history() -> None:
        messages: list[Any] = [{"role": "user", "content": "[[say One.]]"}]
        ask(address, messages)
        messages.append({"role": "user", "content": "[[say Two.]]"})
        equal(ask(address, messages).content, "Two.")

    def messages() -> None:
        asked = {"model": MODEL, "max_tokens": 100}
        asked["messages"] = [{"role": "user", "content": "[[say One.]]"}]
        headers = {"content-type": "application/json", "x-api-key": PROXY_KEY}
        body = json.dumps(asked).encode()
        request = urllib.request.Request(f"{address}/v1/messages", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            equal(json.load(answer)["content"][-1]["text"], "One.")

    run(stream, tool, history, messages)
