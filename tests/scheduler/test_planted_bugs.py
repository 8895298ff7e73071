"""The simulation must find every planted bug, and nothing in the unchanged code."""

from __future__ import annotations

import re

import pytest

from tests.scheduler.planted_bugs import PLANTED
from tests.scheduler.simulator import run_seed

MAX_SEEDS = 60
OF_THE_BUG = re.compile(r"^(seed \d+: )?(AttributeError|NameError|TypeError|KeyError)\b")
WRONG_TOKEN = re.compile(r"token \d+ is \d+, expected")


def first_violation(name: str, *, look_inside: bool = True) -> tuple[int, str] | None:
    """The first seed that catches a planted bug, and how."""
    for seed in range(MAX_SEEDS):
        try:
            run_seed(seed, PLANTED[name], look_inside=look_inside)
        except AssertionError as error:
            # A bug that raises itself was not noticed by a law: it names what is no longer there.
            assert not OF_THE_BUG.search(str(error)), f"{name} does not fit the code: {error}"
            return seed, str(error)
    return None


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught(name: str) -> None:
    assert first_violation(name) is not None, f"{name} survives {MAX_SEEDS} seeds"


@pytest.mark.parametrize(
    "name",
    [
        "StaleIndexEntry",
        "TokensNotCompared",
        "ParentNotCompared",
        "SaltNotCompared",
        "HitAfterMiss",
        "IndexOutlivesEpoch",
        "PromptPublishedTooEarly",
        "SaltIgnored",
    ],
)
def test_wrong_content_shows_in_the_tokens_alone(name: str) -> None:
    violation = first_violation(name, look_inside=False)
    assert violation is not None and WRONG_TOKEN.search(violation[1]), violation


def test_code_without_bugs_passes_the_same_seeds() -> None:
    for seed in range(MAX_SEEDS):
        run_seed(seed)
