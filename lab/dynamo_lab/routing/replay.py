"""Replays a trace through the router over simulated workers, in virtual time.

Real: hashing, index, KV event state machine, active load, cost and choice. Simulated: workers with
an LRU prefix cache (blocks of running requests pinned) that compute one prompt after the other at a
fixed rate, decode in batches, and publish the blocks they store and evict. No I/O, no clock: the
same trace gives the same report.
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from struct import Struct
from typing import Any, NamedTuple

import msgspec

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo.bench.trace import parents
from dynamo.bench.trace_formats import TraceRequest
from dynamo.config.option import from_env
from dynamo.config.router import RouterSettings
from dynamo.errors import ConfigError
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.kv import BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from dynamo.router.caches.indexer import EventMetrics, Indexer
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.picker import InflightPicker, Picker
from dynamo_lab.routing.simulated_worker import Job, SimulatedWorker, WorkerSpeed

_TOKEN = Struct("I")
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "kv, --router-cost seconds": {"mode": "kv", "cost": "seconds"},
    "kv, defaults": {"mode": "kv"},
    "kv, --router-prefill-load-scale 4": {"mode": "kv", "prefill_load_scale": 4.0},
    "kv, cache first": {"mode": "kv", "prefill_load_scale": 64.0, "duplicate_cost": 32.0},
    "kv, without events": {
        "mode": "kv",
        "cost": "seconds",
        "kv_events": False,
        "approximate_cache_policy": "lru",
    },
    "least-loaded": {"mode": "least-loaded"},
    "power-of-two": {"mode": "power-of-two"},
    "round-robin": {"mode": "round-robin"},
}
"""Settings of the router, by the name in the table."""
_BLOCK_TOKENS = 16
"""The rate is in blocks, so their size does not matter; small ones hash faster."""


class Arrival(NamedTuple):
    """One request: arrival time, ids of its prompt blocks, number of generated tokens.

    With ``parent``, the index of an earlier request of the trace, it arrives ``think_s`` after the
    parent's last token, or at ``at_s`` if that is later.
    """

    at_s: float
    block_ids: Sequence[int]
    output_tokens: int
    parent: int | None = None
    think_s: float = 0.0


@dataclass(frozen=True)
class Report:
    """The result of a replay. Shares are per worker; imbalance is busiest over mean."""

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
        """The hit rate of one cache that never evicts."""
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

    The picker's clock must be :meth:`now`. ``block_tokens`` is the size of a block of the trace;
    every prompt consists of whole blocks. The workers take turns to have one of the ``speeds``.
    """

    def __init__(self, block_tokens: int, *speeds: WorkerSpeed) -> None:
        self.block_tokens = block_tokens
        self._speeds = speeds
        self._now_s = 0.0
        self._order = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._workers: dict[int, SimulatedWorker] = {}
        self._ttft_s: list[float] = []
        self._predicted = 0
        self._children: defaultdict[int, list[int]] = defaultdict(list)

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def attach(self, picker: Picker, indexer: Indexer | None, workers: int, blocks: int) -> None:
        """Add ``workers`` simulated workers of ``blocks`` blocks each, with empty caches."""
        self._picker, self._indexer = picker, indexer
        for worker_id in range(1, workers + 1):
            speed = self._speeds[worker_id % len(self._speeds)]
            self._workers[worker_id] = SimulatedWorker(worker_id, blocks, speed)
            picker.add_worker(worker_id, RuntimeConfig(total_kv_blocks=blocks))
            if indexer is not None:
                slot = picker.worker_pool.members[worker_id].slots[0]
                indexer.add(worker_id, 0, slot, answers=False)

    def run(self, arrivals: Sequence[Arrival]) -> Report:
        """Replay until the last request ends.

        Raises ConfigError, before anything runs, for a prompt that fits no worker and for a parent
        that does not precede its child.
        """
        self._check(arrivals)
        self._arrivals = arrivals
        for number, arrival in enumerate(arrivals):
            if arrival.parent is None:
                self._at(arrival.at_s, partial(self._arrive, number))
            else:
                self._children[arrival.parent].append(number)
        while self._events:
            self._now_s, _, action = heapq.heappop(self._events)
            action()
        assert len(self._ttft_s) == len(arrivals), "a request got no first token"
        return self._report(arrivals)

    def _check(self, arrivals: Sequence[Arrival]) -> None:
        capacity = min((worker.capacity_blocks for worker in self._workers.values()), default=0)
        largest = max((len(arrival.block_ids) for arrival in arrivals), default=0)
        if largest > capacity:
            count = sum(len(arrival.block_ids) > capacity for arrival in arrivals)
            raise ConfigError(
                f"{count} of {len(arrivals)} prompts do not fit a worker of {capacity} blocks, "
                f"the largest has {largest}: give the workers at least {largest} blocks"
            )
        for number, arrival in enumerate(arrivals):
            if arrival.parent is not None and not 0 <= arrival.parent < number:
                raise ConfigError(
                    f"request {number} of the trace waits for request {arrival.parent}, "
                    "which does not precede it"
                )

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when_s, self._order, action))

    def _arrive(self, number: int) -> None:
        arrival = self._arrivals[number]
        repeated = [_TOKEN.pack(block_id) * self.block_tokens for block_id in arrival.block_ids]
        prompt = array("I", b"".join(repeated))
        decision = self._picker.pick(str(number), prompt)
        self._predicted += decision.overlap_blocks
        local = block_hashes(prompt, self.block_tokens)
        job = Job(number, self._now_s, arrival.output_tokens, local, sequence_hashes(local))
        worker = self._workers[decision.worker_id]
        worker.requests += 1
        worker.queue.append(job)
        self._start(worker)

    def _start(self, worker: SimulatedWorker) -> None:
        """Start the next prompt if the worker is idle and the prompt fits."""
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
        seconds = worker.service.prefill_s(fresh * self.block_tokens)
        worker.busy_s += seconds
        if evicted:
            self._publish(worker, BlocksRemoved(array("Q", evicted).tobytes()))
        self._at(self._now_s + seconds, partial(self._first_token, worker, job))

    def _first_token(self, worker: SimulatedWorker, job: Job) -> None:
        worker.busy = False
        if job.hits < len(job.chained):
            parent = job.chained[job.hits - 1] if job.hits else None
            blocks, local = job.chained[job.hits :], job.local[job.hits :]
            self._publish(worker, BlocksStored(blocks.tobytes(), local.tobytes(), parent))
        self._picker.mark_prefill_complete(job.request_id)
        self._ttft_s.append(self._now_s - job.arrived_s)
        worker.start_decode(job, self._now_s)
        self._batch_changed(worker)
        self._start(worker)

    def _batch_changed(self, worker: SimulatedWorker) -> None:
        """Schedule the next end in the worker's batch, replacing the one scheduled before.

        The replaced action stays in the heap; its stale version makes :meth:`_end` ignore it.
        """
        worker.batch_version += 1
        end_s = worker.next_end_s()
        if end_s is not None:
            self._at(end_s, partial(self._end, worker, worker.batch_version))

    def _end(self, worker: SimulatedWorker, version: int) -> None:
        if version != worker.batch_version:
            return
        job = worker.finish_decode(self._now_s)
        worker.release(job)
        self._picker.add_output_tokens(job.request_id, job.output_tokens)
        self._picker.free(job.request_id)
        for number in self._children.pop(job.number, ()):
            child = self._arrivals[number]
            when_s = max(child.at_s, self._now_s + child.think_s)
            self._at(when_s, partial(self._arrive, number))
        self._batch_changed(worker)
        self._start(worker)

    def _publish(self, worker: SimulatedWorker, data: BlocksStored | BlocksRemoved) -> None:
        worker.last_event_id += 1
        if self._indexer is not None:
            event = KvEvent(worker.last_event_id, data)
            self._indexer.apply(KvEventBatch(worker.worker_id, [event]))

    def _report(self, arrivals: Sequence[Arrival]) -> Report:
        seen: set[int] = set()
        infinite = 0
        for arrival in arrivals:
            infinite += sum(map(seen.__contains__, arrival.block_ids))
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


