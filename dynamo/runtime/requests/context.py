"""The cancellation handle of one request: stop asks, kill ends, children follow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from typing import Any, Literal

from dynamo.runtime.process.threads import running_loop

CancelKind = Literal["stop", "kill"]
_LEVEL: dict[CancelKind, int] = {"stop": 1, "kill": 2}
_KIND: dict[int, CancelKind] = {level: kind for kind, level in _LEVEL.items()}
_TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
log = logging.getLogger(__name__)


class SpanProxy:
    """The interface of a trace span, without a tracer behind it: every call is ignored."""

    __slots__ = ()

    def set_attribute(self, key: str, value: Any) -> None:
        """Ignore the attribute."""

    def add_event(self, name: str, attrs: dict[str, Any] | None = None) -> None:
        """Ignore the event."""

    def set_status(self, status: str, description: str | None = None) -> None:
        """Ignore the status."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> SpanProxy:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Context:
    """The cancellation state of a request; notifies its listeners and children in link order.

    ``stop`` asks for an early but orderly end (items already produced may still be read), ``kill``
    ends the request. A kill implies a stop; neither can be undone.

    Any thread may read the state, stop and kill: children are then stopped at once, listeners and
    waiters notified on the loop of the first of them. All other methods belong on the loop's
    thread.
    """

    __slots__ = ("_id", "_level", "_listeners", "_loop", "_notified", "_waiters", "metadata")

    def __init__(self, id: str | None = None, metadata: dict[str, Any] | None = None) -> None:
        self._id = id
        self._level = 0
        self._notified = 0  # the level that the listeners have; lower until the loop runs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: list[Callable[[CancelKind], None]] | None = None
        self._waiters: dict[asyncio.Future[bool], int] | None = None
        self.metadata: dict[str, Any] = {} if metadata is None else metadata

    def id(self) -> str:
        """Return the request id; generate one on first use if none was given."""
        if self._id is None:
            self._id = str(uuid.uuid4())
        return self._id

    @property
    def trace_id(self) -> str | None:
        """32 hex digits of the W3C ``traceparent`` in the metadata, if any."""
        return self._traceparent(1, 32)

    @property
    def span_id(self) -> str | None:
        """16 hex digits of the W3C ``traceparent`` in the metadata, if any."""
        return self._traceparent(2, 16)

    @property
    def parent_span_id(self) -> str | None:
        """None: this runtime records no spans, so the caller's span is :attr:`span_id`."""
        return None

    def trace_headers(self) -> dict[str, str] | None:
        """Return the caller's W3C trace headers, for a request to another service; None without."""
        metadata = self.metadata
        if "traceparent" not in metadata:
            return None
        return {name: str(metadata[name]) for name in _TRACE_HEADERS if name in metadata}

    def current_span(self) -> SpanProxy:
        """Return a span whose methods have no effect: this runtime records no spans."""
        return SpanProxy()

    def start_span(self, name: str, attrs: dict[str, Any] | None = None) -> SpanProxy:
        """As :meth:`current_span`; use it in a ``with`` statement."""
        return SpanProxy()

    def notify_first_token(self) -> None:
        """Do nothing: routers see the first token in the response stream."""

    def detached(self, id: str) -> Context:
        """Return a context with a copy of the metadata that this one's end does not cancel."""
        return Context(id, dict(self.metadata))

    def is_stopped(self) -> bool:
        """Return whether the request should end soon; true after a kill, too."""
        return self._level > 0

    def is_killed(self) -> bool:
        """Return whether the caller dropped the request."""
        return self._level == _LEVEL["kill"]

    def stop_generating(self) -> None:
        """Ask the request and its children for an early, orderly end. Idempotent."""
        self._cancel("stop")

    def stop(self) -> None:
        """As :meth:`stop_generating`."""
        self._cancel("stop")

    def kill(self) -> None:
        """End the request and its children. Idempotent."""
        self._cancel("kill")

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """Return a future that becomes True as soon as the request is stopped or killed."""
        return self._reached(_LEVEL["stop"])

    def stopped(self) -> asyncio.Future[bool]:
        """As :meth:`async_killed_or_stopped`: a kill implies a stop."""
        return self._reached(_LEVEL["stop"])

    def killed(self) -> asyncio.Future[bool]:
        """Return a future that becomes True as soon as the request is killed."""
        return self._reached(_LEVEL["kill"])

    def link_child(self, child: Context) -> None:
        """Forward every stop and kill to ``child``; a past one at once."""
        self.on_cancel(child._cancel)
        if self._level > self._notified:  # another thread has cancelled it since the last turn
            child._cancel(_KIND[self._level])

    def unlink_child(self, child: Context) -> None:
        """Stop forwarding to ``child``; ignore one that is not linked."""
        self.off_cancel(child._cancel)

    def on_cancel(self, callback: Callable[[CancelKind], None]) -> None:
        """Call ``callback("stop" | "kill")`` once for each level; at once for a past one."""
        if self._listeners is None:
            self._listeners = []
        if self._loop is None:
            self._loop = running_loop()
        self._listeners.append(callback)
        if self._notified:
            callback(_KIND[self._notified])

    def off_cancel(self, callback: Callable[[CancelKind], None]) -> None:
        """Remove ``callback``; ignore an unknown one."""
        if self._listeners is not None and callback in self._listeners:
            self._listeners.remove(callback)

    def _cancel(self, kind: CancelKind) -> None:
        level = _LEVEL[kind]
        if level <= self._level:
            return
        self._level = level
        loop = self._loop
        # Without a loop no listener was added yet.
        if loop is None or loop is running_loop():
            self._notify(kind)
        else:
            # Another thread: children stop at once, the listeners belong to the loop.
            for callback in tuple(self._listeners or ()):
                child = getattr(callback, "__self__", None)
                if isinstance(child, Context):
                    child._cancel(kind)
            with contextlib.suppress(RuntimeError):  # the loop is closed: no listener is left
                loop.call_soon_threadsafe(self._notify, kind)

    def _notify(self, kind: CancelKind) -> None:
        level = _LEVEL[kind]
        # A stop that another thread has scheduled may come after the kill: it is ignored then.
        if level <= self._notified:
            return
        self._notified = level
        for waiter, wanted in tuple((self._waiters or {}).items()):
            if wanted <= level and not waiter.done():
                waiter.set_result(True)
        for callback in tuple(self._listeners or ()):
            try:
                callback(kind)
            except Exception:  # the other listeners must be notified
                log.exception("%s of request %s: a listener failed", kind, self.id())

    def _reached(self, level: int) -> asyncio.Future[bool]:
        """Return a future that becomes True at ``level``."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        if self._level >= level:
            waiter.set_result(True)
            return waiter
        if self._waiters is None:
            self._waiters = {}
            self._loop = self._loop or loop
        waiters = self._waiters
        waiters[waiter] = level
        # A task that stops waiting takes its future out: else they pile up in a long request.
        waiter.add_done_callback(lambda done: waiters.pop(done, None))
        return waiter

    def _traceparent(self, field: int, digits: int) -> str | None:
        # W3C Trace Context: version-trace-parent-flags. A later version may have more fields.
        parts = str(self.metadata.get("traceparent", "")).split("-")
        return parts[field] if len(parts) >= 4 and len(parts[field]) == digits else None
