"""The executor over Ray actors: large plans, ranks that disagree, ranks that do not answer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from cluster.llm import LLM
from cluster.ranks import calls
from cluster.ranks import group as rank_group
from cluster.ranks.actor import SWITCH_INTERVAL_S, RankActor
from cluster.ranks.causes import may_have_corrupted_memory
from cluster.ranks.group import RankGroup, RankHandle, RankMaker, end_ranks
from cluster.resources.placement import Place, actor_environment
from cluster.resources.room import pick_device
from configs.experts import ExpertsConfig
from scheduler.engine import Engine
from scheduler.errors import ConfigError, StepTimeoutError, WorkerError
from scheduler.messages import Request, StepResult, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from tests.cluster.conftest import SmallModel
from tests.cluster.processes import wait_until
from tests.cluster.ranks.groups import check_every_token, group_with, reserved, two_ranks
from tests.cluster.recovery.forgetful import ForgetfulRank
from tests.workers.conftest import config_of
from tests.workers.test_engine_exactness import (
    NUM_OUTPUT,
    limits_of,
)
from workers import faults
from workers.memory.inheritance import RankMemoryHandles
from workers.progress import Progress
from workers.report import WorkerReport

pytestmark = pytest.mark.engine


EXPERTS = ExpertsConfig(
    num_experts=8, num_experts_per_token=2, intermediate_size=32, normalizes_weights=True
)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_plans_that_travel_as_refs_run_in_order_among_small_ones(
    users_ray: None, small_model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admissions go through the object store here, decodes inline: a small argument must not
    overtake a large one.
    """
    monkeypatch.setattr(calls, "MAX_INLINE_BYTES", 400)
    check_every_token(small_model, max_num_batched_tokens=9)


def test_waiting_for_a_step_ends_with_the_step_or_the_limit(
    users_ray: None, small_model: SmallModel
) -> None:
    config = config_of(small_model.path, tensor_parallel_size=2, num_kv_blocks=64)
    with two_ranks(config) as group:
        limits = limits_of(config, group.start().num_blocks)
        engine = Engine(Scheduler(limits), group, num_steps_ahead=0)
        sampling = ResolvedSampling(seed=0, max_tokens=NUM_OUTPUT)
        engine.add(
            Request(
                request_id="a",
                token_ids=int32_array([1, 2]),
                num_prompt_tokens=2,
                sampling=sampling,
            )
        )
        began = time.monotonic()
        group.wait(0, 10.0)  # of no step
        engine.ensure_step_submitted()
        engine.wait(10.0)
        assert time.monotonic() - began < 5, "it waited for the limit"
        engine.step()
        stopped = [rank.process.pid for rank in group.ranks if rank.process]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        engine.ensure_step_submitted()
        began = time.monotonic()
        engine.wait(0.5)
        assert 0.4 < time.monotonic() - began < 5
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert engine.step() is not None


def test_a_rank_that_is_stuck_is_named_by_its_peer(
    users_ray: None, small_model: SmallModel
) -> None:
    config = config_of(
        small_model.path, tensor_parallel_size=2, num_kv_blocks=64, step_timeout_s=0.5
    )
    with two_ranks(config) as group:
        engine = Engine(
            Scheduler(limits_of(config, group.start().num_blocks)), group, num_steps_ahead=1
        )
        sampling = ResolvedSampling(seed=0, max_tokens=NUM_OUTPUT)
        engine.add(
            Request(
                request_id="a",
                token_ids=int32_array([1, 2]),
                num_prompt_tokens=2,
                sampling=sampling,
            )
        )
        engine.step()
        stuck = group.ranks[1].process
        assert stuck is not None
        os.kill(stuck.pid, signal.SIGSTOP)
        began = time.monotonic()
        # Its peer waits for it in the next step, unless the result of this step was still missing.
        told = (
            r"rank 0: WorkerError: .* of rank 1 did not come|step 1 did not finish within 2.5 s on"
            r" rank \[1\]"
        )
        with pytest.raises((WorkerError, StepTimeoutError), match=told):
            for _ in range(3):
                engine.step()
        assert time.monotonic() - began < 5


