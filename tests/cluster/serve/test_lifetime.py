"""What a program that serves does when Ray Serve says how its application is."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import GetTimeoutError, RaySystemError, RayTaskError
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.exceptions import RayServeException
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
)

from cluster.serve import application, lifetime, run
from cluster.serve.lifetime import RunningApplication
from cluster.timeouts import REPLICA_END_TIMEOUT_S
from configs.serve import ServeConfig
from scheduler.errors import ConfigError, EngineError, UnreadableError

LOST = "A replica's health check failed."
IS_LOST = "a replica of 'engine' is lost, Ray Serve starts another one"
HAS_FAILED = "a replica of 'engine' has failed to start, Ray Serve starts another one"
FAILED = "The deployment failed to start 2 times in a row. Error:\nValueError: too little memory"


def overview(
    status: str, message: str = "", trigger: str = "HEALTH_CHECK_FAILED", num_running: int = 0
) -> ApplicationStatusOverview:
    is_healthy = status == "RUNNING"
    deployment = DeploymentStatusOverview(
        status=DeploymentStatus("HEALTHY" if is_healthy else "UNHEALTHY"),
        status_trigger=DeploymentStatusTrigger(trigger),
        replica_states={ReplicaState.RUNNING: num_running} if num_running else {},
        message=message,
    )
    return ApplicationStatusOverview(
        status=ApplicationStatus(status),
        message="",
        last_deployed_time_s=0.0,
        deployments={"engine": deployment},
    )


def watch(
    monkeypatch: pytest.MonkeyPatch,
    *answers: Any,
    check_can_start: Callable[[], None] = lambda: None,
) -> None:
    """Watch an application until these answers of Ray Serve have been read."""
    monkeypatch.setattr(lifetime, "WATCH_PERIOD_S", 0.0)
    stopping, left = threading.Event(), list(answers)

    def next_answer(_: RunningApplication) -> ApplicationStatusOverview | None:
        answer = left.pop(0)
        if not left:
            stopping.set()
        if isinstance(answer, Exception):
            raise answer
        assert answer is None or isinstance(answer, ApplicationStatusOverview)
        return answer

    monkeypatch.setattr(RunningApplication, "_overview", next_answer)
    RunningApplication("eagleray", check_can_start).watch(stopping)
    assert not left


def test_what_the_cluster_lacks_is_said_while_an_application_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shortages, was_read = ["", "no room yet", "(no answer)", "no room yet"], threading.Event()

    def made_up_shortage(prefix: str) -> str:
        assert prefix == "SERVE_REPLICA::chat#"
        if not shortages:
            was_read.set()
            return ""
        if (shortage := shortages.pop(0)) == "(no answer)":
            raise RuntimeError("the control store does not answer")
        return shortage

    monkeypatch.setattr(lifetime, "LOG_PERIOD_S", 0.01)
    monkeypatch.setattr(lifetime, "shortage_of_groups", made_up_shortage)
    with RunningApplication("chat").logged_waits():
        assert was_read.wait(5)
    assert [record.message for record in caplog.records] == ["waiting for 0 s: no room yet"] * 2
    assert "eagleray-waits" not in [thread.name for thread in threading.enumerate()]


def test_a_route_prefix_that_is_in_use_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        cause = RayServeException('Prefix / is being used by application "chat".')
        raise RayTaskError("deploy", "Traceback\n...", cause, ip="here").as_instanceof_cause()

    for module, name in ((serve, "start"), (application, "application")):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(serve, "run", refuse)
    job = run.ServeJob(config=ServeConfig(), host="::1", port=80)
    with pytest.raises(ConfigError) as refused:
        run._start(job, None, listens_itself=False)
    assert str(refused.value) == (
        'Prefix / is being used by application "chat". Choose another --route-prefix'
    )


def test_a_lost_replica_and_its_return_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fine, lost = overview("RUNNING", num_running=1), overview("UNHEALTHY", LOST)
    with caplog.at_level(logging.INFO, "eagleray"):
        watch(monkeypatch, fine, lost, lost, lost, fine, fine)
    assert [record.message for record in caplog.records] == [
        f"{IS_LOST}: {LOST}",
        "every replica serves again",
    ]


def test_an_application_that_cannot_start_again_ends_the_program_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = overview("UNHEALTHY", FAILED, "REPLICA_STARTUP_FAILED")
    with pytest.raises(EngineError, match=r"started again: ValueError: too little memory$"):
        watch(monkeypatch, overview("UNHEALTHY", LOST), failed)


def no_weights() -> None:
    raise ConfigError("/model holds no *.safetensors file")


def test_a_loss_that_no_start_can_mend_ends_the_program_before_ray_serve_tries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineError, match=r"could not be started again: /model holds no"):
        watch(monkeypatch, overview("UNHEALTHY", LOST), check_can_start=no_weights)
    assert not caplog.records, "it is not said that another one starts"


def test_what_is_found_after_a_start_has_failed_ends_the_program_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [lambda: None, no_weights]
    first = "A replica failed to start with exception. Retrying.\nOSError: it is busy"
    with pytest.raises(EngineError, match="holds no"):
        watch(
            monkeypatch,
            *[overview("UNHEALTHY", LOST)] * 3,
            overview("UNHEALTHY", first),
            check_can_start=lambda: faults.pop(0)(),
        )
    assert [record.message for record in caplog.records] == [f"{IS_LOST}: {LOST}"]


def test_each_start_that_fails_is_said_while_another_one_follows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost = overview("UNHEALTHY", LOST)
    failed = overview("UNHEALTHY", "A replica failed to start. Error:\nOSError: it is busy")
    watch(monkeypatch, lost, lost, failed, failed, overview("RUNNING", num_running=1))
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"{IS_LOST}: {LOST}",
        f"{HAS_FAILED}: OSError: it is busy",
    ]


def test_losses_of_two_kinds_of_replicas_are_no_failed_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, api = (overview("UNHEALTHY", LOST, num_running=1) for _ in range(2))
    api.deployments = {"api": api.deployments.pop("engine")}
    both = overview("UNHEALTHY", num_running=1)
    both.deployments = engine.deployments | api.deployments
    engine.message, both.message, api.message = "['engine']", "['engine', 'api']", "['api']"
    with caplog.at_level(logging.INFO, "eagleray"):
        watch(monkeypatch, engine, both, both, api, overview("RUNNING", num_running=1))
    assert [record.message for record in caplog.records] == [
        f"{IS_LOST}: {LOST}",
        f"a replica of 'api' is lost, Ray Serve starts another one: {LOST}",
        "every replica serves again",
    ]


def test_a_ray_that_has_lost_a_process_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_lost() -> None:
        raise EngineError("a process of Ray has died: gcs_server")

    monkeypatch.setattr(lifetime, "WATCH_PERIOD_S", 0.0)
    with pytest.raises(EngineError, match="gcs_server"):
        RunningApplication("eagleray", check_ray=is_lost).watch(threading.Event())


def test_one_of_several_engines_that_is_lost_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = overview("UNHEALTHY", LOST, num_running=1)
    watch(monkeypatch, lost, lost, check_can_start=no_weights)


@pytest.mark.parametrize(
    "error", [OSError("no answer"), UnreadableError("/model/model.safetensors cannot be read")]
)
def test_a_disk_that_does_not_answer_ends_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_busy() -> None:
        raise error

    watch(monkeypatch, *[overview("UNHEALTHY", LOST)] * 2, check_can_start=is_busy)


def test_one_engine_that_cannot_start_again_leaves_the_others_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = overview("UNHEALTHY", FAILED, "REPLICA_STARTUP_FAILED", num_running=1)
    watch(monkeypatch, failed, failed)


def test_an_application_that_another_program_has_ended_ends_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EngineError, match="'eagleray' was ended by another program"):
        watch(monkeypatch, overview("RUNNING"), None)


def test_a_controller_that_does_not_answer_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watch(monkeypatch, GetTimeoutError(), overview("RUNNING"), GetTimeoutError())


def test_a_ray_that_is_gone_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="Ray Serve is gone"):
        watch(monkeypatch, RaySystemError("the connection was lost"))


@pytest.mark.parametrize("ends", [True, False])
def test_who_ends_an_application_waits_as_long_as_its_requests_may_take(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    limits, deleted = list[float](), list[list[str]]()
    config = SimpleNamespace(graceful_shutdown_timeout_s=300.0)
    api, engine = (
        SimpleNamespace(deployment_config=config),
        SimpleNamespace(deployment_config=SimpleNamespace(graceful_shutdown_timeout_s=20.0)),
    )
    found = SimpleNamespace(deployments={"api": api, "engine": engine})
    details = SimpleNamespace(applications={"eagleray": found})
    remote = SimpleNamespace(delete_apps=SimpleNamespace(remote=deleted.append))

    def has_ended(_: RunningApplication, limit_s: float) -> bool:
        limits.append(limit_s)
        return ends

    monkeypatch.setattr(lifetime, "_serve_details", lambda limit_s: details)
    monkeypatch.setattr(lifetime, "_controller", lambda: remote)
    monkeypatch.setattr(RunningApplication, "_wait_until_ended", has_ended)
    if ends:
        RunningApplication("eagleray").finish()
    else:
        with pytest.raises(EngineError, match="has not ended within 305 s"):
            RunningApplication("eagleray").finish()
    assert deleted == [["eagleray"]] and limits == [300 + REPLICA_END_TIMEOUT_S]


def test_a_signal_while_an_application_ends_ends_its_replicas_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(_: RunningApplication) -> bool:
        raise KeyboardInterrupt

    job, killed = run.ServeJob(config=ServeConfig(), host="::1", port=80), list[str]()
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr(run, "_adapt_to_running_serve", lambda job, owns_ray: job)
    for name in ("_start", "_wait_until_listening", "_drain_watched"):
        monkeypatch.setattr(run, name, lambda *_, **__: None)
    monkeypatch.setattr(RunningApplication, "watch", lambda *_: None)
    monkeypatch.setattr(RunningApplication, "end", interrupt)
    monkeypatch.setattr(RunningApplication, "kill", lambda self: killed.append(self._name))
    setup: Any = SimpleNamespace(expected_config=None)
    with pytest.raises(KeyboardInterrupt):
        run._serve(job, setup, run._SignalHandler(), 0.0, owns_ray=False)
    assert killed == ["eagleray"]


def test_signals_do_not_interrupt_the_end_until_it_has_taken_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    handler = run._SignalHandler()
    handler.is_serving = True
    handler.handle(signal.SIGTERM, None)
    assert handler.stop_event.is_set(), "the first one ends what runs"
    with pytest.raises(KeyboardInterrupt):
        handler.handle(signal.SIGTERM, None)
    handler.handle(signal.SIGINT, None)
    now_s += run.END_LIMIT_S + 1
    with pytest.raises(KeyboardInterrupt):
        handler.handle(signal.SIGINT, None)
    handler.handle(signal.SIGINT, None)
