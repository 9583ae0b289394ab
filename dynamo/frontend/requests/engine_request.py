"""One engine request of an active request: the sink of its worker's stream.

:meth:`EngineRequest.on_data` is the token path: each statement in it is paid for every token.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec

from dynamo.errors import DynamoError, EngineFailure
from dynamo.frontend.answer.choice import Choice
from dynamo.frontend.answer.interface import Answer
from dynamo.frontend.requests.metrics import ModelMetrics
from dynamo.frontend.requests.request_metrics import Prefilled, RequestMetrics
from dynamo.protocols.codec import decoder, encode
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest, Routing
from dynamo.router.picker import Decision, Picker
from dynamo.runtime.requests import ClientStream

__all__ = ["EngineRequest", "Pending", "RequestOwner", "Rerouter"]

_decode = decoder(EngineOutput).decode
_NEVER = 0.0


class Pending(Protocol):
    """A queue entry of an engine request that has no worker yet."""

    def cancel(self) -> None:
        """Leave the queue; nothing is reserved or running afterwards. Idempotent."""
        ...


class Rerouter(Protocol):
    """Sends an engine request to another worker; see :class:`Dispatch`."""

    picker: Picker
    tracks_output: bool

    def reroute(self, engine_request: EngineRequest, error: DynamoError) -> None:
        """Choose a worker again after ``error`` of one that has not seen the request."""
        ...


class RequestOwner(Protocol):
    """The active request that an engine request belongs to; see :class:`ActiveRequest`."""

    closed: bool
    streaming: bool
    generation: Answer
    model: ModelMetrics
    metrics: RequestMetrics
    last_activity_s: float
    detokenize_s: float

    def sent(
        self, engine_request: EngineRequest, decision: Decision, queued: int, chosen_s: float
    ) -> None:
        """A worker has the engine request."""

    def engine_started(self) -> float:
        """A worker computes for the engine request from now on (monotonic seconds, returned)."""

    def engine_stopped(self) -> None:
        """No worker computes for the engine request now."""

    def prefilled(self, done: Prefilled) -> None:
        """A prefill worker has computed the prompt."""

    def output_ready(self, size_bytes: int) -> None:
        """The generation has new output for a streaming client."""

    def engine_request_done(self) -> None:
        """The engine request has ended without an error."""

    def fail(self, error: DynamoError, by_worker: bool = False) -> None:
        """End the request with ``error``."""

    def crashed(self, error: BaseException) -> None:
        """End the request after an unexpected exception."""


class EngineRequest:
    """Choice ``index`` of ``request``: ``preprocessed`` is sent under ``id`` with ``routing``.

    ``id`` is unique among the active requests: the engine identifies the request by it, and the
    picker its reservation. ``pending`` is set while it waits in a queue; ``decision`` and
    ``stream`` once a worker has it. ``tried`` are workers that could not be reached, ``last_error``
    is the error of the last of them. Times are monotonic seconds.
    """

    __slots__ = (
        "_choice",
        "_dispatch",
        "_reported",
        "_text_complete",
        "counted",
        "decision",
        "first_token_s",
        "id",
        "index",
        "last_error",
        "last_token_s",
        "open",
        "pending",
        "picker",
        "preprocessed",
        "released",
        "request",
        "routing",
        "stream",
        "tokens",
        "tried",
    )

    def __init__(
        self,
        request: RequestOwner,
        index: int,
        dispatch: Rerouter,
        engine_id: str,
        preprocessed: PreprocessedRequest,
    ) -> None:
        self.request = request
        self.index = index
        self._choice = request.generation.choices[index]
        self.id = engine_id
        self.preprocessed = preprocessed
        self.routing: Routing | None = preprocessed.routing
        self.picker = dispatch.picker
        self._dispatch = dispatch
        self.tried: frozenset[int] = frozenset()
        self.last_error: DynamoError | None = None
        self.pending: Pending | None = None
        self.decision: Decision | None = None
        self.stream: ClientStream | None = None
        self.open = True
        self.counted = False  # in the request's metrics; a reroute does not count it twice
        self.released = False
        self.first_token_s = _NEVER
        self.last_token_s = _NEVER
        self.tokens = 0
        self._reported = 0
        self._text_complete = False

    def payload(self) -> bytes:
        """The message for the worker."""
        return encode(self.preprocessed)

    def on_data(self, payload: bytes) -> None:
        """Convert one engine output to text and count its tokens."""
        request = self.request
        if request.closed:
            return
        now = time.monotonic()
        request.last_activity_s = now
        try:
            output = _decode(payload)
            text_complete = self._text_complete = self._choice.push(output)
        except DynamoError as error:
            request.fail(error, by_worker=True)
            return
        except msgspec.MsgspecError as error:
            request.fail(EngineFailure(f"not an engine output: {error}"), by_worker=True)
            return
        request.detokenize_s += time.monotonic() - now
        if output.token_ids:
            self._count(len(output.token_ids), now)
        if request.streaming:
            request.output_ready(len(payload))
        if not text_complete:
            self._pass_tokens()
        elif output.finish_reason is None:
            # A stop string ended the text before the engine ended its output.
            if self.stream is not None:
                self.stream.kill()
            self.open = False
            self.release()
            request.engine_request_done()

    def on_tokens(self, ids: list[int], size_bytes: int, now_s: float, spent_s: float) -> None:
        """Count tokens whose texts are in the choice: those of most reads, without ``on_data``."""
        request = self.request
        if request.closed:
            return
        choice: Any = self._choice  # a Choice: see _pass_tokens
        request.last_activity_s = now_s
        request.detokenize_s += spent_s
        choice.count(len(ids))
        for _ in ids:
            self._count(1, now_s)
        if request.streaming:
            request.output_ready(size_bytes)

    def on_end(self) -> None:
        """The engine has ended its output."""
        request = self.request
        if self.open and not request.closed:
            if not self._text_complete:
                self._choice.close()
            self.open = False
            self.release()
            request.engine_request_done()

    def on_error(self, error: DynamoError) -> None:
        """Reroute if no worker has seen the request, else fail it."""
        if not self.open or self.request.closed:
            return
        if error.unsent and not self.first_token_s and self.decision is not None:
            self.stream = None
            self.request.engine_stopped()
            self._dispatch.reroute(self, error)
            return
        self.open = False
        self.request.fail(error, by_worker=True)

    def _count(self, count: int, now_s: float) -> None:
        """Count ``count`` tokens received at ``now_s``."""
        request = self.request
        if self.tokens:
            gap_s = now_s - self.last_token_s
            request.model.itl.observe(gap_s / count, count)
        else:
            self.first_token_s = now_s
            self.picker.mark_prefill_complete(self.id)
            request.metrics.first_token(now_s)
        self.tokens += count
        self.last_token_s = now_s
        if self._dispatch.tracks_output:  # tokens count as load as they arrive
            self._reported = self.tokens
            self.picker.add_output_tokens(self.id, count)

    def _pass_tokens(self) -> None:
        """Let the compiled sink take the next tokens, if their texts are all that they add."""
        choice, stream = self._choice, self.stream
        if stream is None or not isinstance(choice, Choice):
            return
        texts = choice.plain_texts()
        if texts is not None:
            stream.pass_tokens(texts, choice.stop_ids, choice.pending, self.on_tokens)

    def release(self) -> None:
        """Leave the queue, stop the engine if it still runs, free the reservation. Idempotent."""
        if self.released:
            return
        self.released = True
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.cancel()
        stream, self.stream = self.stream, None  # without a cycle, reference counts free both
        if self.open and stream is not None:
            stream.kill()
        self.open = False
        if self.decision is not None:
            self.picker.free(self.id, self.tokens - self._reported)
