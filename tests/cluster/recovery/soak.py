"""Faults of every kind under load: `python -m tests.cluster.recovery.soak [--faults 60]`.

An engine with a tight cache runs 32 requests at once, again and again, while processes are killed
and stopped: at every fault point, while idle, twice in a row, all ranks, a spare with its rank, the
driver, the driver while the ranks come back. Some ranks crash, one after it has destroyed the KV
cache. `--kinds rank` kills ranks at random moments instead,
and sends no poison. Every output is compared with an undisturbed run, token by token. Meanwhile the
engine's health is sampled. At the end, the engine must hold what it held before. Prints one JSON
line; fails if a request is lost, repeats a token, is wrong, or fails, if a process outlives its
epoch, or if the engine reports that it is ready for too long after a death.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray

from benchmarks.common import machine
from cluster import LLM
from cluster.engine import start
from cluster.ranks.processes import ProcessId, marked_local_pids
from scheduler.errors import RequestFailedError
from scheduler.params import SamplingParams
from tests.cluster.processes import command_of, num_memory_files
from tests.cluster.recovery.load import Case, History, Load, cases, compare
from tests.cluster.recovery.poison import POISON, PoisonedDriver
from tests.default_model.experts import write_model_with_experts
from workers import faults

SAMPLE_S = 0.05
IN_A_STEP = ("step", "forward", "collective", "sample", "reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """In seconds. ready_after_kill_s, ready_after_stop_s: how long the engine may still report that
    it is ready.
    """

    stuck_after_s: float = 2.0
    recovery_s: float = 60.0
    round_s: float = 240.0
    ready_after_kill_s: float = 0.5
    ready_after_stop_s: float = 1.0

    @classmethod
    def of_a_machine(cls, slow_by: float) -> Limits:
        """The limits of a machine that is slower by this factor than one without other work."""
        return cls(**{name: slow_by * value for name, value in dataclasses.asdict(cls()).items()})


class Health:
    """Samples of whether the engine reports that it is ready, and when it must not."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.num_samples = 0
        self.late: dict[float, str] = {}  # by the time of the fault
        self.latest_s = 0.0  # the longest time for which "ready" was reported after a fault
        self._fault: tuple[float, float, tuple[Any, int], str] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop before Ray is shut down, because nothing may call Ray after that."""
        self._stopping.set()
        self._thread.join()

    def epoch(self) -> tuple[Any, int]:
        """The driver, and the number of recoveries of its ranks."""
        while True:
            driver = self.llm._engine_processes.driver
            with contextlib.suppress(ray.exceptions.RayError):
                return driver, ray.get(driver.stats.remote(), timeout=2).num_recoveries
            time.sleep(0.05)

    def expect(self, epoch: tuple[Any, int], limit_s: float, what: str) -> None:
        """After `limit_s`, this epoch must not be reported as ready any more."""
        self._fault = time.monotonic(), limit_s, epoch, what

    def forgive(self) -> None:
        """The fault was over before anybody had to notice it."""
        self._fault = None

    def _sample(self) -> None:
        while not self._stopping.wait(SAMPLE_S):
            driver = self.llm._engine_processes.driver
            asked_s = time.monotonic()
            try:
                stats = ray.get(driver.stats.remote(), timeout=2)
            except ray.exceptions.RayError:
                continue  # not ready
            self.num_samples += 1
            fault = self._fault
            if fault is None or not stats.is_ready:
                continue
            fault_s, limit_s, epoch, what = fault
            if (driver, stats.num_recoveries) == epoch and asked_s > fault_s:
                self.latest_s = max(self.latest_s, asked_s - fault_s)
                if asked_s > fault_s + limit_s:
                    self.late[fault_s] = f"ready {asked_s - fault_s:.2f} s after {what}"


class Soak:
    """One engine, and the faults that it has had."""

    def __init__(
        self, llm: LLM, limits: Limits, folder: Path, seed: int, tp: int, kinds: list[str]
    ) -> None:
        self.llm = llm
        self.limits = limits
        self.folder = folder
        self.rng = random.Random(seed)
        self.tp = tp
        self.health = Health(llm)
        self.outlived: list[str] = []
        self.num_signals = 0  # that reached a process, and faults that ranks made
        self.done: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)
        self.kinds = kinds or [
            *(f"at {point}" for point in faults.POINTS if tp > 1 or point != "collective"),
            "rank",
            "all ranks",
            "rank and spare",
            "twice",
            "stop",
            "stop and continue",
            "SIGSEGV",
            "SIGBUS",
            "scribble",
            "driver",
            "driver stopped",
            "driver while recovering",
        ]

    def processes(self) -> dict[str, ProcessId]:
        while True:  # the driver may be another one by now
            with contextlib.suppress(ray.exceptions.RayError):
                found: dict[str, ProcessId] = ray.get(
                    self.llm._engine_processes.driver.processes.remote(), timeout=5
                )
                return found
            time.sleep(0.1)

    def pid(self, name: str) -> int:
        """The process id; 0 while there is no such process."""
        process = self.processes().get(name)
        return process.pid if process is not None else 0

    def signal(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send it as soon as there is such a process. Returns its id."""
        epoch, until = self.health.epoch(), time.monotonic() + self.limits.recovery_s
        while (process := self.processes().get(name)) is None:
            if time.monotonic() > until:
                raise SystemExit(f"no {name} within {self.limits.recovery_s} s")
            time.sleep(0.02)
            epoch = self.health.epoch()
        limits, is_stop = self.limits, number == signal.SIGSTOP
        limit_s = limits.ready_after_stop_s if is_stop else limits.ready_after_kill_s
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
            self.health.expect(epoch, limit_s, f"signal {number} to {name}")
            self.num_signals += 1
        return process.pid

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.num_signals += 1

    def next_kind(self) -> str:
        """One of those that were caused least."""
        least = min(self.done[kind] for kind in self.kinds)
        return self.rng.choice([kind for kind in self.kinds if self.done[kind] == least])

    def wait_for_spares(self) -> None:
        self.wait_for(lambda: "spare 0" in self.processes(), "what stands by", None)

    def end_spares(self) -> None:
        """What stands by dies, so that the ranks after the next loss make a whole start."""
        for name, process in self.processes().items():
            if "spare" in name:
                self.kill(process.pid)

    def fires(self, armed: Path, load: Load) -> bool:
        """Whether a rank reaches an armed point, and acts, before the load ends."""
        fired = armed.with_name(f"{armed.name}.fired")
        self.wait_for(fired.exists, f"{armed.name} to be reached", load)
        armed.unlink(missing_ok=True)
        is_fired = fired.exists()
        fired.unlink(missing_ok=True)
        self.num_signals += is_fired
        return is_fired

    def cause(self, kind: str, load: Load) -> None:
        """Cause one fault, and wait until its epoch has ended and tokens flow again."""
        old, epoch = self.processes(), self.health.epoch()
        began = time.monotonic()
        first, last = "rank 0", f"rank {self.tp - 1}"
        random_rank = self.rng.randrange(self.tp)
        if kind.startswith("at "):
            point = kind[3:]
            armed = self.folder / f"{point}.{random_rank}"
            if not ends_spares(kind):
                action = self.rng.choice(("kill", "kill", "raise", "stop"))
                armed.write_text(f"{action} {self.rng.randrange(4)}")
            else:
                self.end_spares()
                armed.write_text("kill")
                self.signal(first)
            if not self.fires(armed, load):
                return
        elif kind == "rank":
            time.sleep(self.rng.random() * 0.3)
            self.signal(f"rank {random_rank}")
        elif kind == "all ranks":
            for name, process in old.items():
                if name.startswith("rank"):
                    self.kill(process.pid)
            self.health.expect(epoch, self.limits.ready_after_kill_s, kind)
        elif kind == "rank and spare":
            self.end_spares()
            self.signal(last)
        elif kind == "twice":
            self.signal(first)
            self.wait_for(lambda: self.health.epoch() != epoch, "another epoch", load)
            load.wait_for_news(self.limits.recovery_s)
            epoch = self.health.epoch()
            self.signal(last)
        elif kind == "stop":
            self.signal(last, signal.SIGSTOP)
        elif kind == "stop and continue":
            pid = self.signal(first, signal.SIGSTOP)
            time.sleep(0.5 * self.limits.stuck_after_s)
            self.health.forgive()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        elif kind in ("SIGSEGV", "SIGBUS"):
            self.signal(last, signal.Signals[kind])
        elif kind == "scribble":
            armed = self.folder / f"scribble.{random_rank}"
            armed.touch()
            if not self.fires(armed, load):
                return
        elif kind == "driver":
            self.signal("driver")
        elif kind == "driver stopped":
            self.signal("driver", signal.SIGSTOP)
        elif kind == "driver while recovering":
            self.signal(first)
            time.sleep(0.1)
            self.kill(old["driver"].pid)
        if kind != "stop and continue":
            self.wait_for(lambda: self.health.epoch() != epoch, f"an epoch after {kind}", None)
        load.wait_for_news(self.limits.recovery_s)
        self.done[kind] += 1
        self.seconds[kind].append(time.monotonic() - began)
        if self.health.epoch() != epoch:
            self.outlived += [
                f"{name} outlived its epoch ({kind})"
                for name, process in old.items()
                if name.startswith("rank") and command_of(process.pid) is not None
            ]

    def idle(self) -> None:
        """Kill a rank while there is no work."""
        began = time.monotonic()
        name = f"rank {self.tp - 1}"
        before = self.signal(name)
        self.wait_for(lambda: self.pid(name) not in (0, before), f"another {name}", None)
        self.done["idle"] += 1
        self.seconds["idle"].append(time.monotonic() - began)

    def poison(self, action: str, of: list[Case], expected: list[History]) -> list[str]:
        """Run a request that harms ranks whenever it runs, among 15 good ones. Returns what is
        wrong.
        """
        load = Load(self.llm, of[:15])
        load.wait_for_news(self.limits.recovery_s)
        before, began = self.llm.stats().num_recoveries, time.monotonic()
        try:
            self.llm.generate([5, POISON[action], 7], SamplingParams(max_tokens=5))
        except RequestFailedError:
            crashes = self.llm.stats().num_recoveries - before
            wrong = [] if crashes <= 4 else [f"{action}: {crashes} crashes until it failed"]
        else:
            wrong = [f"{action}: the request did not fail"]
        self.done[f"poison: {action}"] += 1
        self.seconds[f"poison: {action}"].append(time.monotonic() - began)
        return wrong + compare(of[:15], load.wait(self.limits.round_s), expected[:15])

    def wait_for(self, condition: Any, what: str, load: Load | None) -> None:
        """Until the condition holds, or the load ends."""
        until = time.monotonic() + self.limits.recovery_s
        while not condition() and (load is None or load.is_running):
            if time.monotonic() > until:
                raise SystemExit(f"{what} took more than {self.limits.recovery_s} s")
            time.sleep(0.02)


