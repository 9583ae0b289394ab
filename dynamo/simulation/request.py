"""The requests of a replay: what arrives, and the state of one request in a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dynamo.bench.trace import TraceRequest, parents

__all__ = ["BLOCK_TOKENS", "ReplayRequest", "RequestState", "from_trace", "sorted_by_arrival"]

BLOCK_TOKENS = 512
"""Tokens per hash id of a Mooncake trace."""


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
