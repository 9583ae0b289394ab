"""Replays a trace through the router's own rooms over simulated workers, in virtual time.

What is real: hashing, index, KV event state machine, active load, cost and choice. What is
simulated: workers with a prefix cache (LRU, blocks of running requests pinned) that compute one
prompt after the other at a fixed rate and decode at a fixed rate, and tell the index what they
store and evict. No I/O, no clock: the same trace gives the same report.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.codec import Tokens
from dynamo.protocols.kv import KvEvent, KvEventBatch, Removed, Stored
from dynamo.router.caches.indexer import Indexer
from dynamo.router.picker import Picker

__all__ = ["Arrival", "Replay", "Report", "ServiceModel", "SimulatedWorker"]


class Arrival(NamedTuple):
    """One request: when, the ids of its prompt blocks, and how many tokens it generates."""

    at_s: float
    block_ids: Sequence[int]
    output_tokens: int


@dataclass(frozen=True)
class ServiceModel:
    """How fast a worker is. Decode speed does not depend on how many requests share a worker."""

    prefill_tokens_per_s: float = 20_000.0
    prefill_fixed_s: float = 0.02
    inter_token_s: float = 0.01

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute ``tokens`` uncached prompt tokens."""
        return self.prefill_fixed_s + tokens / self.prefill_tokens_per_s


@dataclass
class _Job:
    """A request on its way through a worker."""

    request_id: str
    arrived_s: float
    output_tokens: int
    local: Tokens
    chained: Tokens
    hits: int = 0


@dataclass
class SimulatedWorker:
    """An engine as far as routing can see it. Counts blocks and seconds, not bytes."""

    worker_id: int
    capacity_blocks: int
    queue: deque[_Job] = field(default_factory=deque)
    pinned: Counter[int] = field(default_factory=Counter)
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    busy: bool = False
    busy_s: float = 0.0
    hit_blocks: int = 0
    computed_blocks: int = 0
    requests: int = 0
    last_event_id: int = 0

    def cached_prefix(self, chained: Tokens) -> int:
        """Leading blocks that are in the cache, running or idle."""
        for depth, block in enumerate(chained):
            if block not in self.pinned and block not in self.idle:
                return depth
        return len(chained)

    def admit(self, job: _Job) -> list[int] | None:
        """Pin the job's blocks; the evicted ones, or None when there is no room yet."""
        job.hits = self.cached_prefix(job.chained)
        fresh = len(job.chained) - job.hits
        revived = sum(block in self.idle for block in job.chained[: job.hits])
        evict = len(self.pinned) + len(self.idle) + fresh - self.capacity_blocks
        if evict > len(self.idle) - revived:
            return None
        for block in job.chained:
            self.idle.pop(block, None)
            self.pinned[block] += 1
        return [self.idle.popitem(last=False)[0] for _ in range(evict)]

    def release(self, job: _Job) -> None:
        """Unpin, deepest first, so that a prefix outlives what hangs under it."""
        for block in reversed(job.chained):
            self.pinned[block] -= 1
            if not self.pinned[block]:
                del self.pinned[block]
                self.idle[block] = None


@dataclass(frozen=True)
class Report:
    """What a replay found. Shares are per worker; imbalance is busiest over mean."""

    requests: int
    blocks: int
    hit_blocks: int
    predicted_blocks: int
    infinite_hit_blocks: int
    computed_share: list[float]
    request_share: list[float]
    utilisation: float
    ttft_mean_s: float
    ttft_p99_s: float

    @property
    def hit_rate(self) -> float:
        """Share of all prompt blocks that the chosen worker held when it started computing."""
        return self.hit_blocks / max(self.blocks, 1)

    @property
    def infinite_hit_rate(self) -> float:
        """The same with one cache that never forgets."""
        return self.infinite_hit_blocks / max(self.blocks, 1)

    @property
    def of_infinite(self) -> float:
        """Hit rate over infinite-cache hit rate."""
        return self.hit_blocks / max(self.infinite_hit_blocks, 1)

    @property
    def computed_imbalance(self) -> float:
        """Busiest worker's share of computed prompt tokens over the mean."""
        return max(self.computed_share) * len(self.computed_share)

    @property
    def request_imbalance(self) -> float:
        """Busiest worker's share of requests over the mean."""
        return max(self.request_share) * len(self.request_share)


