"""What calls of this package raise. Spec 7.11."""

from __future__ import annotations

from dynamo.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    RouterQueueLimitExceeded,
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

DynamoException = DynamoError
"""Root of the tree."""


class Unknown(DynamoError):
    """A failure without a code of its own."""

    code = "unknown"
