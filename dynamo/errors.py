"""The error tree: every failure has a code, an HTTP face and says whether a retry can help.

Raised where the cause is known, translated once at the edge (the HTTP response, the error frame of
the request plane, the exit status of a command). Spec 5.4, 7.11, 8.2.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "Cancelled",
    "CannotConnect",
    "ConfigError",
    "ConnectionTimeout",
    "Disconnected",
    "DynamoError",
    "EngineFailure",
    "EngineShutdown",
    "InvalidArgument",
    "ModelNotFound",
    "NoInstances",
    "Overloaded",
    "StatefileError",
    "StreamIncomplete",
    "UnknownEndpoint",
    "WorkerUnavailable",
    "from_code",
]


class DynamoError(Exception):
    """Root of the tree.

    ``code`` is the stable name that crosses process borders, ``status`` the HTTP status,
    ``kind`` the ``type`` field of the HTTP error body, ``retryable`` whether the same request may
    succeed on another worker.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "Internal Server Error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


class ConfigError(DynamoError):
    """A flag, variable or file is wrong; the message names it, its value and the remedy."""

    code = "config"


class StatefileError(DynamoError):
    """The statefile is missing, torn, foreign or held by another deployment."""

    code = "statefile"


class InvalidArgument(DynamoError):
    """The caller's fault: a bad field, a bad prompt, a bad endpoint path."""

    code = "invalid_argument"
    status = 400
    kind = "Bad Request"


class ModelNotFound(DynamoError):
    """No worker has ever registered this model."""

    code = "model_not_found"
    status = 404
    kind = "Not Found"


class Unavailable(DynamoError):
    """Nobody can serve the request now; a later one may succeed."""

    code = "unavailable"
    status = 503
    kind = "Service Unavailable"


class NoInstances(Unavailable):
    """The endpoint has no live instance."""

    code = "no_instances"


class WorkerUnavailable(Unavailable):
    """The chosen worker is not there any more."""

    code = "worker_unavailable"
    retryable = True


class UnknownEndpoint(WorkerUnavailable):
    """The worker answered, but does not serve this endpoint (any more)."""

    code = "unknown_endpoint"


class CannotConnect(WorkerUnavailable):
    """The worker's socket refused the connection."""

    code = "cannot_connect"


class ConnectionTimeout(WorkerUnavailable):
    """The worker did not answer in time."""

    code = "connection_timeout"


class Disconnected(WorkerUnavailable):
    """The stream ended without its end frame."""

    code = "disconnected"


class StreamIncomplete(Disconnected):
    """The stream ended before a finish reason."""

    code = "stream_incomplete"


class EngineShutdown(WorkerUnavailable):
    """The worker is shutting down and handed the request back."""

    code = "engine_shutdown"


class Overloaded(Unavailable):
    """Every worker is busy, or this one is at capacity (seed: request rejection)."""

    code = "overloaded"
    kind = "service_unavailable"


class Cancelled(DynamoError):
    """The client went away or asked to stop."""

    code = "cancelled"
    status = 499
    kind = "Client Closed Request"


class EngineFailure(DynamoError):
    """The engine raised; the text is its own."""

    code = "engine_failure"


def _tree(root: type[DynamoError]) -> dict[str, type[DynamoError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


_BY_CODE = _tree(DynamoError)


def from_code(code: str, message: str) -> DynamoError:
    """Rebuild the error that crossed a process border; an unknown code is a plain DynamoError."""
    return _BY_CODE.get(code, DynamoError)(message)
