"""Streams of chats against our server and a peer's: tokens per second, and the processor time of a
token by process.

    python -m benchmarks.serving_streams --model DIR [--tp 1] [--streams 16 64 256] [--tokens 100]
        [--rounds 3] [--options "OPTIONS"] [--peer-command "CMD"]

`--peer-command` starts the peer, with the placeholders {model}, {port} and {tp}; both servers call
the model "model". Servers take turns, each started anew in each round. The clients, in one process,
share the cores with the server. Prints one JSON line per round, server and number of streams, then
the medians.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from typing import Any

from benchmarks.common import machine
from benchmarks.http_load import free_port, processor_s, run_chats, running

PROMPT = "Count on from 17."
OURS = (
    "{python} launch.py serve --model {model} --port {port} --tp {tp} --served-model-name model"
    " --spares off --max-model-len 2048 --max-num-seqs 256"
)


def measure(command: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One line per number of streams, from one start of a server."""
    port = free_port()
    filled = command.format(python=sys.executable, model=args.model, port=port, tp=args.tp)
    lines = []
    with running(shlex.split(filled), port) as session:
        for num_streams in args.streams:
            run_chats(port, PROMPT, num_streams, 8)  # compiles and allocates
            before_s, began_s = processor_s(session), time.perf_counter()
            num_events = run_chats(port, PROMPT, num_streams, args.tokens)
            seconds = time.perf_counter() - began_s
            num_tokens = num_streams * args.tokens
            used_us = {
                name: round(1e6 * (total_s - before_s.get(name, 0.0)) / num_tokens, 1)
                for name, total_s in processor_s(session).items()
            }
            lines.append(
                {
                    "streams": num_streams,
                    "tokens_per_s": round(num_tokens / seconds, 1),
                    "events_per_token": round(num_events / num_tokens, 3),
                    "processor_us": {name: us for name, us in used_us.items() if us >= 1.0},
                }
            )
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", default="", help="more options of our server")
    parser.add_argument("--peer-command")
    args = parser.parse_args()
    commands = {"eagleray": f"{OURS} {args.options}"}
    if args.peer_command:
        commands["peer"] = args.peer_command
    print(json.dumps({"machine": machine(), "model": args.model, "tp": args.tp}), flush=True)
    speeds: dict[tuple[str, int], list[float]] = {}
    for number in range(args.rounds):
        for server, command in commands.items():
            for line in measure(command, args):
                print(json.dumps({"round": number, "server": server} | line), flush=True)
                speeds.setdefault((server, line["streams"]), []).append(line["tokens_per_s"])
    for (server, num_streams), values in speeds.items():
        median = statistics.median(values)
        print(json.dumps({"median": server, "streams": num_streams, "tokens_per_s": median}))


if __name__ == "__main__":
    main()
