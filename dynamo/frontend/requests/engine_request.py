"""One engine request of a call: a sink of the request plane, and its share of the counters.

This is the token path: what stands in :meth:`EngineRequest.on_data` is paid for every token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from dynamo.errors import DynamoError, EngineFailure
from dynamo.protocols.codec import decoder
from dynamo.protocols.engine import EngineOutput
from dynamo.router.picker import Decision, Picker
from dynamo.runtime.requests import ClientStream

if TYPE_CHECKING:
    from dynamo.frontend.requests.request import ActiveRequest

__all__ = ["EngineRequest", "Pending", "TrackedEngineRequest"]

log = logging.getLogger(__name__)
_decode = decoder(EngineOutput).decode
_NEVER = 0.0


class Pending(Protocol):
    """What a leg waits for before its worker gets the request."""

    def cancel(self) -> None:
        """Nobody waits any more: nothing is booked or running afterwards. Idempotent."""
        ...


class EngineRequest:
    """Choice ``index`` of ``call``, booked at ``picker`` under ``reservation_id``.

    ``decision`` and ``stream`` are there once it is dispatched; until then ``pending`` may be what
    it waits for. ``reroute`` sends it to another worker, for errors that say that no handler has
    seen it; it is kept until the first token. Times are monotonic seconds.
    """

    __slots__ = (
        "_released",
        "_reported",
        "call",
        "decision",
        "first_at",
        "index",
        "last_at",
        "open",
        "pending",
        "picker",
        "reroute",
        "reservation_id",
        "stream",
        "tokens",
    )

    decision: Decision | None
    stream: ClientStream | None

    def __init__(
        self, call: ActiveRequest, index: int, picker: Picker, reservation_id: str
    ) -> None:
        self.call = call
        self.index = index
        self.picker = picker
        self.reservation_id = reservation_id
        self.decision = None
        self.stream = None
        self.pending: Pending | None = None
        self.reroute: Callable[[DynamoError], None] | None = None
        self.open = True
        self.first_at = _NEVER
        self.last_at = _NEVER
        self.tokens = 0
        self._reported = 0
        self._released = False

    def on_data(self, payload: bytes) -> None:
        """One engine output: to text, and into this turn's news of the call."""
        call = self.call
        if call.closed:
            return
        now = time.monotonic()
        call.heard_at = now
        try:
            output = _decode(payload)
            done = call.generation.push(self.index, output)
        except DynamoError as error:
            call.fail(error, by_worker=True)
            return
        except msgspec.MsgspecError as error:
            call.fail(EngineFailure(f"not an engine output: {error}"), by_worker=True)
            return
        call.text_s += time.monotonic() - now
        count = len(output.token_ids)
        if count:
            if self.tokens:
                gap_s = now - self.last_at
                call.model.itl.observe(gap_s / count, count)
            else:
                self._first_token(now)
            self.tokens += count
            self.last_at = now
        if call.streaming:
            call.has_news(len(payload))
        if done and output.finish_reason is None:
            self._enough()

    def on_end(self) -> None:
        """The engine has nothing more to say."""
        if self.open and not self.call.closed:
            self.call.generation.close(self.index)
            self._finish()

    def on_error(self, error: DynamoError) -> None:
        """The engine or the way to it failed."""
        if not self.open or self.call.closed:
            return
        if error.unsent and self.reroute is not None:
            self.stream = None
            self.reroute(error)
            return
        self.open = False
        self.call.fail(error, by_worker=True)

    def release(self) -> None:
        """Stop the engine if it still runs, free the load. Idempotent."""
        if self._released:
            return
        self._released = True
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.cancel()
        if self.open and self.stream is not None:
            self.stream.kill()
        self.open = False
        self.stream = self.reroute = None  # they know the leg
        if self.decision is None:  # never booked
            return
        self._report()
        self.picker.free(self.reservation_id)

    def _report(self) -> None:
        """Tell the picker of tokens that it does not know of yet."""
        count = self.tokens - self._reported
        if count:
            self._reported = self.tokens
            self.picker.add_output_tokens(self.reservation_id, count)

    def _first_token(self, now: float) -> None:
        self.first_at = now
        self.reroute = None
        self.picker.mark_prefill_complete(self.reservation_id)
        self.call.metrics.first_token(now)

    def _enough(self) -> None:
        """A stop string was found: the engine may end, the text is complete."""
        if self.stream is not None:
            self.stream.kill()
        self._finish()

    def _finish(self) -> None:
        self.open = False
        self.release()
        self.call.leg_done()


class TrackedEngineRequest(EngineRequest):
    """A leg whose tokens are load as they come: where the picker tracks output blocks."""

    __slots__ = ()

    def on_data(self, payload: bytes) -> None:
        """As any leg; the tokens are reported at once."""
        super().on_data(payload)
        if not self._released:
            self._report()
