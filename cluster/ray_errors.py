"""The one place that turns Ray's errors into ours, by the kinds of `error_kinds.py`.

a remote function raised one of our errors      that error itself
it found no room, memory or process             NoRoomError, an OverloadedError
it raised anything else                         EngineError with the cause
no answer in time                               NoAnswerError
the connection, or an object, was lost          LostCallError, a NoAnswerError
no room for the arguments or the answer         NoRoomError
the actor has died                              DriverDiedError, an EngineDeadError
Ray was shut down                               EngineDeadError
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from cluster.error_kinds import Kind, kind_of
from cluster.timeouts import CALL_TIMEOUT_S
from scheduler.errors import EaglerayError, EngineDeadError, EngineError, OverloadedError


class NoAnswerError(EngineError):
    """A call to the driver, or to a node of the ranks, was not answered in time or was lost; it is
    not known whether it was carried out.
    """


class NoRoomError(OverloadedError):
    """There is no room for a message at the moment: Ray's object store and the disk are full."""


class DriverDiedError(EngineDeadError):
    """The process that was called is gone. The owner of a driver may start another one."""


class LostCallError(NoAnswerError):
    """The connection was lost: the call may have been carried out, and may be made again."""


def call(ref: Any, what: str, limit_s: float = CALL_TIMEOUT_S) -> Any:
    """The value of `ref`. `what` completes "could not ..."; see the table at the top for what is
    raised.
    """
    try:
        return ray.get(ref, timeout=limit_s)
    except GetTimeoutError:
        raise NoAnswerError(f"could not {what}: no answer within {limit_s:g} s") from None
    except SystemExit as error:
        if not hasattr(error, "ray_terminate_msg"):  # the program's own
            raise
        raise EngineDeadError(f"could not {what}: Ray was shut down") from None
    except RayTaskError as error:
        cause = cause_of(error)
        if isinstance(cause, EaglerayError):
            raise cause from None
        if kind_of(cause) is Kind.NO_ROOM:
            raise _ours(cause, what) from error
        raise EngineError(f"could not {what}: {cause}") from error
    except RayError as error:
        raise _ours(error, what) from error


def made(method: Any, what: str, *arguments: Any) -> Any:
    """The ref of a call of an actor's method. What keeps it from being made is raised as by `call`;
    large arguments need room.
    """
    try:
        return method.remote(*arguments)
    except Exception as error:
        if not kind_of(error).may_pass:
            raise
        raise _ours(error, what) from error


def was_lost(ended: Future[Any]) -> bool:
    """Whether a call has ended because it was lost, and not its actor."""
    error = ended.exception()
    return error is not None and kind_of(error) is Kind.LOST_CALL


def _ours(error: Exception, what: str) -> EaglerayError:
    kind = kind_of(error)
    if kind is Kind.LOST_CALL:
        return LostCallError(f"could not {what}: the connection was lost ({error})")
    if kind is Kind.NO_ROOM:
        return NoRoomError(
            f"could not {what}: there is no room for it at the moment, try again later ({error})"
        )
    if kind is Kind.LOST_PEER:
        return DriverDiedError(f"could not {what}: the process has died ({error})")
    return EngineDeadError(f"could not {what}: {error}")


def cause_of(error: Exception) -> Exception:
    """The error that the remote code raised, or Ray's own error if our code raised none."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def failures(refs: Sequence[Any], patience_s: float) -> dict[int, Exception]:
    """The cause of each failed ref, by index, after waiting up to `patience_s` for the others."""
    found: dict[int, Exception] = {}
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=patience_s)
    for place, ref in enumerate(refs):
        if ref in done:
            try:
                ray.get(ref)
            except RayError as failure:
                found[place] = cause_of(failure)
    return found
