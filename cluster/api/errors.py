"""Errors as answers: the one table from the error tree to HTTP statuses and OpenAI's bodies."""

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
MAX_MESSAGE_LENGTH = 2000  # characters; a message may repeat names from the request
MAX_PARAMETER_LENGTH = 200  # characters of the name of a field, which may be from the request too

logger = logging.getLogger("eagleray.api")

# The first class that fits decides about the status, OpenAI's `type`, and `code`.
ERROR_TABLE: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (ClientError, 400, "invalid_request_error", None),
    (OverloadedError, 503, "overloaded_error", "overloaded"),
    (EngineDeadError, 503, "server_error", "engine_dead"),
    (EngineError, 500, "server_error", None),
    (BaseException, 500, "server_error", "internal_error"),
)
# Anthropic's types, by status; others are by whose fault it is.
ANTHROPIC_ERROR_TYPES = {
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
        error_type: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
        details: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`error_type`: OpenAI's `type`. `details`: what clients read besides the message."""
        super().__init__(message)
        self.status, self.error_type = status, error_type
        self.parameter, self.code = parameter, code
        self.details_field = {"details": details} if details else {}
        self.headers = headers or {}


def http_error(error: BaseException) -> HttpError:
    """How an error is answered. The message of an unforeseen one is only logged."""
    if isinstance(error, HttpError):
        return error
    error_class, status, error_type, code = next(
        row for row in ERROR_TABLE if isinstance(error, row[0])
    )
    message = str(error)
    if error_class is BaseException:
        logger.error("a request failed unexpectedly", exc_info=error)
        message = "an internal error; the server's log has the cause"
    parameter = error.parameter if isinstance(error, RequestError) else None
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    return HttpError(
        status, message, error_type=error_type, parameter=parameter, code=code, headers=headers
    )


def openai_error_body(error: BaseException) -> dict[str, Any]:
    """OpenAI's error body."""
    error = http_error(error)
    body = {
        "message": _shortened(str(error), MAX_MESSAGE_LENGTH),
        "type": error.error_type,
        "param": error.parameter and _shortened(error.parameter, MAX_PARAMETER_LENGTH),
        "code": error.code,
    }
    return {"error": body | error.details_field}


def anthropic_error_body(error: BaseException) -> dict[str, Any]:
    """Anthropic's error body."""
    error = http_error(error)
    default_type = "api_error" if error.status >= 500 else "invalid_request_error"
    error_type = ANTHROPIC_ERROR_TYPES.get(error.status, default_type)
    message = str(error)
    if error.code == "context_length_exceeded":
        # There is no code in this body: Claude Code looks for these words, and then compacts.
        message = f"prompt is too long: {message}"
    message = _shortened(message, MAX_MESSAGE_LENGTH)
    return {
        "type": "error",
        "error": {"type": error_type, "message": message} | error.details_field,
    }


def _shortened(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else text[:max_length] + "..."
