"""An engine whose processes are killed: no request is lost, none repeats a token, and every output
is that of an undisturbed run.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster import LLM
from cluster.ranks.processes import ProcessId
from scheduler.errors import OverloadedError, RequestFailedError
from scheduler.params import SamplingParams
from scheduler.suspects import CLEARING_TOKENS
from tests.cluster.processes import command_of, wait_until
from tests.cluster.recovery.forgetful import ForgetfulDriver
from tests.cluster.recovery.load import History, Load, cases, compare
from tests.cluster.recovery.poison import POISON
from workers import faults

pytestmark = [pytest.mark.engine, pytest.mark.programs]
CASES = cases(16, tokens=80)
LIMIT_S = 60.0
OPTIONS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "device": "cpu",
    "dtype": "float32",
    "num_kv_blocks": 160,
    "max_num_seqs": 16,
    "stuck_after_s": 2.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def engine(users_ray: None, folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.FAULTS_VARIABLE, str(folder))
        patch.setattr("cluster.engine.start.Driver", ForgetfulDriver)
        with LLM(**OPTIONS) as llm:
            yield llm


@pytest.fixture(scope="module")
def expected(engine: LLM) -> list[History]:
    """An undisturbed run."""
    return Load(engine, CASES).wait(LIMIT_S)


def processes_of(llm: LLM) -> dict[str, ProcessId]:
    found: dict[str, ProcessId] = ray.get(
        llm._engine_processes.driver.processes.remote(), timeout=10
    )
    return found


def kill(llm: LLM, name: str, number: int = signal.SIGKILL) -> int:
    pid = processes_of(llm)[name].pid
    os.kill(pid, number)
    return pid


def wait_until_ready(llm: LLM, limit_s: float = 30.0) -> None:
    def is_ready() -> bool:
        try:
            return llm.stats().is_ready
        except OverloadedError:  # the driver is being replaced
            return False

    wait_until(is_ready, "the engine to be ready", limit_s)


def wait_for_recovery(llm: LLM, epoch: int) -> None:
    wait_until(lambda: llm.stats().num_recoveries > epoch, "the recovery", 30.0)


def test_ranks_are_killed_under_load(
    engine: LLM, expected: list[History], folder: Path, record_property: Any
) -> None:
    """A rank killed from outside, ranks that kill themselves during a step and during a start, one
    that raises an error, one that stops.
    """
    load = Load(engine, CASES)
    load.wait_for_news(10.0)
    dead = kill(engine, "rank 1")
    load.wait_for_news(10.0)
    wait_until(lambda: command_of(dead) is None, "the end of the killed rank")
    for point, action in (
        ("forward.0", "kill 3"),
        ("collective.1", "kill 5"),
        ("sample.1", "raise"),
        ("reply.0", "kill"),
        ("step.0", "stop 2"),
    ):
        epoch = engine.stats().num_recoveries
        (folder / point).write_text(action)
        wait_until((folder / f"{point}.fired").exists, point, 20.0)
        if point == "reply.0":
            (folder / "load.1").write_text("kill")  # and again while the next epoch starts
        wait_for_recovery(engine, epoch)
        # By the next fault the request that runs alone is cleared: no fault is to convict it.
        load.wait_for_news(20.0, num_tokens=CLEARING_TOKENS)
    assert (folder / "load.1.fired").exists()
    assert compare(CASES, load.wait(LIMIT_S), expected) == []
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks


def test_a_rank_that_dies_while_idle_is_replaced_before_the_next_request(
    engine: LLM, expected: list[History]
) -> None:
    wait_until_ready(engine)
    epoch = engine.stats().num_recoveries

    def is_noticed() -> bool:
        stats = engine.stats()
        return not stats.is_ready or stats.num_recoveries > epoch

    kill(engine, "rank 0")
    wait_until(is_noticed, "notice of the death", 1.0)
    wait_for_recovery(engine, epoch)
    wait_until_ready(engine)
    recoveries = engine.stats().num_recoveries
    assert compare(CASES[:1], Load(engine, CASES[:1]).wait(LIMIT_S), expected[:1]) == []
    assert engine.stats().num_recoveries == recoveries, "the request waits for no recovery"


def test_the_driver_is_killed_under_load(engine: LLM, expected: list[History]) -> None:
    """The next engine has as many blocks, though its ranks find memory for fewer."""
    load = Load(engine, CASES)
    load.wait_for_news(10.0)
    old, dead_driver = processes_of(engine), engine._engine_processes.driver
    counted_by = engine.stats().driver_id
    kill(engine, "driver")
    wait_until(lambda: engine._engine_processes.driver is not dead_driver, "the next driver", 30.0)
    assert all(command_of(process.pid) is None for process in old.values())
    assert compare(CASES, load.wait(LIMIT_S), expected) == []
    assert engine.stats().num_blocks == OPTIONS["num_kv_blocks"]
    assert engine.stats().driver_id not in {"", counted_by}


def test_a_cache_for_which_there_is_no_memory_is_allocated_again_and_who_asks_hears_why(
    engine: LLM, expected: list[History], folder: Path
) -> None:
    wait_until_ready(engine)
    epoch, heard = engine.stats().num_recoveries, set[str]()
    (folder / "no_memory.1").touch()
    kill(engine, "rank 0")
    while engine.stats().num_recoveries == epoch:
        heard.add(engine.stats().recovery_waits_for)
        time.sleep(0.02)
    [said] = heard - {""}
    assert said.startswith("start 1 failed after ") and "KV cache of 100000000000 blocks" in said
    assert compare(CASES[:1], Load(engine, CASES[:1]).wait(LIMIT_S), expected[:1]) == []
    assert engine.stats().recovery_waits_for == ""


def test_a_driver_whose_ranks_find_no_memory_is_started_again_and_who_asks_hears_why(
    engine: LLM, folder: Path
) -> None:
    wait_until_ready(engine)
    heard = set[str]()
    (folder / "no_memory.0").touch()
    kill(engine, "driver")

    def serves_again() -> bool:
        try:
            return engine.stats().is_ready and not (folder / "no_memory.0").exists()
        except OverloadedError as error:
            heard.add(str(error))
        return False

    wait_until(serves_again, "the next driver", LIMIT_S)
    said = "the driver has died and is being replaced; requests are kept and will continue"
    assert heard and all(each.startswith(said) for each in heard), heard
    assert any("start 1 failed after " in each and "KV cache of" in each for each in heard), heard


def test_a_rank_in_an_endless_loop_is_replaced_and_the_stacks_of_all_ranks_are_written(
    engine: LLM, expected: list[History], folder: Path
) -> None:
    wait_until_ready(engine)
    driver, epoch = processes_of(engine)["driver"].pid, engine.stats().num_recoveries
    (folder / "step.1").write_text("loop 2")
    assert compare(CASES, Load(engine, CASES).wait(LIMIT_S), expected) == []
    assert engine.stats().num_recoveries > epoch
    node: Any = ray._private.worker._global_node
    logs = Path(node.get_logs_dir_path())
    [log] = logs.glob(f"worker-*-{driver}.err")
    text = log.read_text()
    assert re.search(r"^[\d-]+ [\d:,]+ WARNING eagleray.driver: epoch \d+ is lost: ", text, re.M)
    reports = text.split("is lost: ")
    [report] = [each for each in reports if "has not moved for 2 s" in each]
    first, second = report.index("rank 0 at "), report.index("rank 1 at ")
    assert "in _act" in report[second:], "where it loops"
    assert "Thread 0x" in report[first:second] and "state " in report[first:second]


def test_a_request_that_kills_ranks_fails_alone(engine: LLM, expected: list[History]) -> None:
    """Killing is tested here; raising an error and an endless loop are tested in the soak."""
    wait_until_ready(engine)
    before = engine.stats().num_recoveries
    load = Load(engine, CASES[:14])
    load.wait_for_news(10.0)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    three_outputs = dataclasses.replace(params, n=3)
    good, bad = engine.generate([[5, 6, 7], [5, POISON["kill"], 7]], [params, three_outputs])
    assert good.error is None and len(good.token_ids) == 5
    assert isinstance(bad.error, RequestFailedError) and bad.finish_reason == "error"
    assert [output.finish_reason for output in bad.outputs] == ["error"] * 3
    assert "ranks failed 4 times while request" in str(bad.error)
    assert engine.stats().num_recoveries - before <= 4
    assert compare(CASES[:14], load.wait(LIMIT_S), expected[:14]) == []


def test_shutdown_with_a_stopped_rank_leaves_nothing(engine: LLM) -> None:
    """The last test of this engine."""
    wait_until_ready(engine)
    found = processes_of(engine)
    kill(engine, "rank 1", signal.SIGSTOP)
    began = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - began < 5.0
    assert [name for name, process in found.items() if command_of(process.pid)] == []
