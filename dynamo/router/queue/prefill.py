"""Who waits for a prefill worker, in which order, and which workers have a free slot.

Pure: time is handed in, nothing is sent. ``T`` is whatever waits; it is only hashed. O(log waiting)
for each step, and O(workers) to look for a free slot.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from dynamo.errors import Overloaded
from dynamo.protocols.card import UNKNOWN_BATCH_TOKENS, RuntimeConfig

__all__ = ["Capacity", "NextPrefill", "PrefillQueue", "Rank", "capacity_of"]

T = TypeVar("T")
Rank = tuple[bool, int, float, int]
"""(never sent yet, minus the strict priority, arrival less the head start, number): small first."""

_SURPLUS = 64
_UNKNOWN_REQUESTS = 1 << 30


class Capacity(NamedTuple):
    """A worker has a free slot below both; one that does nothing always has one.

    ``tokens`` are prompt tokens that it was sent and has not computed yet, as far as we booked.
    """

    tokens: int
    requests: int


def capacity_of(config: RuntimeConfig, slots: int | None) -> Capacity:
    """What a worker may be sent: its next batch, or ``slots`` requests, for each of its ranks."""
    ranks = max(config.data_parallel_size, 1)
    if slots is not None:
        return Capacity(_UNKNOWN_REQUESTS, slots * ranks)
    tokens = config.max_num_batched_tokens or UNKNOWN_BATCH_TOKENS
    return Capacity(tokens * ranks, (config.max_num_seqs or _UNKNOWN_REQUESTS) * ranks)


@dataclass(slots=True)
class _Lane:
    capacity: Capacity
    tokens: int = 0
    requests: int = 0
    suspended: bool = False

    @property
    def free(self) -> bool:
        if self.suspended:
            return False
        below = self.tokens < self.capacity.tokens and self.requests < self.capacity.requests
        return below or not self.requests


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T]):
    rank: Rank
    ticket: T
    pin: int | None
    gone: bool = False

    def __lt__(self, other: _Waiting[T]) -> bool:
        return self.rank < other.rank


class NextPrefill(NamedTuple, Generic[T]):
    """``ticket`` may go to one of ``workers`` (None: to any)."""

    ticket: T
    workers: list[int] | None


class PrefillQueue(Generic[T]):
    """Tickets are waiting (:meth:`enter`), then running (:meth:`start`), then gone.

    Tickets that are pinned to a worker, or bound to it for a while (:meth:`bind`), wait for that
    one; others overtake them meanwhile. The ``busy``
    workers, which other routers keep up to date, get nothing. ``waiting_tokens`` are the prompt
    tokens of the waiting tickets, given by ``tokens_of``.
    """

    def __init__(self, limit: int, tokens_of: Callable[[T], int] = lambda _: 0) -> None:
        self.limit = limit
        self.waiting_tokens = 0
        self._tokens_of = tokens_of
        self.busy: Collection[int] = frozenset()
        self._lanes: dict[int, _Lane] = {}
        self._waiting: dict[T, _Waiting[T]] = {}
        self._running: dict[T, tuple[int, int]] = {}
        self._heaps: dict[int | None, list[_Waiting[T]]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Tickets that wait."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether as many wait as may."""
        return len(self._waiting) >= self.limit

    @property
    def running(self) -> int:
        """Tickets at a worker."""
        return len(self._running)

    @property
    def workers(self) -> list[int]:
        """The workers that may get something sooner or later."""
        return [one for one, lane in self._lanes.items() if not lane.suspended]

    @property
    def free_workers(self) -> list[int]:
        """The workers that have a free slot."""
        return [one for one, lane in self._lanes.items() if lane.free and one not in self.busy]

    @property
    def held_up(self) -> bool:
        """Whether somebody waits although a worker, which is busy, has a free slot."""
        return bool(self._waiting) and any(
            one in self.busy and lane.free for one, lane in self._lanes.items()
        )

    @property
    def known_workers(self) -> list[int]:
        """All workers, those that do not answer included."""
        return list(self._lanes)

    # -- workers

    def set_worker(self, worker_id: int, capacity: Capacity) -> None:
        """The worker is there (again), or has another capacity."""
        lane = self._lanes.get(worker_id)
        if lane is not None:
            lane.capacity = capacity
            lane.suspended = False
            return
        held = [tokens for at, tokens in self._running.values() if at == worker_id]
        self._lanes[worker_id] = _Lane(capacity, sum(held), len(held))

    def suspend(self, worker_id: int, suspended: bool = True) -> None:
        """The worker does not answer (or does again): it gets nothing meanwhile."""
        lane = self._lanes.get(worker_id)
        if lane is not None:
            lane.suspended = suspended

    def remove_worker(self, worker_id: int) -> list[T]:
        """The worker is gone; see :meth:`waiting_for`. What runs there is its own."""
        self._lanes.pop(worker_id, None)
        return self.waiting_for(worker_id)

    def waiting_for(self, worker_id: int) -> list[T]:
        """The tickets that wait for this worker and no other, in order: to be bound anew, or to
        leave, when there is no hope for it."""
        return [one.ticket for one in sorted(self._heaps.get(worker_id, ())) if not one.gone]

    def running_at(self, worker_id: int) -> list[T]:
        """The tickets at a worker, oldest first."""
        return [ticket for ticket, (at, _) in self._running.items() if at == worker_id]

    # -- tickets

    def enter(
        self,
        ticket: T,
        now_s: float,
        *,
        strict: int = 0,
        jump_s: float = 0.0,
        pin: int | None = None,
    ) -> None:
        """Wait behind those of the same ``strict`` priority that came up to ``jump_s`` earlier.

        Raises Overloaded when ``limit`` tickets wait already and none could go at once.
        """
        if self.full and (self._head(pin) is not None or not self._has_slot(pin)):
            raise Overloaded(f"the prefill queue is full: {self.limit} requests wait")
        self._put(ticket, (True, -strict, now_s - jump_s, next(self._numbers)), pin)

    def give_back(self, ticket: T, pin: int | None = None) -> None:
        """To the head of the line: it was sent and has not been computed. Never refused.

        Several stand in the order in which they were first sent back.
        """
        self.finish(ticket)
        self._put(ticket, (False, 0, 0.0, next(self._numbers)), pin)

    def bind(self, ticket: T, worker_id: int | None) -> None:
        """The ticket waits for this worker from now on (None: for any), with its old claim; nothing
        to do if it does not wait."""
        entry = self._waiting.get(ticket)
        if entry is not None:
            self._drop(ticket)
            self._put(ticket, entry.rank, worker_id)

    def next(self) -> NextPrefill[T] | None:
        """The first ticket that there is a free slot for. It waits until :meth:`start` (or
        :meth:`leave`), and is the next one until then."""
        free = self.free_workers
        heads = [self._head(pin) for pin in (None, *free)] if free else []
        entry = min((head for head in heads if head is not None), default=None)
        if entry is None:
            return None
        if entry.pin is not None:
            return NextPrefill(entry.ticket, [entry.pin])
        return NextPrefill(entry.ticket, None if len(free) == len(self._lanes) else free)

    def start(self, ticket: T, worker_id: int, tokens: int) -> None:
        """It was sent to the worker, which has ``tokens`` prompt tokens of it to compute."""
        self._drop(ticket)
        self._running[ticket] = (worker_id, tokens)
        lane = self._lanes.get(worker_id)
        if lane is not None:
            lane.tokens += tokens
            lane.requests += 1

    def finish(self, ticket: T) -> None:
        """It is no longer at its worker. Idempotent."""
        worker_id, tokens = self._running.pop(ticket, (-1, 0))
        lane = self._lanes.get(worker_id)
        if lane is not None:
            lane.tokens -= tokens
            lane.requests -= 1

    def leave(self, ticket: T) -> None:
        """Nobody wants it any more, wherever it is. Idempotent."""
        self._drop(ticket)
        self.finish(ticket)

    def take_all(self) -> list[T]:
        """Empty the line: everyone who waits, in order."""
        everyone = sorted(self._waiting.values())
        self._waiting.clear()
        self._heaps.clear()
        self.waiting_tokens = 0
        return [entry.ticket for entry in everyone]

    # -- own steps

    def _has_slot(self, pin: int | None) -> bool:
        free = self.free_workers
        return bool(free) if pin is None else pin in free

    def _put(self, ticket: T, rank: Rank, pin: int | None) -> None:
        entry = self._waiting[ticket] = _Waiting(rank, ticket, pin)
        self.waiting_tokens += self._tokens_of(ticket)
        heapq.heappush(self._heaps.setdefault(pin, []), entry)

    def _drop(self, ticket: T) -> None:
        entry = self._waiting.pop(ticket, None)
        if entry is None:
            return
        entry.gone = True
        self.waiting_tokens -= self._tokens_of(ticket)
        heap = self._heaps[entry.pin]
        if len(heap) > 2 * len(self._waiting) + _SURPLUS:
            heap[:] = [one for one in heap if not one.gone]
            heapq.heapify(heap)

    def _head(self, pin: int | None) -> _Waiting[T] | None:
        heap = self._heaps.get(pin)
        while heap and heap[0].gone:
            heapq.heappop(heap)
        if heap:
            return heap[0]
        self._heaps.pop(pin, None)
        return None

    def _entries(self) -> Iterator[_Waiting[T]]:
        return (one for heap in self._heaps.values() for one in heap if not one.gone)

    def _check(self) -> None:
        """Assert what must always hold; for tests."""
        assert sorted(map(id, self._entries())) == sorted(map(id, self._waiting.values()))
        assert not self._waiting.keys() & self._running.keys()
        assert self.waiting_tokens == sum(map(self._tokens_of, self._waiting))
        for worker_id, lane in self._lanes.items():
            held = [tokens for at, tokens in self._running.values() if at == worker_id]
            assert (sum(held), len(held)) == (lane.tokens, lane.requests)
