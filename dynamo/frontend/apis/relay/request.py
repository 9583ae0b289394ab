"""A request that goes to its worker whole, and an answer that comes back ready for the client.

The rest is as for every request: admission, queue, choice of a worker, load, metrics, disconnect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Protocol

from dynamo.errors import Disconnected, DynamoError, EngineFailure, HttpFailure, shorten
from dynamo.frontend.answer.generation import Answer
from dynamo.frontend.answer.pooling import PoolingAnswer
from dynamo.frontend.apis.relay.http_answer import EVENTS, HttpAnswer
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.errors import labels
from dynamo.frontend.requests.request import ActiveRequest, ResponseWriter
from dynamo.http import NEVER
from dynamo.protocols.codec import encode
from dynamo.protocols.engine import DP_RANK, PreprocessedEmbeddingRequest, PreprocessedRequest

_OK = 200
_SHOWN_ERROR = 500
"""Characters of an error body that a stream shows which has begun already."""
_PLAIN_TYPES = frozenset(("application/json", "text/event-stream", "text/plain"))


class _BrokenOff(Disconnected):
    """The server ended the connection without the rest of its answer; clients get the text."""

    code = "unavailable"


class RelayedAnswer(Answer, Protocol):
    """An answer made of a worker's raw items; see :class:`HttpAnswer` and :class:`TextAnswer`."""

    streams: bool

    @property
    def begun(self) -> bool:
        """Whether a part of the body has arrived: no other worker can start over."""

    def receive(self, payload: bytes, /) -> int | None:
        """Add an item; return the tokens in it, None if it is no part of the body."""

    def close(self) -> None:
        """The worker has sent the last item."""


class HttpResponseWriter(ResponseWriter):
    """Sends ``answer`` of another HTTP server with that server's status and headers."""

    def __init__(self, answer: HttpAnswer) -> None:
        self._answer = answer

    def may_comment(self, request: ActiveRequest) -> bool:
        """Whether the server has begun to send events, and none is incomplete."""
        return self._answer.can_add_event and not request.output_deferred

    def start(self, request: ActiveRequest) -> None:
        """Begin the response. Raises HttpFailure if comments have begun another one."""
        answer = self._answer
        head = answer.head
        assert head is not None, "the body follows the head"
        answer.begun = True  # a comment may have come first: the head is sent
        if not request.exchange.started:
            request.exchange.start(head.status, *self._headers(request))
        elif head.status != _OK:  # the response has begun with the progress of the load
            raise HttpFailure(f"the server responded with status {head.status}", head.status)

    def complete(self, request: ActiveRequest) -> None:
        """Send the rest of the response; a status of an error counts as a failure."""
        answer, exchange = self._answer, request.exchange
        head = answer.head
        assert head is not None, "a response without a head has failed"
        if request.streaming:
            try:
                request.start()
            except HttpFailure as error:
                request.fail(error, by_worker=True)
                return
            exchange.end(answer.end())
        elif exchange.started:  # with the progress of the load
            text = shorten(answer.unary().decode(errors="replace"), _SHOWN_ERROR)
            request.fail(HttpFailure(text, head.status), by_worker=True)
            return
        else:
            exchange.respond(head.status, answer.unary(), *self._headers(request))
        request.close(labels(HttpFailure("", head.status), True) if head.status >= 400 else None)

    def break_off(self, request: ActiveRequest, error: DynamoError) -> None:
        """Add an event to a stream of events; cut everything else."""
        if self._answer.can_add_event:
            # The client of each API has to find the error: without one, its stream looks complete.
            request.exchange.end(self._answer.flush() + request.error_shape.event(error))
        else:
            request.exchange.abort()

    def _headers(self, request: ActiveRequest) -> tuple[str, list[tuple[str, str]]]:
        """The content type, "" if it is one of the headers, and the headers."""
        answer = self._answer
        content_type, headers = answer.content_type, [*answer.headers, *request.headers]
        # Our server keeps a head for each content type: of the common ones alone, not of any.
        if content_type in _PLAIN_TYPES or not content_type:
            return content_type, headers
        # Nginx holds events back without it; our own streams have it, too.
        if content_type.lower().startswith(EVENTS):
            headers.insert(0, ("x-accel-buffering", "no"))
        return "", [("content-type", content_type), *headers]


class PoolingWriter(ResponseWriter):
    """Sends vectors. A long answer is sent in pieces, one in a turn of the loop, as fast as the
    client reads them: neither the loop nor the memory has to bear all of it at once."""

    def start(self, request: ActiveRequest) -> None:
        """Begin a body that is sent in pieces."""
        request.exchange.start(200, "application/json", request.headers)

    def complete(self, request: ActiveRequest) -> None:
        """Send the vectors, or the first of them."""
        answer = request.generation
        assert isinstance(answer, PoolingAnswer)
        if answer.is_short:
            super().complete(request)
            return
        request.start()
        pieces = _Pieces(request, answer.pieces())
        request.exchange.on_drain = pieces.send_next
        pieces.send_next()

    def break_off(self, request: ActiveRequest, error: DynamoError) -> None:
        """Cut the body, which looks like one that is cut."""
        request.exchange.abort()


