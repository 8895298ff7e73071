"""One sequence beside llama.cpp, in the same shape and with the same number of threads.

    python -m benchmarks.peer_llama_cpp --python VENV/bin/python

The interpreter given has llama-cpp-python and gguf (`CMAKE_ARGS=-DGGML_NATIVE=ON pip install
llama-cpp-python gguf`, minutes on two cores). Both engines read the same random weights; llama.cpp
gets them as GGUF files in BF16, Q8_0 and Q4_0, Eagleray in bfloat16, int8 and int4. Engines take
turns, started anew each time. Output tokens are timed from the first to the last, as a client of
Eagleray sees them, through Ray; and in a plain process as llama.cpp's, which has the cores for
itself, while Ray, the driver and the client use the same cores as the rank. Prints a table in
Markdown: medians, and what the memory would allow, reading as fast as the fastest probe of the
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import alternate, median, model_or_random, write_result
from benchmarks.rank_pool import PoolExecutor, WorkerPool
from cluster import LLM, SamplingParams
from cluster.commands.batch import BatchRequest
from cluster.commands.timing import run_timed
from cluster.resources.placement import HUGE_PAGES_VARIABLE
from cluster.scheduler_limits import limits_of
from configs.engine import EngineConfig
from configs.model import ModelConfig
from configs.quantization import computed_quantization
from configs.shapes import SHAPES
from scheduler.engine import Engine
from scheduler.messages import Request, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from workers.configuration import resolve_config
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

    engines = {
        "ours": lambda: ours(args, model, form),
        "plain process": lambda: in_a_plain_process(args, model, form),
        "llama.cpp": theirs,
    }
    values = alternate(engines, args.rounds)
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


def options_of(args: argparse.Namespace, form: str) -> dict[str, Any]:
    """Options of an engine."""
    return {
        "tensor_parallel_size": 1,
        "dtype": "bfloat16",
        "quantization": None if form == "bfloat16" else form,
        "max_num_seqs": 1,
        "max_model_len": args.prompt + args.output + 8,
        "enable_prefix_caching": False,
        "spares": "off",
    }


def in_a_plain_process(args: argparse.Namespace, model: str, form: str) -> dict[str, float]:
    """One sequence alone, by a rank without Ray; the engine that plans its steps is here."""
    os.environ.setdefault(HUGE_PAGES_VARIABLE, "1")  # as in the actors of an engine
    path = Path(model)
    options = EngineConfig(model=model, **options_of(args, form))
    config = resolve_config(options, ModelConfig.from_dir(path), path, "cpu")
    pool = WorkerPool(1)
    try:
        executor = PoolExecutor(pool, config, os.cpu_count() or 1)
        scheduler = Scheduler(limits_of(config, executor.num_kv_blocks))
        engine = Engine(scheduler, executor, num_steps_ahead=0)
        for _ in range(2):  # the first one warms up
            began_s = time.perf_counter()
            engine.add(
                Request(
                    request_id="alone",
                    token_ids=int32_array(prompt_of(args, config.model.vocab_size)),
                    num_prompt_tokens=args.prompt,
                    sampling=ResolvedSampling(seed=0, max_tokens=args.output + 1, temperature=0.0),
                )
            )
            ends_s = []
            while engine.has_work:
                output = engine.step()
                if output is not None and output.token_ids:
                    ends_s.append(time.perf_counter())
    finally:
        pool.close()
    assert len(ends_s) == args.output + 1
    return {
        "prompt_tokens_per_s": round(args.prompt / (ends_s[0] - began_s), 1),
        "output_tokens_per_s": round(args.output / (ends_s[-1] - ends_s[0]), 2),
    }


def prompt_of(args: argparse.Namespace, vocab_size: int) -> list[int]:
    """The same token ids for each engine of ours."""
    return [i * 7919 % vocab_size for i in range(args.prompt)]


def ours(args: argparse.Namespace, model: str, form: str) -> dict[str, float]:
    """One sequence alone, after another that warms up."""
    params = SamplingParams(max_tokens=args.output + 1, ignore_eos=True, temperature=0.0)
    machine = probe_cpu("bfloat16")
    with LLM(model, device="cpu", **options_of(args, form)) as llm:
        ids = prompt_of(args, llm.report.limits.vocab_size)
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
        "| weights | ours | ratio | in a plain process | ratio | llama.cpp | the memory allows"
        " | prompt: ours | llama.cpp |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mine, plain, their = (row[name] for name in ("ours", "plain process", "llama.cpp"))
        their_speed = their["output_tokens_per_s"]
        cells = (
            f"{row['form']}, {FORMS[row['form']]}",
            *(mine["output_tokens_per_s"], f"{mine['output_tokens_per_s'] / their_speed:.2f}"),
            *(plain["output_tokens_per_s"], f"{plain['output_tokens_per_s'] / their_speed:.2f}"),
            *(their_speed, row["read_tokens_per_s"]),
            *(mine["prompt_tokens_per_s"], their["prompt_tokens_per_s"]),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
