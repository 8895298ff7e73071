"""What each error means, whoever raised it."""

from __future__ import annotations

import errno
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest
from ray import exceptions
from ray.exceptions import RayError, RayTaskError

from cluster.error_kinds import NO_THREAD_MESSAGE, Kind, kind_of
from cluster.grammar.helper import HelperLostError
from cluster.ray_errors import DriverDiedError, LostCallError, NoAnswerError
from configs.paths import CHECKOUT
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
        (exceptions.ActorUnavailableError("lost", None), Kind.LOST_CALL),
        (exceptions.RpcError("lost"), Kind.LOST_CALL),
        (exceptions.OwnerDiedError("00", b"owner", "task"), Kind.LOST_CALL),
        (LostCallError("lost"), Kind.LOST_CALL),
        (exceptions.ObjectStoreFullError("full"), Kind.NO_ROOM),
        (exceptions.OutOfDiskError("full"), Kind.NO_ROOM),
        (OSError(errno.EAGAIN, "fork"), Kind.NO_ROOM),
        (OSError(errno.ENOSPC, "no space left on device"), Kind.NO_ROOM),
        (OSError(errno.EMFILE, "too many open files"), Kind.NO_ROOM),
        (MemoryError(), Kind.NO_ROOM),
        (RuntimeError(NO_THREAD_MESSAGE), Kind.NO_ROOM),
        (OverloadedError("later"), Kind.NO_ROOM),
        (exceptions.ActorDiedError(), Kind.LOST_PEER),
        (exceptions.NodeDiedError("gone"), Kind.LOST_PEER),
        (exceptions.RaySystemError("gone"), Kind.LOST_PEER),
        (NewRayError("new"), Kind.LOST_PEER),
        (ConnectionResetError(), Kind.LOST_PEER),
        (BrokenPipeError(), Kind.LOST_PEER),
        (EOFError(), Kind.LOST_PEER),
        (TimeoutError(), Kind.LOST_PEER),
        (ProcessLookupError(), Kind.LOST_PEER),
        (BrokenProcessPool(), Kind.LOST_PEER),
        (HelperLostError(), Kind.LOST_PEER),
        (WorkerError("rank 1"), Kind.LOST_PEER),
        (StepTimeoutError("step 1"), Kind.LOST_PEER),
        (NoAnswerError("none"), Kind.LOST_PEER),
        (DriverDiedError("dead"), Kind.LOST_PEER),
        (RequestError("no"), Kind.CALLER),
        (ConfigError("no"), Kind.CALLER),
        (EngineDeadError("dead"), Kind.ENDED),
        (EngineError("a result of another step"), Kind.BUG),
        (exceptions.UserCodeException("ours"), Kind.BUG),
        (KeyError("a"), Kind.BUG),
        (RuntimeError("a"), Kind.BUG),
        (AssertionError(), Kind.BUG),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.name,
)
def test_an_error_means_the_same_here_and_raised_remotely(error: Exception, kind: Kind) -> None:
    assert kind_of(error) is kind
    if not isinstance(error, RayError):
        assert kind_of(raised_remotely(error)) is kind


def test_the_table_needs_no_ray() -> None:
    code = "import sys, cluster.error_kinds; assert 'ray' not in sys.modules, 'imports Ray'"
    subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, check=True)
