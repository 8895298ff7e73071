"""The scheduler in 500 random worlds: no law is broken, nothing is stuck, and the worlds have
enough faults to be meaningful.
"""

from __future__ import annotations

import pytest

from tests.scheduler.simulate import main, run_seeds
from tests.scheduler.simulator import run_seed

SEEDS_PER_TEST = 50


@pytest.mark.parametrize("first", range(0, 500, SEEDS_PER_TEST))
def test_random_schedules_keep_every_law(first: int) -> None:
    total = run_seeds(first, SEEDS_PER_TEST)
    assert total.seeds == SEEDS_PER_TEST
    assert total.preemptions > SEEDS_PER_TEST, "too little pressure on the blocks"
    assert total.tokens_cached > 20 * SEEDS_PER_TEST, "too few prefix hits"
    assert (
        min(total.lost_steps, total.ended_outside, total.sent_again, total.evictions, total.refused)
        > 0
    )


def test_one_seed_gives_one_world() -> None:
    assert run_seed(11) == run_seed(11)


def test_command_line_prints_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--processes", "1"]) == 0
    assert "violations 0, stuck 0" in capsys.readouterr().out


def test_command_line_names_the_seed_that_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(first: int, count: int, processes: int) -> None:
        raise AssertionError(f"seed {first}: a law is broken")

    monkeypatch.setattr("tests.scheduler.simulate.run_parallel", fail)
    assert main(["--seeds", "3", "--first", "41", "--processes", "1"]) == 1
    assert "--seeds 1 --first 41" in capsys.readouterr().out
