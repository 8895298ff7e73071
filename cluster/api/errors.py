"""Every error as an answer: the one table from the error tree to HTTP statuses and OpenAI's error
bodies.
"""

from __future__ import annotations

import logging
from typing import Any

from scheduler.errors import (
    ClientError,
    EaglerayError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
)

RETRY_AFTER_S = 1
MAX_MESSAGE = 2000  # characters; a message may repeat names from the request
MAX_PARAMETER = 200  # characters of the name of a field, which may be from the request too

logger = logging.getLogger("eagleray.api")

# The first class that fits decides about the status, OpenAI's `type`, and `code`.
TABLE: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (ClientError, 400, "invalid_request_error", None),
    (OverloadedError, 503, "overloaded_error", "overloaded"),
    (EngineDeadError, 503, "server_error", "engine_dead"),
    (EngineError, 500, "server_error", None),
    (BaseException, 500, "server_error", "internal_error"),
)
# Anthropic's types, by status; others are by whose fault it is.
MESSAGES_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class HttpError(EaglerayError):
    """An error as it is answered, also where the error tree has no class, such as for 404."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
        details: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`kind`: OpenAI's `type`. `details`: what clients read besides the message."""
        super().__init__(message)
        self.status, self.kind, self.parameter, self.code = status, kind, parameter, code
        self.details = {"details": details} if details else {}
        self.headers = headers or {}


def http_error(error: BaseException) -> HttpError:
    """How an error is answered. The message of an unforeseen one is only logged."""
    if isinstance(error, HttpError):
        return error
    cause, status, kind, code = next(row for row in TABLE if isinstance(error, row[0]))
    message = str(error)
    if cause is BaseException:
        logger.error("a request failed unexpectedly", exc_info=error)
        message = "an internal error; the server's log has the cause"
    parameter = error.parameter if isinstance(error, RequestError) else None
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    return HttpError(status, message, kind=kind, parameter=parameter, code=code, headers=headers)


def body_of(error: BaseException) -> dict[str, Any]:
    """OpenAI's error body."""
    error = http_error(error)
    body = {
        "message": _shortened(str(error), MAX_MESSAGE),
        "type": error.kind,
        "param": error.parameter and _shortened(error.parameter, MAX_PARAMETER),
        "code": error.code,
    }
    return {"error": body | error.details}


def messages_body_of(error: BaseException) -> dict[str, Any]:
    """Anthropic's error body."""
    error = http_error(error)
    by_fault = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = MESSAGES_KINDS.get(error.status, by_fault)
    message = _shortened(str(error), MAX_MESSAGE)
    return {"type": "error", "error": {"type": kind, "message": message} | error.details}


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."
