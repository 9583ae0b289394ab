"""A request that goes to its worker whole, and an answer that comes back ready for the client.

The rest is as for every request: admission, queue, choice of a worker, load, metrics, disconnect.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from dynamo.errors import Disconnected, DynamoError, EngineFailure, HttpFailure, shorten
from dynamo.frontend.answer.embeddings import EmbeddingsAnswer
from dynamo.frontend.answer.generation import Answer
from dynamo.frontend.answer.sse import KEEP_ALIVE
from dynamo.frontend.apis.relay.http_answer import EVENTS, HttpAnswer
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.errors import labels
from dynamo.frontend.requests.metrics import ModelMetrics
from dynamo.frontend.requests.recent import RequestInfo
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.requests.request import ActiveRequest
from dynamo.http import NEVER, Exchange
from dynamo.protocols.codec import encode
from dynamo.protocols.engine import DP_RANK, PreprocessedEmbeddingRequest, PreprocessedRequest

_LOST_WORKERS = 1
"""A request that a lost worker may have received is sent again this often: if it is what ends
workers, it must not end all of them."""
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


class RelayedActiveRequest(ActiveRequest):
    """An active request whose worker pauses while the client reads too slowly."""

    __slots__ = ("_paused",)

    def __init__(
        self,
        shared: RequestRegistry,
        exchange: Exchange,
        info: RequestInfo,
        model: ModelMetrics,
        stream: bool,
    ) -> None:
        super().__init__(shared, exchange, info, model, stream)
        self._paused = False

    def flush(self) -> None:
        """Write the output since the last flush; pause the worker if the client is behind."""
        super().flush()
        behind = bool(self._held_bytes)
        if self.closed or behind == self._paused:
            return
        self._paused = behind
        for one in self.engine_requests:
            if one.stream is not None and behind:
                one.stream.pause()
            elif one.stream is not None:
                one.stream.resume()
        # A paused worker is not silent: the connection bounds how long a client may read nothing.
        self.last_activity_s = NEVER if behind else time.monotonic()


class RelayedHttpRequest(RelayedActiveRequest):
    """A request to another HTTP server: its response has the server's status and headers."""

    __slots__ = ()

    generation: HttpAnswer

    def engine_stopped(self) -> None:
        """Another worker gets the request now."""
        super().engine_stopped()
        self.generation.restart()

    def keep_alive(self, comment: bytes = KEEP_ALIVE) -> None:
        """Send a comment between two events of the server, once it has begun to send events."""
        if self.generation.can_add_event and not self._output_deferred:
            super().keep_alive(comment)

    def _complete(self) -> None:
        answer = self.generation
        head = answer.head
        assert head is not None, "a response without a head has failed"
        if self.streaming:
            try:
                if not self._started:
                    self._start()
            except HttpFailure as error:
                self.fail(error, by_worker=True)
                return
            self.exchange.end(answer.end())
        elif self.exchange.started:  # with the progress of the load
            text = shorten(answer.unary().decode(errors="replace"), _SHOWN_ERROR)
            self.fail(HttpFailure(text, head.status), by_worker=True)
            return
        else:
            content_type, headers = self._response_headers()
            self.exchange.respond(head.status, answer.unary(), content_type, headers)
        self._close(labels(HttpFailure("", head.status), True) if head.status >= 400 else None)

    def _end_with(self, error: DynamoError) -> None:
        if self.generation.can_add_event:
            # The client of each API has to find the error: without one, its stream looks complete.
            event = self._shared.error_shape(self.info.endpoint, self.exchange).event(error)
            self.exchange.end(self.generation.flush() + event)
        else:
            self.exchange.abort()

    def _start(self) -> None:
        head = self.generation.head
        assert head is not None, "the body follows the head"
        self.generation.begun = True  # a comment may have come first: the head is sent
        if not self.exchange.started:
            self.exchange.start(head.status, *self._response_headers())
        elif head.status != _OK:  # the response has begun with the progress of the load
            raise HttpFailure(f"the server responded with status {head.status}", head.status)
        self._started = True
        self.exchange.on_drain = self.flush

    def _response_headers(self) -> tuple[str, list[tuple[str, str]]]:
        """The content type, if heads with it are worth keeping, and the other headers."""
        answer = self.generation
        content_type, headers = answer.content_type, [*answer.headers, *self._headers]
        if content_type in _PLAIN_TYPES or not content_type:
            return content_type, headers
        if content_type.lower().startswith(EVENTS):
            headers.insert(0, ("x-accel-buffering", "no"))
        return "", [("content-type", content_type), *headers]


class EmbeddingRequest(RelayedActiveRequest):
    """A request for vectors. A long answer is sent in pieces, one in a turn of the loop, as fast as
    the client reads them: neither the loop nor the memory has to bear all of it at once."""

    __slots__ = ("_next_piece", "_pieces")

    generation: EmbeddingsAnswer

    def _complete(self) -> None:
        if self.generation.is_short:
            super()._complete()
            return
        self._started = True
        self._pieces = self.generation.pieces()
        self._next_piece: asyncio.Handle | None = None
        self.exchange.on_drain = self._send_piece
        self.exchange.start(200, "application/json", self._headers)
        self._send_piece()

    def _send_piece(self) -> None:
        """Send the next piece and schedule the one after it; ``on_drain`` goes on later."""
        if self._next_piece is not None:
            self._next_piece.cancel()
            self._next_piece = None
        exchange = self.exchange
        if self.closed or exchange.above_high_water:
            return
        try:
            piece = next(self._pieces, b"")
            if piece:
                exchange.write(piece)
                self._next_piece = asyncio.get_running_loop().call_soon(self._send_piece)
            else:
                exchange.end()
                self._close(None)
        except BaseException as error:  # noqa: BLE001 - crashed() logs it
            self.crashed(error)

    def _end_with(self, error: DynamoError) -> None:
        self.exchange.abort()  # a body that is cut looks like one


class RelayedEngineRequest(EngineRequest):
    """The only engine request of a relayed one. ``message`` is sent in place of ``preprocessed``,
    which has the prompt and the routing for the router; inputs to embed get that routing, too."""

    __slots__ = ("_answer", "_message")

    def __init__(
        self,
        request: RelayedActiveRequest,
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
        request.streaming = self._answer.streams
        if count is None:
            return
        if not self.first_token_s:
            self._message = b""  # no other worker gets it now
            self.answering = True
            if self.lost:
                self._dispatch.trial_over(self)
            self.first_token_s = self.last_token_s = now
            self.picker.mark_prefill_complete(self.id)
            request.metrics.first_token(now)
            self._migrated("success")
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
        except BaseException as error:  # noqa: BLE001 - crashed() logs it
            request.crashed(error)
            return
        self.tokens = max(self.tokens, self._answer.usage().completion_tokens)
        self.open = False
        self.release()
        request.engine_request_done()

    @property
    def can_migrate(self) -> bool:
        """Whether nothing of the body has arrived: a relayed answer cannot be continued."""
        return not self._answer.begun

    @property
    def migration_limit(self) -> int:
        """As for every request, and at least one."""
        return super().migration_limit or _LOST_WORKERS

    def fail(self, error: DynamoError) -> None:
        """End the request with an error of the workers, whose text says what the server did."""
        if isinstance(error, Disconnected):
            what = "server" if isinstance(self._answer, HttpAnswer) else "worker"
            did = "broke off its answer" if self._answer.begun else "closed the connection at once"
            error = _BrokenOff(f"The {what} of this model {did}; see its log")
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
