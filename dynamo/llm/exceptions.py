"""What calls of this package raise. Spec 7.11."""

from __future__ import annotations

from dynamo.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    InvalidArgument,
    Overloaded,
    StreamIncomplete,
    WorkerUnavailable,
)

__all__ = [
    "Cancelled",
    "CannotConnect",
    "ConnectionTimeout",
    "Disconnected",
    "DynamoException",
    "EngineShutdown",
    "HttpError",
    "InvalidArgument",
    "RouterQueueLimitExceeded",
    "StreamIncomplete",
    "Unknown",
    "WorkerUnavailable",
]

_MESSAGE_LIMIT = 8192

DynamoException = DynamoError
"""Root of the tree."""


class RouterQueueLimitExceeded(Overloaded):
    """The router's line is full."""

    code = "router_queue_limit_exceeded"


class Unknown(DynamoError):
    """A failure without a code of its own."""

    code = "unknown"


class HttpError(Exception):
    """An HTTP status that the engine wants the client to see.

    ``code`` is 0..599; a message longer than 8192 characters is cut and ends in three dots.
    ValueError for anything else.
    """

    def __init__(self, code: int, message: str) -> None:
        if not isinstance(code, int) or isinstance(code, bool) or not 0 <= code <= 599:
            raise ValueError(f"code must be an integer from 0 to 599, got {code!r}")
        if not isinstance(message, str):
            raise ValueError(f"message must be a string, got {type(message).__name__}")
        if len(message) > _MESSAGE_LIMIT:
            message = message[: _MESSAGE_LIMIT - 3] + "..."
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        """``HTTP 422: text``."""
        return f"HTTP {self.code}: {self.message}"
