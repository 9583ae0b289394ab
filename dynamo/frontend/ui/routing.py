"""The picture of the routing that the page shows: workers, their queues, and the last decisions.

It is that of this frontend's router. Nothing is collected, and no load report is read, unless a
page shows the section.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec

from dynamo.frontend.models.model import LoadedModel
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.recent import RequestFigures
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.ui.stream import Columns, columns
from dynamo.protocols import codec
from dynamo.protocols.kv import KV_METRICS, KvMetrics
from dynamo.router.decision.decision import Decision
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.picker import InflightPicker, Picker
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.events.channels import Subscription

_WINDOW_S = 60.0
_OVERLAP_S = 0.5
_DECISIONS = 100
"""Of one event."""
_IDLE_S = 5.0
"""Load reports are read for so long after the last look."""
_REPORTS = 1000
"""Publishers whose newest report is kept; those that have been silent longest go first."""
_decode_loads = codec.decoder(list[KvMetrics]).decode


class RoutedWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank of a worker. ``cached_blocks`` are those that the router's index has of it.

    ``running`` and ``waiting`` are the requests of its engine, ``in_flight`` those that this
    frontend has sent it. ``prefill_s`` is the time until it would begin with another prompt,
    ``prefill_tokens`` are those before it. What is unknown is left out.
    """

    worker: str
    dp_rank: int = 0
    busy: bool = False
    cached_blocks: int | None = None
    total_blocks: int | None = None
    kv_use: float | None = None
    running: int | None = None
    waiting: int | None = None
    in_flight: int = 0
    prefill_tokens: int | None = None
    prefill_s: float | None = None


class RoutedPool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The workers of a model that one router chooses among; ``waiting`` requests have none yet.

    ``phase`` is ``prefill`` or ``decode`` with prefill workers, else empty. Costs are in ``unit``,
    blocks or seconds; empty in modes without a cost.
    """

    model: str
    mode: str
    phase: str = ""
    unit: str = ""
    waiting: int = 0
    workers: tuple[RoutedWorker, ...] = ()


class RoutedDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that got its worker at ``at_s`` (Unix time)."""

    request_id: str
    model: str
    at_s: float
    worker: str
    dp_rank: int = 0
    prefill_worker: str = ""
    overlap_blocks: int = 0
    prompt_blocks: int = 0


class RoutingView(msgspec.Struct, frozen=True, kw_only=True):
    """All pools, and the newest decisions (:class:`RoutedDecision`); ``left_out`` more were
    made."""

    at_s: float
    pools: tuple[RoutedPool, ...]
    decisions: Columns
    left_out: int


