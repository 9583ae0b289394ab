"""What a policy sees of a model: its pools, its traffic, the load of its workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.planner.capacity.season import Usual
from dynamo.serve.graph.facts import DECODE, PREFILL


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The last load report of one worker, all ranks together."""

    worker_id: int
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    running: int = 0
    waiting: int = 0
    active_prefill_tokens: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0..1."""
        return self.kv_used_blocks / self.kv_total_blocks if self.kv_total_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """One metric pull, at ``at_s`` on the planner's clock.

    ``decode`` has the workers whose load is known; ``prefill_queue`` is the number of queued
    prefill requests per prefill slot, None if it is unknown.
    """

    at_s: float
    decode: tuple[WorkerLoad, ...] = ()
    prefill_queue: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of an interval, as the frontends count them.

    ``arrived`` requests arrived in ``duration_s``. The means are those of requests that finished or
    got tokens in the interval; None without any. TTFT and ``request_s`` are without the wait for a
    first worker of the model. ``queued`` wait for their first token at its end, ``inflight`` are
    not finished then (the queued ones included). Not ``known``: the metrics of a
    frontend could not be read, so more requests may have arrived than are counted here.
    """

    duration_s: float
    arrived: int = 0
    finished: int = 0
    isl: float | None = None
    osl: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    request_s: float | None = None
    queued: int = 0
    inflight: int = 0
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The workers of one kind (decode or aggregated, or prefill) and their limits.

    ``ready`` are in discovery, ``starting`` have GPUs but do not serve yet. ``draining`` finish
    their requests: they still hold GPUs and take no new requests. ``asleep`` keep their process
    and hold no GPU; an addition wakes them before it starts others.
    """

    ready: int
    starting: int = 0
    draining: int = 0
    asleep: int = 0
    gpus_per_worker: float = 1.0
    minimum: int = 1
    maximum: int | None = None

    @property
    def workers(self) -> int:
        """The workers that serve or will serve."""
        return self.ready + self.starting

    @property
    def gpus(self) -> float:
        """The GPUs that the pool holds now."""
        return (self.ready + self.starting + self.draining) * self.gpus_per_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One model at the end of an interval of ``interval_s``, at ``now_s`` on the planner's clock.

    ``prefill`` is None in aggregated serving. ``pulls`` are those since the last decision, oldest
    first; none of them was made while workers were added or removed. ``changed`` says that the set
    of ready workers is not the one at the start of the interval. ``max_gpus`` bounds what both
    pools may hold together; GPUs of other models are not part of it. ``usual`` has the rates of
    earlier days at this time of the day and the week, if any are known.
    """

    now_s: float
    interval_s: float
    decode: Pool
    traffic: Traffic
    prefill: Pool | None = None
    pulls: Sequence[Pull] = field(default=())
    max_gpus: float = 8
    changed: bool = False
    usual: Usual | None = None

    @property
    def pools(self) -> dict[str, Pool]:
        """The pools by name, prefill first."""
        prefill = {} if self.prefill is None else {PREFILL: self.prefill}
        return {**prefill, DECODE: self.decode}
