"""Compares servers under a rising load of requests: ours and a peer's, with the same load
generator.

    python -m benchmarks.serving_load --model DIR --load-command "CMD" [--peer-command "CMD"]
        [--options "OPTIONS"] [--tp 2] [--shares 25,50,75,100,120] [--seconds 30]
        [--input-len 128] [--output-len 64] [--saturation REQUESTS_PER_S]

`--load-command` is the beginning of `vllm bench serve`; `--peer-command` starts the peer, with the
placeholders {model}, {port} and {tp}; with `--options`, our server is measured with those as well.
Saturation is the highest of the servers' rates when all requests come at once, unless it is given,
so that runs can be compared. Then every server gets Poisson arrivals at the shares of that rate,
the same requests for all. Prints one JSON line per server and rate.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.http_load import free_port, running

NUM_WARM_UP = 8
NAME = "model"
FIGURES = {
    "completed": "completed",
    "request_throughput": "requests_per_s",
    "output_throughput": "output_tokens_per_s",
    "median_ttft_ms": "ttft_ms_p50",
    "p99_ttft_ms": "ttft_ms_p99",
    "median_tpot_ms": "per_token_ms_p50",
    "p99_tpot_ms": "per_token_ms_p99",
    "median_itl_ms": "inter_token_ms_p50",
    "p99_itl_ms": "inter_token_ms_p99",
}
Load = tuple[int | str, int, float]  # share in percent, requests, requests per second
OURS = "{python} launch.py serve --model {model} --port {port} --tp {tp} --served-model-name model"


def load(args: argparse.Namespace, port: int, num: int, rate: float, seed: int) -> dict[str, Any]:
    """The figures of one run of the load generator; `rate` is in requests per second."""
    result = Path(tempfile.mkdtemp()) / "result.json"
    command = [
        *shlex.split(args.load_command),
        *("--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", f"http://127.0.0.1:{port}", "--model", NAME, "--tokenizer", args.model),
        *("--dataset-name", "random", "--random-input-len", str(args.input_len)),
        *("--random-output-len", str(args.output_len), "--random-range-ratio", "0.5"),
        *("--num-prompts", str(num), "--request-rate", f"{rate}", "--seed", str(seed)),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99"),
        *("--save-result", "--result-dir", str(result.parent)),
        *("--result-filename", result.name),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode or not result.exists():
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    figures = json.loads(result.read_text())
    line = {ours: round(figures[theirs], 2) for theirs, ours in FIGURES.items()}
    return {"requests": num, "failed": num - figures["completed"]} | line


def main() -> None:
    parser = argparse.ArgumentParser(description="Servers under a rising load of requests.")
    parser.add_argument("--model", required=True, help="a checkpoint with a tokenizer")
    parser.add_argument("--load-command", required=True, help="such as 'vllm bench serve'")
    parser.add_argument("--peer-command", help="with {model}, {port} and {tp} as placeholders")
    parser.add_argument("--options", help="of a second server of ours")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--shares", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals per rate")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--saturating", type=int, default=64, help="requests sent at once")
    parser.add_argument("--saturation", type=float, help="requests per second, if it is known")
    args = parser.parse_args()
    commands = {"eagleray": OURS}
    if args.options:
        commands[f"eagleray {args.options}"] = f"{OURS} {args.options}"
    if args.peer_command:
        commands["peer"] = args.peer_command
    print(json.dumps({"machine": machine(), "model": args.model, "tp": args.tp}), flush=True)

    def run(name: str, loads: list[Load]) -> list[dict[str, Any]]:
        """The lines from one start of a server."""
        port = free_port()
        command = commands[name].format(
            python=sys.executable, model=args.model, port=port, tp=args.tp
        )
        lines = []
        with running(shlex.split(command), port):
            load(args, port, NUM_WARM_UP, float("inf"), seed=99)
            for share, num, rate in loads:
                seed = 0 if share == "saturated" else int(share)
                line = {"server": name, "share": share, "rate": round(rate, 3)}
                lines.append(line | load(args, port, num, rate, seed))
                print(json.dumps(lines[-1]), flush=True)
        return lines

    saturated: list[Load] = [("saturated", args.saturating, float("inf"))]
    most = args.saturation or max(run(name, saturated)[0]["requests_per_s"] for name in commands)
    rates = [(share, most * share / 100) for share in args.shares or [25, 50, 75, 100, 120]]
    loads: list[Load] = [(share, max(8, round(rate * args.seconds)), rate) for share, rate in rates]
    for name in commands:
        run(name, loads)


if __name__ == "__main__":
    main()