def test_calls_that_wait_for_the_end_leave_the_heartbeat_its_thread(
    users_ray: None, small_model: SmallModel
) -> None:
    """One that was lost on its way back still waits in the actor when it is made again."""
    placement = reserved(1, "cpu")
    maker = RankMaker(config_of(small_model.path, tensor_parallel_size=1), placement, "test")
    rank = maker.create(placement.places()[0])
    try:
        ray.get(rank.actor.identify.remote(), timeout=60)
        ends = [rank.actor.wait_for_end.remote() for _ in range(3)]
        assert ray.get(rank.actor.progress.remote(), timeout=20).phase == "start"
        ray.kill(rank.actor)
        for end in ends:
            with pytest.raises(RayActorError):
                ray.get(end, timeout=20)
    finally:
        end_ranks([rank])
        placement.remove()


def test_a_start_that_takes_too_long_says_what_each_rank_is_at(
    users_ray: None, small_model: SmallModel
) -> None:
    placement = reserved(2, "cpu")
    maker = RankMaker(config_of(small_model.path, tensor_parallel_size=2), placement, "test")
    group = RankGroup(maker)
    try:
        places = placement.places()
        group.ranks = [maker.create(place) for place in places]
        first = group.ranks[0].actor
        first.start.remote(
            first.open_rendezvous.remote(True), places[0], 0, []
        )  # its peer does not arrive
        wait_until(
            lambda: group._describe_phases() == "rank 0 is at rendezvous, rank 1 is at start",
            "the rendezvous",
            30.0,
        )
    finally:
        group.close()
        placement.remove()


def test_a_rank_that_has_died_does_not_hide_what_the_others_are_at(
    users_ray: None, small_model: SmallModel
) -> None:
    def fail() -> None:
        raise ConnectionError

    failed = ray.remote(num_cpus=0)(fail).remote()
    ray.wait([failed], timeout=60)
    group = group_with(small_model, [])
    for ref in (ray.put(Progress(phase="load", loaded_bytes=2 * 10**9)), failed):
        progress = SimpleNamespace(remote=lambda ref=ref: ref)
        group.ranks.append(RankHandle(SimpleNamespace(progress=progress)))
    expected = r"rank 0 is at load.*, the process of rank 1 does not answer"
    assert re.fullmatch(expected, group._describe_phases())


class LateGroup(RankGroup):
    """Its ranks never answer. `sleep` lets the time of the test pass."""

    sleep: Callable[[float], None]

    def _identify(self, *_: Any) -> None:
        self.sleep(20.0)

    def _get_all(
        self, refs: Any, action: str, limit_s: float, remaining_s: float | None = None
    ) -> Any:
        self.sleep(limit_s if remaining_s is None else remaining_s)
        raise StepTimeoutError(action)

    def _describe_phases(self) -> str:
        return "rank 0 is at load"


def test_the_limit_of_a_start_is_one_for_all_its_parts_and_named(
    small_model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s)
    monkeypatch.setattr(rank_group, "time", clock)
    place = Place(rank=0, bundle=0, node_id="n", host="h", local_rank=0, ranks_on_node=1)
    placement: Any = SimpleNamespace(places=lambda: [place])
    maker = RankMaker(config_of(small_model.path, start_timeout_s=30.0), placement, "test")
    maker.note_gpus(place, [])
    call = SimpleNamespace(remote=lambda *_, **__: None)
    group = LateGroup(maker, ranks=[RankHandle(SimpleNamespace(open_rendezvous=call, start=call))])
    group.sleep = sleep
    expected = r"did not start within 30 s \(start_timeout_s\): rank 0 is at load"
    with pytest.raises(WorkerError, match=expected):
        group.start()
    assert now_s == 130.0


def test_ranks_that_sampled_different_tokens_are_an_error_that_names_the_step(
    users_ray: None, small_model: SmallModel
) -> None:
    results = [
        StepResult(step_id=7, epoch=0, rank=rank, digest=rank, token_ids=int32_array([rank]))
        for rank in range(2)
    ]
    group = group_with(small_model, [ray.put(pickle.dumps(result)) for result in results])
    with pytest.raises(
        WorkerError, match=r"different tokens in step 7: digests by rank \[0, 1\]"
    ) as raised:
        group.result(7)
    assert may_have_corrupted_memory(str(raised.value))


