"""Output tokens per second compared with a peer's and with static batching, on one workload file.

    python -m benchmarks.throughput --model DIR --workload FILE.jsonl --tp 1 2 \\
        --peer-command "CMD {model} {workload} {tp}"

Each run is its own process, the engines take turns, and the ratio is that of the medians. A peer's
command prints a line of JSON with `output_tokens_per_s`, start-up not counted. The limit:
`roofline`, the tokens per second of an engine that takes no longer than the machine needs (see
workers/roofline.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import alternate, median, write_result

SOURCE_ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 3600.0
OURS, PEER, STATIC = "eagleray", "peer", "transformers_static"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument(
        "--workload",
        required=True,
        help="requests as for launch.py generate --input, ids as prompts",
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--peer-command", help="a command with {model}, {workload} and {tp} as placeholders"
    )
    parser.add_argument("--engine-options", default="", help="more flags for launch.py bench")
    parser.add_argument(
        "--transformers", action=argparse.BooleanOptionalAction, default=True, help="at tp 1"
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    measured: dict[str, Any] = {
        "model": Path(args.model).name,
        "workload": Path(args.workload).name,
    }
    for tp in args.tp:
        runs = {
            name: functools.partial(run, command) for name, command in commands(args, tp).items()
        }
        measured[f"tp{tp}"] = summary(alternate(runs, args.repeats))
    limit = "roofline_tokens_per_s: the least time the machine needs for this workload"
    write_result(f"throughput_{measured['model']}", limit, measured, module="throughput")


def commands(args: argparse.Namespace, tp: int) -> dict[str, list[str]]:
    """The commands by name; transformers only at tp 1, since it uses the whole machine."""
    ours = [
        sys.executable,
        "launch.py",
        "bench",
        "--model",
        args.model,
        "--input",
        args.workload,
        "--tp",
        str(tp),
    ]
    by_name = {OURS: ours + shlex.split(args.engine_options)}
    if args.peer_command:
        words = shlex.split(args.peer_command)
        by_name[PEER] = [
            word.format(model=args.model, workload=args.workload, tp=tp) for word in words
        ]
    if args.transformers and tp == 1:
        by_name[STATIC] = [
            sys.executable,
            "-m",
            "benchmarks.transformers_static",
            args.model,
            args.workload,
        ]
    return by_name


def run(command: list[str]) -> dict[str, Any]:
    """Run a command and return the line of JSON that it prints."""
    done = subprocess.run(
        command, cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("{") and '"output_tokens_per_s"' in line:
            result: dict[str, Any] = json.loads(line)
            return result
    raise SystemExit(
        f"{shlex.join(command)} printed no result (exit code"
        f" {done.returncode}):\n{done.stderr[-2000:]}"
    )


def summary(values: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of tokens per second, ours as a multiple of each other engine's, and the roofline
    from the best probe of our runs.
    """
    speed = {
        name: median([line["output_tokens_per_s"] for line in lines])
        for name, lines in values.items()
    }
    floors = [line["output_tokens"] / line["roofline"]["floor_s"] for line in values[OURS]]
    best = max(floors)
    return {
        "tokens_per_s": speed,
        "runs": {
            name: [line["output_tokens_per_s"] for line in lines] for name, lines in values.items()
        },
        "ratio": {
            name: round(speed[OURS] / other, 3) for name, other in speed.items() if name != OURS
        },
        "roofline_tokens_per_s": round(best, 1),
        "share_of_roofline": {name: round(value / best, 4) for name, value in speed.items()},
    }


if __name__ == "__main__":
    main()
