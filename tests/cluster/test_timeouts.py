"""The order of the limits, for the options that users may give."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import timeouts
from cluster.client.setup import make_engine_setup
from cluster.timeouts import Timeouts
from configs.engine import EngineConfig
from scheduler.errors import ConfigError

SECONDS = st.floats(1.0, 86400.0)


@settings(deadline=None)
@given(stuck=SECONDS, start=SECONDS, nodes=st.integers(0, 86400))
def test_whoever_depends_on_another_waits_longer_whatever_the_options(
    stuck: float, start: float, nodes: int
) -> None:
    options = EngineConfig(stuck_after_s=stuck, start_timeout_s=start, wait_for_nodes_s=nodes)
    limits = Timeouts.from_options(options)
    order = [
        timeouts.HEARTBEAT_S + timeouts.RANK_ANSWER_TIMEOUT_S,
        limits.stuck_after_s,
        limits.driver_silence_s,
        limits.replica_silence_s,
    ]
    assert order == sorted(set(order)), order
    assert start < limits.driver_start_s < limits.lease_wait_s, (
        "a request outlasts one start of a driver"
    )
    assert (
        max(start, nodes, limits.driver_silence_s)
        <= limits.give_up_after_s
        < limits.replacement_timeout_s
    )
    assert nodes + limits.driver_start_s < limits.first_engine_wait_s


def test_each_who_asks_for_counters_waits_longer_than_whom_it_asks() -> None:
    order = [
        timeouts.ENGINE_STATS_TIMEOUT_S,
        timeouts.POOL_STATS_TIMEOUT_S,
        timeouts.POOL_THREAD_TIMEOUT_S,
        timeouts.API_STATS_TIMEOUT_S,
        timeouts.GATHER_TIMEOUT_S,
    ]
    assert order == sorted(set(order))


def test_an_engine_that_is_dead_for_good_is_replaced_within_ten_seconds() -> None:
    noticed_s = timeouts.DRIVER_CHECK_PERIOD_S
    assert noticed_s + (timeouts.NUM_FAILED_CHECKS + 1) * timeouts.HEALTH_PERIOD_S < 10


def test_nothing_is_raised_by_default() -> None:
    limits = Timeouts.from_options(EngineConfig())
    assert limits.describe_raised_limits() is None
    assert (limits.stuck_after_s, limits.driver_silence_s, limits.give_up_after_s) == (20, 25, 300)
    assert limits.replica_silence_s == 30


def test_what_is_raised_is_said_in_one_line() -> None:
    said = Timeouts.from_options(
        EngineConfig(stuck_after_s=100, start_timeout_s=900)
    ).describe_raised_limits()
    assert said == (
        "a driver that hangs is replaced after 105 s, and Ray Serve ends a replica that does not"
        " answer after 110 s; lost ranks and drivers are replaced for 900 s"
    )


def test_a_limit_that_would_replace_ranks_that_work_is_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"stuck_after_s 0\.5 .* give more than 0\.9"):
        make_engine_setup(EngineConfig(stuck_after_s=0.5))
