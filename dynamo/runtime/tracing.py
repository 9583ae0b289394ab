"""Spans of the requests that a process serves, where traces are exported."""

from __future__ import annotations

import time

from dynamo.errors import Cancelled, DynamoError
from dynamo.observability.tracing import OpenSpan, Tracing
from dynamo.runtime.requests import PushHandler, ServerStream

__all__ = ["traced"]

_NAME = "handle_payload"


def traced(handler: PushHandler, tracing: Tracing) -> PushHandler:
    """Return ``handler`` with a span for each request that belongs to a trace.

    The request's context has the span as its parent.
    """

    def handle(stream: ServerStream, payload: bytes) -> None:
        if "traceparent" in stream.headers:
            span = tracing.start(_NAME, stream.headers, time.monotonic())
            attributes = {
                "dynamo.endpoint": stream.endpoint,
                "dynamo.request_id": stream.headers.get("request-id", ""),
            }
            stream.headers = {**stream.headers, **span.headers}
            stream.on_finished = _Ending(span, attributes)
        handler(stream, payload)

    return handle


class _Ending:
    """Ends the span with the stream."""

    __slots__ = ("_attributes", "_span")

    def __init__(self, span: OpenSpan, attributes: dict[str, str]) -> None:
        self._span = span
        self._attributes = attributes

    def __call__(self, error: DynamoError | None) -> None:
        failed = error is not None and not isinstance(error, Cancelled)
        self._span.end(
            time.monotonic(), self._attributes, f"{error.code}: {error}" if failed and error else ""
        )
