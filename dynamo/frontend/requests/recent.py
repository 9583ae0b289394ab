"""The requests that ended last, for ``/v1/requests``, ``dynamo explain``, ``top`` and ``/ui``.

The figures that a request collected are kept as they are; a :class:`RequestRecord` is made when it
is read.
"""

from __future__ import annotations

import heapq
import re
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dynamo.errors import InvalidArgument, ModelNotFound, shorten
from dynamo.frontend.answer.generation import Usage
from dynamo.frontend.requests.headers import request_id
from dynamo.http import NEVER, Exchange
from dynamo.observability.tracing import OpenSpan
from dynamo.protocols.status import RecentList, RequestRecord, RouteReceipt
from dynamo.router.decision.decision import Decision
from dynamo.router.decision.receipt import DecisionInputs

if TYPE_CHECKING:
    from dynamo.observability.otel import OtelTracing

_ROUTED = 1000
_REFUSED = 200
_DIGITS = 6
"""Of seconds that are shown: microseconds."""
CLIENT_ID_CHARACTERS = 128
"""So much of a text that a client chose is kept."""
WORKER_WAIT = "worker_wait"
"""The stage of a request that waits for the first worker of its model."""
_PREFIXES = re.compile(r"(?:chatcmpl|cmpl|embd|resp|msg)[-_]")
_SECRET = re.compile(r"-[0-9a-f]{32}$")
"""The end of the id of a response that is stored."""
_SPAN = "http-request"
_NO_ERROR = ("ok", "cancelled", "validation", "not_found")
"""Outcomes without the status ERROR: OpenTelemetry blames a server for its own failures alone."""


class Prefilled(NamedTuple):
    """The prefill worker of a prompt, the blocks of it that the worker had cached, and when the
    worker received and finished the prompt (monotonic seconds)."""

    worker_id: int
    dp_rank: int
    overlap_blocks: int
    prompt_blocks: int
    sent_s: float
    done_s: float


class RequestInfo(NamedTuple):
    """The ``endpoint`` label of the counters, the request's id, and the client's own id, if any,
    which the response echoes."""

    endpoint: str
    request_id: str
    echoed_id: str | None


