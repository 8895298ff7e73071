"""`launch.py top` and `launch.py trace` over a real port."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from cluster.commands import top
from cluster.commands.trace import run_trace
from configs.paths import SOURCE_ROOT
from scheduler.errors import ConfigError
from tests.cluster.api.scripted import echo_number, serve


def text_of(last: top.MetricsReading | None, now: top.MetricsReading) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(top.metrics_table("URL", last, now))
    return captured.get()


def test_the_numbers_of_a_server_are_shown() -> None:
    with serve(echo_number) as server:
        first = top.read_metrics(server.url)
        for _ in range(3):
            httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": "a", "stream": True, "max_tokens": 5, "logprobs": 0},
            )
        second = top.read_metrics(server.url)
        command = [sys.executable, "launch.py", "top", "--once", "--url", server.url]
        done = subprocess.run(
            command, cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=60, check=True
        )
    second.time_s = first.time_s + 3.0
    shown = text_of(first, second)
    assert "5.0 per s" in shown  # 15 tokens in 3 s
    assert "running / waiting" in shown and "0 / 0" in shown
    assert "time in the queue" in done.stdout and "250.0 ms" in done.stdout
    assert "forward 500.0 ms" in done.stdout


def test_an_event_that_is_rare_is_shown_with_its_total() -> None:
    first, second = top.MetricsReading(100.0), top.MetricsReading(102.0)
    first.totals["eagleray_preemptions_total"] = 11.0
    second.totals["eagleray_preemptions_total"] = 12.0
    live, once = text_of(first, second), text_of(None, second)
    assert "0.5 per s, 12 since the start" in live and "at URL, the last 2 s" in live
    assert (
        "12 since the start" in once and "per s" not in once and "at URL, since its start" in once
    )


def test_an_address_without_a_server_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no server answers at 'http://127.0.0.1:1'"):
        top.read_metrics("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="no server answers at 'http://a:b': "):
        top.read_metrics("http://a:b")
    with pytest.raises(ConfigError, match="no server answers at 'nonsense'"):
        top.read_metrics("nonsense")


def test_a_trace_has_the_steps_their_parts_and_who_waited(tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    with serve(echo_number) as server:
        command = [sys.executable, "launch.py", "trace", "--url", server.url]
        done = subprocess.run(
            [*command, "--seconds", "5", "--output", str(output)],
            cwd=SOURCE_ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        refused = [
            httpx.get(f"{server.url}/debug/trace?seconds={seconds}")
            for seconds in ("many", "nan", "-5", "0")
        ]
    assert done.stdout.startswith("2 steps of the last 5 s are in ")
    events = json.loads(output.read_text())["traceEvents"]
    [step] = [event for event in events if event["name"] == "step 0"]
    assert (step["ph"], step["ts"], step["dur"]) == ("X", 0, pytest.approx(9000, abs=1))
    assert step["args"]["first in line waits for"] == "kv blocks"
    [forward] = [event for event in events if event["name"] == "forward"]
    assert (forward["ts"], forward["dur"]) == (pytest.approx(4000, abs=1), 4000)
    assert any(event["name"] == "step 1: no result" for event in events)
    for answer in refused:
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "seconds"


@pytest.mark.parametrize("url", ["myhost", "::1:8130", "http://a:b", "http://127.0.0.1:1"])
def test_a_trace_needs_the_address_of_a_server(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no server answers at '{url}': .* such as http://"):
        run_trace(url, 10.0, tmp_path / "trace.json", None)


@pytest.mark.parametrize("seconds", [math.nan, -5.0, 0.0])
def test_a_trace_looks_back_for_a_time_above_0(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--seconds must be a number above 0"):
        run_trace("http://127.0.0.1:1", seconds, tmp_path / "trace.json", None)


def test_the_key_of_the_environment_may_end_with_a_newline(tmp_path: Path) -> None:
    with serve(echo_number, api_key="secret") as server:
        command = [sys.executable, "launch.py", "trace", "--url", server.url]
        done = subprocess.run(
            [*command, "--output", str(tmp_path / "trace.json")],
            cwd=SOURCE_ROOT,
            env=os.environ | {"EAGLERAY_API_KEY": "secret\n"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
