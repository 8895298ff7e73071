"""What an error means: may another attempt succeed, is the caller wrong, or is there a bug?

    LOST_CALL     a message may not have arrived: make the call again
    NO_ROOM       no memory, disk space, process or thread is free at the moment: try later
    LOST_PEER     a process or a node is gone: start it again
    CALLER_FAULT  trying again changes nothing
    ENGINE_ENDED  the engine has stopped
    BUG           a fault of our own code, which would happen again

`kind_of` decides whether an error ends the engine. Errors of Ray and of the operating system that
the table does not name count as a lost peer, so an unforeseen fault costs an attempt, not the
engine. Ray's errors are listed by name: this module imports nothing that a helper process lacks.
"""

from __future__ import annotations

import errno
from enum import Enum

from configs.paths import PACKAGE_PREFIX
from scheduler.errors import EaglerayError


class ErrorKind(Enum):
    """What an error means; see the table at the top."""

    LOST_CALL = "a call was lost"
    NO_ROOM = "there is no room at the moment"
    LOST_PEER = "a peer is lost"
    CALLER_FAULT = "the caller is wrong"
    ENGINE_ENDED = "the engine has ended"
    BUG = "a bug"

    @property
    def is_transient(self) -> bool:
        """Whether another attempt may succeed."""
        return self in (ErrorKind.LOST_CALL, ErrorKind.NO_ROOM, ErrorKind.LOST_PEER)


NO_ROOM_ERRNOS = (
    errno.EAGAIN,  # of a fork: too many processes
    errno.ENOMEM,
    errno.ENFILE,
    errno.EMFILE,
    errno.ENOSPC,
    errno.EDQUOT,
)
NO_THREAD_MESSAGE = "can't start new thread"  # of a plain RuntimeError


# By the name of the class, with its module unless it is built in. The first class in an error's
# method resolution order that is listed here decides.
KIND_BY_CLASS = {
    "ray.exceptions.ActorUnavailableError": ErrorKind.LOST_CALL,
    "ray.exceptions.RpcError": ErrorKind.LOST_CALL,
    "ray.exceptions.ObjectLostError": ErrorKind.LOST_CALL,  # also slow fetches, owners that died
    "ray.exceptions.PlasmaObjectNotAvailable": ErrorKind.LOST_CALL,
    "ray.exceptions.ObjectStoreFullError": ErrorKind.NO_ROOM,
    "ray.exceptions.OutOfDiskError": ErrorKind.NO_ROOM,
    "ray.exceptions.PendingCallsLimitExceeded": ErrorKind.NO_ROOM,
    "ray.exceptions.UserCodeException": ErrorKind.BUG,
    "ray.exceptions.UnserializableException": ErrorKind.BUG,
    "ray.exceptions.OufOfBandObjectRefSerializationException": ErrorKind.BUG,
    "ray.exceptions.CrossLanguageError": ErrorKind.BUG,
    "ray.exceptions.RayError": ErrorKind.LOST_PEER,  # all others: dead actors, processes, nodes
    "scheduler.errors.ClientError": ErrorKind.CALLER_FAULT,
    "scheduler.errors.UnreadableError": ErrorKind.LOST_PEER,  # as of a file server that is silent
    "scheduler.errors.OverloadedError": ErrorKind.NO_ROOM,
    "scheduler.errors.WorkerError": ErrorKind.LOST_PEER,
    "scheduler.errors.StepTimeoutError": ErrorKind.LOST_PEER,
    "scheduler.errors.EngineDeadError": ErrorKind.ENGINE_ENDED,
    "cluster.ray_errors.NoAnswerError": ErrorKind.LOST_PEER,
    "cluster.ray_errors.LostCallError": ErrorKind.LOST_CALL,
    "cluster.ray_errors.DriverDiedError": ErrorKind.LOST_PEER,
    "cluster.grammar.helper.HelperLostError": ErrorKind.LOST_PEER,
    "concurrent.futures._base.BrokenExecutor": ErrorKind.LOST_PEER,
    "MemoryError": ErrorKind.NO_ROOM,
    "EOFError": ErrorKind.LOST_PEER,
    "OSError": ErrorKind.LOST_PEER,  # and its subclasses; but see `NO_ROOM_ERRNOS`
}


def kind_of(error: BaseException) -> ErrorKind:
    """What an error means. An error that remote code raised counts as that code's."""
    cause = getattr(error, "cause", None)
    class_names = [error_class.__name__ for error_class in type(error).__mro__]
    if isinstance(cause, BaseException) and "RayTaskError" in class_names:
        return kind_of(cause)
    if isinstance(error, OSError) and error.errno in NO_ROOM_ERRNOS:
        return ErrorKind.NO_ROOM
    if type(error) is RuntimeError and NO_THREAD_MESSAGE in str(error):
        return ErrorKind.NO_ROOM
    for error_class in type(error).__mro__:
        name = f"{error_class.__module__}.{error_class.__name__}".removeprefix("builtins.")
        if (name := name.removeprefix(PACKAGE_PREFIX)) in KIND_BY_CLASS:
            return KIND_BY_CLASS[name]
    return ErrorKind.BUG


def reason_of(error: BaseException) -> str:
    """An error for a message. The text of an error that is not ours may not say what kind it is, so
    its class is added.
    """
    return str(error) if isinstance(error, EaglerayError) else f"{type(error).__name__}: {error}"
