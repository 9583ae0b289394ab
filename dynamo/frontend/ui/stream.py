"""Server-sent events for pages: a bounded number of streams, of which slow ones are dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from dynamo.frontend.ui.files import HEADERS
from dynamo.http import Exchange
from dynamo.http.exchange import NEVER

__all__ = ["EventStreams", "event"]

log = logging.getLogger(__name__)


def event(name: str, data: bytes) -> bytes:
    """Return the event ``name`` with ``data``, which is JSON and so has no line break."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class EventStreams:
    """Open streams, at most ``limit``. ``on_change`` is called when one is opened or closed."""

    def __init__(self, limit: int, on_change: Callable[[], None] | None = None) -> None:
        self._limit = limit
        self._open: set[Exchange] = set()
        self._on_change = on_change
        self._ended = ""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, exchange: Exchange) -> bool:
        return exchange in self._open

    def open(self, exchange: Exchange) -> bool:
        """Begin a stream, or refuse it: too many, or the frontend stops. HEAD gets no events."""
        if self._ended:
            exchange.refuse(503, self._ended)
        elif len(self._open) >= self._limit:
            text = f"{self._limit} pages or logs are open already; close one of them"
            exchange.refuse(503, text)
        elif exchange.method == "HEAD":
            exchange.respond(200, b"", "text/event-stream", HEADERS)
        else:
            self._start(exchange)
            return True
        return False

    def send(self, data: bytes) -> None:
        """Send an event to every stream; drop those that read too slowly."""
        for exchange in list(self._open):
            self.send_one(exchange, data)

    def send_one(self, exchange: Exchange, data: bytes) -> None:
        """Send an event to one stream, or drop it if its client reads too slowly."""
        if exchange.above_high_water:
            log.info("%s: dropped a page that reads too slowly", exchange.path)
            self._forget(exchange)
            exchange.abort()
        else:
            exchange.write(data)

    def close(self, message: str) -> None:
        """End all streams; their pages show ``message`` and open them again."""
        for exchange in list(self._open):
            self.close_one(exchange, message)

    def close_one(self, exchange: Exchange, message: str) -> None:
        """End one stream; the page shows ``message``."""
        if exchange in self._open:
            self._forget(exchange)
            exchange.end(event("end", msgspec.json.encode({"message": message})))

    def end(self, message: str) -> None:
        """End all streams, and refuse others, with ``message``."""
        self._ended = message
        self.close(message)

    def _start(self, exchange: Exchange) -> None:
        exchange.deadline = NEVER
        exchange.keep_alive = False  # so that its end also ends the connection, in a drain too
        exchange.on_disconnect = lambda: self._forget(exchange)
        exchange.start(200, "text/event-stream", [*HEADERS, ("cache-control", "no-store")])
        self._open.add(exchange)
        self._changed()

    def _forget(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        exchange.on_disconnect = None
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()