def test_a_rank_that_does_not_answer_is_an_error_that_names_rank_and_step(
    users_ray: None, small_model: SmallModel
) -> None:
    done = ray.put(pickle.dumps(StepResult(step_id=7, epoch=0, token_ids=int32_array())))
    never = ray.remote(num_cpus=0)(lambda: time.sleep(20)).remote()
    with pytest.raises(StepTimeoutError, match=r"step 7 did not finish within 2.5 s on rank \[1\]"):
        group_with(small_model, [done, never], step_timeout_s=0.5).result(7)
    ray.cancel(never, force=True)


def test_an_answer_that_comes_with_the_end_of_the_limit_is_taken(
    users_ray: None, small_model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, num_calls = ray.get, 0

    def get_too_late(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise GetTimeoutError
        return get(*args, **options)

    done = [
        ray.put(pickle.dumps(StepResult(step_id=7, epoch=0, token_ids=int32_array([3]))))
        for _ in range(2)
    ]
    monkeypatch.setattr(ray, "get", get_too_late)
    assert group_with(small_model, done).result(7).token_ids.tolist() == [3]
    assert num_calls == 2


def test_a_later_epoch_is_given_the_blocks_of_the_first_though_it_finds_memory_for_fewer(
    users_ray: None, small_model: SmallModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(faults.FAULTS_VARIABLE, str(tmp_path))
    config = config_of(small_model.path, tensor_parallel_size=1, num_kv_blocks=100)
    placement = reserved(1, "cpu")
    maker = RankMaker(config, placement, "test", ForgetfulRank)
    groups = [RankGroup(maker, epoch) for epoch in range(2)]
    try:
        first = groups[0].start()
        assert first.num_blocks == 100
        groups[0].close()
        assert groups[1].start(first).num_blocks == 100
    finally:
        for group in groups:
            group.close()
        placement.remove()


class NoLedger:
    def line(self) -> str:
        return ""


class SeeingRankActor(RankActor):
    """Starts without computing, and reports which of the GPUs that it sees would be its own."""

    def start(
        self,
        rendezvous_address: tuple[str, int],
        place: Place,
        epoch: int,
        gpus: list[str],
        num_kv_blocks: int | None = None,
        *,
        is_standby: bool = False,
    ) -> WorkerReport:
        self._met_at = rendezvous_address
        self._wait_for_worker().start = self._look  # type: ignore[assignment, method-assign]
        return super().start(
            rendezvous_address, place, epoch, gpus, num_kv_blocks, is_standby=is_standby
        )

    def allocate_cache(self, num_blocks: int) -> RankMemoryHandles:
        return RankMemoryHandles()

    def gpu(self) -> tuple[str, list[str]]:
        """(the one that it would use, those that it sees)"""
        return self._seen[self._index], self._seen

    def met_at(self) -> tuple[str, int]:
        """Where the ranks were to meet."""
        return self._met_at

    def seen(self) -> list[str]:
        """The GPUs that it sees before it has started."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")

    def switch_interval_s(self) -> float:
        return sys.getswitchinterval()

    def _look(
        self,
        address: Any,
        num_threads: int | None,
        epoch: int,
        gpu_index: int,
        num_kv_blocks: int | None,
    ) -> WorkerReport:
        self._index, self._seen = gpu_index, self.seen()
        no_ledger: Any = NoLedger()
        return WorkerReport(
            rank=self._rank, backend="", seconds={}, num_kv_blocks=1, ledger=no_ledger
        )


@pytest.fixture(scope="class", params=[True, False], ids=["hidden", "seen"])
def seeing(
    users_ray: None, small_model: SmallModel, request: pytest.FixtureRequest
) -> Iterator[tuple[list[Any], Any]]:
    """The actors of two ranks and of a spare. Ray hides from each rank the GPUs of the others, or
    does not.
    """
    environment = actor_environment()
    if not request.param:
        environment["env_vars"]["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    config = dataclasses.replace(config_of(small_model.path, tensor_parallel_size=2), device="cuda")
    placement = reserved(2, "cuda")
    maker = RankMaker(config, placement, "test", SeeingRankActor)
    group = RankGroup(maker)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_group, "actor_environment", lambda: environment)
            group.start()
            spare = maker.create(placement.places()[1], placement.places())
        yield [rank.actor for rank in group.ranks], spare.actor
    finally:
        group.close()
        placement.remove()


class TestRanksAndASpare:
    def test_each_rank_sees_the_gpus_of_its_engine_and_uses_the_one_that_ray_gave_it(
        self,
        seeing: tuple[list[Any], Any],
    ) -> None:
        ranks, spare = seeing
        of_spare = ray.get(spare.seen.remote(), timeout=30)
        given = ray.get([rank.identify.remote() for rank in ranks], timeout=30)
        seen = ray.get([rank.gpu.remote() for rank in ranks], timeout=30)
        [host, _] = ray.get(ranks[1].met_at.remote(), timeout=30)
        each = [gpu for _, [gpu] in given]
        assert sorted(each) == ["0", "1"]
        assert seen == [(gpu, each) for gpu in each]
        assert host == "127.0.0.1", (
            "on one node, no other machine can reach the place where they meet"
        )
        assert of_spare == each

    def test_a_spare_that_warms_up_does_not_ask_for_the_interpreters_lock_as_often_as_a_rank(
        self,
        seeing: tuple[list[Any], Any],
    ) -> None:
        ranks, spare = seeing
        both = [spare.switch_interval_s.remote(), ranks[0].switch_interval_s.remote()]
        of_spare, of_rank = ray.get(both, timeout=30)
        assert of_spare == pytest.approx(sys.getswitchinterval())
        assert of_rank == pytest.approx(SWITCH_INTERVAL_S)


class UnlikeRankActor(SeeingRankActor):
    """Reports a processor that no other rank has."""

    def _look(self, *args: Any) -> WorkerReport:
        return dataclasses.replace(super()._look(*args), compute_platform=f"chip {self._rank}")


@pytest.mark.parametrize("experts", [None, EXPERTS], ids=["dense", "experts"])
def test_only_ranks_of_a_model_with_experts_need_processors_of_one_kind(
    users_ray: None, small_model: SmallModel, experts: ExpertsConfig | None
) -> None:
    config = config_of(small_model.path, tensor_parallel_size=2)
    config = dataclasses.replace(
        config, device="cuda", model=dataclasses.replace(config.model, experts=experts)
    )
    placement = reserved(2, "cuda")
    group = RankGroup(RankMaker(config, placement, "test", UnlikeRankActor))
    refusal = pytest.raises(ConfigError, match=r"rank 0 on .* has 'chip 0' and rank 1 .* 'chip 1'")
    try:
        with refusal if experts is not None else contextlib.nullcontext():
            group.start()
    finally:
        group.close()
        placement.remove()


def test_other_weights_on_one_rank_are_another_checkpoint() -> None:
    def report(rank: int, checkpoint: str, loaded: str) -> WorkerReport:
        no_ledger: Any = NoLedger()
        return WorkerReport(
            rank=rank,
            backend="",
            seconds={},
            num_kv_blocks=1,
            ledger=no_ledger,
            checkpoint_hash=checkpoint,
            weights_hash=loaded,
        )

    ways = [("files", "a", "b"), ("files", "a", "c"), ("files", "b", "a"), ("other", "a", "b")]
    checkpoints = {
        rank_group._checkpoint_id([report(0, files, first), report(1, files, second)])
        for files, first, second in ways
    }
    assert len(checkpoints) == len(ways)


def say_where(*_: Any) -> None:
    raise ConfigError(f"configured beside GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}")


@NO_GPU
def test_kernels_are_chosen_where_the_ranks_run(
    users_ray: None, small_model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.engine.start.resolve_config", say_where)
    with pytest.raises(ConfigError, match=r"^configured beside GPU [01]$"):
        LLM(small_model.path, tensor_parallel_size=2, device="cuda", attention_backend="flash_attn")


@NO_GPU
def test_gpus_that_torch_cannot_use_are_an_error_when_asked_for_and_passed_over_otherwise(
    users_ray: None, small_model: SmallModel, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"device 'cuda': torch .* cannot use a GPU here"):
        LLM(small_model.path, tensor_parallel_size=2, device="cuda")
    assert ray.cluster_resources()["GPU"] == 2 and pick_device("auto", 2) == "cpu"
    assert "torch" in caplog.text and "cannot use them: the ranks run on the CPU" in caplog.text
