"""The queue before the prefill workers: its order, and which workers have a free slot.

Pure: time is handed in, nothing is sent. ``T`` identifies a request; it is only hashed. Each step
is O(log requests), and O(workers) to look for a free slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from dynamo.errors import Overloaded
from dynamo.protocols.control import UNKNOWN_BATCH_TOKENS, RuntimeConfig
from dynamo.router.queue.waiting import LazyHeap

T = TypeVar("T")
SortKey = tuple[bool, int, float, int]
"""(never sent yet, -strict priority, arrival less the boost, number): the smallest goes first.
Numbers are unique: two ranks never compare equal."""

_UNKNOWN_REQUESTS = 1 << 30


class Capacity(NamedTuple):
    """A worker has a free slot below both limits; an idle worker always has one.

    ``tokens`` are prompt tokens sent to the worker and, as far as they are booked, not computed.
    """

    tokens: int
    requests: int


def capacity_of(config: RuntimeConfig, slots: int | None) -> Capacity:
    """Return what a worker may be sent, for all its ranks: its next batch, or ``slots`` requests
    a rank."""
    ranks = max(config.data_parallel_size, 1)
    if slots is not None:
        return Capacity(_UNKNOWN_REQUESTS, slots * ranks)
    tokens = config.max_num_batched_tokens or UNKNOWN_BATCH_TOKENS
    return Capacity(tokens * ranks, (config.max_num_seqs or _UNKNOWN_REQUESTS) * ranks)


@dataclass(slots=True)
class _WorkerLoad:
    capacity: Capacity
    tokens: int = 0
    requests: int = 0
    suspended: bool = False


class NextPrefill(NamedTuple, Generic[T]):
    """``request`` may go to one of ``workers`` (None: to any)."""

    request: T
    workers: list[int] | None


class PrefillQueue(Generic[T]):
    """Requests wait (:meth:`add`), run at a worker (:meth:`start`), and end.

    A request that is pinned or bound (:meth:`bind`) to a worker waits for that one, and others
    overtake it. The workers that ``busy`` returns get nothing.
    ``waiting_tokens`` is the sum of ``tokens_of`` over the waiting requests.
    """

    def __init__(
        self,
        limit: int,
        tokens_of: Callable[[T], int] = lambda _: 0,
        busy: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self.limit = limit
        self.waiting_tokens = 0
        self._tokens_of = tokens_of
        self._busy = busy
        self._workers: dict[int, _WorkerLoad] = {}
        self._pins: dict[T, int | None] = {}  # of the waiting requests
        self._running: dict[T, tuple[int, int]] = {}
        # One heap for each pin, so that the head of one never hides a request that could run.
        self._heaps: dict[int | None, LazyHeap[T]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._pins)

    @property
    def is_full(self) -> bool:
        """Whether ``limit`` requests wait."""
        return len(self._pins) >= self.limit

    @property
    def running(self) -> int:
        """The number of requests at workers."""
        return len(self._running)

    @property
    def workers(self) -> list[int]:
        """The workers that may be sent requests, now or once they have a free slot."""
        return [worker_id for worker_id, load in self._workers.items() if not load.suspended]

    @property
    def free_workers(self) -> list[int]:
        """The workers with a free slot."""
        busy = self._busy()
        return [
            worker_id
            for worker_id in self._workers
            if self._has_free_slot(worker_id) and worker_id not in busy
        ]

    @property
    def is_blocked(self) -> bool:
        """Whether requests wait although a worker, which is busy, has a free slot."""
        return bool(self._pins) and any(
            worker_id in self._workers and self._has_free_slot(worker_id)
            for worker_id in self._busy()
        )

    @property
    def all_workers(self) -> list[int]:
        """All workers, suspended ones included."""
        return list(self._workers)

    def set_worker(self, worker_id: int, capacity: Capacity) -> None:
        """Add a worker, or change its capacity; it is not suspended any more."""
        load = self._workers.get(worker_id)
        if load is not None:
            load.capacity = capacity
            load.suspended = False
            return
        # A worker that left and returned may still run requests.
        tokens_held = [tokens for at, tokens in self._running.values() if at == worker_id]
        self._workers[worker_id] = _WorkerLoad(capacity, sum(tokens_held), len(tokens_held))

    def suspend(self, worker_id: int, suspended: bool = True) -> None:
        """Send nothing to a worker that does not answer, until it is resumed."""
        load = self._workers.get(worker_id)
        if load is not None:
            load.suspended = suspended

    def remove_worker(self, worker_id: int) -> list[T]:
        """Remove a worker; return :meth:`waiting_for` it. Its running requests stay running."""
        self._workers.pop(worker_id, None)
        return self.waiting_for(worker_id)

    def waiting_for(self, worker_id: int) -> list[T]:
        """Return the requests that wait for this worker only, in order: to be bound to another one
        or removed if the worker does not return."""
        heap = self._heaps.get(worker_id)
        return [] if heap is None else heap.in_order()

    def running_at(self, worker_id: int) -> list[T]:
        """Return the requests at a worker, oldest first."""
        return [request for request, (at, _) in self._running.items() if at == worker_id]

    def add(
        self,
        request: T,
        now_s: float,
        *,
        strict: int = 0,
        priority_boost_s: float = 0.0,
        pin: int | None = None,
    ) -> None:
        """Queue a request behind those of its ``strict`` priority that arrived more than
        ``priority_boost_s`` earlier.

        Raises Overloaded when the queue is full, unless the request could start at once.
        """
        if self.is_full and not self._starts_at_once(pin):
            raise Overloaded(f"the prefill queue is full: {self.limit} requests wait")
        self._push(request, (True, -strict, now_s - priority_boost_s, next(self._numbers)), pin)

    def requeue(self, request: T, pin: int | None = None) -> None:
        """Move a request that was sent and not computed to the head. Never rejected.

        Several requeued requests keep the order in which they were requeued.
        """
        self.finish(request)
        self._push(request, (False, 0, 0.0, next(self._numbers)), pin)

    def bind(self, request: T, worker_id: int | None) -> None:
        """Let a waiting request wait for this worker only (None: for any), with its old rank."""
        if request in self._pins:
            # Before the discard, which removes the heap that has the rank.
            rank = self._rank(request)
            self._discard(request)
            self._push(request, rank, worker_id)

    def next(self) -> NextPrefill[T] | None:
        """Return the first request that has a free slot. It waits, and remains the next one, until
        :meth:`start` or :meth:`remove`."""
        free = self.free_workers
        heads = [self._head(pin) for pin in (None, *free)] if free else []
        request = min((head for head in heads if head is not None), key=self._rank, default=None)
        if request is None:
            return None
        pin = self._pins[request]
        if pin is not None:
            return NextPrefill(request, [pin])
        return NextPrefill(request, None if len(free) == len(self._workers) else free)

    def start(self, request: T, worker_id: int, tokens: int) -> None:
        """Move a request to the worker, which has ``tokens`` prompt tokens of it to compute."""
        self._discard(request)
        self._running[request] = (worker_id, tokens)
        load = self._workers.get(worker_id)
        if load is not None:
            load.tokens += tokens
            load.requests += 1

    def finish(self, request: T) -> None:
        """Free the slot of a running request. Idempotent."""
        worker_id, tokens = self._running.pop(request, (-1, 0))
        load = self._workers.get(worker_id)
        if load is not None:
            load.tokens -= tokens
            load.requests -= 1

    def remove(self, request: T) -> None:
        """Remove a request, whether it waits or runs. Idempotent."""
        self._discard(request)
        self.finish(request)

    def pop_all(self) -> list[T]:
        """Remove and return all waiting requests, in order."""
        waiting = sorted(self._pins, key=self._rank)
        for request in waiting:
            self._discard(request)
        return waiting

    def _has_free_slot(self, worker_id: int) -> bool:
        load = self._workers[worker_id]
        if load.suspended or not load.requests:
            return not load.suspended  # an idle worker takes a prompt of any size
        return load.tokens < load.capacity.tokens and load.requests < load.capacity.requests

    def _starts_at_once(self, pin: int | None) -> bool:
        if self._head(pin) is not None:
            return False
        return bool(self.free_workers) if pin is None else pin in self.free_workers

    def _rank(self, request: T) -> SortKey:
        rank: SortKey = self._heaps[self._pins[request]].key(request)
        return rank

    def _push(self, request: T, rank: SortKey, pin: int | None) -> None:
        self._pins[request] = pin
        self.waiting_tokens += self._tokens_of(request)
        heap = self._heaps.get(pin)
        if heap is None:
            heap = self._heaps[pin] = LazyHeap()
        heap.push(request, rank)

    def _discard(self, request: T) -> None:
        """Remove a request if it waits."""
        if request not in self._pins:
            return
        pin = self._pins.pop(request)
        self.waiting_tokens -= self._tokens_of(request)
        heap = self._heaps[pin]
        heap.remove(request)
        # One heap for each pin: empty ones would add up as workers come and leave.
        if not heap:
            del self._heaps[pin]

    def _head(self, pin: int | None) -> T | None:
        heap = self._heaps.get(pin)
        return None if heap is None else heap.first()

    def _check(self) -> None:
        """Assert what must always hold; for tests."""
        for heap in self._heaps.values():
            heap._check()
        assert all(request in self._heaps[pin] for request, pin in self._pins.items())
        assert sum(map(len, self._heaps.values())) == len(self._pins)
        assert all(self._heaps.values()), "an empty heap is dropped"
        assert not self._pins.keys() & self._running.keys()
        assert self.waiting_tokens == sum(map(self._tokens_of, self._pins))
        for worker_id, load in self._workers.items():
            tokens_held = [tokens for at, tokens in self._running.values() if at == worker_id]
            assert (sum(tokens_held), len(tokens_held)) == (load.tokens, load.requests)
