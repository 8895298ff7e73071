"""The one place that turns Ray's errors into ours.

a remote function raised one of our errors      that error itself
it raised anything else                         EngineError with the cause
no answer in time                               NoAnswerError
the connection was lost                         LostCallError, a NoAnswerError
the actor has died                              DriverDiedError, an EngineDeadError
Ray was shut down                               EngineDeadError
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from cluster.timeouts import CALL_TIMEOUT_S
from scheduler.errors import EaglerayError, EngineDeadError, EngineError


class NoAnswerError(EngineError):
    """A call to the driver, or to a node of the ranks, was not answered in time or was lost; it is
    not known whether it was carried out.
    """


class DriverDiedError(EngineDeadError):
    """The driver's process is gone. Its owner may start another one."""


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
        raise EngineError(f"could not {what}: {cause}") from error
    except ActorUnavailableError as error:
        raise LostCallError(f"could not {what}: the connection was lost ({error})") from None
    except RayActorError as error:
        raise DriverDiedError(f"could not {what}: the driver has died ({error})") from error
    except RayError as error:
        raise EngineDeadError(f"could not {what}: {error}") from error


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
