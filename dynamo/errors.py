"""The error tree: each failure has a code, an HTTP status, and whether a retry may succeed.

Raise an error where its cause is known; translate it once at the edge: the HTTP response, the
error frame of the request plane, the exit status of a command.
"""

from __future__ import annotations

import os
from http import HTTPStatus
from typing import ClassVar

__all__ = [
    "MESSAGE_LIMIT",
    "Cancelled",
    "CannotConnect",
    "ConfigError",
    "ConnectTimeout",
    "ConnectionTimeout",
    "DeadlineExceeded",
    "Disconnected",
    "DynamoError",
    "EngineDied",
    "EngineFailure",
    "EngineKilled",
    "EngineShutdown",
    "Forbidden",
    "HandlerCancelled",
    "HttpError",
    "HttpFailure",
    "InstanceGone",
    "InvalidArgument",
    "InvalidRequest",
    "MigrationExhausted",
    "ModelNotFound",
    "ModelUnreachable",
    "NoInstances",
    "Overloaded",
    "RouterQueueLimitExceeded",
    "StatefileError",
    "StreamIncomplete",
    "Unavailable",
    "UnknownEndpoint",
    "WorkerAtCapacity",
    "WorkerLeaving",
    "WorkerSilent",
    "WorkerUnavailable",
    "WorkersLost",
    "from_code",
    "shorten",
]

MESSAGE_LIMIT = 8192
"""Characters of an error message that a client receives."""


class DynamoError(Exception):
    """Root of the tree.

    ``code`` is the stable name on the wire, ``status`` the HTTP status, ``kind`` the ``type`` field
    of the HTTP error body. ``retryable``: the same request may succeed on another worker.
    ``unsent``: no handler has received the request, so a retry cannot run it twice. ``relayed``:
    raised by another process and received over the request plane. ``exit_status`` is that of a
    program that cannot start because of it.
    """

    code: ClassVar[str] = "internal"
    status: int = 500
    kind: str = "Internal Server Error"
    retryable: ClassVar[bool] = False
    unsent: ClassVar[bool] = False
    relayed: bool = False
    exit_status: ClassVar[int] = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def wire_code(self) -> str:
        """Return the code from which :func:`from_code` rebuilds the error."""
        return self.code


class ConfigError(DynamoError):
    """A flag, variable or file is wrong; the message gives its name, its value and the remedy."""

    code = "config"


class ModelUnreachable(ConfigError):
    """A model cannot be downloaded now: the network, or its server. A later try may succeed."""

    code = "model_unreachable"
    exit_status = os.EX_TEMPFAIL


class StatefileError(DynamoError):
    """The statefile is missing, damaged, or belongs to another deployment."""

    code = "statefile"


class InvalidArgument(DynamoError):
    """The request is invalid: a bad field, prompt or endpoint path."""

    code = "invalid_argument"
    status = 400
    kind = "Bad Request"


class Forbidden(InvalidArgument):
    """The API key of the request may not ask for this."""

    code = "forbidden"
    status = 403
    kind = "Forbidden"


class InvalidRequest(InvalidArgument, ValueError):
    """A handler raised ValueError or TypeError; ``cause`` is the name of that class."""

    code = "invalid_request"

    def __init__(self, message: str = "", cause: str = "ValueError") -> None:
        super().__init__(message)
        self.cause = cause

    def wire_code(self) -> str:
        """``invalid_request.TypeError``."""
        return f"{self.code}.{self.cause}"


class ModelNotFound(DynamoError):
    """No worker has ever registered this model."""

    code = "model_not_found"
    status = 404
    kind = "Not Found"


class Unavailable(DynamoError):
    """No worker can serve the request now; a later one may succeed."""

    code = "unavailable"
    status = 503
    kind = "Service Unavailable"


class NoInstances(Unavailable):
    """The endpoint has no live instance."""

    code = "no_instances"


class MigrationExhausted(Unavailable):
    """Workers failed more often than the request may migrate."""

    code = "migration_exhausted"


class WorkerUnavailable(Unavailable):
    """The chosen worker cannot serve the request."""

    code = "worker_unavailable"
    retryable = True


class InstanceGone(WorkerUnavailable):
    """The instance is not registered, or no longer."""

    code = "instance_gone"
    unsent = True


class UnknownEndpoint(WorkerUnavailable):
    """The worker answered, but does not serve this endpoint, or no longer."""

    code = "unknown_endpoint"
    unsent = True


class CannotConnect(WorkerUnavailable):
    """The worker's socket refused the connection."""

    code = "cannot_connect"
    unsent = True


class ConnectionTimeout(WorkerUnavailable):
    """The worker did not answer in time."""

    code = "connection_timeout"


class ConnectTimeout(ConnectionTimeout):
    """The worker's socket did not accept the connection in time."""

    code = "connect_timeout"
    unsent = True


class WorkerSilent(ConnectionTimeout):
    """The worker's process does not answer pings: it hangs, or the network drops its packets."""

    code = "worker_silent"