def ends_spares(kind: str) -> bool:
    """Whether a fault of this kind begins with the death of what stands by."""
    is_at_start = kind.startswith("at ") and kind[3:] not in IN_A_STEP
    return is_at_start or kind == "rank and spare"


def holdings(llm: LLM) -> dict[str, int]:
    """What must be the same after any number of recoveries."""
    stats = llm.stats()
    pids = marked_local_pids(llm._engine_processes._owner._engine_id)
    return {
        "processes": len(pids),
        "memory files": num_memory_files(pids),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "blocks": stats.num_blocks - stats.num_free_blocks,
        "requests": stats.num_running + stats.num_waiting,
    }


def more_held(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What is left over. Of this process's descriptors and threads some are Ray's."""
    return [
        f"{name}: {after[name]} instead of {number}"
        for name, number in before.items()
        if after[name] > number + (20 if name in ("descriptors", "threads") else 0)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults of every kind under load.")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps-ahead", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=70, help="KV blocks; too few for all")
    parser.add_argument("--lose-calls", type=int, default=0, help="percent of Ray's actor calls")
    parser.add_argument("--experts", action="store_true", help="the default model with experts")
    parser.add_argument("--kinds", default="", help="such as rank,driver; all by default")
    parser.add_argument("--slow-by", type=float, default=1.0, help="factor of all time limits")
    args = parser.parse_args()
    limits = Limits.of_a_machine(args.slow_by)
    if args.lose_calls:
        # Ray's own fault injection: the request, or the reply, of a call does not arrive. In whole
        # percent; Ray takes a share for 0.
        lost = {"req_failure_prob": args.lose_calls, "resp_failure_prob": args.lose_calls}
        methods = {"CoreWorkerService.grpc_client.PushTask": {"num_failures": -1, **lost}}
        os.environ["RAY_testing_rpc_failure"] = json.dumps(methods)  # noqa: SIM112 (Ray's name)
    folder = Path(tempfile.mkdtemp())
    os.environ[faults.FAULTS_VARIABLE] = str(folder)
    of = cases(32, tokens=160, have_grammar=True)
    patch.object(start, "Driver", PoisonedDriver).start()
    if args.experts:
        (folder / "model").mkdir()
        write_model_with_experts(folder / "model")
    with LLM(
        str(folder / "model") if args.experts else None,
        tensor_parallel_size=args.tp,
        num_steps_ahead=args.steps_ahead,
        device=args.device,
        dtype="float32",
        num_kv_blocks=args.blocks,
        max_num_seqs=16,
        stuck_after_s=limits.stuck_after_s,
        log_level="error",
    ) as llm:
        expected = Load(llm, of).wait(limits.round_s)
        kinds = [kind for kind in args.kinds.split(",") if kind]
        soak = Soak(llm, limits, folder, args.seed, args.tp, kinds)
        soak.wait_for_spares()
        before, rounds, wrong = holdings(llm), 0, []
        before["threads"] -= 1  # that of `Health`
        kind = soak.next_kind()
        while sum(soak.done.values()) < args.faults:
            if ends_spares(kind):  # they may take longer than a load
                soak.wait_for_spares()
            load = Load(llm, of)
            rounds += 1
            load.wait_for_news(limits.recovery_s)
            for _ in range(4):
                soak.cause(kind, load)
                print(f"{sum(soak.done.values())}: {kind}", flush=True)
                kind = soak.next_kind()
                if not load.is_running or ends_spares(kind):
                    break
            faults_of_round = compare(of, load.wait(limits.round_s), expected)
            wrong += faults_of_round
            print(f"round {rounds}: {len(wrong)} not as expected", *faults_of_round, flush=True)
            if not kinds and soak.done["idle"] <= soak.done[kind]:
                soak.idle()
        for action in () if kinds else POISON:
            wrong += soak.poison(action, of, expected)
        wrong += [*soak.outlived, *soak.health.late.values()]
        if args.faults >= 2 * len(soak.kinds):
            wrong += [f"never: {kind}" for kind in soak.kinds if not soak.done[kind]]
        soak.wait_for_spares()
        soak.health.stop()
        until = time.monotonic() + limits.recovery_s
        while (more := more_held(before, holdings(llm))) and time.monotonic() < until:
            time.sleep(0.2)
        wrong += more
        after, stats = holdings(llm), llm.stats()
    line = {
        "machine": machine(),
        "faults": sum(soak.done.values()),
        "signals": soak.num_signals,
        "requests": rounds * len(of),
        "options": {
            "tp": args.tp,
            "steps_ahead": args.steps_ahead,
            "lose_calls": args.lose_calls,
            "experts": args.experts,
        },
        "slow_by": args.slow_by,
        "not_as_expected": len(wrong),
        "health_samples": soak.health.num_samples,
        "ready_said_at_most_s_after_a_fault": round(soak.health.latest_s, 3),
        "kinds": dict(soak.done),
        "seconds": {
            kind: [round(statistics.median(s), 2), round(max(s), 2)]
            for kind, s in soak.seconds.items()
        },
        "before": before,
        "after": after,
        "of_the_last_driver": {
            name: getattr(stats, name)
            for name in ("num_recoveries", "num_preemptions", "num_cached_tokens")
        },
    }
    for fault in wrong:
        print(fault)
    print(json.dumps(line))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
