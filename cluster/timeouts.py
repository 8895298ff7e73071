"""How long each part waits for another one: all limits that depend on each other, in one order.

    ranks are asked and answer < ranks are stuck < the driver is replaced < Ray Serve ends a replica

Whatever is lost is replaced by whoever loses least by it: ranks by their driver, which keeps every
token; a driver by its owner, whose frontend keeps every request; a replica, whose streams end with
it, by Ray Serve, last of all. So each limit is longer than those on its left, and whoever waits for
a request waits longer than one replacement takes. The user gives `stuck_after_s`,
`start_timeout_s` and `wait_for_nodes_s`; the others are derived from these.

Answers about the state of engines have an order of their own, from the engine outward: each waits
longer than the one that it asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler.errors import ConfigError

# How often the supervisor looks at the ranks, and asks those that work. Together with `ANSWER_S`,
# this bounds the time after which an engine whose rank is stopped no longer reports that it is
# ready.
HEARTBEAT_S = 0.5
# If a rank has not answered for this long, the engine does not report that it is ready.
ANSWER_S = 0.4
# How long a poll waits for news. A driver that hangs is noticed this much later than ranks are.
POLL_WAIT_S = 5.0
# For a call that a healthy process answers at once, to which nothing of ours is added.
CALL_TIMEOUT_S = 30.0
# How long lost ranks or a lost driver are tried to be replaced, at least.
GIVE_UP_AFTER_S = 300.0
# A node may be silent for about a minute before Ray declares it dead, and ends its processes.
NODE_TIMEOUT_S = 150.0

# Ray Serve asks a replica whether it is healthy, and ends it after so many failed answers in a row.
# The replica answers from what it knows, so asking often costs nothing.
HEALTH_PERIOD_S = 1.0
NUM_FAILED_CHECKS = 3
MIN_HEALTH_TIMEOUT_S = 10.0
# By how much the limit of Ray Serve is longer than that of the driver.
HEALTH_MARGIN_S = 5.0
# How often a replica asks its driver. With the checks above, an engine that is dead for good is
# replaced within 10 s.
DRIVER_CHECK_PERIOD_S = 2.0

# Who asks for counters: the engine's replica its driver, the API the engines, a client the API, and
# one API all the others.
ENGINE_STATS_TIMEOUT_S = 1.0
POOL_STATS_TIMEOUT_S = 1.5
API_STATS_TIMEOUT_S = 2.0
GATHER_TIMEOUT_S = 5.0

# How often a program that serves looks at its application, and how long it waits for an answer.
WATCH_PERIOD_S = 1.0
CONTROLLER_TIMEOUT_S = 5.0

# The end of an application: how long the driver may take to end its ranks, then how long Ray Serve
# may take to end the replicas, after which they are killed.
SHUTDOWN_TIMEOUT_S = 2.0
END_TIMEOUT_S = 5.0


class _Options(Protocol):
    """The options of `EngineConfig` from which the limits follow."""

    @property
    def stuck_after_s(self) -> float: ...

    @property
    def start_timeout_s(self) -> float: ...

    @property
    def wait_for_nodes_s(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The limits of one engine, in seconds.

    stuck_s: without progress, after which ranks are replaced; also how long a driver may take to
    answer. driver_silent_s: after which a driver that hangs is noticed while requests run.
    start_s: one start of a driver. give_up_s: how long replacing is tried, the last attempt not
    counted. replaced_s: the longest that a replacement may take. health_timeout_s: how long Ray
    Serve waits for one answer of a replica. lease_s: how long a request waits for an engine of
    several. first_engine_s: how long an API waits for the first engine.
    """

    stuck_s: float
    driver_silent_s: float
    start_s: float
    give_up_s: float
    replaced_s: float
    health_timeout_s: float
    lease_s: float
    first_engine_s: float

    @classmethod
    def of(cls, options: _Options) -> Timeouts:
        """The limits that fit the options of an engine: those that would be too short for them are
        raised. Raises `ConfigError` for options that none can fit.
        """
        least_s = HEARTBEAT_S + ANSWER_S
        if options.stuck_after_s <= least_s:
            raise ConfigError(
                f"stuck_after_s {options.stuck_after_s:g} would replace ranks that work: they are"
                f" asked every {HEARTBEAT_S:g} s and may take {ANSWER_S:g} s to answer; give more"
                f" than {least_s:g}"
            )
        stuck_s = options.stuck_after_s
        driver_silent_s = POLL_WAIT_S + stuck_s
        start_s = options.start_timeout_s + CALL_TIMEOUT_S
        give_up_s = max(
            GIVE_UP_AFTER_S, options.wait_for_nodes_s, options.start_timeout_s, 3 * driver_silent_s
        )
        least_health_s = (driver_silent_s + HEALTH_MARGIN_S) / NUM_FAILED_CHECKS
        return cls(
            stuck_s=stuck_s,
            driver_silent_s=driver_silent_s,
            start_s=start_s,
            give_up_s=give_up_s,
            # Ending what is left, waiting for room, and the last attempt's start.
            replaced_s=give_up_s + NODE_TIMEOUT_S + give_up_s + start_s,
            health_timeout_s=max(MIN_HEALTH_TIMEOUT_S, least_health_s),
            lease_s=driver_silent_s + start_s,
            first_engine_s=options.wait_for_nodes_s + start_s + CALL_TIMEOUT_S,
        )

    @property
    def replica_silent_s(self) -> float:
        """After which Ray Serve ends a replica that does not answer."""
        return NUM_FAILED_CHECKS * self.health_timeout_s

    def raised(self) -> str | None:
        """What is longer than usual, to fit the options; None if nothing is."""
        changes = []
        if self.health_timeout_s > MIN_HEALTH_TIMEOUT_S:
            changes.append(
                f"a driver that hangs is replaced after {self.driver_silent_s:g} s, and Ray Serve"
                f" ends a replica that does not answer after {self.replica_silent_s:g} s"
            )
        if self.give_up_s > GIVE_UP_AFTER_S:
            changes.append(f"lost ranks and drivers are replaced for {self.give_up_s:g} s")
        return "; ".join(changes) or None
