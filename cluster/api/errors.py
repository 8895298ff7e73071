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
    RequestError,
)

RETRY_AFTER_S = 1
MAX_MESSAGE = 2000  # characters; a message may repeat names from the request
MAX_PARAMETER = 200  # characters of the name of a field, which may be from the request too

logger = logging.getLogger("eagleray.api")

# The first class that fits decides about the status, OpenAI's `type`, and `code`.
TABLE: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (ClientError, 400, "invalid_request_error", None),
    (OverloadedError, 503, "overloaded_error", "overloaded"),
    (EngineDeadError, 503, "server_error", "engine_dead"),
    (EngineError, 500, "server_error", None),
    (BaseException, 500, "server_error", "internal_error"),
)


class HttpError(EaglerayError):
    """An error answer for which the error tree has no class, such as 404."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        details: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`details`: what clients read besides the message."""
        super().__init__(message)
        self.status, self.parameter, self.code = status, parameter, code
        self.details = details
        self.headers = headers or {}


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    return next(status for kind, status, _, _ in TABLE if isinstance(error, kind))


def body_of(error: BaseException) -> dict[str, Any]:
    """OpenAI's error body. The message of an unforeseen error is only logged."""
    if isinstance(error, HttpError):
        body = _body(str(error), "invalid_request_error", error.parameter, error.code)
        body["error"] |= _details_of(error)
        return body
    kind, _, name, code = next(row for row in TABLE if isinstance(error, row[0]))
    if kind is BaseException:
        logger.error("a request failed unexpectedly", exc_info=error)
        return _body("an internal error; the server's log has the cause", name, None, code)
    parameter = error.parameter if isinstance(error, RequestError) else None
    return _body(str(error), name, parameter, code)


def messages_body_of(error: BaseException) -> dict[str, Any]:
    """Anthropic's error body."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    status = status_of(error)
    if status == 503:
        kind = "overloaded_error"
    else:
        kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = body_of(error)["error"]["message"]
    return {"type": "error", "error": {"type": kind, "message": message} | _details_of(error)}


def headers_of(error: BaseException) -> dict[str, str]:
    """Headers that go with an error."""
    if isinstance(error, HttpError):
        return error.headers
    return {"retry-after": str(RETRY_AFTER_S)} if status_of(error) == 503 else {}


def _details_of(error: BaseException) -> dict[str, Any]:
    details = error.details if isinstance(error, HttpError) else None
    return {} if details is None else {"details": details}


def _body(message: str, kind: str, parameter: str | None, code: str | None) -> dict[str, Any]:
    shortened = _shortened(message, MAX_MESSAGE)
    name = None if parameter is None else _shortened(parameter, MAX_PARAMETER)
    return {"error": {"message": shortened, "type": kind, "param": name, "code": code}}


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."
