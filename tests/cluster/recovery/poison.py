"""Ranks that certain requests kill, and ranks that destroy the KV cache or write over weights."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import ray

from cluster.engine.driver import Driver
from cluster.ranks.actor import RankActor
from cluster.recovery import standby
from scheduler.messages import StepPlan
from workers import faults

POISON = {"kill": 401, "raise": 402, "loop": 403}  # token ids that no other prompt has


def take_order(name: str) -> bool:
    """Whether a test has ordered something, by a file of this name; each order counts once."""
    armed = Path(os.environ[faults.FAULTS_VARIABLE]) / name
    if not armed.exists():
        return False
    armed.rename(f"{armed}.fired")
    return True


class ScribblingRank(RankActor):
    """Writes over the whole KV cache and dies of it, once, when the file `scribble.RANK` is
    there.
    """

    @ray.method(concurrency_group="steps")
    def step(self, *pieces: bytes) -> bytes:
        if take_order(f"scribble.{self._rank}"):
            runner = self._wait_for_worker()._runner
            assert runner is not None
            runner.cache.tensor.fill_(float("nan"))
            os.kill(os.getpid(), signal.SIGSEGV)
        run: Any = super().step
        result: bytes = run(*pieces)
        return result


class StrayRank(RankActor):
    """Writes over its weights, once, when the file `stray.RANK` is there: a SIGSEGV on a CPU, on a
    GPU a fault after which nothing more runs.
    """

    @ray.method(concurrency_group="steps")
    def step(self, *pieces: bytes) -> bytes:
        import torch

        if take_order(f"stray.{self._rank}"):
            loaded_model = self._wait_for_worker()._loaded_model
            assert loaded_model is not None
            with torch.inference_mode():
                loaded_model.model.norm.weight.add_(1)  # by a kernel on a GPU, unlike `zero_`
        run: Any = super().step
        result: bytes = run(*pieces)
        return result


class StrayDriver(Driver):
    """A driver of such ranks."""

    rank_actor_class = StrayRank


class ScribblingDriver(Driver):
    """A driver of such ranks. When a group that stands by is lost, it soon makes the next one."""

    rank_actor_class = ScribblingRank

    def __init__(self, *arguments: Any, **options: Any) -> None:
        standby.FIRST_DELAY_S = 1.0
        super().__init__(*arguments, **options)


class PoisonedRank(ScribblingRank):
    """A rank that certain token ids kill, make raise an error, or keep busy forever."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._poisoned: dict[int, str] = {}  # action by slot

    @ray.method(concurrency_group="steps")
    def step(self, *pieces: bytes) -> bytes:
        plan: StepPlan = pickle.loads(b"".join(pieces))
        for slot in plan.released_slots:
            self._poisoned.pop(slot, None)
        is_last = self._rank == self._config.engine.tensor_parallel_size - 1
        if plan.admitted_rows is not None:
            start = 0
            for slot, num_tokens in zip(
                plan.admitted_rows.slots, plan.admitted_rows.num_tokens, strict=True
            ):
                tokens = plan.admitted_rows.token_ids[start : start + num_tokens]
                start += num_tokens
                for action, token_id in POISON.items():
                    if token_id in tokens and is_last:
                        self._poisoned[slot] = action
        for action in {self._poisoned[slot] for slot in plan.slots if slot in self._poisoned}:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if action == "raise":
                raise RuntimeError("this request cannot be computed")
            time.sleep(1e6)
        run: Any = super().step
        result: bytes = run(*pieces)
        return result


class PoisonedDriver(Driver):
    """A driver of such ranks."""

    rank_actor_class = PoisonedRank