class Replay:
    """Drives ``picker`` and, where given, ``indexer`` with a trace.

    The picker's clock should be :meth:`now`. ``block_tokens`` is the size of a block of the trace;
    every prompt is taken as whole blocks.
    """

    def __init__(self, block_tokens: int, service: ServiceModel) -> None:
        self.block_tokens = block_tokens
        self.service = service
        self._now_s = 0.0
        self._order = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._workers: dict[int, SimulatedWorker] = {}
        self._ttft_s: list[float] = []
        self._predicted = 0

    def now(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def attach(self, picker: Picker, indexer: Indexer | None, workers: int, blocks: int) -> None:
        """Add ``workers`` simulated workers of ``blocks`` blocks each, with empty caches."""
        self._picker, self._indexer = picker, indexer
        for worker_id in range(1, workers + 1):
            self._workers[worker_id] = SimulatedWorker(worker_id, blocks)
            picker.add_worker(worker_id, RuntimeConfig(total_kv_blocks=blocks))
            if indexer is not None:
                slot = picker.fleet.members[worker_id].slots[0]
                indexer.add(worker_id, 0, slot, answers=False)

    def run(self, arrivals: Sequence[Arrival]) -> Report:
        """Replay to the end of the last request."""
        for number, arrival in enumerate(arrivals):
            self._at(arrival.at_s, partial(self._arrive, str(number), arrival))
        while self._events:
            self._now_s, _, action = heapq.heappop(self._events)
            action()
        return self._report(arrivals)

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when_s, self._order, action))

    def _arrive(self, request_id: str, arrival: Arrival) -> None:
        prompt = array("I")
        for block_id in arrival.block_ids:
            prompt.extend(array("I", [block_id]) * self.block_tokens)
        decision = self._picker.pick(request_id, prompt)
        self._predicted += decision.overlap_blocks
        local = block_hashes(prompt, self.block_tokens)
        job = _Job(request_id, self._now_s, arrival.output_tokens, local, sequence_hashes(local))
        worker = self._workers[decision.worker_id]
        worker.requests += 1
        worker.queue.append(job)
        self._start(worker)

    def _start(self, worker: SimulatedWorker) -> None:
        """Begin the next prompt if the worker is free and it fits."""
        if worker.busy or not worker.queue:
            return
        job = worker.queue[0]
        evicted = worker.admit(job)
        if evicted is None:
            return
        worker.queue.popleft()
        worker.busy = True
        fresh = len(job.chained) - job.hits
        worker.hit_blocks += job.hits
        worker.computed_blocks += fresh
        seconds = self.service.prefill_s(fresh * self.block_tokens)
        worker.busy_s += seconds
        if evicted:
            self._publish(worker, Removed(array("Q", evicted).tobytes()))
        self._at(self._now_s + seconds, partial(self._first_token, worker, job))

    def _first_token(self, worker: SimulatedWorker, job: _Job) -> None:
        worker.busy = False
        if job.hits < len(job.chained):
            parent = job.chained[job.hits - 1] if job.hits else None
            blocks, local = job.chained[job.hits :], job.local[job.hits :]
            self._publish(worker, Stored(blocks.tobytes(), local.tobytes(), parent))
        self._picker.mark_prefill_complete(job.request_id)
        self._ttft_s.append(self._now_s - job.arrived_s)
        seconds = job.output_tokens * self.service.inter_token_s
        self._at(self._now_s + seconds, partial(self._end, worker, job))
        self._start(worker)

    def _end(self, worker: SimulatedWorker, job: _Job) -> None:
        worker.release(job)
        self._picker.add_output_tokens(job.request_id, job.output_tokens)
        self._picker.free(job.request_id)
        self._start(worker)

    def _publish(self, worker: SimulatedWorker, data: Stored | Removed) -> None:
        worker.last_event_id += 1
        if self._indexer is not None:
            event = KvEvent(worker.last_event_id, data)
            self._indexer.apply(KvEventBatch(worker.worker_id, [event]))

    def _report(self, arrivals: Sequence[Arrival]) -> Report:
        seen: set[int] = set()
        infinite = 0
        for arrival in arrivals:
            infinite += sum(block_id in seen for block_id in arrival.block_ids)
            seen.update(arrival.block_ids)
        workers = list(self._workers.values())
        computed = sum(worker.computed_blocks for worker in workers)
        served = sum(worker.requests for worker in workers)
        ttft_s = sorted(self._ttft_s)
        return Report(
            requests=len(arrivals),
            blocks=sum(len(arrival.block_ids) for arrival in arrivals),
            hit_blocks=sum(worker.hit_blocks for worker in workers),
            predicted_blocks=self._predicted,
            infinite_hit_blocks=infinite,
            computed_share=[worker.computed_blocks / max(computed, 1) for worker in workers],
            request_share=[worker.requests / max(served, 1) for worker in workers],
            utilisation=sum(w.busy_s for w in workers) / max(self._now_s * len(workers), 1e-9),
            ttft_mean_s=sum(ttft_s) / max(len(ttft_s), 1),
            ttft_p99_s=ttft_s[int(len(ttft_s) * 0.99)] if ttft_s else 0.0,
        )
