"""What a streamed token costs outside the ranks: `python -m benchmarks.token_cost`.

The engine is the real one, but its rank waits for a simulated device: 256 rows every 5 ms are
51,200 tokens per second, which no CPU computes. One after the other in each round:

    whole     `LLM.generate`, in one process
    streams   `LLM.astream`, in one process
    chats     streamed chats over HTTP from one API process, with its clients on the same cores

Tokens per second as a share of what the device gives, and microseconds of processor time per token
by process: medians, and each round. `--profile SECONDS` has py-spy, which must be
installed, list the functions that take most of the API's process and of the driver.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import alternate, median, write_result
from benchmarks.dispatch_actors import sleeping_driver
from benchmarks.http_load import free_port, processor_s, run_chats, running
from configs.paths import DEFAULT_MODEL_DIR

PROMPT = "Count on from 17."
_NAMES = {"ray::SleepingDriver": "driver", "ray::SleepingRank": "rank", "python": "api"}


def start_engine(args: argparse.Namespace) -> Any:
    """An engine whose rank waits instead of computing."""
    from cluster import LLM

    driver = sleeping_driver(args.step_ms / 1000, launch_s=0.0)
    with mock.patch("cluster.engine.start.Driver", driver):
        return LLM(
            DEFAULT_MODEL_DIR,
            max_num_seqs=args.rows,
            max_model_len=4096,
            kv_cache_bytes=3 * 2**30,
            num_steps_ahead=args.steps_ahead,
            device="cpu",
            spares="off",
        )


def serve(args: argparse.Namespace) -> None:
    """The API in the process of the engine's client, until it is told to end."""
    import uvicorn

    from cluster.api.admission import ApiLimits
    from cluster.api.app import SWITCH_INTERVAL_S, Api
    from cluster.api.connections import server_config
    from cluster.api.endpoints import ServedModel

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with start_engine(args) as llm:
        served = ServedModel(
            name="model", builder=llm.client.builder, tokenizer=llm._setup.tokenizer
        )
        api = Api(llm.client, served, version="0", limits=ApiLimits())
        uvicorn.Server(server_config(api, port=args.port, log_level="warning")).run()


def run_in_process(args: argparse.Namespace) -> None:
    """Print the line of `whole` or `streams`."""
    from cluster import SamplingParams

    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0)

    async def stream(llm: Any) -> None:
        async for _ in llm.astream(PROMPT, params):
            pass

    async def streams(llm: Any) -> None:
        await asyncio.gather(*(stream(llm) for _ in range(args.rows)))

    with start_engine(args) as llm:
        llm.generate([PROMPT] * args.rows, SamplingParams(max_tokens=8, ignore_eos=True))
        before, began_s = processor_s(os.getsid(0)), time.perf_counter()
        if args.way == "whole":
            llm.generate([PROMPT] * args.rows, params)
        else:
            asyncio.run(streams(llm))
        seconds = time.perf_counter() - began_s
        print(json.dumps(_line(args, seconds, before, processor_s(os.getsid(0)))), flush=True)


def run_served(args: argparse.Namespace) -> dict[str, Any]:
    """The line of `chats`."""
    port = free_port()
    with running(_child(args, "serve", port), port) as session:
        run_chats(port, PROMPT, 16, 8)
        profile = _profile(session, args.profile) if args.profile else None
        before, began_s = processor_s(session), time.perf_counter()
        own_before_s = time.process_time()
        num_events = run_chats(port, PROMPT, args.rows, args.tokens)
        seconds = time.perf_counter() - began_s
        line = _line(args, seconds, before, processor_s(session))
        line["events_per_token"] = round(num_events / (args.rows * args.tokens), 3)
        line["client_us"] = _per_token(args, time.process_time() - own_before_s)
        if profile is not None:
            line["profile"] = profile()
        return line


def _line(
    args: argparse.Namespace, seconds: float, before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    used_s: defaultdict[str, float] = defaultdict(float)
    for name, total_s in after.items():
        kind = next((kind for start, kind in _NAMES.items() if name.startswith(start)), "ray")
        used_s[kind] += total_s - before.get(name, 0.0)
    num_tokens = args.rows * args.tokens
    per_device_s = 1000 * args.rows / args.step_ms
    return {
        "tokens_per_s": round(num_tokens / seconds),
        "share_of_device": round(num_tokens / seconds / per_device_s, 3),
    } | {f"{kind}_us": _per_token(args, total_s) for kind, total_s in sorted(used_s.items())}


def _per_token(args: argparse.Namespace, seconds: float) -> float:
    return float(round(1e6 * seconds / (args.rows * args.tokens), 1))


def _profile(session: int, seconds: int) -> Any:
    """Start py-spy on the API's process and on the driver; returns what reads their tables."""
    samples = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and _session_of(path) == session:
            command = (path / "cmdline").read_bytes().decode().replace("\0", " ")
            kind = "driver" if "Driver" in command.split(" ")[0] else "api"
            if kind == "driver" or "--way serve" in command:
                out = Path(tempfile.mkdtemp()) / f"{kind}.raw"
                spy = [
                    str(Path(sys.executable).with_name("py-spy")),
                    "record",
                    "--gil",
                    "-r",
                    "500",
                    "-d",
                    str(seconds),
                    "-f",
                    "raw",
                ]
                samples[kind] = out, subprocess.Popen([*spy, "-o", out, "-p", path.name])

    def tables() -> dict[str, dict[str, float]]:
        shares = {}
        for kind, (out, spy) in samples.items():
            spy.wait()
            own: Counter[str] = Counter()
            for line in out.read_text().splitlines():
                stack, count = line.rsplit(" ", 1)
                own[stack.rsplit(";", 1)[-1]] += int(count)
            total = max(1, own.total())
            shares[kind] = {name: round(n / total, 3) for name, n in own.most_common(12)}
        return shares

    return tables


def _session_of(path: Path) -> int:
    try:
        return os.getsid(int(path.name))
    except OSError:
        return -1


def _child(args: argparse.Namespace, way: str, port: int = 0) -> list[str]:
    options = ("step_ms", "rows", "tokens", "steps_ahead")
    named = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in options]
    return [
        *(sys.executable, "-m", "benchmarks.token_cost", *named),
        *("--way", way, "--port", str(port)),
    ]


def _in_process(args: argparse.Namespace, way: str) -> dict[str, Any]:
    done = subprocess.run(
        _child(args, way), capture_output=True, text=True, start_new_session=True, check=True
    )
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1000, help="output tokens per row")
    parser.add_argument("--steps-ahead", type=int, default=3, help="3, as on GPUs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="whole,streams,chats")
    parser.add_argument("--profile", type=int, metavar="SECONDS")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        (serve if args.way == "serve" else run_in_process)(args)
        return
    runs = {
        way: partial(run_served, args) if way == "chats" else partial(_in_process, args, way)
        for way in args.ways.split(",")
    }
    lines = alternate(runs, args.rounds)
    medians = {
        way: {
            name: median([line[name] for line in of_way])
            for name, value in of_way[0].items()
            if not isinstance(value, dict)
        }
        for way, of_way in lines.items()
    }
    limit = "share_of_device: 1"
    write_result("token_cost", limit, {"medians": medians, "rounds": lines})


if __name__ == "__main__":
    main()
