"""The answer of another HTTP server, relayed as the worker sends it, and its count of tokens.

A JSON body up to a bound is collected and sent as one response, so that a server which breaks off
becomes an error with a status. Everything else is streamed as it arrives.

Nothing is parsed while the bytes pass: a search for the beginnings of events in each part, and one
search for ``usage`` in the last parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from json import JSONDecodeError, JSONDecoder
from typing import Any

import msgspec

from dynamo.errors import DynamoError, EngineFailure
from dynamo.frontend.answer.generation import Usage
from dynamo.http.cors import CORS_HEADERS
from dynamo.protocols.engine import EngineOutput, HttpResponseHead

_decode_head = msgspec.msgpack.Decoder(HttpResponseHead).decode
_JSON = "application/json"
EVENTS = "text/event-stream"
_COLLECTED_BYTES = 1 << 20
_LAST_BYTES = 4096
_MAX_HEADERS = 100
# Those of one connection, those that our server writes, also for pages of other origins, and the
# id, which is the client's.
_OWN_HEADERS = frozenset(
    (
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("content-length", "content-type", "date", "server", "x-request-id"),
        *("x-accel-buffering", *CORS_HEADERS),
        *("proxy-authenticate", "proxy-connection"),
    )
)
_EVENT = b"\ndata:"
_KEPT_PARTS = 4
_USAGE = '"usage"'
# More is an error of the server: it would spoil the sums of the metrics.
_LIMIT = 2**48
_BESIDE_INPUT = ("cache_read_input_tokens", "cache_creation_input_tokens")
_DECODE = JSONDecoder().raw_decode


class EventCounter:
    """Counts server-sent events in a stream that is cut anywhere.

    ``last_parts`` are the last few parts, where the usage is. The count includes the event
    ``[DONE]``.
    """

    __slots__ = ("_tail", "last_parts")

    def __init__(self) -> None:
        self._tail = b"\n"
        self.last_parts: deque[bytes] = deque(maxlen=_KEPT_PARTS)

    @property
    def between_events(self) -> bool:
        """Whether the bytes so far end with a complete event: another one may follow."""
        return self._tail.endswith((b"\n\n", b"\r\n\r\n")) or self._tail == b"\n"

    def count(self, part: bytes) -> int:
        """Return how many events begin in ``part``, or with it. O(bytes)."""
        # The tail is one byte shorter than what is searched for, so nothing is counted twice.
        text = self._tail + part
        self._tail = text[1 - len(_EVENT) :]
        self.last_parts.append(part)
        return text.count(_EVENT)


def find_usage(text: bytes) -> Usage | None:
    """Return the last ``usage`` object in ``text``, part of a response; None without one.

    Understands the names of chat and text completions, of /v1/responses and of /v1/messages.
    """
    whole = text.decode(errors="replace")
    # From the end: earlier events may have counts of their own, or null.
    position = whole.rfind(_USAGE)
    while position >= 0:
        usage = _object_after(whole, position + len(_USAGE))
        if usage is not None:
            return usage_of(usage)
        position = whole.rfind(_USAGE, 0, position)
    return None


def _object_after(text: str, position: int) -> dict[str, Any] | None:
    """The object that follows the colon at ``position``, if there is one, whole."""
    following = text[position : position + 4096].lstrip()
    if not following.startswith(":"):
        return None
    try:
        value, _ = _DECODE(following[1:].lstrip())
    except (JSONDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def usage_of(usage: dict[str, Any]) -> Usage:
    """Return the counts of a ``usage`` object; what it lacks or states wrongly is 0 or None."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if cached is None:
        cached = usage.get("cache_read_input_tokens")
    prompt_tokens = _count(usage, "prompt_tokens", "input_tokens")
    # Of /v1/messages: there the input is what was neither found in a cache nor added to it.
    prompt_tokens += sum(_count(usage, name) for name in _BESIDE_INPUT)
    return Usage(
        prompt_tokens,
        _count(usage, "completion_tokens", "output_tokens"),
        cached if _is_count(cached) else None,
    )


def _count(usage: dict[str, Any], *names: str) -> int:
    return next((usage[name] for name in names if _is_count(usage.get(name))), 0)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LIMIT


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
        """The parts that are left; the event of the error is that of the API."""
        return self.flush()

    def unary(self) -> bytes:
        """The collected body."""
        body = b"".join(self._parts)
        # Kept: usage() searches it.
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
        headers = [(name.lower(), value) for name, value in head.headers[:_MAX_HEADERS]]
        self.content_type = dict(headers).get("content-type", "")
        self.headers = [header for header in headers if header[0] not in _OWN_HEADERS]
        media_type = self.content_type.partition(";")[0].strip().lower()
        if media_type == EVENTS:
            self._counter = EventCounter()
        # 204 and 304 have no body, whatever type they state: they are one response.
        self.streams = media_type != _JSON and head.status not in (204, 304)
        self.head = head
