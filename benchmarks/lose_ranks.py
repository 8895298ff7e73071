"""What the death of a rank costs streams with long contexts: `python -m benchmarks.lose_ranks`.

Starts an engine of a model with random weights, keeps streams going whose prompts are long, kills a
rank again and again, and prints a JSON line per kill, then one of all: seconds from the kill to the
next token of each stream (median over all, and the worst), and tokens that were computed again. It
fails if a kill was not followed by a recovery.
`--when`: once a group stands by; after the start, as soon as every stream has a token, each time in
another engine; or again, within a second of the kill before, which the seconds then leave out.
`--who`: one rank, all, or one and its spare. Every stream is compared with one that nothing has
disturbed; with `--signal none` nobody is killed, which shows how many differ by rounding, the usual
gap and speed; with `--signal stray` the rank writes over its weights, which ends it, or on a GPU
all that it does there. On a GPU the memory in use after the shutdown, less that before the start,
is printed too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch

from benchmarks.common import QWEN3_0_6B, QWEN3_60M, machine, model_or_random
from cluster import LLM
from cluster.engine.driver import Driver
from scheduler.params import SamplingParams
from tests.cluster.recovery.poison import StrayDriver
from workers import faults

SHAPES = {"60m": QWEN3_60M, "0.6b": QWEN3_0_6B}
LIMIT_S = 180.0
_ON_THEIR_WAY_S = 0.1
STANDBY_LIMIT_S = 60.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV, "none": 0}
STRAY = "stray"


class Streams:
    """Streams of the same prompts, in threads; the tokens and when each came."""

    def __init__(self, llm: LLM, prompts: list[list[int]], num_tokens: int) -> None:
        params = [
            SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0) for _ in prompts
        ]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.came_s: list[list[float]] = [[] for _ in prompts]
        self._failures: list[BaseException] = []
        self._num_tokens = num_tokens
        self._threads = [
            threading.Thread(target=self._follow, args=(llm, index, *one), daemon=True)
            for index, one in enumerate(zip(prompts, params, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, llm: LLM, index: int, prompt: list[int], params: SamplingParams) -> None:
        try:
            for chunk in llm.stream(prompt, params):
                self.tokens[index] += chunk.token_ids
                self.came_s[index] += [time.monotonic()] * len(chunk.token_ids)
        except BaseException as error:
            self._failures.append(error)  # `join` raises it

    def wait_for(self, at_s: float, count: int = 1) -> list[float]:
        """For each stream, when its `count`th token after `at_s` came."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            later = [[moment for moment in came_s if moment > at_s] for came_s in self.came_s]
            if all(len(moments) >= count for moments in later):
                return [moments[count - 1] for moments in later]
            time.sleep(0.002)
        raise SystemExit("a stream got no token in time")

    def silences_s(self, killed_s: float) -> list[tuple[float, float]]:
        """For each stream that has ended, the longest silence that began before a kill or soon
        after, since tokens that were on their way come a moment later: how long it was in seconds,
        and how long after the kill it ended.
        """
        return [
            max(
                (later_s - earlier_s, later_s - killed_s)
                for earlier_s, later_s in itertools.pairwise(came_s)
                if later_s > killed_s and earlier_s <= killed_s + _ON_THEIR_WAY_S
            )
            for came_s in self.came_s
        ]

    def join(self) -> None:
        """Raises `SystemExit` if a stream failed, or has not ended in time."""
        for thread in self._threads:
            thread.join(LIMIT_S)
        if self._failures:
            raise SystemExit(f"a stream failed: {self._failures[0]}")
        if any(len(tokens) < self._num_tokens for tokens in self.tokens):
            raise SystemExit(f"a stream has not ended within {LIMIT_S:.0f} s")

    def tokens_per_s(self) -> float:
        """Of all streams, from the first token to the last."""
        moments_s = [moment for came_s in self.came_s for moment in came_s]
        return len(moments_s) / (max(moments_s) - min(moments_s))


def wait_until_someone_stands_by(llm: LLM) -> None:
    until_s = time.monotonic() + STANDBY_LIMIT_S
    while time.monotonic() < until_s:
        processes = ray.get(llm._engine_processes.driver.processes.remote(), timeout=10)
        if "spare 0" in processes and llm.stats().is_ready:
            return
        time.sleep(0.05)
    raise SystemExit("no group stands by")


def kill(llm: LLM, args: argparse.Namespace, rank: int) -> float:
    """When the signal was sent."""
    processes = ray.get(llm._engine_processes.driver.processes.remote(), timeout=10)
    names = {
        "rank": [f"rank {rank}"],
        "ranks": [f"rank {each}" for each in range(args.tp)],
        "rank and spare": [f"spare {rank}", f"rank {rank}"],
    }[args.who]
    killed_s = time.monotonic()
    if args.signal == STRAY:
        (Path(os.environ[faults.FAULTS_VARIABLE]) / f"stray.{rank}").touch()
        return killed_s
    for name in names:
        os.kill(processes[name].pid, SIGNALS[args.signal])
    return killed_s


