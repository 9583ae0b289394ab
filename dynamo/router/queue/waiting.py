"""The order of requests that wait for a worker: a heap from which any can be removed. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from dynamo.errors import RouterQueueLimitExceeded
from dynamo.protocols.engine import Routing

POLICY_CLASS = "default"
"""The only class of requests, as metrics and errors name it."""
_MAX_BOOST_S = 10**9
Work = Callable[[int, int], float]
T = TypeVar("T", bound=Hashable)
_SLACK = 64
"""Removed entries that a small heap may carry before it is rebuilt."""


class LazyHeap(Generic[T]):
    """Items by key, the smallest first; of equal keys the one pushed first.

    ``heapq`` cannot remove from the middle, so a removed entry stays in the list without its item
    until it reaches the top, or until more than half of the list is such entries. Every step is
    O(log n) amortised, memory is O(items).
    """

    __slots__ = ("_entries", "_heap", "_pushes")

    def __init__(self) -> None:
        # [key, number of the push, item or None]; the number is unique, so that items are never
        # compared.
        self._heap: list[list[Any]] = []
        self._entries: dict[T, list[Any]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def push(self, item: T, key: Any) -> None:
        """Add ``item``, or give it another key."""
        # Entries are not changed in place: the heap's order rests on their keys.
        self.remove(item)
        self._pushes += 1
        entry = self._entries[item] = [key, self._pushes, item]
        heapq.heappush(self._heap, entry)

    def remove(self, item: T) -> bool:
        """Return whether ``item`` was in the heap; it is not any more."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        entry[-1] = None
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[-1] is not None]
            heapq.heapify(self._heap)
        return True

    def key(self, item: T) -> Any:
        """Return the key of an item. Raises KeyError."""
        return self._entries[item][0]

    def first(self) -> T | None:
        """Return the item with the smallest key, or None; it stays in the heap."""
        heap = self._heap
        while heap:
            item: T | None = heap[0][-1]
            if item is not None:
                return item
            heapq.heappop(heap)
        return None

    def in_order(self) -> list[T]:
        """Return all items, smallest key first. O(n log n)."""
        return [entry[-1] for entry in sorted(self._entries.values())]

    def _check(self) -> None:
        """Assert what must always hold; for tests."""
        alive = [entry for entry in self._heap if entry[-1] is not None]
        assert {entry[-1]: entry for entry in alive} == self._entries
        assert len(alive) == len(self._entries)
        assert len(self._heap) <= 2 * len(self._entries) + _SLACK + 1


class Priority(NamedTuple):
    """What a request asks for: a higher ``strict`` goes first whatever the policy says;
    ``priority_boost_s`` makes it count as if it had arrived so many seconds earlier."""

    strict: int = 0
    priority_boost_s: float = 0.0


def priority_of(routing: Routing | None) -> Priority:
    """Return the priority in the request's hints.

    ``priority`` is the newer name of ``priority_jump`` and wins. Boosts are clamped to 1e9 seconds:
    beyond, sums with a clock would lose their fraction.
    """
    if routing is None:
        return Priority()
    boost_s = routing.priority_jump if routing.priority is None else routing.priority
    if boost_s is None or boost_s != boost_s:  # NaN
        boost_s = 0
    boost_s = float(max(-_MAX_BOOST_S, min(boost_s, _MAX_BOOST_S)))
    return Priority(routing.strict_priority or 0, boost_s)


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A waiting request: ``isl_tokens`` of prompt, of which a worker holds ``cached_tokens``."""

    priority: Priority
    isl_tokens: int
    cached_tokens: int = field(default=0, init=False)
    arrived_s: float = field(default=0.0, init=False)
    number: int = field(default=0, init=False)
    """The order of arrival, set by the queue."""


E = TypeVar("E", bound=QueueEntry)


class WaitingQueue(Generic[E]):
    """Ordered by strict priority, then the score of ``policy``, then arrival; ``limit`` entries.

    ``policy`` is one of :data:`POLICIES`. ``work`` says what computing (tokens, behind cached ones)
    costs, in any unit; the tokens themselves by default. ``isl_tokens`` and ``cached_tokens`` are
    sums over all entries. Adding and removing are O(log entries) amortised.
    """

    def __init__(self, policy: str, limit: int, work: Work | None = None) -> None:
        self.limit = limit
        self.isl_tokens = 0
        self.cached_tokens = 0
        self._score = POLICIES[policy]
        self._work = work or _tokens
        self._heap: LazyHeap[E] = LazyHeap()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def is_full(self) -> bool:
        """Whether :meth:`add` would raise."""
        return len(self._heap) >= self.limit

    def limit_error(self) -> RouterQueueLimitExceeded:
        """Return the error for a request that the full queue rejects."""
        return RouterQueueLimitExceeded(
            f'router policy class "{POLICY_CLASS}" queue requests limit reached '
            f"(current={len(self)}, limit={self.limit})"
        )

    def add(self, entry: E) -> None:
        """Add an entry. Raises RouterQueueLimitExceeded when the queue is full."""
        if self.is_full:
            raise self.limit_error()
        self._arrivals += 1
        entry.number = self._arrivals
        self.isl_tokens += entry.isl_tokens
        self.cached_tokens += entry.cached_tokens
        self._heap.push(entry, self._key(entry))

    def remove(self, entry: E) -> bool:
        """Remove an entry; return whether it was in the queue."""
        if not self._heap.remove(entry):
            return False
        self.isl_tokens -= entry.isl_tokens
        self.cached_tokens -= entry.cached_tokens
        return True

    def head(self) -> E | None:
        """Return the next entry; it stays until it is removed."""
        return self._heap.first()

    def set_cached_tokens(self, entry: E, cached_tokens: int) -> None:
        """Update how much of the entry's prompt a worker holds; its place may change."""
        if entry not in self._heap:
            return
        self.cached_tokens += cached_tokens - entry.cached_tokens
        entry.cached_tokens = cached_tokens
        key = self._key(entry)
        if key != self._heap.key(entry):
            self._heap.push(entry, key)

    def _key(self, entry: E) -> tuple[int, float, int]:
        """Negate what is best when high: the smallest key goes first."""
        return -entry.priority.strict, -self._score(entry, self._work), entry.number


# Scores compare waiting times: up to a common instant t, a request has waited t - arrived, plus its
# boost. t cancels out, so the order never changes with time and no score needs a refresh.
def _first_come(entry: QueueEntry, work: Work) -> float:
    # As in Dynamo, a negative boost delays nothing here.
    return max(entry.priority.priority_boost_s, 0.0) - entry.arrived_s


def _last_come(entry: QueueEntry, work: Work) -> float:
    return entry.priority.priority_boost_s + entry.arrived_s


def _shortest_work(entry: QueueEntry, work: Work) -> float:
    uncached_tokens = max(entry.isl_tokens - entry.cached_tokens, 1)
    return (1.0 + entry.priority.priority_boost_s) / work(uncached_tokens, entry.cached_tokens)


def _tokens(tokens: int, cached_tokens: int) -> float:
    return tokens


POLICIES: dict[str, Callable[[QueueEntry, Work], float]] = {
    "fcfs": _first_come,
    "lcfs": _last_come,
    "wspt": _shortest_work,
}
"""Score by policy, the highest first: first come first served, last come first served, weighted
shortest processing time (weight 1 + boost, work of the tokens that no worker holds)."""
