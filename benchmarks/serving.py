"""The cost of HTTP: the same streams in-process, through bare uvicorn, and through Ray Serve.

    python -m benchmarks.serving --model DIR [--tp 2] [--streams 1,16,64] [--rounds 5] [--ways W]

Ways, one after the other in each round: `in-process` (LLM.astream), `uvicorn` (the API in the
process of the engine's client), `direct` (launch.py serve: the replica listens), and through Ray
Serve's proxy: `serve`, `serve-grpc` (the same, with gRPC to the replica), `haproxy`. Prints one
JSON line per round, way and number of streams, then the medians, with processor milliseconds per
token by process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from benchmarks.http_load import Timings, free_port, processor_s, run_streams, running
from cluster.resources.local_ray import LOCAL_RAY_SETTINGS
from configs.paths import SOURCE_ROOT

PROMPT_TOKENS = 32
WAYS: dict[str, dict[str, str]] = {
    "in-process": {},
    "uvicorn": {},
    "direct": {},
    "serve": {"RAY_SERVE_PROXY_USE_GRPC": "0"},
    "serve-grpc": {"RAY_SERVE_PROXY_USE_GRPC": "1"},
    "serve-one-loop": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"},
    "haproxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1"},
}


def bodies(streams: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(300, 100_000) for _ in range(PROMPT_TOKENS)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        for _ in range(streams)
    ]


async def run_in_process(llm: Any, each: list[dict[str, Any]]) -> Timings:
    """As `run_streams`, over `LLM.astream`."""
    from scheduler.params import SamplingParams

    timings = Timings()

    async def stream(body: dict[str, Any]) -> None:
        params = SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True, temperature=0)
        sent_s, last_s = time.perf_counter(), 0.0
        async for chunk in llm.astream(body["prompt"], params):
            now_s = time.perf_counter()
            if last_s:
                timings.between_s.append(now_s - last_s)
            else:
                timings.first_s.append(now_s - sent_s)
            last_s = now_s
            timings.num_tokens += len(chunk.token_ids)

    began = time.perf_counter()
    await asyncio.gather(*map(stream, each))
    timings.total_s = time.perf_counter() - began
    return timings


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    # An engine makes its spares some seconds after its start, which would slow one of the ways.
    options = {"max_model_len": 1024, "kv_cache_bytes": 2**30, "spares": "off"}
    return {"tensor_parallel_size": args.tp} | options


def serve_uvicorn(args: argparse.Namespace) -> None:
    """The API in the process of the engine's client."""
    import uvicorn

    from cluster import LLM
    from cluster.api.app import Api
    from cluster.api.endpoints import ServedModel

    with LLM(args.model, **engine_options(args)) as llm:
        tokenizer = llm._setup.tokenizer
        served = ServedModel(name="model", builder=llm.client.builder, tokenizer=tokenizer)
        api = Api(llm.client, served, version="0")
        print("ready on", args.port, flush=True)
        uvicorn.run(api, port=args.port, log_level="warning", lifespan="off", ws="none")


def measure(way: str, args: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """One line per number of streams, from one start of a way."""
    if way == "in-process":
        return _measure_in_process(args, seed)
    port = free_port()
    if way == "uvicorn":
        command = [sys.executable, "-m", "benchmarks.serving", "--child-port", str(port)]
        command += ["--model", args.model, "--tp", str(args.tp)]
    elif way == "direct":
        command = [sys.executable, "launch.py", "serve", "--port", str(port), "--model", args.model]
        command += ["--tp", str(args.tp), "--max-model-len", "1024", "--spares", "off"]
    else:
        command = [str(Path(sys.executable).with_name("serve")), "run", str(_file(args, port))]
    with running(command, port, LOCAL_RAY_SETTINGS | WAYS[way]) as pid:
        time.sleep(0.5)
        url = f"http://127.0.0.1:{port}"
        asyncio.run(run_streams(url, bodies(2, 8, seed + 10**6)))  # warm-up
        lines = []
        for streams in args.streams:
            before = processor_s(pid)
            timings = asyncio.run(run_streams(url, bodies(streams, args.tokens, seed + streams)))
            used = processor_s(pid)
            per_token = {
                name: round(1e3 * (used[name] - before.get(name, 0.0)) / timings.num_tokens, 3)
                for name in used
                if used[name] - before.get(name, 0.0) > 0.01 and timings.num_tokens
            }
            lines.append({"way": way, "streams": streams} | timings.line() | {"cpu_ms": per_token})
        return lines


def _file(args: argparse.Namespace, port: int) -> Path:
    """configs/serve.yaml for this model and port."""
    file = yaml.safe_load((SOURCE_ROOT / "configs" / "serve.yaml").read_text())
    file["http_options"]["port"] = port
    options = engine_options(args) | {"model": args.model}
    file["applications"][0]["args"] = {"engine": options}
    path = Path(tempfile.mkdtemp()) / "serve.yaml"
    path.write_text(yaml.safe_dump(file))
    return path


def _measure_in_process(args: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    from cluster import LLM

    lines = []
    with LLM(args.model, **engine_options(args)) as llm:
        asyncio.run(run_in_process(llm, bodies(2, 8, seed + 10**6)))
        for streams in args.streams:
            timings = asyncio.run(run_in_process(llm, bodies(streams, args.tokens, seed + streams)))
            lines.append({"way": "in-process", "streams": streams} | timings.line())
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="What HTTP costs.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--tokens", type=int, default=32, help="output tokens per stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default="in-process,uvicorn,serve,serve-grpc,haproxy")
    parser.add_argument("--child-port", dest="port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.streams = args.streams or [1, 16, 64]
    if args.port:
        serve_uvicorn(args)
        return
    ways = args.ways.split(",")
    lines = []
    for number in range(args.rounds):
        for way in ways if number % 2 == 0 else ways[::-1]:
            for line in measure(way, args, seed=1000 * number):
                lines.append(line)
                print(json.dumps({"round": number} | line), flush=True)
    for streams in args.streams:
        for way in ways:
            of_way = [x for x in lines if (x["way"], x["streams"]) == (way, streams)]
            names = [name for name, value in of_way[0].items() if isinstance(value, float)]
            medians = {name: statistics.median(x[name] for x in of_way) for name in names}
            print(json.dumps({"median": way, "streams": streams} | medians), flush=True)


if __name__ == "__main__":
    main()
