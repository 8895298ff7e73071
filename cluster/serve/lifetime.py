"""Watches a Ray Serve application from its start to its end, for the program that serves it.

Ray Serve replaces lost replicas. A loss that it cannot repair ends the program, with one line that
says why. Serve's controller may itself be lost or hang, so every call to it has a time limit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayError
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentDetails,
    DeploymentStatusOverview,
    ServeInstanceDetails,
)
from ray.util import list_named_actors

from cluster.error_kinds import ErrorKind, kind_of
from cluster.resources.placement import LOG_PERIOD_S, shortage_of_groups
from cluster.timeouts import CONTROLLER_TIMEOUT_S, REPLICA_END_TIMEOUT_S, WATCH_PERIOD_S
from scheduler.errors import EngineError

CANNOT_START_MESSAGE = "the engine was lost and could not be started again"

logger = logging.getLogger("eagleray")


class RunningApplication:
    """An application, for the program that starts and serves it, or only ends it."""

    def __init__(
        self,
        name: str,
        check_can_start: Callable[[], None] = lambda: None,
        check_ray: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_can_start` raises `ClientError` if no engine could start any more, `check_ray`
        raises `EngineError` if Ray has lost a process that it needs.
        """
        self._name = name
        self._check_can_start = check_can_start
        self._check_ray = check_ray
        # Of each deployment that lacks replicas now, the reason that was logged.
        self._reported_reasons: dict[str, str] = {}

    @contextmanager
    def logged_waits(self) -> Iterator[None]:
        """While the block starts the application, log now and then what the cluster lacks for its
        engines: Ray Serve waits for room without a limit and without a word.
        """
        end_event = threading.Event()
        began_s = time.monotonic()

        def log_waits() -> None:
            while not end_event.wait(LOG_PERIOD_S):
                try:
                    shortage = shortage_of_application(self._name)
                except Exception as error:  # of Ray, which the start meets too, and tells
                    logger.debug("what the cluster lacks is not known: %s", error)
                    continue
                if shortage:
                    logger.warning("waiting for %.0f s: %s", time.monotonic() - began_s, shortage)

        thread = threading.Thread(target=log_waits, name="eagleray-waits", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end_event.set()
            thread.join(CONTROLLER_TIMEOUT_S)

    def watch(self, stop_event: threading.Event) -> None:
        """Return when `stop_event` is set. Logs when replicas are lost and when they are back.
        Raises `EngineError` when they will not come back.
        """
        while not stop_event.wait(WATCH_PERIOD_S):
            self._check_ray()
            try:
                overview = self._overview()
            except GetTimeoutError:  # it may be restarting, and the replicas serve meanwhile
                self._check_ray()
                continue
            except RayError as error:
                raise EngineError(f"Ray Serve is gone: {_first_line(error)}") from error
            self._report(overview)

    def _report(self, overview: ApplicationStatusOverview | None) -> None:
        if overview is None:
            raise EngineError(f"the application {self._name!r} was ended by another program")
        if overview.status == ApplicationStatus.RUNNING:
            if self._reported_reasons:
                logger.info("every replica serves again")
            self._reported_reasons = {}
            return
        if overview.status == ApplicationStatus.DEPLOY_FAILED or _has_used_up_starts(overview):
            raise EngineError(f"{CANNOT_START_MESSAGE}: {reported_reason(overview)}")
        deployments = overview.deployments
        unhealthy = {n: d for n, d in deployments.items() if d.status == DeploymentStatus.UNHEALTHY}
        reasons = {name: _telling_line(lacking.message) for name, lacking in unhealthy.items()}
        changed_names = [
            name for name in reasons if reasons[name] != self._reported_reasons.get(name)
        ]
        if changed_names and any(map(has_no_running_replica, unhealthy.values())):
            self._check_that_another_can_start()
        for name in changed_names:
            event = "has failed to start" if _failed_to_start(unhealthy[name]) else "is lost"
            logger.warning(
                "a replica of %r %s, Ray Serve starts another one: %s", name, event, reasons[name]
            )
        if reasons:
            self._reported_reasons = reasons

    def _check_that_another_can_start(self) -> None:
        """Raise `EngineError` at once for a fault that another start would not repair."""
        try:
            self._check_can_start()
        except Exception as error:
            if kind_of(error) is ErrorKind.CALLER_FAULT:
                raise EngineError(f"{CANNOT_START_MESSAGE}: {error}") from error
            # Such as a disk that does not answer; Ray Serve will find out.
            logger.warning("the checkpoint could not be looked at: %s", error)

    def finish(self) -> None:
        """Have Ray Serve end the application once its requests have finished. Raises `EngineError`
        if that takes longer than its replicas may take, or if Serve does not answer.
        """
        try:
            details = _serve_details(CONTROLLER_TIMEOUT_S).applications[self._name]
            limit_s = REPLICA_END_TIMEOUT_S + max(map(_drain_limit_s, details.deployments.values()))
            _controller().delete_apps.remote([self._name])
        except GetTimeoutError:
            raise EngineError(
                f"Ray Serve did not answer within {CONTROLLER_TIMEOUT_S:g} s; try again"
            ) from None
        if not self._wait_until_ended(limit_s):
            raise EngineError(
                f"the application {self._name!r} has not ended within {limit_s:g} s; 'launch.py"
                " status' shows what is left of it"
            )

    def end(self) -> bool:
        """Have Ray Serve end the application, and kill what does not end in time. Returns whether
        it has ended; raises nothing.
        """
        try:
            _controller().delete_apps.remote([self._name])
            if self._wait_until_ended(REPLICA_END_TIMEOUT_S):
                return True
        except Exception as error:
            logger.warning("Ray Serve is gone: %s", _first_line(error))
        return self.kill()

    def kill(self) -> bool:
        """End the replicas, and with them their engines, at once. Returns and raises as `end`."""
        try:
            _controller().delete_apps.remote([self._name])  # or it would replace them
            for actor in list_named_actors(all_namespaces=True):
                if actor["name"].startswith(_replica_prefix(self._name)):
                    ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
            return self._wait_until_ended(REPLICA_END_TIMEOUT_S)
        except Exception as error:  # Serve has not started, or is gone
            logger.debug("the replicas could not be ended: %s", error)
            return False

    def _wait_until_ended(self, limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            try:
                if self._overview(remaining_s) is None:
                    return True
            except GetTimeoutError:
                return False
            time.sleep(min(remaining_s, 0.1))
        return False

    def _overview(self, limit_s: float = CONTROLLER_TIMEOUT_S) -> ApplicationStatusOverview | None:
        """`serve.status` of this application, None if there is none. Raises `GetTimeoutError`."""
        applications = _serve_details(limit_s)._get_status().applications
        overview: ApplicationStatusOverview | None = applications.get(self._name)
        return overview


def _serve_details(limit_s: float) -> ServeInstanceDetails:
    details = ray.get(_controller().get_serve_instance_details.remote(), timeout=limit_s)
    return ServeInstanceDetails(**details)


def _drain_limit_s(deployment: DeploymentDetails) -> float:
    """How long the running requests of a replica may take before Serve kills it."""
    return float(deployment.deployment_config.graceful_shutdown_timeout_s)


def _has_used_up_starts(overview: ApplicationStatusOverview) -> bool:
    """Whether some deployment has no replica left and has failed to start as often as it may. Ray
    Serve itself would try forever once a replica has served.
    """
    return any(
        deployment.status_trigger == DeploymentStatusTrigger.REPLICA_STARTUP_FAILED
        and has_no_running_replica(deployment)
        for deployment in overview.deployments.values()
    )


def has_no_running_replica(deployment: DeploymentStatusOverview) -> bool:
    """Whether no replica of it runs now."""
    return not deployment.replica_states.get(ReplicaState.RUNNING)


def _failed_to_start(deployment: DeploymentStatusOverview) -> bool:
    """Whether its last event is a failed start. Only the message tells: the trigger changes after
    several failed starts, and never while another replica serves.
    """
    return "failed to start" in deployment.message


def shortage_of_application(name: str) -> str:
    """What the cluster lacks for engines of an application that wait for room; "" if none waits."""
    return shortage_of_groups(_replica_prefix(name))


def _replica_prefix(name: str) -> str:
    """How Serve names the actors and placement groups of an application's replicas."""
    return f"SERVE_REPLICA::{name}#"


def reported_reason(
    overview: ApplicationStatusOverview, default: str = "no reason is known"
) -> str:
    """Serve's message about the deployment that failed, in one line."""
    messages = [deployment.message for deployment in overview.deployments.values()]
    return _telling_line("\n".join([overview.message, *messages]).strip()) or default


def _telling_line(message: str) -> str:
    """The last line of a remote traceback, which names the error; without one the first line."""
    lines = message.splitlines()
    error_lines = [line for line in lines if "Error" in line]
    return (error_lines[-1:] or lines[:1] or [""])[0].strip()


def _controller() -> Any:
    serve_client: Any = serve.context._get_global_client()
    return serve_client._controller


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
