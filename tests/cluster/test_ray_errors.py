"""Ray's errors, and what our code gets in their place."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import exceptions
from ray.exceptions import RayTaskError

from cluster.error_kinds import kind_of
from cluster.ray_errors import (
    DriverDiedError,
    LostCallError,
    NoAnswerError,
    NoRoomError,
    result_of,
    start_call,
)
from scheduler.errors import EngineDeadError, EngineError, OverloadedError, RequestError


def remote(cause: Exception) -> Exception:
    error: Exception = RayTaskError("submit", "traceback", cause).as_instanceof_cause()
    return error


CASES = [
    (exceptions.GetTimeoutError("late"), NoAnswerError),
    (exceptions.ActorUnavailableError("lost", None), LostCallError),
    (exceptions.RpcError("lost"), LostCallError),
    (exceptions.ObjectLostError("00", b"owner", "task"), LostCallError),
    (exceptions.OwnerDiedError("00", b"owner", "task"), LostCallError),
    (exceptions.ObjectStoreFullError("full"), NoRoomError),
    (exceptions.OutOfDiskError("full"), NoRoomError),
    (remote(exceptions.OutOfDiskError("full")), NoRoomError),
    (remote(OSError(errno.EAGAIN, "fork")), NoRoomError),
    (exceptions.ActorDiedError(), DriverDiedError),
    (exceptions.NodeDiedError("gone"), DriverDiedError),
    (exceptions.WorkerCrashedError(), DriverDiedError),
    (exceptions.OutOfMemoryError("killed"), DriverDiedError),
    (exceptions.RaySystemError("gone"), DriverDiedError),
    (exceptions.UserCodeException("bug"), EngineDeadError),
    (remote(RequestError("too long", "prompt")), RequestError),
    (remote(KeyError("a")), EngineError),
]


@pytest.mark.parametrize(
    ("error", "expected"), CASES, ids=[f"{type(error).__name__}" for error, _ in CASES]
)
def test_an_answer_that_is_an_error_of_ray_becomes_ours(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception]
) -> None:
    def get(ref: object, timeout: float) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(expected) as raised:
        result_of(object(), "submit requests")
    assert type(raised.value) is expected
    if expected is not RequestError:
        assert str(raised.value).startswith("could not submit requests: ")


def test_a_message_has_the_first_line_of_what_ray_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(ref: object, timeout: float) -> None:
        raise exceptions.RaySystemError("The actor died unexpectedly.\n\tname: driver\n\tpid: 7")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(DriverDiedError, match=r"has died \(.*died unexpectedly\)$") as raised:
        result_of(object(), "poll the driver")
    assert len(str(raised.value).splitlines()) == 1


def test_an_error_in_the_creation_of_an_actor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "The actor died because of an error raised in its creation task, ray::Driver():"

    def get(ref: object, timeout: float) -> None:
        raise exceptions.RaySystemError(f"{said}\n  File a.py\nValueError: no such device\n")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(DriverDiedError, match=r"creation task.*: ValueError: no such device\)$"):
        result_of(object(), "start the engine")


def method_raising(error: Exception) -> Any:
    def remote(*_: object) -> None:
        raise error

    return SimpleNamespace(remote=remote)


def test_a_call_that_cannot_be_made_for_want_of_room_says_so_and_may_be_made_later() -> None:
    with pytest.raises(NoRoomError, match=r"could not submit requests: .* later") as raised:
        start_call(method_raising(exceptions.OutOfDiskError("full")), "submit requests", 1, 2)
    assert isinstance(raised.value, OverloadedError) and kind_of(raised.value).is_transient


def test_a_call_that_cannot_be_made_because_of_a_bug_is_a_bug() -> None:
    with pytest.raises(TypeError):
        start_call(method_raising(TypeError("no such argument")), "submit requests")


def test_a_call_that_can_be_made_is_made() -> None:
    assert start_call(SimpleNamespace(remote=lambda *a: a), "submit requests", 1, 2) == (1, 2)
