"""Failed requests: their responses, and their labels in the counters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dynamo.errors import (
    MESSAGE_LIMIT,
    Cancelled,
    ConnectionTimeout,
    DynamoError,
    HttpFailure,
    InvalidArgument,
    MigrationExhausted,
    ModelNotFound,
    NoInstances,
    Overloaded,
    RouterQueueLimitExceeded,
    Unavailable,
    WorkersLost,
    WorkerUnavailable,
    shorten,
)
from dynamo.frontend.answer.sse import DONE, error_event, public_message
from dynamo.frontend.prompt.bounds import DESERIALIZE
from dynamo.http import error_body, openai_error, reason_phrase
from dynamo.router.eligibility.filters import NoneAllowed

_RETRY = ("retry-after", "1")
_TOO_LONG = "This model's maximum context length"
_NAME = r"[a-z_]+(?:\[\d+\]|\.[a-z_]+)*"
_PARAM = re.compile(
    rf"(?:Validation: |{re.escape(DESERIALIZE)})?(?:'({_NAME})'|({_NAME}): )"
    r"|Unsupported parameter\(s\): `?([^`,\s]{1,64})"
)
"""The name of the field that a message about the request begins with."""
_OVERLOADED = "Service temporarily unavailable: All workers are busy, please retry later"


class BackendSilent(ConnectionTimeout):
    """The engine sent nothing for longer than DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS."""

    code = "backend_silent"


class SlowClient(Cancelled):
    """The client reads so slowly that the output kept for it has reached its bound."""

    code = "slow_client"


class ErrorShape(NamedTuple):
    """How an API writes an error that is a result of :func:`explained`.

    ``body`` is that of a response with a status; ``event`` ends a stream that has begun before the
    request reached its model. ``id_header``, if set, is the header of all responses with the
    request's id, and ``add_id`` puts that into a body.
    """

    body: Callable[[int, DynamoError], bytes]
    event: Callable[[DynamoError], bytes]
    id_header: str = ""
    add_id: Callable[[bytes, str], bytes] | None = None


class Labels(NamedTuple):
    """The labels of a failure: ``error_type`` of requests_total, ``class`` and ``reason`` of
    failures_total."""

    error_type: str
    failure_class: str
    reason: str


_BAD_REQUEST = Labels("validation", "InvalidRequest", "request.invalid")
_LABELS: tuple[tuple[type[DynamoError], Labels], ...] = (
    (ModelNotFound, Labels("not_found", "NotFound", "model.not_found")),
    (InvalidArgument, _BAD_REQUEST),
    (Cancelled, Labels("cancelled", "Cancelled", "client.disconnected")),
    (
        RouterQueueLimitExceeded,
        Labels("overload", "CapacityExhausted", "capacity.router_queue_full"),
    ),
    (Overloaded, Labels("overload", "CapacityExhausted", "capacity.pool_exhausted")),
    (BackendSilent, Labels("response_timeout", "Timeout", "backend.silent")),
    (NoInstances, Labels("unavailable", "Unavailable", "instances.none")),
    (WorkerUnavailable, Labels("unavailable", "Unavailable", "transport.disconnected")),
    (MigrationExhausted, Labels("unavailable", "Unavailable", "migration.exhausted")),
    (Unavailable, Labels("unavailable", "Unavailable", "service.unavailable")),
    (WorkersLost, Labels("internal", "Internal", "workers.lost")),
    (DynamoError, Labels("internal", "Internal", "engine.failure")),
)
_BY_STATUS = {
    404: Labels("not_found", "NotFound", "engine.not_found"),
    429: Labels("overload", "CapacityExhausted", "capacity.worker_overloaded"),
    499: Labels("cancelled", "Cancelled", "engine.cancelled"),
    501: Labels("not_implemented", "NotImplemented", "engine.not_implemented"),
    503: Labels("unavailable", "Unavailable", "service.unavailable"),
}
_AT_WORKER = Labels("overload", "CapacityExhausted", "capacity.worker_overloaded")


def labels(error: DynamoError, by_worker: bool = False) -> Labels:
    """Return the labels of ``error``; ``by_worker``: a worker responded with it."""
    if by_worker and isinstance(error, Overloaded):
        return _AT_WORKER
    # The status of another server says whose fault it was: below 500 the client's.
    if isinstance(error, HttpFailure):
        fallback = _BAD_REQUEST if error.status < 500 else _LABELS[-1][1]
        return _BY_STATUS.get(error.status, fallback)
    return next(its_labels for kind, its_labels in _LABELS if isinstance(error, kind))


def explained(error: DynamoError, model: str) -> DynamoError:
    """Return the same kind of error with the message that Dynamo's clients expect."""
    if isinstance(error, RouterQueueLimitExceeded):
        return error
    if isinstance(error, Overloaded):
        return Overloaded(_OVERLOADED)
    if isinstance(error, NoInstances) and not isinstance(error, NoneAllowed):
        return NoInstances(
            f"Model `{model}` is not ready to serve requests yet. It has no worker now: the "
            "last one was unloaded, stopped or put to sleep, or the first one is still starting. "
            "Please retry shortly."
        )
    return error


def with_retry(error: DynamoError, headers: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return ``headers``, with ``Retry-After`` if the same request may succeed a second later."""
    return (*headers, _RETRY) if isinstance(error, Unavailable) else headers


def id_headers(shape: ErrorShape | None, echoed: str | None) -> Sequence[tuple[str, str]]:
    """Return the headers that echo the id which the client gave to its request."""
    if echoed is None:
        return ()
    header = ("x-request-id", echoed)
    return (
        (header,) if shape is None or not shape.id_header else (header, (shape.id_header, echoed))
    )


def error_response(
    error: DynamoError,
    overload_status: int = 503,
    shape: ErrorShape | None = None,
    echoed: str | None = None,
) -> tuple[int, bytes]:
    """Return status and body for ``error``, a result of :func:`explained`."""
    status = overload_status if isinstance(error, Overloaded) else error.status
    shape = shape or DYNAMO_ERRORS
    body = shape.body(status, error)
    return status, body if echoed is None or shape.add_id is None else shape.add_id(body, echoed)


def error_object(status: int, error: DynamoError) -> dict[str, Any]:
    """OpenAI's error object of ``error``."""
    full = isinstance(error, Overloaded)  # says which limit, and nothing of a worker
    message = shorten(error.message if full else public_message(error), MESSAGE_LIMIT)
    if isinstance(error, ModelNotFound):
        return openai_error(status, message, "model", error.code)
    if not isinstance(error, InvalidArgument):
        return openai_error(status, message, None, error.code)
    if message.startswith(_TOO_LONG):
        return openai_error(status, message, None, "context_length_exceeded")
    named = _PARAM.match(message)
    return openai_error(status, message, named and next(filter(None, named.groups())))


def _dynamo_body(status: int, error: DynamoError) -> bytes:
    body = error_object(status, error)
    if isinstance(error, Overloaded) and status == 529:
        body["message"] = "Service temporarily overloaded"
        return error_body(status, body["message"], error=body)
    if status >= 500 and status != 503:
        details = {"backend_status": status}
        return error_body(status, body["message"], reason_phrase(status), body, details=details)
    return error_body(status, body["message"], error.kind, body)


DYNAMO_ERRORS = ErrorShape(_dynamo_body, lambda error: error_event(error) + DONE)
"""Errors of every API without a shape of its own."""