class _NoCounts(EventMetrics):
    """Counts nothing."""

    def __init__(self) -> None:
        pass

    def applied(self, event_type: str, status: str, count: int = 1) -> None:
        """Ignored."""

    def warning(self, kind: str, count: int = 1) -> None:
        """Ignored."""


def replay(
    arrivals: list[Arrival],
    settings: RouterSettings,
    workers: int,
    blocks_per_worker: int,
    service: WorkerSpeed | None = None,
    block_tokens: int = 512,
    seed: int = 1,
    slower: WorkerSpeed | None = None,
) -> Report:
    """One replay of ``arrivals`` with a router of these settings; every second worker may be
    ``slower``."""
    service = service or WorkerSpeed()
    run = Replay(block_tokens, service, slower or service)
    index = make_index(settings)
    picker: Picker
    if settings.mode == "kv":
        picker = KvPicker(settings, block_tokens, index, None, Random(seed), run.now)
    else:
        picker = InflightPicker(settings.mode, Random(seed))
    follows = index is not None and not settings.predicts
    indexer = Indexer(index, lambda recovery: None, _NoCounts()) if index and follows else None
    run.attach(picker, indexer, workers, blocks_per_worker)
    return run.run(arrivals)


class RoutingResult(msgspec.Struct, frozen=True):
    """``hit_rate``: share of the prompts' blocks that their worker had cached. ``busiest``: the
    greatest share of computed blocks over the mean."""

    name: str
    ttft_mean_s: float
    ttft_p99_s: float
    hit_rate: float
    busiest: float