class RequestFigures(msgspec.Struct):
    """The figures of one request. Moments are monotonic seconds, 0 if it did not get so far.

    ``model`` is its name, ``key`` that of the client's API key. ``resumed_s`` is when its model got
    a worker, ``rerouted_s`` the same if the workers left while it was prepared; infinite while it
    waits. ``lost_prefill_s`` and ``lost_decode_s`` are the seconds of these stages in which the
    model had no worker. ``sent_s`` is when its (decode) worker was chosen, ``prefilled`` the step
    of a prefill worker before that; ``inputs`` and ``prefill_inputs`` explain the choices.
    ``outcome`` and what follows from the engines' output are set when it ends.
    """

    info: RequestInfo
    model: str
    received_s: float
    outcome: str = ""
    ended_s: float = 0.0
    resumed_s: float = 0.0
    prepared_s: float = 0.0
    rerouted_s: float = 0.0
    lost_prefill_s: float = 0.0
    lost_decode_s: float = 0.0
    sent_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    prompt_tokens: int = 0
    overlap_blocks: int = 0
    prompt_blocks: int = 0
    key: str = ""
    usage: Usage | None = None
    decision: Decision | None = None
    prefilled: Prefilled | None = None
    migrations: int = 0
    inputs: DecisionInputs | None = None
    prefill_inputs: DecisionInputs | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None without one."""
        return self.first_token_s - self.received_s if self.first_token_s else None

    def worker_wait_s(self) -> float:
        """Seconds without any worker of its model."""
        spans = self.stages()
        first_s = sum(ended_s - begun_s for name, begun_s, ended_s in spans if name == WORKER_WAIT)
        return first_s + self.lost_prefill_s + self.lost_decode_s

    def explained(self) -> RequestRecord:
        """As :meth:`record`, with the receipts of its routes."""
        return msgspec.structs.replace(
            self.record(), route=_receipt(self.inputs), prefill_route=_receipt(self.prefill_inputs)
        )

    def record(self) -> RequestRecord:
        """Return what operators see."""
        usage, decision, prefilled = self.usage, self.decision, self.prefilled
        stage_s: dict[str, float] = {}
        for name, begun_s, ended_s in self.stages():
            stage_s[name] = round(stage_s.get(name, 0.0) + ended_s - begun_s, _DIGITS)
        # Waits for a worker within a stage are shown apart, so the sum stays the duration.
        for name, lost_s in (("prefill", self.lost_prefill_s), ("decode", self.lost_decode_s)):
            if lost_s:
                stage_s[name] = round(max(stage_s.get(name, 0.0) - lost_s, 0.0), _DIGITS)
                stage_s[WORKER_WAIT] = round(stage_s.get(WORKER_WAIT, 0.0) + lost_s, _DIGITS)
        # The prefill worker computed the prompt: its cache is the one that counted.
        counts = self if prefilled is None else prefilled
        return RequestRecord(
            request_id=self.info.request_id,
            client_id=self.info.echoed_id or "",
            key=self.key,
            model=self.model,
            endpoint=self.info.endpoint,
            received_at_s=round(time.time() - (time.monotonic() - self.received_s), 3),
            duration_s=round(self.ended_s - self.received_s, _DIGITS),
            outcome=self.outcome,
            worker="" if decision is None else f"{decision.worker_id:x}",
            dp_rank=0 if decision is None else decision.dp_rank,
            prefill_worker="" if prefilled is None else f"{prefilled.worker_id:x}",
            prompt_tokens=self.prompt_tokens,
            completion_tokens=0 if usage is None else usage.completion_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            overlap_blocks=counts.overlap_blocks,
            prompt_blocks=counts.prompt_blocks,
            migrations=self.migrations,
            ttft_s=None if self.ttft_s is None else round(self.ttft_s, _DIGITS),
            worker_wait_s=stage_s.get(WORKER_WAIT),
            prepare_s=stage_s.get("prepare"),
            queue_s=stage_s.get("queue"),
            prefill_s=stage_s.get("prefill"),
            decode_s=stage_s.get("decode"),
        )

    def stages(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, begin and end of each stage that the request reached, in order.

        The stage in which it failed lasts until its end.
        """
        # With a prefill worker the queue ended there, and the way to the decode worker is prefill.
        sent_s = self.sent_s if self.prefilled is None else self.prefilled.sent_s
        begun_s = self.received_s
        for name, moment_s in (
            (WORKER_WAIT, self.resumed_s),
            ("prepare", self.prepared_s),
            (WORKER_WAIT, self.rerouted_s),
            ("queue", sent_s),
            ("prefill", self.first_token_s),
            ("decode", self.last_token_s),
        ):
            if name == WORKER_WAIT and not moment_s:
                continue
            reached = moment_s and moment_s != NEVER
            yield name, begun_s, max(moment_s if reached else self.ended_s, begun_s)
            if not reached:
                return
            begun_s = moment_s


