"""What an error means: may another attempt succeed, is the caller wrong, or is there a bug?

    LOST_CALL   a message may not have arrived: make the call again
    NO_ROOM     no memory, disk space, process or thread is free at the moment: try later
    LOST_PEER   a process, a node or an object is gone: start it again
    CALLER      trying again changes nothing
    ENDED       the engine has stopped
    BUG         a fault of our own code, which would happen again

`kind_of` decides whether an error ends the engine. Errors of Ray and of the operating system that
the table does not name count as a lost peer, so an unforeseen fault costs an attempt, not the
engine. Ray's errors are listed by name: this module imports nothing that a helper process lacks.
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
NO_THREAD_MESSAGE = "can't start new thread"  # of a plain RuntimeError


def _full_name(error_class: type) -> str:
    return f"{error_class.__module__}.{error_class.__name__}".removeprefix(PREFIX)


# By the name of the class, with its module unless it is built in. The first class in an error's
# method resolution order that is listed here decides.
KIND_BY_CLASS: dict[str, Kind] = {
    **{
        f"ray.exceptions.{name}": kind
        for kind, names in {
            Kind.LOST_CALL: (
                "ActorUnavailableError",
                "RpcError",
                "ObjectLostError",  # and its subclasses: slow fetches, owners that died
                "PlasmaObjectNotAvailable",
            ),
            Kind.NO_ROOM: ("ObjectStoreFullError", "OutOfDiskError", "PendingCallsLimitExceeded"),
            Kind.BUG: (
                "UserCodeException",
                "UnserializableException",
                "OufOfBandObjectRefSerializationException",
                "CrossLanguageError",
            ),
            Kind.LOST_PEER: ("RayError",),  # all others: dead actors, processes and nodes
        }.items()
        for name in names
    },
    **{
        _full_name(error_class): kind
        for error_class, kind in (
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
    "OSError": Kind.LOST_PEER,  # and its subclasses; but see `NO_ROOM_ERRNOS`
}


def kind_of(error: BaseException) -> Kind:
    """What an error means. An error that remote code raised counts as that code's."""
    cause = getattr(error, "cause", None)
    class_names = [error_class.__name__ for error_class in type(error).__mro__]
    if isinstance(cause, BaseException) and "RayTaskError" in class_names:
        return kind_of(cause)
    if isinstance(error, OSError) and error.errno in NO_ROOM_ERRNOS:
        return Kind.NO_ROOM
    if type(error) is RuntimeError and NO_THREAD_MESSAGE in str(error):
        return Kind.NO_ROOM
    for error_class in type(error).__mro__:
        is_built_in = error_class.__module__ == "builtins"
        name = error_class.__name__ if is_built_in else _full_name(error_class)
        if name in KIND_BY_CLASS:
            return KIND_BY_CLASS[name]
    return Kind.BUG


def reason_of(error: BaseException) -> str:
    """An error for a message. The text of an error that is not ours may not say what kind it is, so
    its class is added.
    """
    return str(error) if isinstance(error, EaglerayError) else f"{type(error).__name__}: {error}"
