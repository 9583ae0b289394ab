"""A worker of a replay: a prefix cache, one prefill at a time, and decoding in batches.

Counts blocks and virtual seconds. No I/O, no clock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from dynamo.protocols.codec import Tokens


@dataclass(frozen=True)
class WorkerSpeed:
    """The speed of a worker.

    A decode step gives every running request one token. It takes ``inter_token_s``, and
    ``inter_token_per_request_s`` more for each running request beyond the first.
    """

    prefill_tokens_per_s: float = 20_000.0
    prefill_fixed_s: float = 0.02
    inter_token_s: float = 0.01
    inter_token_per_request_s: float = 0.0

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds to compute ``tokens`` uncached prompt tokens."""
        return self.prefill_fixed_s + tokens / self.prefill_tokens_per_s

    def step_s(self, running: int) -> float:
        """Return the seconds of one decode step of ``running`` requests."""
        return self.inter_token_s + self.inter_token_per_request_s * max(running - 1, 0)


@dataclass
class Job:
    """A request at a worker; ``number`` is its index in the trace."""

    number: int
    arrived_s: float
    output_tokens: int
    local: Tokens
    chained: Tokens
    hits: int = 0

    @property
    def request_id(self) -> str:
        """The id that the router uses."""
        return str(self.number)


@dataclass
class SimulatedWorker:
    """An engine, as routing sees it."""

    worker_id: int
    capacity_blocks: int
    service: WorkerSpeed = field(default_factory=WorkerSpeed)
    queue: deque[Job] = field(default_factory=deque)
    pinned: dict[int, int] = field(default_factory=dict)
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    busy: bool = False
    busy_s: float = 0.0
    hit_blocks: int = 0
    computed_blocks: int = 0
    requests: int = 0
    last_event_id: int = 0
    batch_version: int = 0
    _steps: float = 0.0
    _stepped_at_s: float = 0.0
    _decoding: list[tuple[float, int, Job]] = field(default_factory=list)

    def cached_prefix(self, chained: Tokens) -> int:
        """Return the number of leading blocks in the cache, running or idle."""
        for depth, block in enumerate(chained):
            if block not in self.pinned and block not in self.idle:
                return depth
        return len(chained)

    def admit(self, job: Job) -> list[int] | None:
        """Pin the job's blocks; return the evicted ones, or None while they do not fit."""
        job.hits = self.cached_prefix(job.chained)
        fresh = len(job.chained) - job.hits
        # Idle hits become pinned: they are not available for eviction.
        pinned, idle = self.pinned, self.idle
        revived = sum(map(idle.__contains__, job.chained[: job.hits]))
        evict = len(pinned) + len(idle) + fresh - self.capacity_blocks
        if evict > len(idle) - revived:
            return None
        for block in job.chained:
            requests = pinned.get(block, 0)
            if not requests:
                idle.pop(block, None)
            pinned[block] = requests + 1
        return [idle.popitem(last=False)[0] for _ in range(evict)]

    def release(self, job: Job) -> None:
        """Unpin, deepest first, so that a prefix is evicted after its extensions."""
        pinned, idle = self.pinned, self.idle
        for block in reversed(job.chained):
            requests = pinned[block] - 1
            if requests:
                pinned[block] = requests
            else:
                del pinned[block]
                idle[block] = None

    def start_decode(self, job: Job, now_s: float) -> None:
        """Add the job to the decode batch."""
        self._step_to(now_s)
        heapq.heappush(self._decoding, (self._steps + job.output_tokens, job.number, job))

    def finish_decode(self, now_s: float) -> Job:
        """Remove the job that has generated its last token from the batch and return it."""
        self._step_to(now_s)
        self._steps, _, job = heapq.heappop(self._decoding)
        return job

    def next_end_s(self) -> float | None:
        """Return when the next job ends if the batch stays as it is; None for an empty batch."""
        if not self._decoding:
            return None
        steps = max(self._decoding[0][0] - self._steps, 0.0)
        return self._stepped_at_s + steps * self.service.step_s(len(self._decoding))

    def _step_to(self, now_s: float) -> None:
        """Count the decode steps since the batch last changed."""
        if self._decoding:
            elapsed_s = now_s - self._stepped_at_s
            self._steps += elapsed_s / self.service.step_s(len(self._decoding))
        self._stepped_at_s = now_s
