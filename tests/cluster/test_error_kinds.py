"""What each error means, whoever raised it."""

from __future__ import annotations

import errno
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest
from ray import exceptions
from ray.exceptions import RayError, RayTaskError

from cluster.error_kinds import NO_THREAD_MESSAGE, ErrorKind, kind_of
from cluster.grammar.helper import HelperLostError
from cluster.ray_errors import DriverDiedError, LostCallError, NoAnswerError
from configs.paths import SOURCE_ROOT
from scheduler.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestError,
    StepTimeoutError,
    WorkerError,
)


class NewRayError(RayError):
    """An error of a version of Ray that is not out yet."""


def raised_remotely(cause: Exception) -> Exception:
    error: Exception = RayTaskError("step", "traceback", cause).as_instanceof_cause()
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.ActorUnavailableError("lost", None), ErrorKind.LOST_CALL),
        (exceptions.RpcError("lost"), ErrorKind.LOST_CALL),
        (exceptions.OwnerDiedError("00", b"owner", "task"), ErrorKind.LOST_CALL),
        (LostCallError("lost"), ErrorKind.LOST_CALL),
        (exceptions.ObjectStoreFullError("full"), ErrorKind.NO_ROOM),
        (exceptions.OutOfDiskError("full"), ErrorKind.NO_ROOM),
        (OSError(errno.EAGAIN, "fork"), ErrorKind.NO_ROOM),
        (OSError(errno.ENOSPC, "no space left on device"), ErrorKind.NO_ROOM),
        (OSError(errno.EMFILE, "too many open files"), ErrorKind.NO_ROOM),
        (MemoryError(), ErrorKind.NO_ROOM),
        (RuntimeError(NO_THREAD_MESSAGE), ErrorKind.NO_ROOM),
        (OverloadedError("later"), ErrorKind.NO_ROOM),
        (exceptions.ActorDiedError(), ErrorKind.LOST_PEER),
        (exceptions.NodeDiedError("gone"), ErrorKind.LOST_PEER),
        (exceptions.RaySystemError("gone"), ErrorKind.LOST_PEER),
        (NewRayError("new"), ErrorKind.LOST_PEER),
        (ConnectionResetError(), ErrorKind.LOST_PEER),
        (BrokenPipeError(), ErrorKind.LOST_PEER),
        (EOFError(), ErrorKind.LOST_PEER),
        (TimeoutError(), ErrorKind.LOST_PEER),
        (ProcessLookupError(), ErrorKind.LOST_PEER),
        (BrokenProcessPool(), ErrorKind.LOST_PEER),
        (HelperLostError(), ErrorKind.LOST_PEER),
        (WorkerError("rank 1"), ErrorKind.LOST_PEER),
        (StepTimeoutError("step 1"), ErrorKind.LOST_PEER),
        (NoAnswerError("none"), ErrorKind.LOST_PEER),
        (DriverDiedError("dead"), ErrorKind.LOST_PEER),
        (RequestError("no"), ErrorKind.CALLER_FAULT),
        (ConfigError("no"), ErrorKind.CALLER_FAULT),
        (EngineDeadError("dead"), ErrorKind.ENGINE_ENDED),
        (EngineError("a result of another step"), ErrorKind.BUG),
        (exceptions.UserCodeException("ours"), ErrorKind.BUG),
        (KeyError("a"), ErrorKind.BUG),
        (RuntimeError("a"), ErrorKind.BUG),
        (AssertionError(), ErrorKind.BUG),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.name,
)
def test_an_error_means_the_same_here_and_raised_remotely(
    error: Exception, kind: ErrorKind
) -> None:
    assert kind_of(error) is kind
    if not isinstance(error, RayError):
        assert kind_of(raised_remotely(error)) is kind


def test_the_table_needs_no_ray() -> None:
    code = "import sys, cluster.error_kinds; assert 'ray' not in sys.modules, 'imports Ray'"
    subprocess.run([sys.executable, "-c", code], cwd=SOURCE_ROOT, check=True)