def measure(args: argparse.Namespace, model: str) -> dict[str, Any]:
    rng = random.Random(1)
    prompts = [[rng.randrange(1000) for _ in range(args.context)] for _ in range(args.streams)]
    options: dict[str, Any] = {
        "tensor_parallel_size": args.tp,
        "spares": args.spares,
        "stuck_after_s": 5.0,
        "log_level": args.log_level,
    }
    if args.device == "cpu":  # a GPU's cache takes all that its memory allows
        options["max_model_len"] = args.context + args.tokens + 64
        num_blocks_per_stream = -(-(args.context + args.tokens) // 64) + 1
        options["num_kv_blocks"] = args.streams * num_blocks_per_stream
    gaps_s: list[float] = []
    computed_again: list[int] = []
    tokens_per_s: list[float] = []
    waits_s: list[float] = []
    num_wrong = spare_bytes = 0
    for engine in range(args.kills if args.when == "start" else 1):
        with LLM(model, device=args.device, **options) as llm:
            all_streams: list[Streams] = []
            if args.when != "start":
                all_streams.append(Streams(llm, prompts, args.tokens))
                all_streams[0].join()
            for index in range(1 if args.when == "start" else args.kills):
                if args.when != "start":
                    used_bytes = gpu_bytes(args.device)
                    began_s = time.monotonic()
                    wait_until_someone_stands_by(llm)
                    waits_s.append(time.monotonic() - began_s)
                    # Less, if the next spare was there already before the streams had ended.
                    spare_bytes = max(spare_bytes, gpu_bytes(args.device) - used_bytes)
                streams = Streams(llm, prompts, args.tokens)
                streams.wait_for(0.0, 1 if args.when == "start" else 20)
                rank = (engine + index) % args.tp
                if args.when == "again":
                    streams.wait_for(kill(llm, args, rank) + 0.05)
                before = llm.stats()
                killed_s = kill(llm, args, rank)
                streams.join()
                after = llm.stats()
                if args.signal != "none" and after.num_recoveries == before.num_recoveries:
                    raise SystemExit(f"{args.signal} of rank {rank} did not end it")
                computed_again.append(after.num_recomputed_tokens - before.num_recomputed_tokens)
                for silence_s, after_kill_s in streams.silences_s(killed_s):
                    gaps_s.append(silence_s if args.signal == "none" else after_kill_s)
                tokens_per_s.append(streams.tokens_per_s())
                last = {"next_token_s": max(gaps_s[-args.streams :])}
                last |= {"computed_again": computed_again[-1], "tokens_per_s": tokens_per_s[-1]}
                print(json.dumps(last), flush=True)
                all_streams.append(streams)
            if args.when == "start":
                all_streams.insert(0, Streams(llm, prompts, args.tokens))
                all_streams[0].join()
            num_kv_blocks = llm.stats().num_blocks
            undisturbed, *disturbed = all_streams
            num_wrong += sum(
                tokens != expected
                for streams in disturbed
                for tokens, expected in zip(streams.tokens, undisturbed.tokens, strict=True)
            )
    return {
        "next_token_s_median": round(statistics.median(gaps_s), 3),
        "next_token_s_worst": round(max(gaps_s), 3),
        "computed_again_per_kill": statistics.median(computed_again),
        "computed_again_worst": max(computed_again),
        "streams_that_differ": num_wrong,
        "tokens_per_s_median": round(statistics.median(tokens_per_s), 1),
        "num_kv_blocks": num_kv_blocks,
        "waits_for_standby_s": [round(wait_s, 1) for wait_s in waits_s],
        "spare_on_the_gpu_mib": round(spare_bytes / 2**20),
        "kernel": os.uname().release,
    }


def gpu_bytes(device: str) -> int:
    """Memory of the GPU that is in use; 0 without one."""
    if device == "cpu":
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="What the death of a rank costs.")
    parser.add_argument("--shape", choices=SHAPES, default="60m")
    parser.add_argument("--model", help="a checkpoint instead of random weights of a shape")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--signal", choices=[*SIGNALS, STRAY], default="kill")
    parser.add_argument("--spares", default="warm")
    parser.add_argument("--who", choices=["rank", "ranks", "rank and spare"], default="rank")
    parser.add_argument("--when", choices=["standby", "start", "again"], default="standby")
    parser.add_argument("--log-level", default="warning")
    args = parser.parse_args()
    used_bytes = gpu_bytes(args.device)
    with (
        model_or_random(args.model, SHAPES[args.shape]) as model,
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {faults.FAULTS_VARIABLE: folder}),
        mock.patch("cluster.engine.start.Driver", StrayDriver if args.signal == STRAY else Driver),
    ):
        row = measure(args, model)
    if args.device == "cuda":
        row["left_on_the_gpu_mib"] = round((gpu_bytes(args.device) - used_bytes) / 2**20)
    has_standby = args.spares == "standby" or (args.spares == "warm" and args.device == "cpu")
    keeps_cache = has_standby and (args.signal, args.who, args.when) == ("kill", "rank", "standby")
    print(json.dumps({**row, **vars(args), "machine": machine()}))
    if keeps_cache and row["computed_again_worst"]:
        raise SystemExit("a rank was replaced without its cache: the log says why")
    if args.signal == STRAY and not row["computed_again_per_kill"]:
        raise SystemExit("the cache of a rank that has written where it may not was kept")


if __name__ == "__main__":
    main()
