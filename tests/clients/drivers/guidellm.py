"""guidellm: a short benchmark of chats and of completions."""

from __future__ import annotations

import json
from pathlib import Path

from checks import KEY, MODEL, URL, equal, output_of, run

NUM_REQUESTS = 8


def benchmark(path: str) -> None:
    """Run a benchmark of one path: all requests must succeed."""
    questions = [{"prompt": f"What is {a} + 38?"} for a in range(40, 40 + NUM_REQUESTS)]
    Path("data.json").write_text(json.dumps(questions))
    server = {"kind": "openai_http", "target": URL, "model": MODEL, "api_key": KEY}
    output_of(
        *("guidellm", "run", "--disable-progress"),
        *("--backend", json.dumps(server | {"request_format": path})),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", "kind=json_file,path=data.json"),
        *("--output", "kind=json,path=report.json"),
        HF_HUB_OFFLINE="1",
    )
    [result] = json.loads(Path("report.json").read_text())["benchmarks"]
    counts = result["metrics"]["request_totals"]
    equal((counts["successful"], counts["errored"]), (NUM_REQUESTS, 0))


def chats() -> None:
    benchmark("/v1/chat/completions")


def completions() -> None:
    benchmark("/v1/completions")


run(chats, completions)
