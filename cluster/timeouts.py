"""How long each part waits for another: all time limits that depend on each other, in order.

    ranks are asked and answer < ranks are stuck < the driver is replaced < Ray Serve ends a replica

Each part is replaced by the one that loses least by it: ranks by their driver, which keeps every
token; a driver by its owner, whose frontend keeps every request; a replica, whose streams end with
it, by Ray Serve, last of all. So each limit is longer than those on its left. A request waits as
long as it takes to notice that a driver hangs and to start another one once. The user sets
`stuck_after_s`, `start_timeout_s` and `wait_for_nodes_s`; the others are derived from these.

Calls that ask for the state of engines have their own order, from the engine outward: each caller
waits longer than the one that it calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.engine import EngineConfig
from scheduler.errors import ConfigError

# How often the supervisor checks the ranks, and asks those that work. With the next limit, this
# bounds the time until an engine whose rank is stopped no longer reports that it is ready.
HEARTBEAT_S = 0.5
# If a rank has not answered for this long, the engine does not report that it is ready.
RANK_ANSWER_TIMEOUT_S = 0.4
# How long a poll waits for news. A hanging driver is noticed this much later than hanging ranks.
POLL_WAIT_S = 5.0
# For a call that a healthy process answers at once.
CALL_TIMEOUT_S = 30.0
# How long the replacement of lost ranks or a lost driver is tried, at least.
GIVE_UP_AFTER_S = 300.0
# How long a node is asked until it answers or Ray declares it dead, which takes about a minute.
NODE_TIMEOUT_S = 150.0

# Ray Serve checks the health of a replica, and ends it after this many failed checks in a row. The
# replica answers without calling anybody, so frequent checks cost nothing.
HEALTH_PERIOD_S = 1.0
NUM_FAILED_CHECKS = 3
MIN_HEALTH_TIMEOUT_S = 10.0
# By how much the limit of Ray Serve is longer than that of the driver.
HEALTH_MARGIN_S = 5.0
# How often a replica asks its driver. With the checks above, an engine that is dead for good is
# replaced within 10 s.
DRIVER_CHECK_PERIOD_S = 2.0

# Calls for counters: an engine's replica calls its driver, the API the engines (on its event loop,
# for which one of its threads waits, and for this thread `Api.stats`), and one process of the API
# calls all of them.
ENGINE_STATS_TIMEOUT_S = 1.0
POOL_STATS_TIMEOUT_S = 1.5
POOL_THREAD_TIMEOUT_S = 1.75
API_STATS_TIMEOUT_S = 2.0
GATHER_TIMEOUT_S = 5.0

# How often a program that serves checks its application, and how long it waits for an answer.
WATCH_PERIOD_S = 1.0
CONTROLLER_TIMEOUT_S = 5.0

# The end of an application: how long the driver may take to end its ranks, then how long Ray Serve
# may take to end the replicas, after which they are killed.
DRIVER_SHUTDOWN_TIMEOUT_S = 2.0
REPLICA_END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The limits of one engine, in seconds."""

    # Until ranks without progress are replaced; also for an answer of the driver.
    stuck_after_s: float
    driver_silence_s: float  # until a hanging driver is noticed while requests run
    driver_start_s: float  # for one start of a driver
    give_up_after_s: float  # how long a replacement is tried, not counting the last attempt
    replacement_timeout_s: float  # the longest that replacing a driver may take
    health_timeout_s: float  # how long Ray Serve waits for one answer of a replica
    lease_wait_s: float  # how long a request waits for one of several engines
    first_engine_wait_s: float  # how long an API waits for the first engine

    @classmethod
    def from_options(cls, options: EngineConfig) -> Timeouts:
        """The limits that fit the options of an engine: those that would be too short are raised.
        Raises `ConfigError` for options that no limits fit.
        """
        min_stuck_after_s = HEARTBEAT_S + RANK_ANSWER_TIMEOUT_S
        if options.stuck_after_s <= min_stuck_after_s:
            raise ConfigError(
                f"stuck_after_s {options.stuck_after_s:g} would replace ranks that work: they are"
                f" asked every {HEARTBEAT_S:g} s and may take {RANK_ANSWER_TIMEOUT_S:g} s to"
                f" answer; give more than {min_stuck_after_s:g}"
            )
        stuck_after_s = options.stuck_after_s
        driver_silence_s = POLL_WAIT_S + stuck_after_s
        driver_start_s = options.start_timeout_s + CALL_TIMEOUT_S
        give_up_after_s = max(
            GIVE_UP_AFTER_S, options.wait_for_nodes_s, options.start_timeout_s, 3 * driver_silence_s
        )
        needed_health_timeout_s = (driver_silence_s + HEALTH_MARGIN_S) / NUM_FAILED_CHECKS
        return cls(
            stuck_after_s=stuck_after_s,
            driver_silence_s=driver_silence_s,
            driver_start_s=driver_start_s,
            give_up_after_s=give_up_after_s,
            # Ending what is left, waiting for room, and the last attempt's start.
            replacement_timeout_s=give_up_after_s
            + NODE_TIMEOUT_S
            + give_up_after_s
            + driver_start_s,
            health_timeout_s=max(MIN_HEALTH_TIMEOUT_S, needed_health_timeout_s),
            lease_wait_s=driver_silence_s + driver_start_s,
            first_engine_wait_s=options.wait_for_nodes_s + driver_start_s + CALL_TIMEOUT_S,
        )

    @property
    def replica_silence_s(self) -> float:
        """Ray Serve ends a replica that does not answer after this time."""
        return NUM_FAILED_CHECKS * self.health_timeout_s

    def describe_raised_limits(self) -> str | None:
        """Which limits are longer than usual, to fit the options; None if none is."""
        raised_limits = []
        if self.health_timeout_s > MIN_HEALTH_TIMEOUT_S:
            raised_limits.append(
                f"a driver that hangs is replaced after {self.driver_silence_s:g} s, and Ray Serve"
                f" ends a replica that does not answer after {self.replica_silence_s:g} s"
            )
        if self.give_up_after_s > GIVE_UP_AFTER_S:
            raised_limits.append(
                f"lost ranks and drivers are replaced for {self.give_up_after_s:g} s"
            )
        return "; ".join(raised_limits) or None
