"""The requests of a replay: what arrives, and the state of one request in a simulation.

What the frontends count in a replay, and the difference between two points in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dynamo.bench.trace import parents
from dynamo.bench.trace_formats import TraceRequest
from dynamo.planner.observation import Traffic

BLOCK_TOKENS = 512
"""Tokens per hash id of a Mooncake trace."""


class TrafficCounters:
    """Sums since the start of the replay."""

    __slots__ = (
        "arrived",
        "finished",
        "first_tokens",
        "isl",
        "osl",
        "rejected",
        "request_s",
        "token_s",
        "tokens",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.arrived = self.finished = self.rejected = self.first_tokens = self.tokens = 0
        self.isl = self.osl = 0
        self.ttft_s = self.token_s = self.request_s = 0.0

    def first_token(self, request: RequestState) -> None:
        """Count the first token of ``request``."""
        self.first_tokens += 1
        self.isl += request.isl
        self.ttft_s += request.ttft_s

    def finish(self, request: RequestState) -> None:
        """Count ``request`` as finished."""
        self.finished += 1
        self.osl += request.osl
        self.request_s += request.end_s - request.arrived_s

    def copy(self) -> TrafficCounters:
        """Return the sums as they are now."""
        other = TrafficCounters()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def since(self, before: TrafficCounters, duration_s: float) -> Traffic:
        """Return the traffic between ``before`` and now, ``duration_s`` later."""
        first = self.first_tokens - before.first_tokens
        finished = self.finished - before.finished
        tokens = self.tokens - before.tokens
        return Traffic(
            duration_s=duration_s,
            arrived=self.arrived - before.arrived,
            finished=finished,
            isl=_mean(self.isl - before.isl, first),
            osl=_mean(self.osl - before.osl, finished),
            ttft_ms=_mean(1000 * (self.ttft_s - before.ttft_s), first),
            itl_ms=_mean(1000 * (self.token_s - before.token_s), tokens),
            request_s=_mean(self.request_s - before.request_s, finished),
            queued=self.arrived - self.rejected - self.first_tokens,
            inflight=self.arrived - self.rejected - self.finished,
        )


def _mean(total: float, number: int) -> float | None:
    return total / number if number else None


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request: it arrives at ``at_s``, or ``delay_s`` after the answer of ``parent`` if that is
    later. ``blocks`` are the ids of its prompt's full blocks; equal prefixes can be reused."""

    at_s: float
    isl: int
    osl: int
    blocks: tuple[int, ...] = ()
    parent: int | None = None
    delay_s: float = 0.0


def from_trace(requests: Sequence[TraceRequest]) -> list[ReplayRequest]:
    """Convert a trace; conversations are found as ``dynamo.bench.trace.parents`` describes.

    Requests with the same timestamp are spread evenly over one tick of the trace's clock, which is
    the smallest gap in it: 3 s in the Mooncake traces, whose timestamps are rounded.
    """
    return sorted_by_arrival(_convert(requests, _spread([r.timestamp / 1000 for r in requests])))


def _spread(times_s: Sequence[float]) -> list[float]:
    sizes = Counter(times_s)
    distinct = sorted(sizes)
    tick_s = min((after - before for before, after in pairwise(distinct)), default=0.0)
    seen: Counter[float] = Counter()
    spread = []
    for at_s in times_s:
        spread.append(at_s + tick_s * seen[at_s] / sizes[at_s])
        seen[at_s] += 1
    return spread


def sorted_by_arrival(requests: Iterable[ReplayRequest]) -> list[ReplayRequest]:
    """Sort by ``at_s``; the indices of parents follow."""
    given = list(requests)
    order = sorted(range(len(given)), key=lambda number: given[number].at_s)
    place = {old: new for new, old in enumerate(order)}
    return [_move(given[number], place) for number in order]


def _move(request: ReplayRequest, place: dict[int, int]) -> ReplayRequest:
    parent = None if request.parent is None else place[request.parent]
    return replace(request, parent=parent)


def _convert(requests: Sequence[TraceRequest], times_s: Sequence[float]) -> Iterable[ReplayRequest]:
    for request, parent, at_s in zip(requests, parents(requests), times_s, strict=True):
        isl = request.input_length or max(1, len(request.hash_ids) * BLOCK_TOKENS)
        yield ReplayRequest(
            at_s=at_s,
            isl=isl,
            osl=max(1, request.output_length),
            blocks=tuple(request.hash_ids[: (isl - 1) // BLOCK_TOKENS]),
            parent=parent,
            delay_s=request.delay / 1000,
        )


class RequestState:
    """One request in a simulation.

    ``prompt`` tokens are to be computed, ``computed`` of them have KV; ``left`` tokens are still to
    be generated when it joins a batch; it finishes with iteration ``finish_step`` of its worker.
    ``estimate`` is the prefill work that the router counted for it.
    """

    __slots__ = (
        "arrived_s",
        "blocks",
        "computed",
        "end_s",
        "estimate",
        "finish_step",
        "first_s",
        "index",
        "isl",
        "left",
        "osl",
        "preempted_s",
        "prompt",
        "rejected",
        "transferred",
    )

    def __init__(self, index: int, request: ReplayRequest, arrived_s: float) -> None:
        self.index = index
        self.arrived_s = arrived_s
        self.isl = self.prompt = request.isl
        self.osl = self.left = request.osl
        self.blocks = request.blocks
        self.computed = self.estimate = 0
        self.finish_step = -1
        self.first_s = self.end_s = self.preempted_s = -1.0
        self.rejected = self.transferred = False

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_s - self.arrived_s

    @property
    def itl_s(self) -> float:
        """Mean seconds between tokens; 0 for a single token."""
        return (self.end_s - self.first_s) / (self.osl - 1) if self.osl > 1 else 0.0
