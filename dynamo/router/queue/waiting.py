"""Who is next among requests that wait for a worker. Pure: time is handed in. Spec 3.9."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from dynamo.errors import RouterQueueLimitExceeded
from dynamo.protocols.engine import Routing

__all__ = ["POLICIES", "POLICY_CLASS", "Priority", "QueueEntry", "WaitingQueue", "priority_of"]

T = TypeVar("T")
POLICY_CLASS = "default"
"""The one class of requests that there is, as metrics and errors call it."""
_MOST_S = 10**9
_SLACK = 64


class Priority(NamedTuple):
    """What a request says for itself: ``strict`` beats everything, ``priority_boost_s`` are seconds that it
    may claim to have come earlier."""

    strict: int = 0
    priority_boost_s: float = 0.0


def priority_of(routing: Routing | None) -> Priority:
    """The claim in the request's hints. ``priority`` is the newer name of ``priority_jump`` and
    wins; beyond 1e9 seconds all are alike."""
    if routing is None:
        return Priority()
    priority_boost_s = routing.priority_jump if routing.priority is None else routing.priority
    if priority_boost_s is None or priority_boost_s != priority_boost_s:  # NaN
        priority_boost_s = 0
    return Priority(
        routing.strict_priority or 0, float(max(-_MOST_S, min(priority_boost_s, _MOST_S)))
    )


class QueueEntry(Generic[T]):
    """One who waits: ``isl_tokens`` of prompt, of which a worker holds ``cached_tokens``."""

    __slots__ = ("_entry", "arrived_s", "cached_tokens", "priority", "isl_tokens", "item", "number")

    def __init__(
        self,
        item: T,
        priority: Priority,
        isl_tokens: int,
        cached_tokens: int,
        arrived_s: float,
        number: int,
    ) -> None:
        self.item = item
        self.priority = priority
        self.isl_tokens = isl_tokens
        self.cached_tokens = cached_tokens
        self.arrived_s = arrived_s
        self.number = number
        self._entry: tuple[int, float, int, int, QueueEntry[T]] | None = None


class WaitingQueue(Generic[T]):
    """Ordered by strict priority, then the score of ``policy``, then arrival; ``limit`` of them.

    ``policy`` is one of :data:`POLICIES`. ``isl_tokens`` and ``cached_tokens`` are sums over all
    who wait. Joining and leaving are O(log waiting) amortised: who left is forgotten lazily.
    """

    def __init__(self, policy: str, limit: int) -> None:
        self.limit = limit
        self.isl_tokens = 0
        self.cached_tokens = 0
        self._score = POLICIES[policy]
        self._heap: list[tuple[int, float, int, int, QueueEntry[T]]] = []
        self._waiting = 0
        self._numbers = 0
        self._versions = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def is_full(self) -> bool:
        """Whether nobody else may join."""
        return self._waiting >= self.limit

    def limit_error(self) -> RouterQueueLimitExceeded:
        """What to tell who comes when it is full."""
        return RouterQueueLimitExceeded(
            f'router policy class "{POLICY_CLASS}" queue requests limit reached '
            f"(current={self._waiting}, limit={self.limit})"
        )

    def add(
        self, item: T, priority: Priority, isl_tokens: int, cached_tokens: int, now_s: float
    ) -> QueueEntry[T]:
        """Stand in line. Raises RouterQueueLimitExceeded when it is full."""
        if self.is_full:
            raise self.limit_error()
        self._numbers += 1
        entry = QueueEntry(item, priority, isl_tokens, cached_tokens, now_s, self._numbers)
        self._waiting += 1
        self.isl_tokens += isl_tokens
        self.cached_tokens += cached_tokens
        self._enter(entry)
        return entry

    def remove(self, entry: QueueEntry[T]) -> bool:
        """Go, served or not, and let go of the item; whether ``entry`` was still in line."""
        if entry._entry is None:
            return False
        entry._entry = None
        del entry.item
        self._waiting -= 1
        self.isl_tokens -= entry.isl_tokens
        self.cached_tokens -= entry.cached_tokens
        if len(self._heap) > 2 * self._waiting + _SLACK:
            self._compact()
        return True

    def head(self) -> QueueEntry[T] | None:
        """Who is next; they stay until they leave."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if entry[-1]._entry is entry:
                return entry[-1]
            heapq.heappop(heap)
        return None

    def set_cached_tokens(self, entry: QueueEntry[T], cached_tokens: int) -> None:
        """Workers hold more or less of the prompt than they did; the score may change with it."""
        if entry._entry is None:
            return
        self.cached_tokens += cached_tokens - entry.cached_tokens
        entry.cached_tokens = cached_tokens
        if -self._score(entry) != entry._entry[1]:
            self._enter(entry)

    def _enter(self, entry: QueueEntry[T]) -> None:
        self._versions += 1
        key = (-entry.priority.strict, -self._score(entry), entry.number, self._versions, entry)
        entry._entry = key
        heapq.heappush(self._heap, key)
        if len(self._heap) > 2 * self._waiting + _SLACK:
            self._compact()

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[-1]._entry is entry]
        heapq.heapify(self._heap)


def _first_come(entry: QueueEntry[T]) -> float:
    return max(entry.priority.priority_boost_s, 0.0) - entry.arrived_s


def _last_come(entry: QueueEntry[T]) -> float:
    return entry.priority.priority_boost_s + entry.arrived_s


def _shortest_work(entry: QueueEntry[T]) -> float:
    return (1.0 + entry.priority.priority_boost_s) / max(entry.isl_tokens - entry.cached_tokens, 1)


POLICIES: dict[str, Callable[[QueueEntry[T]], float]] = {
    "fcfs": _first_come,
    "lcfs": _last_come,
    "wspt": _shortest_work,
}
"""Score by policy, the highest first: who came first, who came last, and the least work for the
weight (weighted shortest processing time)."""