class _Pieces:
    """The rest of the body of ``request``."""

    def __init__(self, request: ActiveRequest, pieces: Iterator[bytes]) -> None:
        self._request = request
        self._pieces = pieces
        self._turn: asyncio.Handle | None = None

    def send_next(self) -> None:
        """Send the next piece and schedule the one after it; ``on_drain`` goes on later."""
        # on_drain may call while a turn is scheduled: two of them would double the rate.
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        request, exchange = self._request, self._request.exchange
        if request.closed or exchange.above_high_water:
            return
        try:
            piece = next(self._pieces, b"")
            if piece:
                exchange.write(piece)
                self._turn = asyncio.get_running_loop().call_soon(self.send_next)
            else:
                exchange.end()
                request.close(None)
        except BaseException as error:  # noqa: BLE001 - fail() logs it
            request.fail(error)


class RelayedEngineRequest(EngineRequest):
    """The only engine request of a relayed one. ``message`` is sent in place of ``preprocessed``,
    which has the prompt and the routing for the router; inputs to embed get that routing, too."""

    __slots__ = ("_answer", "_message")

    least_migrations = 1
    """A request that a lost worker may have received is sent again this often: if it is what ends
    workers, it must not end all of them."""

    def __init__(
        self,
        request: ActiveRequest,
        answer: RelayedAnswer,
        dispatch: Dispatch,
        preprocessed: PreprocessedRequest,
        message: bytes | PreprocessedEmbeddingRequest,
    ) -> None:
        super().__init__(request, 0, dispatch, request.engine_id, preprocessed)
        self._answer = answer
        self._message = message

    def payload(self) -> bytes:
        """The message for the worker."""
        message = self._message
        if isinstance(message, bytes):
            return message
        message.routing = self.preprocessed.routing
        return encode(message)

    def headers(self) -> dict[str, str]:
        """Those of every message; for an HTTP request also the rank of the decision, which the
        client's headers cannot have: a worker in front of several ranks gives it to the server."""
        decision, headers = self.decision, super().headers()
        if decision is not None and isinstance(self._answer, HttpAnswer):
            headers[DP_RANK] = str(decision.dp_rank)
        return headers

    def client_reads(self, reads: bool) -> None:
        """Pause the worker while the client reads too slowly."""
        if self.stream is not None and reads:
            self.stream.resume()
        elif self.stream is not None:
            self.stream.pause()
        # A paused worker is not silent: the connection bounds how long a client may read nothing.
        self.request.last_activity_s = time.monotonic() if reads else NEVER

    def leave_worker(self, error: DynamoError) -> int:
        """As every request; another server sends another head."""
        if isinstance(self._answer, HttpAnswer):
            self._answer.restart()
        return super().leave_worker(error)

    def on_data(self, payload: bytes) -> None:
        """Pass an item on and count its tokens."""
        request = self.request
        if request.closed:
            return
        now = time.monotonic()
        if request.last_activity_s != NEVER:  # else the worker is paused
            request.last_activity_s = now
        try:
            count = self._answer.receive(payload)
        except DynamoError as error:
            request.fail(error, by_worker=True)
            return
        request.decide_streaming(self._answer.streams)
        if count is None:
            return
        if not self.first_token_s:
            self._message = b""  # no other worker gets it now
            self._answer_begins(now, 1)
            self.last_token_s = now
        if count:
            self._count(count, now)
        if request.streaming:
            request.output_ready(len(payload))

    def on_end(self) -> None:
        """The worker has sent the whole answer."""
        request = self.request
        if not self.open or request.closed:
            return
        try:
            self._answer.close()
            if not self._answer.begun:
                raise EngineFailure("the worker ended without a response")
        except DynamoError as error:
            request.fail(error, by_worker=True)
            return
        except BaseException as error:  # noqa: BLE001 - fail() logs it
            request.fail(error)
            return
        self.tokens = max(self.tokens, self._answer.usage().completion_tokens)
        self.open = False
        self.release()
        request.engine_request_done()

    @property
    def can_migrate(self) -> bool:
        """Whether nothing of the body has arrived: a relayed answer cannot be continued."""
        return not self._answer.begun

    def fail(self, error: DynamoError) -> None:
        """End the request with an error of the workers, whose text says what the server did."""
        if isinstance(error, Disconnected):
            peer = "server" if isinstance(self._answer, HttpAnswer) else "worker"
            did = "broke off its answer" if self._answer.begun else "closed the connection at once"
            error = _BrokenOff(f"The {peer} of this model {did}; see its log")
        super().fail(error)

    def exhausted(self, error: DynamoError) -> DynamoError:
        """The error itself: it says more than how often a request was sent."""
        return error

    def _count(self, count: int, now: float) -> None:
        if self.tokens:
            gap_s = now - self.last_token_s
            self.request.model.itl.observe(gap_s / count, count)
        self.tokens += count
        self.last_token_s = now
        if self._dispatch.tracks_output:
            self._reported = self.tokens
            self.picker.add_output_tokens(self.id, count)