class RecentRequests:
    """The last 1,000 requests that reached their model, and the last 200 that did not.

    Those that are refused early are kept apart, so that a flood of them hides no others. An entry
    has at most 6 KB, all of them 7 MB. ``records`` and ``refused`` begin with the oldest.
    """

    def __init__(self, routed: int = _ROUTED, refused: int = _REFUSED) -> None:
        self.records: deque[RequestFigures] = deque(maxlen=routed)
        self.refused: deque[RequestFigures] = deque(maxlen=refused)
        self.add = self.records.append  # called for each request: no layer

    def forget(self, model: str) -> None:
        """Keep the figures alone of the requests to a model that is gone: its metrics are freed."""
        fields = RequestFigures.__struct_fields__
        for position, request in enumerate(self.records):
            if request.model == model and type(request) is not RequestFigures:
                values = (getattr(request, field) for field in fields)
                self.records[position] = RequestFigures(*values)

    def refuse(self, endpoint: str, model: str, outcome: str, exchange: Exchange) -> RequestFigures:
        """Keep a request that has not reached its model; return its record."""
        internal, client_id = request_id(exchange.headers)
        echoed_id = None if client_id is None else client_id[:CLIENT_ID_CHARACTERS]
        ended = RequestFigures(
            RequestInfo(endpoint, internal, echoed_id),
            shorten(model, CLIENT_ID_CHARACTERS),
            exchange.received_at,
            outcome,
            time.monotonic(),
            exchange.resumed_at,
            key="" if exchange.api_key is None else exchange.api_key.name,
        )
        self.refused.append(ended)
        return ended

    def newest(self, limit: int, model: str = "") -> list[RequestRecord]:
        """The newest ``limit`` requests, of ``model`` alone if it is given; newest first."""
        chosen = (figures for figures in self.ended() if not model or figures.model == model)
        return [figures.record() for figures in islice(chosen, limit)]

    def after(self, cursor: float, limit: int, model: str = "") -> RecentList:
        """The newest ``limit`` requests that ended after ``cursor``, 0 for all; newest first.

        The cursor is a time of the machine's monotonic clock, so that it outlives this process.
        """
        newer = list(takewhile(lambda figures: figures.ended_s > cursor, self.ended()))
        chosen = [figures for figures in newer if not model or figures.model == model]
        return RecentList(
            requests=tuple(figures.record() for figures in chosen[:limit]),
            cursor=newer[0].ended_s if newer else cursor,
            left_out=len(chosen[limit:]),
        )

    def ended(self) -> Iterator[RequestFigures]:
        """All of them, the last one that ended first."""
        both = (reversed(self.refused), reversed(self.records))
        return heapq.merge(*both, key=attrgetter("ended_s"), reverse=True)

    def last(self) -> RequestFigures:
        """The request that ended last. Raises ModelNotFound (404) without one."""
        for figures in self.ended():
            return figures
        raise ModelNotFound("No request has ended since the frontend started")

    def find(self, name: str) -> RequestFigures:
        """The request of this id: its own, that of the response, the client's, or the beginning or
        the end of its own: ids of requests in a row differ at the end.

        Raises ModelNotFound (404), InvalidArgument if there are several.
        """
        shortened = shorten(name, CLIENT_ID_CHARACTERS)
        matches = [figures for figures in self.ended() if name in figures.info[1:]]
        if not matches:
            # People paste what a client printed: chatcmpl-ID, resp_ID, or a part of the UUID.
            part = _SECRET.sub("", _PREFIXES.sub("", name, count=1).lower())
            matches = [
                figures
                for figures in self.ended()
                if part and _matches(figures.info.request_id, part)
            ]
        if not matches:
            raise ModelNotFound(
                f"No request {shortened}: the last {self.records.maxlen} are kept, and one "
                "that is still running is not among them"
            )
        ids = [figures.info.request_id for figures in matches]
        if len(set(ids)) > 1:
            if name in matches[0].info[1:]:  # of the client, which has sent it several times
                raise InvalidArgument(
                    f"{len(ids)} requests have the id {shortened}: name one by its own, as {ids[0]}"
                )
            raise InvalidArgument(
                f"{len(ids)} requests begin or end with {shortened}: give more digits"
            )
        return matches[0]


def _matches(request_id: str, part: str) -> bool:
    return request_id.startswith(part) or request_id.endswith(part)


def _receipt(inputs: DecisionInputs | None) -> RouteReceipt | None:
    return None if inputs is None else inputs.receipt()


def begin_trace(tracing: OtelTracing | None, exchange: Exchange) -> OpenSpan:
    """Start the span of a request, below that of its client if it has one."""
    if tracing is None:
        return OpenSpan(exchange.headers)
    return tracing.start(_SPAN, exchange.headers, exchange.received_at)


def end_trace(span: OpenSpan, ended: RequestFigures) -> None:
    """End the span of a request with its stages and figures."""
    for name, begun_s, ended_s in ended.stages():
        span.child(name, begun_s, ended_s)
    decision, usage, prefilled = ended.decision, ended.usage, ended.prefilled
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.model": ended.model,
        "dynamo.request_id": ended.info.request_id,
        "dynamo.endpoint": ended.info.endpoint,
        "dynamo.outcome": ended.outcome,
        "dynamo.migrations": ended.migrations,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
    }
    if usage is not None:
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
    if decision is not None:
        attributes["dynamo.worker"] = f"{decision.worker_id:x}"
        attributes["dynamo.dp_rank"] = decision.dp_rank
        attributes["dynamo.overlap_blocks"] = ended.overlap_blocks
        attributes["dynamo.prompt_blocks"] = ended.prompt_blocks
    if prefilled is not None:
        attributes["dynamo.prefill_worker"] = f"{prefilled.worker_id:x}"
    if ended.ttft_s is not None:
        attributes["dynamo.ttft_seconds"] = ended.ttft_s
    error = "" if ended.outcome in _NO_ERROR else ended.outcome
    span.end(ended.ended_s, attributes, error)


def trace_refused(tracing: OtelTracing, exchange: Exchange, ended: RequestFigures) -> None:
    """Export the span of a request that has not reached its model."""
    span = begin_trace(tracing, exchange)
    if span.recording:
        end_trace(span, ended)
