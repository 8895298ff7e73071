"""One sequence beside llama.cpp, in the same shape and with the same number of threads.

    python -m benchmarks.peer_llama_cpp --python VENV/bin/python

The interpreter given has llama-cpp-python and gguf (`CMAKE_ARGS=-DGGML_NATIVE=ON pip install
llama-cpp-python gguf`, minutes on two cores). Both engines read the same random weights; llama.cpp
gets them as GGUF files in BF16, Q8_0 and Q4_0, Eagleray in bfloat16, int8 and int4. Engines take
turns, started anew each time. Output tokens are timed from the first to the last, as a client of
Eagleray sees them, through Ray. Prints a table in Markdown: medians, and what the memory would
allow, reading as fast as the fastest probe of the runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import alternate, median, model_or_random, write_result
from cluster import LLM, SamplingParams
from cluster.commands.batch import BatchRequest
from cluster.commands.timing import run_timed
from configs.model import ModelConfig
from configs.quantization import computed_quantization
from configs.shapes import SHAPES
from workers.models.size import count_parameters
from workers.roofline import probe_cpu

_PEER = Path(__file__).with_name("peer_llama_cpp_run.py")
FORMS = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
LIMIT = "read_tokens_per_s: every matrix is read once per token, at the memory's speed"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter that has llama-cpp-python")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="llama.cpp's; ours has all cores")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sizes = {key: getattr(args, key) for key in ("shape", "prompt", "output", "threads", "rounds")}
    with (
        model_or_random(None, SHAPES[args.shape]) as model,
        tempfile.TemporaryDirectory() as folder,
    ):
        rows = [compare(args, model, Path(folder), form) for form in args.forms]
    write_result("peer_llama_cpp", LIMIT, {**sizes, "forms": rows})
    print(table(rows), file=sys.stderr)


def compare(args: argparse.Namespace, model: str, folder: Path, form: str) -> dict[str, Any]:
    """Both engines with one form of weights."""
    file = folder / f"{FORMS[form]}.gguf"
    peer = [args.python, str(_PEER)]
    subprocess.run([*peer, "write", model, str(file), "--type", FORMS[form]], check=True)
    numbers = ("prompt", "output", "threads")
    options = [word for key in numbers for word in (f"--{key}", str(getattr(args, key)))]

    def theirs() -> dict[str, float]:
        command = [*peer, "time", str(file), *options]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(ran.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    values = alternate({"ours": lambda: ours(args, model, form), "llama.cpp": theirs}, args.rounds)
    file.unlink()
    bytes_per_token = bytes_read(model, form)
    fastest = max(value["memory_bytes_per_s"] for value in values["ours"])
    keys = ("output_tokens_per_s", "prompt_tokens_per_s")
    return {
        "form": form,
        "read_tokens_per_s": round(fastest / bytes_per_token, 1),
        "runs": values,
    } | {
        name: {key: median([v[key] for v in runs]) for key in keys} for name, runs in values.items()
    }


def ours(args: argparse.Namespace, model: str, form: str) -> dict[str, float]:
    """One sequence alone, after another that warms up."""
    params = SamplingParams(max_tokens=args.output + 1, ignore_eos=True, temperature=0.0)
    quantization = None if form == "bfloat16" else form
    machine = probe_cpu("bfloat16")
    with LLM(
        model,
        tensor_parallel_size=1,
        device="cpu",
        dtype="bfloat16",
        quantization=quantization,
        max_num_seqs=1,
        max_model_len=args.prompt + args.output + 8,
        enable_prefix_caching=False,
        spares="off",
    ) as llm:
        ids = [i * 7919 % llm.report.limits.vocab_size for i in range(args.prompt)]
        request = BatchRequest(source="", prompt={"prompt_token_ids": ids}, params=params)
        for _ in range(2):
            [line] = run_timed(llm, [request], [0.0]).timelines
    assert line.time_to_first_token_s is not None
    return {
        "prompt_tokens_per_s": round(args.prompt / line.time_to_first_token_s, 1),
        "output_tokens_per_s": round(args.output / sum(line.inter_token_gaps_s()), 2),
        "memory_bytes_per_s": round(machine.memory_bytes_per_s),
    }


def bytes_read(model: str, form: str) -> float:
    """Of the matrices, for one token."""
    config = ModelConfig.from_dir(Path(model))
    parameters = count_parameters(config)
    head = config.hidden_size * config.vocab_size
    num_read = parameters.total - parameters.vocabulary + head
    of_weight = 2.0 if form == "bfloat16" else computed_quantization(form).bytes_per_weight
    return num_read * of_weight


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, tokens per second."""
    lines = [
        "| weights | ours | llama.cpp | ratio | the memory allows | prompt: ours | llama.cpp |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mine, their = row["ours"], row["llama.cpp"]
        ratio = mine["output_tokens_per_s"] / their["output_tokens_per_s"]
        cells = (
            f"{row['form']}, {FORMS[row['form']]}",
            *(mine["output_tokens_per_s"], their["output_tokens_per_s"], f"{ratio:.2f}"),
            *(row["read_tokens_per_s"], mine["prompt_tokens_per_s"], their["prompt_tokens_per_s"]),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
