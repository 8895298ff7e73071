"""Every error, sorted once: may another attempt succeed, is the caller wrong, or is there a bug?

    LOST_CALL   a message may not have arrived: make the call again
    NO_ROOM     no memory, disk, process or thread to be had at the moment: later
    LOST_PEER   a process, a node or an object is gone: start it again
    CALLER      asking again changes nothing
    ENDED       the engine has stopped
    BUG         a fault of our own code, which would happen again

Whoever decides whether an error ends the engine asks `kind_of`. Whatever the world outside our code
raises that is not in the table counts as a lost peer: all errors of Ray and of the operating
system. So a fault that nobody thought of costs an attempt, not the engine. Ray's errors are known
by name: this module imports nothing that a helper process lacks.
"""

from __future__ import annotations

import errno
from enum import Enum

from configs.paths import PREFIX
from scheduler.errors import (
    ClientError,
    EaglerayError,
    EngineDeadError,
    OverloadedError,
    StepTimeoutError,
    UnreadableError,
    WorkerError,
)


class Kind(Enum):
    """What an error means; see the table at the top."""

    LOST_CALL = "a call was lost"
    NO_ROOM = "there is no room at the moment"
    LOST_PEER = "a peer is lost"
    CALLER = "the caller is wrong"
    ENDED = "the engine has ended"
    BUG = "a bug"

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may succeed."""
        return self in (Kind.LOST_CALL, Kind.NO_ROOM, Kind.LOST_PEER)


NO_ROOM_ERRNOS = (
    errno.EAGAIN,  # of a fork: too many processes
    errno.ENOMEM,
    errno.ENFILE,
    errno.EMFILE,
    errno.ENOSPC,
    errno.EDQUOT,
)
NO_THREAD = "can't start new thread"  # Python says this in a plain RuntimeError

# By class, with the module where it is not a built-in one. The first class of an error's method
# resolution order that is here decides.
KINDS: dict[str, Kind] = {
    **{
        f"ray.exceptions.{name}": kind
        for kind, names in {
            Kind.LOST_CALL: (
                "ActorUnavailableError",
                "RpcError",
                "ObjectLostError",  # with it, of fetches that took too long, of owners that died
                "PlasmaObjectNotAvailable",
            ),
            Kind.NO_ROOM: ("ObjectStoreFullError", "OutOfDiskError", "PendingCallsLimitExceeded"),
            Kind.BUG: (
                "UserCodeException",
                "UnserializableException",
                "OufOfBandObjectRefSerializationException",
                "CrossLanguageError",
            ),
            Kind.LOST_PEER: ("RayError",),  # all others: actors, processes and nodes that died
        }.items()
        for name in names
    },
    **{
        f"{each.__module__}.{each.__name__}".removeprefix(PREFIX): kind
        for each, kind in (
            (ClientError, Kind.CALLER),
            (UnreadableError, Kind.LOST_PEER),  # such as a file server that does not answer
            (OverloadedError, Kind.NO_ROOM),
            (WorkerError, Kind.LOST_PEER),
            (StepTimeoutError, Kind.LOST_PEER),
            (EngineDeadError, Kind.ENDED),
        )
    },
    "cluster.ray_errors.NoAnswerError": Kind.LOST_PEER,
    "cluster.ray_errors.LostCallError": Kind.LOST_CALL,
    "cluster.ray_errors.DriverDiedError": Kind.LOST_PEER,
    "cluster.grammar.helper.HelperLostError": Kind.LOST_PEER,
    "concurrent.futures._base.BrokenExecutor": Kind.LOST_PEER,
    "MemoryError": Kind.NO_ROOM,
    "EOFError": Kind.LOST_PEER,
    "OSError": Kind.LOST_PEER,  # with it, of connections and time limits; see `NO_ROOM_ERRNOS`
}


def kind_of(error: BaseException) -> Kind:
    """What an error means. An error that remote code raised counts as that code's."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException) and "RayTaskError" in _names(error):
        return kind_of(cause)
    if isinstance(error, OSError) and error.errno in NO_ROOM_ERRNOS:
        return Kind.NO_ROOM
    if type(error) is RuntimeError and NO_THREAD in str(error):
        return Kind.NO_ROOM
    for each in type(error).__mro__:
        name = each.__name__ if each.__module__ == "builtins" else _full_name(each)
        if name in KINDS:
            return KINDS[name]
    return Kind.BUG


def reason_of(error: BaseException) -> str:
    """What a message says of an error. The text of an error that is not ours may not say what it
    is.
    """
    return str(error) if isinstance(error, EaglerayError) else f"{type(error).__name__}: {error}"


def _names(error: BaseException) -> list[str]:
    return [each.__name__ for each in type(error).__mro__]


def _full_name(of: type) -> str:
    return f"{of.__module__}.{of.__name__}".removeprefix(PREFIX)