def arrivals_of(
    trace: Sequence[TraceRequest], block_tokens: int, speedup: float, output_scale: float
) -> list[Arrival]:
    """Return the requests as a replay takes them; a turn of a session waits for the one before.

    A prompt without block ids shares nothing, and gets ids of its own.
    """
    first_ms = min((request.timestamp for request in trace), default=0.0)
    arrivals, own = [], 0
    for request, parent in zip(trace, parents(trace), strict=True):
        blocks: Sequence[int] = request.hash_ids
        if not blocks:
            count = max(-(-(request.input_length or 1) // block_tokens), 1)
            blocks, own = range(own - count, own), own - count
        at_s = (request.timestamp - first_ms) / 1e3 / speedup
        tokens = max(round(request.output_length * output_scale), 1)
        after = parent if request.session_id is not None else None
        arrivals.append(Arrival(at_s, blocks, tokens, after, request.delay / 1e3 / speedup))
    return _numbered(arrivals)


def compare(
    name: str, arrivals: list[Arrival], workers: int, blocks: int, blocks_per_s: float
) -> RoutingResult:
    """Replay with the policy of this name.

    Raises ConfigError for a prompt that no worker has room for.
    """
    service = WorkerSpeed(blocks_per_s * _BLOCK_TOKENS)
    settings = from_env(RouterSettings, {}, **POLICIES[name])
    report = replay(arrivals, settings, workers, blocks, service, _BLOCK_TOKENS)
    return RoutingResult(
        name, report.ttft_mean_s, report.ttft_p99_s, report.hit_rate, report.computed_imbalance
    )


def _numbered(arrivals: list[Arrival]) -> list[Arrival]:
    """Give blocks numbers from 0, as tokens are unsigned numbers of 32 bits."""
    numbers: dict[int, int] = {}
    return [
        arrival._replace(
            block_ids=[numbers.setdefault(block, len(numbers)) for block in arrival.block_ids]
        )
        for arrival in arrivals
    ]
