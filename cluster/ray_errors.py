"""Translates Ray's errors into ours, by the kinds of `error_kinds.py`; nothing else does.

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

from cluster.error_kinds import ErrorKind, kind_of
from cluster.timeouts import CALL_TIMEOUT_S
from scheduler.errors import EaglerayError, EngineDeadError, EngineError, OverloadedError


class NoAnswerError(EngineError):
    """A call to the driver, or to a node of the ranks, was not answered in time or was lost. It may
    have been carried out.
    """


class NoRoomError(OverloadedError):
    """There is no room at the moment: for a message, in Ray's object store and on the disk, or for
    memory or a process that the remote code needs.
    """


class DriverDiedError(EngineDeadError):
    """The process that was called has died. The owner of a driver may start another one."""


class LostCallError(NoAnswerError):
    """The connection was lost: the call may have been carried out, and may be made again."""


def result_of(ref: Any, action: str, limit_s: float = CALL_TIMEOUT_S) -> Any:
    """The value of `ref`. `action` completes "could not ...". Raises the errors of the table."""
    try:
        return ray.get(ref, timeout=limit_s)
    except GetTimeoutError:
        raise NoAnswerError(f"could not {action}: no answer within {limit_s:g} s") from None
    except SystemExit as error:
        if not hasattr(error, "ray_terminate_msg"):  # the program's own
            raise
        raise EngineDeadError(f"could not {action}: Ray was shut down") from None
    except RayTaskError as error:
        cause = cause_of(error)
        if isinstance(cause, EaglerayError):
            raise cause from None
        if kind_of(cause) is ErrorKind.NO_ROOM:
            raise _translated_error(cause, action) from error
        raise EngineError(f"could not {action}: {cause}") from error
    except RayError as error:
        raise _translated_error(error, action) from error


def start_call(method: Any, action: str, *arguments: Any) -> Any:
    """Call an actor's method; returns the ref. Raises as `result_of`: large arguments need room."""
    try:
        return method.remote(*arguments)
    except Exception as error:
        if not kind_of(error).is_transient:
            raise
        raise _translated_error(error, action) from error


def was_lost(ended_call: Future[Any]) -> bool:
    """Whether a call has ended because it was lost, although its actor lives."""
    error = ended_call.exception()
    return error is not None and kind_of(error) is ErrorKind.LOST_CALL


def _translated_error(error: Exception, action: str) -> EaglerayError:
    kind = kind_of(error)
    said = _summary(str(error)) or type(error).__name__
    if kind is ErrorKind.LOST_CALL:
        return LostCallError(f"could not {action}: the connection was lost ({said})")
    if kind is ErrorKind.NO_ROOM:
        return NoRoomError(
            f"could not {action}: there is no room for it at the moment, try again later ({said})"
        )
    if kind is ErrorKind.LOST_PEER:
        return DriverDiedError(f"could not {action}: the process has died ({said})")
    return EngineDeadError(f"could not {action}: {error}")


def _summary(text: str) -> str:
    """The first line of what Ray says, and the last one where that has the error."""
    lines = [line.strip().rstrip(".:") for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and "creation task" in lines[0]:
        return f"{lines[0]}: {lines[-1]}"
    return lines[0] if lines else ""


def cause_of(error: Exception) -> Exception:
    """The error that the remote code raised, or Ray's own error if our code raised none."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def failures(refs: Sequence[Any], limit_s: float) -> dict[int, Exception]:
    """The cause of each failed ref, by index, after waiting up to `limit_s` for all of them."""
    causes: dict[int, Exception] = {}
    ready_refs, _ = ray.wait(list(refs), num_returns=len(refs), timeout=limit_s)
    for index, ref in enumerate(refs):
        if ref in ready_refs:
            try:
                ray.get(ref)
            except RayError as failure:
                causes[index] = cause_of(failure)
    return causes
