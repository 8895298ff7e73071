"""`launch.py top` over a real port."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from rich.console import Console

from cluster.commands import top
from configs.paths import CHECKOUT
from scheduler.errors import ConfigError
from tests.cluster.api.scripted import echo_number, serve


def text_of(last: top.Reading | None, now: top.Reading) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(top.table("URL", last, now))
    return captured.get()


def test_the_numbers_of_a_server_are_shown() -> None:
    with serve(echo_number) as server:
        first = top.read(server.url)
        for _ in range(3):
            httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": "a", "stream": True, "max_tokens": 5, "logprobs": 0},
            )
        second = top.read(server.url)
        command = [sys.executable, "launch.py", "top", "--once", "--url", server.url]
        done = subprocess.run(
            command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=True
        )
    second.at_s = first.at_s + 3.0
    shown = text_of(first, second)
    assert "5.0 per s" in shown  # 15 tokens in 3 s
    assert "running / waiting" in shown and "0 / 0" in shown
    assert "time in the queue" in done.stdout and "250.0 ms" in done.stdout
    assert "forward 500.0 ms" in done.stdout


def test_an_address_without_a_server_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no server answers at 'http://127.0.0.1:1'"):
        top.read("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="no server answers at 'nonsense'"):
        top.read("nonsense")
