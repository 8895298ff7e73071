"""Processor time per streamed token with one and with several API processes at one port:
`python -m benchmarks.several_apis`.

The engine is the real one, but its rank waits instead of computing (`token_cost.py`), so that the
API is what the processor works for. Each API process is an actor with a frontend, an API and its
part of the port, as in a served application, but without Ray Serve, whose processes use the
processor whether or not there are tokens. The numbers of processes take turns; medians of all
rounds, in microseconds per token by process.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from functools import partial
from typing import Any

import ray

from benchmarks.common import alternate, median, write_result
from benchmarks.http_load import free_port, processor_s, run_chats, running
from benchmarks.token_cost import PROMPT, start_engine
from cluster.api.app import SWITCH_INTERVAL_S, Api
from cluster.api.endpoints import ServedModel
from cluster.client.client import Client
from cluster.client.frontend import Frontend
from cluster.client.setup import make_engine_setup
from cluster.resources.placement import actor_environment
from cluster.serve.listener import HttpListener
from cluster.serve.port import SharedPortOwner
from configs.engine import EngineConfig
from configs.serve import ServeConfig
from scheduler.limits import SchedulerLimits

WARM_UP_TOKENS = 8
KINDS = {"ray::SleepingDriver": "driver", "ray::SleepingRank": "rank", "ray::ApiProcess": "api"}


class ApiProcess:
    """An API over a driver, at a shared port."""

    def __init__(self, config: EngineConfig, driver: Any, limits: SchedulerLimits) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        setup = make_engine_setup(config)
        builder = setup.request_builder(limits)
        served = ServedModel(name="model", builder=builder, tokenizer=setup.tokenizer)
        self._api = Api(Client(builder, Frontend(driver)), served, version="0")

    async def listen(self, path: str) -> None:
        """Take connections from the port with this Unix socket."""
        self._listener = HttpListener(self._api, ServeConfig(shared_port_path=path))


def serve(args: argparse.Namespace) -> None:
    """The engine and its API processes, until SIGTERM."""
    with start_engine(args) as llm:
        port = SharedPortOwner("127.0.0.1", args.port, args.apis)
        actor = ray.remote(ApiProcess).options(num_cpus=0, runtime_env=actor_environment())
        limits = llm._engine_processes.report.limits
        processes: list[Any] = [
            actor.remote(llm.config, llm._engine_processes.driver, limits) for _ in range(args.apis)
        ]
        ray.get([process.listen.remote(port.path) for process in processes])
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        ended.wait()
        port.close()


def run_apis(args: argparse.Namespace, num_apis: int) -> dict[str, Any]:
    """Microseconds of processor time per token with so many API processes, by kind of process."""
    port = free_port()
    options = [f"--step-ms={args.step_ms}", f"--rows={args.rows}", f"--port={port}"]
    options += [f"--steps-ahead={args.steps_ahead}", f"--apis={num_apis}"]
    command = [sys.executable, "-m", "benchmarks.several_apis", *options]
    with running(command, port) as session:
        run_chats(port, PROMPT, args.rows, WARM_UP_TOKENS)
        before = _processor_s(session)
        num_tokens = run_chats(port, PROMPT, args.rows, args.tokens)
        used = _processor_s(session)
    line: dict[str, Any] = {
        kind: round(1e6 * (used[kind] - before[kind]) / num_tokens, 2) for kind in KINDS.values()
    }
    return line | {"tokens": num_tokens}


def _processor_s(session: int) -> dict[str, float]:
    """By kind of process: Ray adds to the name of an actor's process what it does."""
    seconds = dict.fromkeys(KINDS.values(), 0.0)
    for name, used_s in processor_s(session).items():
        for start, kind in KINDS.items():
            seconds[kind] += used_s * name.startswith(start)
    return seconds


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="output tokens per row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps-ahead", type=int, default=3, help="3, as on GPUs")
    parser.add_argument("--apis", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.apis:
        serve(args)
        return
    runs = {f"{num_apis} processes": partial(run_apis, args, num_apis) for num_apis in (1, 2)}
    rounds = alternate(runs, args.rounds)
    medians = {
        name: {kind: median([line[kind] for line in lines]) for kind in (*KINDS.values(), "tokens")}
        for name, lines in rounds.items()
    }
    limit = "the processor time of one process"
    write_result("several_apis", limit, {"medians": medians, "rounds": rounds})


if __name__ == "__main__":
    main()
