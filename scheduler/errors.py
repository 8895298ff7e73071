"""The errors that callers handle; packages add their own.

    EaglerayError
    ├── ClientError              the caller asked for something impossible
    │   ├── ConfigError          engine options, checkpoint or cluster do not fit
    │   │   └── UnreadableError  a file of the checkpoint cannot be read or downloaded just now
    │   └── RequestError         one request cannot be accepted; names the parameter
    │       └── PromptTooLongError  its prompt leaves no room for an answer
    ├── OverloadedError          no room now, try again later
    └── EngineError              a fault of the engine's
        ├── WorkerError          a rank failed, or its result is wrong
        ├── StepTimeoutError     a step took longer than its limit
        ├── RequestFailedError   ranks died whenever it ran, or no grammar can be had here
        └── EngineDeadError      the engine has stopped and will not come back
            └── EngineLostError  because what it needs is lost; its requests may go on elsewhere

A message says what was asked, what is possible and what to do. All of them pickle: the message is
their only state, except `RequestError.parameter`.
"""

from __future__ import annotations

# What a `WorkerError` says where ranks contradict each other: by these words it is known that their
# memory cannot be trusted (`cluster/ranks/causes.py`).
DIFFERENT_TOKENS_PHRASE = "sampled different tokens"
OTHER_OPERATION_PHRASE = "runs another operation"


class EaglerayError(Exception):
    """Base of the errors that callers handle."""


class ClientError(EaglerayError):
    """The caller asked for something that cannot be done; asking again changes nothing."""


class ConfigError(ClientError):
    """Engine options, checkpoint or cluster do not fit together."""


class UnreadableError(ConfigError):
    """A file of the checkpoint cannot be read or downloaded. If it could before, that may pass."""


class RequestError(ClientError):
    """One request cannot be accepted. `parameter` names the field at fault, if one is."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str | None]]:
        return type(self), (str(self), self.parameter)


def id_in_use_error(request_id: str) -> RequestError:
    """That another request, which has not ended, has this id."""
    return RequestError(
        f"request_id {request_id!r} is in use; choose another, or wait until that request ends",
        "request_id",
    )


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer. Clients that know this shorten it and ask again."""


class OverloadedError(EaglerayError):
    """No room at the moment; the same call may succeed later."""


class EngineError(EaglerayError):
    """A fault of the engine's."""


class WorkerError(EngineError):
    """A rank failed, or its result contradicts another rank's."""


class StepTimeoutError(EngineError):
    """A step did not finish within its limit."""


class RequestFailedError(EngineError):
    """Ranks died each time this request ran, even when it or another that asks for the same ran
    alone, or its grammar could not be compiled or followed for want of a process. The engine
    continues.
    """


class EngineDeadError(EngineError):
    """The engine has stopped; a new one must be started."""


class EngineLostError(EngineDeadError):
    """The engine has stopped because its ranks or its checkpoint are lost, not because of a fault
    that its requests might cause in another engine too.
    """
