"""What `launch.py status` says of engines that start."""

from __future__ import annotations

import contextlib

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
)

from cluster.commands import engines


def test_engines_that_start_are_listed_without_waiting_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deployment(state: ReplicaState) -> DeploymentStatusOverview:
        return DeploymentStatusOverview(
            status=DeploymentStatus.UPDATING,
            status_trigger=DeploymentStatusTrigger.CONFIG_UPDATE_STARTED,
            replica_states={state: 1},
            message="",
        )

    application = ApplicationStatusOverview(
        status=ApplicationStatus.DEPLOYING,
        message="",
        last_deployed_time_s=0.0,
        deployments={
            "engine": deployment(ReplicaState.RUNNING),
            "api": deployment(ReplicaState.STARTING),
        },
    )

    def ask(name: str) -> None:
        raise AssertionError(f"{name} is asked")

    monkeypatch.setattr(engines, "_cluster_connection", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(engines, "_applications", lambda: {"chat": application})
    monkeypatch.setattr(engines, "shortage_of_application", lambda name: "")
    monkeypatch.setattr(engines, "_engine_statuses", ask)
    engines.run_status(None)
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if "chat" in line]
    assert "DEPLOYING" in row
