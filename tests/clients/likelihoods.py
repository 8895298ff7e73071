"""lm-evaluation-harness over the server computes the likelihoods that it computes with transformers
itself.

    python -m tests.clients.likelihoods VENV

VENV is a virtual environment with `lm-eval[api]` and `accelerate`. Makes a task of 50 multiple-
choice items, runs it with the harness's `local-completions` against `launch.py serve` and with its
`hf` on the same checkpoint in float32, and compares the log likelihood of every choice. Ends with 1
if any differs by more than 1e-3.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from configs.paths import DEFAULT_MODEL_DIR
from tests.cluster.serve.served import Program

NUM_ITEMS = 50
TOLERANCE = 1e-3
TASK = "made_here"
TASK_FILE = f"""\
task: {TASK}
dataset_path: json
dataset_kwargs:
  data_files:
    test: ITEMS
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list:
  - metric: acc
"""
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def make_items() -> list[dict[str, Any]]:
    """Questions of the kinds that the default model knows, and text that it does not; contexts of a
    few to some hundred tokens, choices of one to many.
    """
    rng = random.Random(11)
    items = []
    for index in range(NUM_ITEMS):
        a, b = rng.randrange(100), rng.randrange(100)
        day = rng.randrange(7)
        others = [str(a + b + shift) for shift in (1, 10, -1)]
        before = "".join(f"{n} + {b} = {n + b}\n" for n in range(rng.choice([0, 0, 1, 5, 30])))
        question, choices = [
            (f"{before}{a} + {b} =", [f" {a + b}", *(f" {other}" for other in others)]),
            (
                f"{before}<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n",
                [str(a + b), *others],
            ),
            (
                f"{before}The day after {DAYS[day]} is",
                [f" {DAYS[(day + shift) % 7]}" for shift in (1, 2, 3, 6)],
            ),
            (f"Zürich, naïve, 東京 {a}:", [" 京都", " é" * 20, "\n\nnothing", f" {b}"]),
        ][index % 4]
        items.append({"question": question, "choices": choices, "answer": 0})
    return items


def write_task(folder: Path) -> None:
    items = folder / "items.jsonl"
    items.write_text("".join(json.dumps(item) + "\n" for item in make_items()))
    (folder / f"{TASK}.yaml").write_text(TASK_FILE.replace("ITEMS", str(items)))


def likelihoods(venv: Path, tasks: Path, out: Path, model: str, *arguments: str) -> list[list[Any]]:
    """What the harness logs per item: [log likelihood, whether it is greedy] of each choice."""
    command = [str(venv / "bin" / "lm_eval"), "--model", model, "--tasks", TASK]
    command += ["--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    # One thread: several that wait for one another take minutes on a busy machine.
    offline = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tasks / "hf"),
    }
    subprocess.run([*command, *arguments], env=os.environ | offline, check=True)
    [samples] = out.rglob(f"samples_{TASK}_*.jsonl")
    by_item = {
        sample["doc_id"]: [[float(value), str(greedy)] for value, greedy in _pairs(sample)]
        for sample in map(json.loads, samples.read_text().splitlines())
    }
    assert len(by_item) == NUM_ITEMS
    return [by_item[index] for index in range(NUM_ITEMS)]


def _pairs(sample: dict[str, Any]) -> list[Any]:
    return [response[0] if len(response) == 1 else response for response in sample["resps"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path, help="a virtual environment with lm-eval[api]")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the server")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder)
        ours = from_server(arguments.venv, folder, arguments.tp)
        theirs = likelihoods(
            arguments.venv,
            folder,
            folder / "hf",
            "hf",
            *("--model_args", f"pretrained={DEFAULT_MODEL_DIR},dtype=float32"),
            *("--device", "cpu", "--batch_size", "1"),
        )
    pairs = [pair for item in zip(ours, theirs, strict=True) for pair in zip(*item, strict=True)]
    largest = max(abs(own[0] - other[0]) for own, other in pairs)
    greedy = sum(own[1] != other[1] for own, other in pairs)
    print(
        f"{len(pairs)} likelihoods of {NUM_ITEMS} items, from {min(p[1][0] for p in pairs):.1f} to"
        f" {max(p[1][0] for p in pairs):.4f}: largest difference {largest:.2e}, {greedy} differ in"
        " whether they are greedy"
    )
    return int(largest > TOLERANCE or greedy > 0)


def from_server(venv: Path, folder: Path, num_ranks: int) -> list[list[Any]]:
    """The likelihoods over HTTP."""
    server = Program("--dtype", "float32", "--tp", str(num_ranks))
    try:
        server.wait_until_ready()
        [model] = httpx.get(f"{server.url}/v1/models").json()["data"]
        options = {
            "model": model["id"],
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(DEFAULT_MODEL_DIR),
            "tokenizer_backend": "huggingface",
            "num_concurrent": "4",
            "max_length": str(model["max_model_len"]),
        }
        text = ",".join(f"{name}={value}" for name, value in options.items())
        return likelihoods(
            venv, folder, folder / "server", "local-completions", "--model_args", text
        )
    finally:
        server.process.terminate()
        server.process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
