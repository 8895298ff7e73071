"""`launch.py trace`: the last seconds of an engine of a running server as a Chrome trace."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from cluster.commands.top import ANSWER_TIMEOUT_S, no_server_error
from scheduler.errors import ConfigError


def run_trace(url: str, seconds: float, output: Path, api_key: str | None) -> str:
    """Write the trace to a file; returns a message about it. Raises `ConfigError`."""
    if not seconds > 0:  # nor NaN
        raise ConfigError(f"--seconds must be a number above 0, got {seconds:g}")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(f"{url}/debug/trace?seconds={seconds:g}", headers=headers)
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            trace = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        body = error.read(1000).decode(errors="replace")
        raise ConfigError(f"{url!r} answers {error.code}: {body}") from None
    except (OSError, ValueError, HTTPException) as error:
        raise no_server_error(url, error) from None
    try:
        output.write_text(json.dumps(trace))
    except OSError as error:
        raise ConfigError(f"--output {str(output)!r} cannot be written: {error}") from None
    num_steps = sum(event["name"].startswith("step ") for event in trace["traceEvents"])
    return (
        f"{num_steps} steps of the last {seconds:g} s are in {output}; open it in ui.perfetto.dev"
    )
