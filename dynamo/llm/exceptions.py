"""The exceptions that this package raises."""

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
    "SelectionServiceError",
    "StreamIncomplete",
    "Unknown",
    "WorkerUnavailable",
]

DynamoException = DynamoError
"""The base class of all of them."""


class Unknown(DynamoError):
    """A failure of no other class."""

    code = "unknown"


class SelectionServiceError(DynamoError):
    """A failure of Dynamo's selection service, which this package does not have."""

    code = "selection_service"
