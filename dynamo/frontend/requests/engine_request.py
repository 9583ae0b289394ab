"""One engine request of an active request: the sink of its worker's stream.

:meth:`EngineRequest.on_data` is the token path: each statement in it is paid for every token.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dynamo.errors import DynamoError, MigrationExhausted
from dynamo.frontend.answer.choice import Choice
from dynamo.frontend.requests.migration import (
    Retries,
    continued,
    without_pin,
    without_prefill_pin,
)
from dynamo.frontend.requests.recent import Prefilled
from dynamo.protocols.codec import encode
from dynamo.protocols.engine import (
    EngineOutput,
    InvalidOutput,
    PreprocessedRequest,
    Routing,
    decode_output,
)
from dynamo.router.decision.decision import Decision
from dynamo.router.decision.receipt import DecisionInputs
from dynamo.runtime import Client
from dynamo.runtime.requests import ClientStream
from dynamo.runtime.requests.stream import REQUEST_ID

if TYPE_CHECKING:
    from dynamo.frontend.requests.dispatch import Dispatch
    from dynamo.frontend.requests.request import ActiveRequest

_NEVER = 0.0


class Pending(Protocol):
    """The entry of an engine request in the queue where it waits.

    The five queues: of the router, of the prefill workers, for the first worker of its model, for a
    turn alone on a worker, and to be sent again.
    """

    def cancel(self) -> None:
        """Leave the queue; nothing is reserved or running afterwards. Idempotent."""


class EngineRequest:
    """Choice ``index`` of ``request``: ``preprocessed`` is sent under ``id`` with ``routing``.

    It alone changes itself: its owner, its queues and the dispatch call a method for each event.
    Of its owner it calls ``sent``, ``computing``, ``output_ready``, ``engine_request_done`` and
    ``fail``, and passes on the comments of its queue; the owner's metrics learn the rest.

    ``id`` is unique among the active requests: the engine identifies the request by it, and the
    picker its reservation. ``pending`` is set while it waits in a queue; ``decision`` and
    ``stream`` once a worker has it; ``answering`` once that worker has sent tokens. ``retries``
    has the workers that failed. ``detokenize_s`` is spent on converting outputs to text. Other
    times are monotonic seconds.

    ``original`` is the request as the client made it; ``inputs`` and ``prefill_inputs`` explain the
    choice of its latest workers.
    """

    __slots__ = (
        "_choice",
        "_counted",
        "_dispatch",
        "_reported",
        "_text_complete",
        "answering",
        "decision",
        "detokenize_s",
        "first_token_s",
        "id",
        "index",
        "inputs",
        "last_token_s",
        "open",
        "original",
        "pending",
        "picker",
        "prefill_inputs",
        "preprocessed",
        "released",
        "request",
        "retries",
        "routing",
        "stream",
        "tokens",
    )

    least_migrations = 0
    """So often it may migrate where the dispatch sets no limit."""

    def __init__(
        self,
        request: ActiveRequest,
        index: int,
        dispatch: Dispatch,
        engine_id: str,
        preprocessed: PreprocessedRequest,
    ) -> None:
        self.request = request
        self.index = index
        self._choice = request.generation.choices[index]
        self.id = engine_id
        self.preprocessed = self.original = preprocessed
        self.routing: Routing | None = preprocessed.routing
        self.picker = dispatch.picker
        self._dispatch = dispatch
        self.retries = Retries(dispatch.migrations, preprocessed, self.least_migrations)
        self.pending: Pending | None = None
        self.decision: Decision | None = None
        self.inputs: DecisionInputs | None = None
        self.prefill_inputs: DecisionInputs | None = None
        self.stream: ClientStream | None = None
        self.open = True
        self._counted = False  # in the request's metrics; a reroute does not count it twice
        self.released = False
        self.answering = False
        self.first_token_s = _NEVER
        self.last_token_s = _NEVER
        self.tokens = 0
        self.detokenize_s = 0.0
        self._reported = 0
        self._text_complete = False

    # -- called by the dispatch and the queues

    def waits(self, pending: Pending) -> None:
        """Note that it waits in a queue, as ``pending``."""
        self.pending = pending

    def continues(self) -> None:
        """Note that it has left its queue."""
        self.pending = None

    def open_stream(self, client: Client, decision: Decision, queued: int) -> None:
        """Send it to the chosen worker; ``queued`` requests are left in the router's queue.

        Raises InstanceGone; :meth:`leave_worker` frees the reservation then.
        """
        chosen_s = time.monotonic()
        self.pending = None
        self.decision, self.inputs = decision, decision.inputs
        preprocessed, routing = self.preprocessed, self.routing
        # The worker gets the decision in its request, rank 0 too: without one it chooses itself.
        preprocessed.estimated_prefix_hit_num_blocks = decision.overlap_blocks or None
        if routing is None:
            routing = Routing(dp_rank=decision.dp_rank)
        else:
            routing = msgspec.structs.replace(routing, dp_rank=decision.dp_rank)
        preprocessed.routing = routing
        self.stream = client.open(decision.worker_id, self.payload(), self, self.headers())
        first, self._counted = not self._counted, True
        self.request.sent(self, decision, queued, chosen_s, first)

    @property
    def ended(self) -> bool:
        """Whether it, or its request, has ended: nothing may be sent for it."""
        return not self.open or self.request.closed

    def routed(self, phase: str) -> None:
        """Note that a worker for ``phase``, one of ``PHASES``, is being chosen."""
        self.request.metrics.routed(phase)

    def retry_anywhere(self) -> None:
        """Let any worker have it again, those that failed and left too."""
        self.retries.retry_all()
        self.routing = without_prefill_pin(self.routing)

    def give_up(self, error: BaseException, by_worker: bool = False) -> None:
        """End the request with ``error``; ``by_worker``: a prefill worker has reported it."""
        self.request.fail(error, by_worker)

    def lost_all_workers(self, pending: Pending) -> None:
        """Note that it waits, as ``pending``, for the first worker of its model."""
        self.waits(pending)
        self.request.metrics.waits_for_worker()

    def waited_for_worker(self, since_s: float) -> None:
        """Note the end of a wait that began at ``since_s``; it is no gap between tokens."""
        now_s = time.monotonic()
        self.pending = None
        self.request.metrics.waited_for_worker(since_s, now_s)
        if self.tokens:
            self.last_token_s = now_s

    def has_worker(self) -> None:
        """Go on: a worker of its model answers again."""
        self.request.metrics.has_worker()
        self.retries.retry_all()

    def comment(self, text: bytes) -> None:
        """Send the client a comment while it waits, if its answer is a stream."""
        self.request.keep_alive(text)

    # -- called by its owner

    def client_reads(self, reads: bool) -> None:
        """Note whether the client reads, or its text accumulates. A relayed answer pauses then."""

    # -- called by the prefill step

    def prefill_chosen(self, inputs: DecisionInputs | None) -> None:
        """Note the ``inputs`` by which a prefill worker was chosen."""
        self.prefill_inputs = inputs

    def prefill_started(self) -> float:
        """Note that a prefill worker computes the prompt; return since when (monotonic seconds)."""
        self.request.computing(True)
        self.request.metrics.prefilling()
        return self.request.last_activity_s

    def prefill_failed(self) -> None:
        """Note that the prefill worker has failed."""
        self.request.computing(False)

    def prefilled(self, done: Prefilled, preprocessed: PreprocessedRequest) -> None:
        """Note that the prompt is computed: a decode worker gets ``preprocessed``."""
        metrics = self.request.metrics
        metrics.prefilled = metrics.prefilled or done  # the first one is shown to the client
        self.request.last_activity_s = done.done_s
        self.request.computing(False)
        self.preprocessed = preprocessed

    # -- the sink of the stream

    def payload(self) -> bytes:
        """The message for the worker."""
        return encode(self.preprocessed)

    def headers(self) -> dict[str, str]:
        """The headers of the message: the id, and the trace context if there is one."""
        trace = self.request.trace
        return {REQUEST_ID: self.id} if trace is None else {**trace.headers, REQUEST_ID: self.id}

    def on_data(self, payload: bytes) -> None:
        """Convert one engine output to text and count its tokens."""
        request = self.request
        if request.closed:
            return
        now = request.last_activity_s = time.monotonic()
        # Whatever a worker sends must not end the connection, which other requests share.
        try:
            output = decode_output(payload, self.original)
            text_complete = self._text_complete = self._choice.push(output)
        except InvalidOutput as error:
            request.fail(error.at(self.decision.worker_id if self.decision else 0), by_worker=True)
            return
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; fail() logs it
            request.fail(error)
            return
        self.detokenize_s += time.monotonic() - now
        if output.token_ids:
            self._add_tokens(output.token_ids, now, len(output.token_ids))
        elif output.text:  # without its tokens it cannot be continued
            self.retries.bare_text()
        if request.streaming:
            request.output_ready(len(payload))
        # Last: what the sink takes from now on comes behind this output.
        if not text_complete:
            self._pass_tokens()
        elif output.finish_reason is None:
            self._stop_early()

    def on_tokens(self, ids: list[int], size_bytes: int, now_s: float, spent_s: float) -> None:
        """Count tokens whose texts are in the choice: those of most reads, without ``on_data``."""
        request = self.request
        if request.closed:
            return
        choice: Any = self._choice  # a Choice: see _pass_tokens
        request.last_activity_s = now_s
        self.detokenize_s += spent_s
        choice.count(ids)
        self._add_tokens(ids, now_s, 1)
        if request.streaming:
            request.output_ready(size_bytes)

    def on_end(self) -> None:
        """The engine has ended its output."""
        request = self.request
        if self.open and not request.closed:
            try:
                if not self._text_complete:
                    self._choice.close()
                if self.retries.migration is not None:
                    self.retries.end("success")
            except BaseException as error:  # noqa: BLE001 - fail() logs it
                request.fail(error)
                return
            self.open = False
            self.release()
            request.engine_request_done()

    def on_error(self, error: DynamoError) -> None:
        """Go on with another worker if the error allows it, else fail the request."""
        if self.ended:
            return
        try:
            self._dispatch.worker_failed(self, error)
        except BaseException as unexpected:  # noqa: BLE001 - fail() logs it
            self.request.fail(unexpected)

    @property
    def can_migrate(self) -> bool:
        """Whether another worker can continue exactly here, ignoring the limit."""
        return self.retries.can_continue(self.tokens)

    def leave_worker(self, error: DynamoError) -> int:
        """Free the reservation at a worker that failed; return its id."""
        decision, self.decision = self.decision, None
        assert decision is not None, "only a request with a worker leaves it"
        if self.stream is not None:  # else it was never sent
            self.stream = None
            self.request.computing(False)
        self.answering = False
        # The picker counts output tokens once, here or as they arrive; the next worker starts at 0.
        self.picker.free(self.id, self.tokens - self._reported)
        self._reported = self.tokens
        self.retries.leave(decision.worker_id, error)
        return decision.worker_id

    def migrate(self, error: DynamoError) -> int:
        """Leave a worker that failed, and make the request for the next: with the tokens so far."""
        worker_id = self.leave_worker(error)
        # The last worker had the tokens of those before it behind its prompt, and generated the
        # rest: so much less output is expected of the next one.
        before = len(self.preprocessed.token_ids) - len(self.original.token_ids)
        self.preprocessed = continued(self.original, self.retries.generated, worker_id)
        self.routing = without_pin(self.routing, worker_id, self.tokens - before)
        if self.tokens and isinstance(self._choice, Choice):
            self._choice.continued()
        return worker_id

    def fail(self, error: DynamoError) -> None:
        """End the request with an error of the workers."""
        self.open = False
        self.retries.end("failure")
        self.request.fail(error, by_worker=True)

    def _add_tokens(self, ids: list[int], now_s: float, first: int) -> None:
        """Count and keep the tokens ``ids``: ``first`` of one item, then items of one each."""
        # An item of several tokens took one gap, which its tokens share.
        if self.answering:
            self.request.model.itl.observe((now_s - self.last_token_s) / first, first)
        else:
            self._answer_begins(now_s, first)
        count = len(ids)
        if count > first:  # received at the same time
            self.request.model.itl.observe(0.0, count - first)
        self.tokens += count
        self.last_token_s = now_s
        generated = self.retries.generated
        if generated is not None:
            generated.fromlist(ids)
            if self.tokens > self.retries.kept_tokens:
                self.retries.outgrown()
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
        else:
            stream.keep_tokens()

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
        if self.retries.lost:
            self._dispatch.trial_over(self)
        if self.retries.migration is not None:
            self.retries.end("cancelled")

    def _stop_early(self) -> None:
        """A stop string ended the text before the engine ended its output."""
        if self.stream is not None:
            # stop() first: the engine counts a finished request. kill() ends any handler.
            self.stream.stop()
            self.stream.kill()
        self.open = False
        self.release()
        self.request.engine_request_done()

    def _answer_begins(self, now: float, count: int) -> None:
        """The worker has computed the prompt, and sent ``count`` tokens."""
        self.answering = True
        if self.retries.lost:
            self._dispatch.trial_over(self)
        self.picker.mark_prefill_complete(self.id)
        if self.tokens:  # those of workers that failed
            self.request.model.itl.observe((now - self.last_token_s) / count, count)
        else:
            self.first_token_s = now
            self.request.metrics.first_token(now)
        if self.retries.migration is not None:
            self.retries.end("success")

    def is_complete(self) -> bool:
        """Whether nothing is left to generate, although the worker has not ended its output."""
        if self._text_complete:
            return True
        limit = self.original.stop_conditions.max_tokens
        if limit is None or self.tokens < limit:
            return False
        self._text_complete = self._choice.push(EngineOutput(finish_reason="length"))
        if self.request.streaming:
            self.request.output_ready(0)
        return self._text_complete

    def exhausted(self, error: DynamoError) -> DynamoError:
        """The error after the last migration; without any limit that of the worker."""
        limited = self._dispatch.migrations.limit
        return MigrationExhausted("Migration limit exhausted") if limited else error
