"""The answer of another HTTP server, relayed: head and body as the worker sends them.

A JSON body up to a bound is collected and sent as one response, so that a server which breaks off
becomes an error with a status. Everything else is streamed as it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.errors import DynamoError, EngineFailure
from dynamo.frontend.answer.generation import Usage
from dynamo.frontend.answer.relayed_usage import EventCounter, find_usage
from dynamo.frontend.answer.sse import DONE, error_event
from dynamo.protocols.engine import EngineOutput
from dynamo.protocols.relay import HttpResponseHead

__all__ = ["HttpAnswer"]

_decode_head = msgspec.msgpack.Decoder(HttpResponseHead).decode
_JSON = "application/json"
_EVENTS = "text/event-stream"
_COLLECTED_BYTES = 1 << 20
_LAST_BYTES = 4096
_MAX_HEADERS = 100
# Those of one connection, those that our server writes, and the id, which is the client's.
_OWN_HEADERS = frozenset(
    (
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("content-length", "content-type", "date", "server", "x-request-id"),
        *("proxy-authenticate", "proxy-connection"),
    )
)


class HttpAnswer:
    """``head`` is None until the worker has sent it; ``begun``: something of the body has arrived;
    ``streams``: parts are written as they arrive.

    Its own choice: there is one engine request, whatever the body asks for.
    """

    __slots__ = (
        "_collected_bytes",
        "_counter",
        "_events",
        "_last",
        "_parts",
        "begun",
        "content_type",
        "final_usage",
        "head",
        "headers",
        "streams",
        "worker_id",
    )

    def __init__(self) -> None:
        self.begun = False
        self.restart()
        self.final_usage: Usage | None = None
        self.worker_id: dict[str, Any] | None = None
        self._events = 0
        self._last = b""
        self._parts: list[bytes] = []
        self._collected_bytes = 0

    @property
    def choices(self) -> Sequence[HttpAnswer]:
        """Itself. Not an attribute: it would be a reference cycle."""
        return (self,)

    @property
    def can_add_event(self) -> bool:
        """Whether an event of ours may follow the bytes so far."""
        return self._counter is not None and self._counter.between_events

    def restart(self) -> None:
        """Forget the head: another worker will send one."""
        self.head: HttpResponseHead | None = None
        self.content_type = ""
        self.headers: list[tuple[str, str]] = []
        self.streams = False
        self._counter: EventCounter | None = None

    def receive(self, payload: bytes) -> int | None:
        """Add an item of the worker's stream; return the events in it, None for the head.

        Raises EngineFailure for a malformed head.
        """
        if self.head is None:
            self._begin(payload)
            return None
        self.begun = True
        self._parts.append(payload)
        if self._counter is not None:
            count = self._counter.count(payload)
            self._events += count
            return count
        if self.streams:
            self._last = (self._last + payload)[-_LAST_BYTES:]
        else:
            self._collected_bytes += len(payload)
            self.streams = self._collected_bytes > _COLLECTED_BYTES
        return 0

    def push(self, output: EngineOutput, /) -> bool:
        """Refuse an output in tokens: the server has its own format."""
        raise EngineFailure(f"expected a part of an HTTP response, got {output!r}")

    def close(self) -> None:
        """The response is complete; it may have no body."""
        self.begun = self.head is not None

    def opening(self) -> bytes:
        """Nothing precedes the body."""
        return b""

    def flush(self) -> bytes:
        """The parts since the last time."""
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return body

    def end(self) -> bytes:
        """The parts that are left."""
        return self.flush()

    def error(self, error: DynamoError, /) -> bytes:
        """The parts that are left and an error event."""
        return self.flush() + error_event(error) + DONE

    def unary(self) -> bytes:
        """The collected body."""
        body = b"".join(self._parts)
        self._parts = [body]
        return body

    def usage(self) -> Usage:
        """What the server reported, else the events as output tokens."""
        if self.final_usage is None:
            text, done = self._last_bytes(), False
            if self._counter is not None:
                done = text.rstrip().endswith(b"[DONE]")
            self.final_usage = find_usage(text) or Usage(0, max(self._events - done, 0), None)
        return self.final_usage

    def _last_bytes(self) -> bytes:
        if self._counter is not None:
            return b"".join(self._counter.last_parts)
        return self._last if self.streams else b"".join(self._parts)

    def _begin(self, payload: bytes) -> None:
        try:
            head = _decode_head(payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise EngineFailure(f"not the head of an HTTP response: {error}") from None
        if not 200 <= head.status <= 599:
            raise EngineFailure(f"the server responded with status {head.status}")
        given = [(name.lower(), value) for name, value in head.headers[:_MAX_HEADERS]]
        self.content_type = dict(given).get("content-type", "")
        self.headers = [one for one in given if one[0] not in _OWN_HEADERS]
        media_type = self.content_type.partition(";")[0].strip().lower()
        if media_type == _EVENTS:
            self._counter = EventCounter()
        self.streams = media_type != _JSON and head.status not in (204, 304)
        self.head = head
