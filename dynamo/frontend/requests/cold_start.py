"""Requests that wait for a worker: the first of a model, or another after a failure.

They wait in order of arrival, whether they have reached the model's router (:class:`HeldDispatch`)
or not (:class:`HeldExchange`: the body is not parsed). Streams get comments while they wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from dynamo.errors import DynamoError, Unavailable
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.headers import request_id
from dynamo.http import NEVER, Exchange
from dynamo.observability.logs import counted
from dynamo.observability.metrics import Gauge

if TYPE_CHECKING:
    from dynamo.frontend.requests.registry import RequestRegistry

_COMMENT_EVERY_S = 5.0
_NO_CACHE = ("cache-control", "no-cache")
_PROGRESS_EVERY_S = 1.0
_CHAT_PATH = "/v1/chat/completions"
_STREAMED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
log = logging.getLogger(__name__)
RESEND_SLICE_S = 0.002
"""The time for waiting requests in one turn of the loop; at least one is sent."""
TRIAL_WAIT_S = 10.0
"""The longest time that a request waits for its turn on trial."""


class ResendQueue:
    """Engine requests that ``send`` is called for: the first at once, others in later turns.

    A worker may fail with a thousand requests; routing and sending them all at once would stall
    every other stream for 100 ms. Bounded by the number of running requests.
    """

    def __init__(self, send: Callable[[EngineRequest], None]) -> None:
        self._send = send
        self._waiting: dict[EngineRequest, None] = {}
        self._turn: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, engine_request: EngineRequest, at_once: bool = True) -> None:
        """Send the request now, if ``at_once`` and none was sent before in this turn of the loop,
        or in a later turn."""
        at_once = at_once and self._turn is None
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._drain)
        if at_once:
            self._send(engine_request)
        else:
            self._waiting[engine_request] = None
            engine_request.waits(WaitingResend(self._waiting, engine_request))

    def add_later(self, engine_request: EngineRequest, delay_s: float) -> None:
        """Send the request after ``delay_s``."""
        loop = asyncio.get_running_loop()
        engine_request.waits(loop.call_later(delay_s, self._continue, engine_request))

    def _continue(self, engine_request: EngineRequest) -> None:
        engine_request.continues()
        self._send(engine_request)

    def _drain(self) -> None:
        self._turn = None
        end_s = time.perf_counter() + RESEND_SLICE_S
        while self._waiting:
            engine_request = next(iter(self._waiting))
            del self._waiting[engine_request]
            self._continue(engine_request)
            if time.perf_counter() > end_s:
                break
        if self._waiting:
            self._turn = asyncio.get_running_loop().call_soon(self._drain)


class TrialQueue:
    """Engine requests whose worker was lost before their first token; one of them may be the cause.

    Each gets a worker without another of them until its first token, so that a second loss names
    the cause. The others wait, in order, up to ``TRIAL_WAIT_S``; ``send_late`` gets them then, many
    in one turn. ``has_room`` says whether a request has a worker to itself. Bounded by the number
    of running requests.
    """

    def __init__(
        self,
        send: Callable[[EngineRequest], None],
        has_room: Callable[[EngineRequest], bool],
        send_late: Callable[[EngineRequest], None],
    ) -> None:
        self._send = send
        self._send_late = send_late
        self._has_room = has_room
        self._waiting: dict[EngineRequest, None] = {}
        self._running: dict[EngineRequest, None] = {}
        self._sending = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    @property
    def workers(self) -> set[int]:
        """The workers that have a request on trial."""
        decisions = (request.decision for request in self._running)
        return {decision.worker_id for decision in decisions if decision is not None}

    def add(self, engine_request: EngineRequest) -> None:
        """Send the request when a worker has none on trial; until then it is pending."""
        self._running.pop(engine_request, None)
        self._waiting[engine_request] = None
        engine_request.waits(WaitingResend(self._waiting, engine_request))
        # Never cancelled: _overdue looks whether the request still waits.
        loop = asyncio.get_running_loop()
        loop.call_later(TRIAL_WAIT_S, self._overdue, engine_request)
        self._next()

    def over(self, engine_request: EngineRequest) -> None:
        """The request has its first token, or has ended. Idempotent."""
        if engine_request in self._running:
            del self._running[engine_request]
            self._next()

    def _next(self) -> None:
        if self._sending:
            return  # a request that ends while it is sent calls this again
        self._sending = True
        try:
            while self._waiting:
                engine_request = next(iter(self._waiting))
                # A trial without a worker is in a queue: it may get the worker that this one needs.
                if any(running.decision is None for running in self._running):
                    break
                if self._running and not self._has_room(engine_request):
                    break
                self._start(engine_request, self._send)
        finally:
            self._sending = False

    def _start(self, engine_request: EngineRequest, send: Callable[[EngineRequest], None]) -> None:
        del self._waiting[engine_request]
        self._running[engine_request] = None
        engine_request.continues()
        send(engine_request)

    def _overdue(self, engine_request: EngineRequest) -> None:
        if engine_request in self._waiting:
            self._start(engine_request, self._send_late)


class WaitingResend:
    """The place of an engine request in the queue."""

    __slots__ = ("_engine_request", "_waiting")

    def __init__(self, waiting: dict[EngineRequest, None], engine_request: EngineRequest) -> None:
        self._waiting = waiting
        self._engine_request = engine_request

    def cancel(self) -> None:
        """Leave the queue. Idempotent."""
        self._waiting.pop(self._engine_request, None)


class _StreamFlag(msgspec.Struct):
    """The members of a body that count here."""

    stream: object = None


_decode = msgspec.json.Decoder(_StreamFlag).decode


class WaitingRequest(Protocol):
    """A request in a :class:`ColdStartQueue`. ``size_bytes`` is the body that it keeps."""

    size_bytes: int

    def resume(self) -> None:
        """Continue: the model has a worker."""

    def fail(self, error: DynamoError) -> None:
        """End the request with ``error``."""

    def comment(self, text: bytes) -> None:
        """Send an SSE comment, if the request is for a stream."""

    def show_progress(self) -> bool:
        """Send how far the load is, if the client gets that instead of comments."""


class ColdStartQueue:
    """The waiting requests of one model, at most ``limit``.

    ``on_change`` is called when the first one waits and when none waits any more.
    """

    def __init__(
        self, model: str, limit: int, gauge: Gauge, on_change: Callable[[ColdStartQueue], None]
    ) -> None:
        self.model = model
        self.held_bytes = 0
        self._limit = limit
        self._gauge = gauge
        self._on_change = on_change
        self._waiting: dict[WaitingRequest, float] = {}
        self._releasing = 0
        self._turn: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: WaitingRequest) -> None:
        """Let ``request`` wait. Raises Unavailable above the limit."""
        if len(self._waiting) >= self._limit:
            wait = counted(len(self._waiting), "request waits", "requests wait")
            raise Unavailable(
                f"Model `{self.model}` has no worker now, and {wait} for its first one already. "
                "Please retry later."
            )
        # A dict, not a deque: it is ordered, too, and any entry leaves in O(1).
        self._waiting[request] = time.monotonic()
        self.held_bytes += request.size_bytes
        self._changed(1)

    def remove(self, request: WaitingRequest) -> None:
        """Forget ``request``. Idempotent."""
        if self._waiting.pop(request, None) is not None:
            self.held_bytes -= request.size_bytes
            self._changed(0)

    def release(self) -> None:
        """Continue the requests that wait now, in their order: 2 ms of work in a loop turn."""
        # A number, not the entries: some may leave before their turn, and later ones move up.
        self._releasing = len(self._waiting)
        if self._releasing and self._turn is None:
            log.info(
                "model %s: %s, the oldest after %.1f s",
                self.model,
                counted(self._releasing, "waiting request continues", "waiting requests continue"),
                self.oldest_s(),
            )
            self._turn = asyncio.get_running_loop().call_soon(self._drain)

    def fail_all(self, error: DynamoError) -> None:
        """End every waiting request with ``error``."""
        for request in list(self._waiting):
            self.remove(request)
            request.fail(error)

    def tick(self, elapsed_s: float, timeout_s: float, reason: str = "") -> None:
        """End requests that have waited ``timeout_s``; send comments to the others.

        ``reason`` says why no worker is started, if that is known. The last call was ``elapsed_s``
        ago.
        """
        now_s = time.monotonic()
        for request, since_s in list(self._waiting.items()):
            waited_s = now_s - since_s
            if waited_s >= timeout_s:
                self.remove(request)
                request.fail(self._timeout(waited_s, reason))
            elif request.show_progress():
                continue
            # When its own wait passes a multiple of the interval. >= 0: a request that came after
            # the last call was at -1 then, and would get a comment at once.
            elif waited_s // _COMMENT_EVERY_S > (waited_s - elapsed_s) // _COMMENT_EVERY_S >= 0:
                request.comment(b": loading, %d s\n\n" % waited_s)

    def oldest_s(self) -> float:
        """How long the oldest request has waited; 0 without any."""
        since_s = next(iter(self._waiting.values()), None)
        return 0.0 if since_s is None else time.monotonic() - since_s

    def _timeout(self, waited_s: float, reason: str) -> Unavailable:
        text = f"Model `{self.model}` got no worker within {waited_s:.0f} s"
        return Unavailable(f"{text}: {reason}." if reason else f"{text}. Please retry later.")

    def _drain(self) -> None:
        self._turn = None
        end_s = time.perf_counter() + RESEND_SLICE_S
        while self._releasing and self._waiting:
            self._releasing -= 1
            request = next(iter(self._waiting))
            self.remove(request)
            request.resume()
            if time.perf_counter() > end_s:
                break
        if self._releasing and self._waiting:
            self._turn = asyncio.get_running_loop().call_soon(self._drain)

    def _changed(self, at_size: int) -> None:
        """Update the gauge; report that the first request waits (1) or that none does (0)."""
        self._gauge.value = len(self._waiting)
        if len(self._waiting) == at_size:
            self._on_change(self)


class LoadProgress(NamedTuple):
    """How far the load of ``model`` is: a chat stream shows ``text()`` in ``reasoning_field``."""

    text: Callable[[], str]
    model: str
    reasoning_field: str


class HeldExchange:
    """A request whose body is not parsed yet; ``again`` handles it from the start.

    ``comments``: a stream of it may begin with comments, or with ``progress`` if that is given.
    """

    def __init__(
        self,
        exchange: Exchange,
        endpoint: str,
        queue: ColdStartQueue,
        registry: RequestRegistry,
        again: Callable[[Exchange], None],
        comments: bool,
        progress: LoadProgress | None,
    ) -> None:
        self.size_bytes = len(exchange.body)
        self._comments = comments and exchange.path in _STREAMED_PATHS
        self._progress = progress
        self._shown = ""
        self._shown_s = 0.0
        self._exchange = exchange
        self._endpoint = endpoint
        self._queue = queue
        self._registry = registry
        self._again = again
        self._streams = _asks_for_stream(exchange.body)

    def wait(self) -> None:
        """Wait in the queue. Raises Unavailable if it is full."""
        self._queue.add(self)
        self._registry.enter()
        if not self._exchange.resumed_at:  # once, however often it waits
            started = self._registry.metrics.model(self._queue.model).started
            started[self._endpoint, self._queue.model, self._kind].value += 1
        self._exchange.resumed_at = NEVER
        self._exchange.deadline = NEVER  # that of the queue applies
        self._exchange.on_disconnect = self._disconnected

    def resume(self) -> None:
        """Handle the request."""
        exchange = self._exchange
        exchange.on_disconnect = None
        exchange.resumed_at = time.monotonic()
        self._registry.leave()
        try:
            self._again(exchange)
        except BaseException as error:  # also a panic in Rust, which is not an Exception
            log.exception("%s %s failed", exchange.method, exchange.path)
            exchange.crashed(error)

    def fail(self, error: DynamoError) -> None:
        """Respond with ``error``."""
        self._exchange.on_disconnect = None
        self._registry.leave()
        request = (self._queue.model, self._kind)
        self._registry.refuse(self._exchange, self._endpoint, error, request)

    def comment(self, text: bytes) -> None:
        """Send a comment to a client that asked for a stream; it begins the response."""
        if self._streams and self._comments:
            self._write(text)

    def show_progress(self) -> bool:
        """Send a chunk with the progress once a second, if it has changed.

        False if it has not for a while: then a comment shows that the connection is alive.
        """
        exchange, progress = self._exchange, self._progress
        if progress is None or not self._streams or exchange.path != _CHAT_PATH:
            return False
        text, now_s = progress.text(), time.monotonic()
        if text != self._shown and now_s - self._shown_s >= _PROGRESS_EVERY_S:
            self._shown, self._shown_s = text, now_s
            # The chunks of the answer get the same id.
            own_id, client_id = request_id(exchange.headers)
            if client_id is None:
                exchange.headers = {**exchange.headers, "x-request-id": own_id}
            chunk = {
                "id": f"chatcmpl-{own_id}",
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": progress.model,
                "choices": [
                    {
                        "index": 0,
                        "delta": {progress.reasoning_field: f"{text}\n"},
                        "finish_reason": None,
                    }
                ],
            }
            self._write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        return now_s - self._shown_s < _COMMENT_EVERY_S

    def _write(self, text: bytes) -> None:
        """Send a part of the stream, which begins the response; none to a slow client."""
        exchange = self._exchange
        if exchange.above_high_water:
            return
        if not exchange.started:
            echoed = exchange.headers.get("x-request-id")
            own = () if echoed is None else (("x-request-id", echoed),)
            exchange.start(200, "text/event-stream", [_NO_CACHE, *own])
        exchange.write(text)

    @property
    def _kind(self) -> str:
        return "stream" if self._streams else "unary"

    def _disconnected(self) -> None:
        self._queue.remove(self)
        self._registry.leave()
        self._registry.abandoned(self._exchange, self._endpoint, self._queue.model, self._streams)


class HeldDispatch:
    """An engine request that ``send`` sends to a worker; its request ends it if it is cancelled."""

    size_bytes = 0

    def __init__(
        self,
        engine_request: EngineRequest,
        queue: ColdStartQueue,
        send: Callable[[EngineRequest], None],
    ) -> None:
        self._engine_request = engine_request
        self._queue = queue
        self._send = send
        self._since_s = time.monotonic()

    def wait(self) -> None:
        """Wait in the queue. Raises Unavailable if it is full."""
        self._queue.add(self)
        self._engine_request.lost_all_workers(self)

    def cancel(self) -> None:
        """Leave the queue: the request has ended. Idempotent."""
        self._queue.remove(self)
        self._engine_request.waited_for_worker(self._since_s)

    def resume(self) -> None:
        """Send the request to the new worker."""
        self._engine_request.waited_for_worker(self._since_s)
        self._engine_request.has_worker()
        self._send(self._engine_request)

    def fail(self, error: DynamoError) -> None:
        """End the request with ``error``."""
        self._engine_request.waited_for_worker(self._since_s)
        self._engine_request.give_up(error)

    def comment(self, text: bytes) -> None:
        """Send a comment, if the answer is a stream."""
        self._engine_request.comment(text)

    def show_progress(self) -> bool:
        """Send none: its answer may have begun."""
        return False


def _asks_for_stream(body: bytes) -> bool:
    """Whether the JSON ``body`` asks for a stream; False for other bodies."""
    try:
        return _decode(body).stream is True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