class LoadReports:
    """The newest load report of each worker, decoded when it is read."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._subscriptions: dict[tuple[str, str], Subscription] = {}
        self._payloads: dict[int, bytes] = {}
        self._timer: asyncio.TimerHandle | None = None

    def read(self, components: set[tuple[str, str]]) -> dict[tuple[int, int], KvMetrics]:
        """Return reports by worker and rank; from now on, those of ``components`` are received."""
        for gone in self._subscriptions.keys() - components:
            self._subscriptions.pop(gone).close()
        for namespace, component in components - self._subscriptions.keys():
            topic = namespace, component, KV_METRICS
            subscription = self._runtime.subscribe(*topic, self._on_loads)
            self._subscriptions[namespace, component] = subscription
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_IDLE_S, self.close)
        reports = {}
        for payload in self._payloads.values():
            try:
                states = _decode_loads(payload)
            except msgspec.MsgspecError:  # the router's log says so
                continue
            reports.update({(report.worker_id, report.dp_rank): report for report in states})
        return reports

    def close(self) -> None:
        """Receive nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._subscriptions:
            self._subscriptions.popitem()[1].close()
        self._payloads.clear()

    def _on_loads(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        # To the end: the first one is then that of the publisher silent longest.
        self._payloads.pop(publisher_id, None)
        self._payloads[publisher_id] = payload
        if len(self._payloads) > _REPORTS:
            del self._payloads[next(iter(self._payloads))]


class RoutingFeed:
    """Looks at the routers of ``models`` and at the requests of ``registry``."""

    def __init__(
        self, runtime: DistributedRuntime, models: Models, registry: RequestRegistry
    ) -> None:
        self._models = models
        self._registry = registry
        self._loads = LoadReports(runtime)
        self._cursor = 0.0

    async def read(self, first: bool) -> RoutingView:
        """Return the state now. O(workers + requests in progress).

        The ``first`` time with the decisions of the last minute. The page knows a decision by its
        request: those of the last seconds are sent again, for requests that were on their way.
        """
        now_s = time.monotonic()
        after_s = now_s - _WINDOW_S if first else self._cursor - _OVERLAP_S
        self._cursor = now_s
        decided = sorted(
            self._registry.decided_since(after_s), key=lambda pair: pair[0].sent_s, reverse=True
        )
        unix_s = time.time() - now_s
        return RoutingView(
            at_s=round(now_s + unix_s, 3),
            pools=self._pools(),
            decisions=columns([_decision(*pair, unix_s) for pair in decided[:_DECISIONS]]),
            left_out=len(decided[_DECISIONS:]),
        )

    def close(self) -> None:
        """Read no more load reports."""
        self._loads.close()

    def _pools(self) -> tuple[RoutedPool, ...]:
        models = self._models.loaded_models()
        decode = {model.router.workers[:2] for model in models}
        prefill = {model.prefill.endpoint[:2] for model in models if model.prefill.endpoint}
        loads = self._loads.read(decode | prefill)
        return tuple(pool for model in models for pool in self._pools_of(model, loads))

    def _pools_of(
        self, loaded: LoadedModel, loads: dict[tuple[int, int], KvMetrics]
    ) -> Iterator[RoutedPool]:
        in_flight = self._registry.in_flight_by_worker()
        prefill = loaded.prefill.router
        chooser = None if prefill is None else prefill.workers.picker
        if prefill is not None and chooser is not None:
            queue = prefill.queue
            sent = {worker_id: len(queue.running_at(worker_id)) for worker_id in queue.all_workers}
            yield _pool(loaded.name, "prefill", chooser, len(queue), sent, loads)
        waiting = len(loaded.dispatch.queue or ())
        phase = "" if chooser is None else "decode"
        yield _pool(loaded.name, phase, loaded.picker, waiting, in_flight, loads)


def _pool(
    model: str,
    phase: str,
    picker: Picker,
    waiting: int,
    in_flight: dict[int, int],
    loads: dict[tuple[int, int], KvMetrics],
) -> RoutedPool:
    kv = picker if isinstance(picker, KvPicker) else None
    pool = picker.worker_pool
    workers = [
        _worker(
            kv,
            slot,
            RoutedWorker(
                worker=f"{worker_id:x}",
                dp_rank=rank,
                busy=worker_id in pool.busy or worker_id in pool.avoided,
                in_flight=in_flight.get(worker_id, 0),
                total_blocks=member.config.total_kv_blocks,
            ),
            loads.get((worker_id, rank)),
        )
        for worker_id, member in pool.members.items()
        for rank, slot in member.slots.items()
    ]
    return RoutedPool(
        model=model,
        phase=phase,
        mode="kv" if kv is not None else picker.mode if isinstance(picker, InflightPicker) else "",
        unit="" if kv is None else "seconds" if kv.in_seconds else "blocks",
        waiting=waiting,
        workers=tuple(workers),
    )


def _worker(
    picker: KvPicker | None, slot: int, worker: RoutedWorker, load: KvMetrics | None
) -> RoutedWorker:
    """Return ``worker`` with what its router and its engine know of it."""
    changes: dict[str, int | float | None] = {}
    if load is not None:
        total = load.kv_total_blocks or worker.total_blocks
        changes = {
            "running": load.num_requests_running,
            "waiting": load.num_requests_waiting,
            "total_blocks": total,
        }
        if total and load.kv_used_blocks is not None:
            changes["kv_use"] = round(min(1.0, load.kv_used_blocks / total), 3)
    if picker is not None:
        changes["prefill_tokens"], wait_s = picker.active.backlog(slot)
        changes["prefill_s"] = None if wait_s is None else round(wait_s, 4)
        if picker.index is not None:
            changes["cached_blocks"] = picker.index.held(slot)
    return msgspec.structs.replace(worker, **changes)


def _decision(figures: RequestFigures, decision: Decision, unix_s: float) -> RoutedDecision:
    prefilled = figures.prefilled
    cached = figures if prefilled is None else prefilled
    return RoutedDecision(
        request_id=figures.info.request_id,
        model=figures.model,
        at_s=round(figures.sent_s + unix_s, 3),
        worker=f"{decision.worker_id:x}",
        dp_rank=decision.dp_rank,
        prefill_worker="" if prefilled is None else f"{prefilled.worker_id:x}",
        overlap_blocks=cached.overlap_blocks,
        prompt_blocks=cached.prompt_blocks,
    )
