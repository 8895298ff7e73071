"""Ranks that are lost while a group stands by: what they had computed is not computed again, unless
their memory cannot be trusted.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import LLM
from scheduler.params import SamplingParams
from tests.cluster.processes import wait_until
from tests.cluster.recovery.load import History, Load, cases, compare
from tests.cluster.recovery.poison import ScribblingDriver
from tests.cluster.recovery.test_recovery import (
    LIMIT_S,
    OPTIONS,
    kill,
    processes_of,
    wait_for_recovery,
    wait_until_ready,
)
from workers import faults

pytestmark = [pytest.mark.engine, pytest.mark.programs]
CASES = cases(16, tokens=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def engine(users_ray: None, folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.FAULTS_VARIABLE, str(folder))
        patch.setattr("cluster.engine.start.Driver", ScribblingDriver)
        with LLM(**OPTIONS) as llm:
            yield llm


@pytest.fixture(scope="module")
def expected(engine: LLM) -> list[History]:
    """An undisturbed run."""
    return Load(engine, CASES).wait(LIMIT_S)


def wait_until_a_group_stands_by(llm: LLM) -> None:
    wait_until_ready(llm)
    wait_until(lambda: "spare 1" in processes_of(llm), "a group that stands by", LIMIT_S)


def policies_of(pid: int) -> set[int]:
    """By which the threads of a process are scheduled."""
    policies = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            policies.add(os.sched_getscheduler(int(thread.name)))
    return policies


def lose(engine: LLM, expected: list[History], action: Any) -> int:
    """Lose ranks by an action under load; how many tokens were computed again."""
    wait_until_a_group_stands_by(engine)
    before = engine.stats()
    load = Load(engine, CASES)
    for _ in range(3):
        load.wait_for_news(10.0)
    action()
    wait_for_recovery(engine, before.num_recoveries)
    assert compare(CASES, load.wait(LIMIT_S), expected) == []
    after = engine.stats()
    assert after.num_recoveries == before.num_recoveries + 1
    assert after.num_free_blocks == after.num_blocks
    return after.num_recomputed_tokens - before.num_recomputed_tokens


def test_a_group_whose_process_dies_is_replaced(engine: LLM) -> None:
    wait_until_a_group_stands_by(engine)
    killed = kill(engine, "spare 1")

    def is_replaced() -> bool:
        spare = processes_of(engine).get("spare 1")
        return spare is not None and spare.pid != killed

    wait_until(is_replaced, "the next group that stands by", LIMIT_S)


def test_what_lost_ranks_had_computed_is_not_computed_again(
    engine: LLM, expected: list[History], folder: Path
) -> None:
    """Cached prefixes neither. One that is killed, one in the middle of a step, one that raises,
    one that stops.
    """
    params = SamplingParams(max_tokens=4, temperature=0)
    prompt = list(range(300))
    [before] = engine.generate(prompt, params)
    wait_until_a_group_stands_by(engine)
    standby = processes_of(engine)["spare 1"]
    assert policies_of(standby.pid) == {os.SCHED_BATCH}, "it interrupts no rank that computes"
    assert lose(engine, expected, lambda: kill(engine, "rank 0")) == 0
    assert processes_of(engine)["rank 1"].pid == standby.pid
    assert policies_of(standby.pid) == {os.SCHED_OTHER}
    [after] = engine.generate(prompt, params)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.num_cached_tokens >= 256
    for action in (
        lambda: (folder / "forward.1").write_text("kill 3"),
        lambda: (folder / "sample.0").write_text("raise"),
        lambda: kill(engine, "rank 1", signal.SIGSTOP),
    ):
        assert lose(engine, expected, action) == 0


def test_the_cache_of_a_rank_that_may_have_written_anywhere_is_not_trusted(
    engine: LLM, expected: list[History], folder: Path
) -> None:
    assert lose(engine, expected, lambda: (folder / "scribble.1").touch()) > 0


def test_rank_and_spare_may_die_at_once(engine: LLM, expected: list[History]) -> None:
    def kill_both() -> None:
        kill(engine, "spare 0")
        kill(engine, "rank 0")

    assert lose(engine, expected, kill_both) > 0