class Disconnected(WorkerUnavailable):
    """The stream ended without its end frame."""

    code = "disconnected"


class StreamIncomplete(Disconnected):
    """The stream ended before a finish reason."""

    code = "stream_incomplete"


class EngineShutdown(WorkerUnavailable):
    """The worker is shutting down and returned the request."""

    code = "engine_shutdown"


class EngineDied(EngineShutdown):
    """The worker's engine died with the request."""

    code = "engine_died"


class EngineKilled(EngineDied):
    """A signal ended the worker's engine: no request is likely to be the cause."""

    code = "engine_killed"


class WorkerLeaving(EngineShutdown):
    """The worker is shutting down and rejects new requests."""

    code = "worker_leaving"
    unsent = True


class Overloaded(Unavailable):
    """Every worker is busy, or this one is at capacity."""

    code = "overloaded"
    kind = "service_unavailable"


class WorkerAtCapacity(Overloaded):
    """The chosen worker is at capacity and has rejected the request before its engine got it."""

    code = "worker_at_capacity"
    retryable = True
    unsent = True


class RouterQueueLimitExceeded(Overloaded):
    """The router's queue is full."""

    code = "router_queue_limit_exceeded"


class Cancelled(DynamoError):
    """The client disconnected or cancelled the request."""

    code = "cancelled"
    status = 499
    kind = "Client Closed Request"


class HandlerCancelled(Cancelled):
    """The handler raised asyncio.CancelledError."""

    code = "handler_cancelled"


class DeadlineExceeded(DynamoError):
    """The engine raised TimeoutError."""

    code = "deadline_exceeded"
    status = 504
    kind = "Gateway Timeout"


class EngineFailure(DynamoError):
    """The engine raised; the message is the engine's."""

    code = "engine_failure"


class WorkersLost(DynamoError):
    """Two workers died, or stopped answering, before the first token of the request."""

    code = "workers_lost"

    def __init__(self, message: str = "") -> None:
        super().__init__(
            message
            or "Two workers died or stopped answering before the first token of this request; "
            "it is not sent to another one"
        )


class HttpFailure(DynamoError):
    """The engine raised :class:`HttpError`; a status that is no error becomes 500.

    Clients receive the message of a 4xx literally.
    """

    code = "http"

    def __init__(self, message: str = "", status: int = 500) -> None:
        super().__init__(message)
        self.status = status if 400 <= status <= 599 else 500
        self.kind = _phrase(self.status)

    def wire_code(self) -> str:
        """``http.418``."""
        return f"{self.code}.{self.status}"


class HttpError(Exception):
    """An engine's handler raises it to choose the HTTP status of the response.

    ``code`` is 0..599; a message longer than 8192 characters is shortened and ends in three dots.
    Raises ValueError for any other argument.
    """

    def __init__(self, code: int, message: str) -> None:
        if not isinstance(code, int) or isinstance(code, bool) or not 0 <= code <= 599:
            raise ValueError(f"code must be an integer from 0 to 599, got {code!r}")
        if not isinstance(message, str):
            raise ValueError(f"message must be a string, got {type(message).__name__}")
        message = shorten(message, MESSAGE_LIMIT)
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        """``HTTP 422: text``."""
        return f"HTTP {self.code}: {self.message}"


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Client Closed Request" if status == Cancelled.status else "Error"


def _tree(root: type[DynamoError]) -> dict[str, type[DynamoError]]:
    classes = {root.code: root}
    for child in root.__subclasses__():
        classes.update(_tree(child))
    return classes


_BY_CODE = _tree(DynamoError)


def from_code(code: str, message: str) -> DynamoError:
    """Rebuild an error received from another process; an unknown code gives a DynamoError."""
    name, _, detail = code.partition(".")
    if name == HttpFailure.code and detail.isascii() and detail.isdigit():
        return HttpFailure(message, int(detail[:3]))
    if name == InvalidRequest.code:
        return InvalidRequest(message, shorten(detail) or "ValueError")
    return _BY_CODE.get(code, DynamoError)(message)


def shorten(value: object, characters: int = 64) -> str:
    """Return ``value`` as text of at most ``characters``; a shortened text ends in three dots."""
    text = str(value)
    return text if len(text) <= characters else text[: characters - 3] + "..."


def text_of(error: BaseException) -> str:
    """Return the text of an exception of users' code, whose own methods may fail."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - users' code, too
        return "(no text: its __str__ failed)"


def name_problem(name: str) -> str:
    """Return why ``name`` cannot name a model, or "": logs, tables and metrics print it."""
    if name.isprintable():
        return ""
    return "has a line break or another character that cannot be printed; choose another name"


def as_argument(name: str) -> str:
    """Return ``name`` as the last word of a shell command, also where it begins with ``-``."""
    import shlex  # only here: completion of a command imports this module

    return "-- " * name.startswith("-") + shlex.quote(name)


def as_path(path: str) -> str:
    """Return ``path`` as a word of a shell command, also where it begins with ``-``."""
    return as_argument("./" * path.startswith("-") + path)
