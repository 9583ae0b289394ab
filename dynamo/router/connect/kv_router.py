"""The kv mode connected to workers, KV events and replicas, with the timers that clean up."""

from __future__ import annotations

import asyncio
import logging
import time

from dynamo.config.router import RouterSettings
from dynamo.observability.logs import counted
from dynamo.observability.metrics import Gauge, Registry, gauge
from dynamo.router.caches.indexer import Indexer
from dynamo.router.caches.predicted import STEP_BLOCKS, PredictedCache
from dynamo.router.connect.event_feed import EventFeed
from dynamo.router.connect.replicas import ReplicaSync
from dynamo.router.connect.router import (
    ConnectedRouter,
    RoutedWorkers,
    SpeedFile,
    speed_file,
)
from dynamo.router.labels import RouterLabels
from dynamo.router.load.active_load import WorkerMetrics
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.kv_metrics import DecisionMetrics
from dynamo.router.modes.policy import make_kv_picker
from dynamo.router.queue.request_queue import make_queue
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.process.tasks import Tasks

log = logging.getLogger(__name__)
SWEEP_S = 30.0
_SAVE_S = 60.0
SILENCE_S = 2.0
"""From the first token of a worker's first prompt: by then it has published the stored blocks."""

_MISMATCHED_WORKERS = gauge(
    "dynamo_component_router_kv_event_source_mismatch_workers",
    "Workers that serve prompts without KV events, or whose blocks are of another size",
    "dynamo_component dynamo_namespace model"
    " target_component target_endpoint target_namespace worker_id worker_type",
)


class Maintenance:
    """Timers of one router. ``indexer`` is None where no events are followed.

    ``useless`` counts the workers whose KV events are missing, or of another block size.
    """

    def __init__(
        self, picker: KvPicker, indexer: Indexer | None, expiry_s: float, useless: Gauge
    ) -> None:
        self._picker = picker
        self._indexer = indexer
        self._expiry_s = expiry_s
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._silent: set[int] = set()
        self._unusable: set[int] = set()
        self._exempt: set[int] = set()
        self._closed = False
        useless.function = lambda: len(self._silent | self._unusable)

    def start(self) -> None:
        """Arm the timers."""
        if self._indexer is not None:
            self._picker.on_first_served = self._on_first_served
        self._arm("sweep", SWEEP_S)
        self.age_predictions()

    def close(self) -> None:
        """Disarm them. Idempotent."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()

    def age_predictions(self) -> None:
        """Expire old predictions from now on, if caches are predicted. Idempotent."""
        if self._picker.predicted is not None and "age" not in self._timers and not self._closed:
            self._age(self._picker.predicted)

    def forget(self, worker_id: int) -> None:
        """Forget a removed worker."""
        self._silent.discard(worker_id)
        self._unusable.discard(worker_id)
        self._exempt.discard(worker_id)

    def exempt(self, worker_id: int) -> None:
        """Expect no KV events of a worker that decodes prompts which others have computed."""
        self._exempt.add(worker_id)

    def mark_unusable(self, worker_id: int) -> None:
        """Count a worker whose KV events cannot be used; the caller has logged the reason."""
        self._unusable.add(worker_id)

    def sweep(self) -> None:
        """Drop stale load, check for lost last events, name workers that publish nothing."""
        expired = self._picker.expire(self._expiry_s)
        if expired:
            log.warning("dropped the load of %s that never ended", counted(len(expired), "request"))
        if self._indexer is not None:
            self._indexer.verify()
            self.check_silence(self._indexer)

    def check_silence(self, indexer: Indexer) -> None:
        """Log, once each, the workers that have served prompts and published nothing."""
        for worker_id in self._picker.worker_pool.members:
            if not self._picker.served.get(worker_id) or not indexer.silent(worker_id):
                self._silent.discard(worker_id)
            elif worker_id not in self._silent | self._unusable | self._exempt:
                self._silent.add(worker_id)
                log.warning(
                    "worker %x has served prompts but published no KV event: "
                    "its cache stays unknown (does its engine publish them?)",
                    worker_id,
                )

    def _arm(self, name: str, delay_s: float) -> None:
        if name in self._timers:  # of a worker that has slept, or has left and returned
            self._timers[name].cancel()
        timer = asyncio.get_running_loop().call_later(delay_s, self._fire, name)
        self._timers[name] = timer

    def _fire(self, name: str) -> None:
        if name == "sweep":
            # Arm first: an error in one sweep must not end all later ones.
            self._arm("sweep", SWEEP_S)
            self.sweep()
        elif self._indexer is not None:
            del self._timers[name]
            self.check_silence(self._indexer)

    def _on_first_served(self, worker_id: int) -> None:
        if not self._closed:
            self._arm(f"silence of {worker_id}", SILENCE_S)

    def _age(self, predicted: PredictedCache) -> None:
        """Expire old predictions also without requests, a bounded step at a time."""
        more = predicted.expire(time.perf_counter()) >= STEP_BLOCKS
        # A full step may have left some: continue soon, with requests in between.
        pause_s = 0.01 if more else 1.0
        loop = asyncio.get_running_loop()
        self._timers["age"] = loop.call_later(pause_s, self._age, predicted)


class ConnectedKvRouter(ConnectedRouter):
    """A :class:`ConnectedRouter` that also follows caches and load.

    ``events`` is None where the workers' events are not followed. The caches of workers that exist
    at :meth:`start` are known shortly after it.
    """

    picker: KvPicker

    def __init__(
        self,
        runtime: DistributedRuntime,
        workers: RoutedWorkers,
        settings: RouterSettings,
        client: Client,
        admits: bool = False,
    ) -> None:
        registry, labels = runtime.metrics, workers.labels(runtime.instance_id)
        index = make_index(settings)
        metrics = DecisionMetrics(registry, labels)
        picker = make_kv_picker(settings, workers.block_size, index, metrics, registry, labels)
        super().__init__(runtime, workers, client, picker, admits)
        self.queue = make_queue(settings, picker, registry, labels)
        self._worker_metrics = WorkerMetrics(registry, labels)
        self.events: EventFeed | None = None
        if index is not None and not settings.predicts:
            threads = settings.event_threads
            self.events = EventFeed(runtime, labels, workers.block_size, index, threads)
            picker.recovering = self.events.indexer.recovering_slots
        elif settings.predicts and settings.event_threads > 1:
            log.warning("without KV events --router-event-threads has no effect")
        self._labels, self._policy = labels, settings.approximate_cache_policy
        self._export_predictions()
        self.maintenance = Maintenance(
            picker,
            None if self.events is None else self.events.indexer,
            settings.active_request_expiry_s,
            useless_sources(registry, labels, workers.endpoint),
        )
        if self.events is not None:
            self.events.on_unusable = self.maintenance.mark_unusable
        self._sync = ReplicaSync(runtime, labels, picker) if settings.replica_sync else None
        self._speeds = speed_file(runtime, workers) if settings.in_seconds else None
        self._tasks = Tasks("router")

    async def _follow(self) -> None:
        await self._runtime.start()
        if self._speeds is not None:
            speed = self._speeds.load()
            if speed is not None:
                self.picker.active.restore_prefill_speed(speed)
            self._tasks.spawn(self._save_speed(self._speeds), name="prefill speed")
        if self.events is not None:
            # Before the first worker: events after its dump would be lost otherwise.
            await self.events.start()
        await super()._follow()
        if self._sync is not None:
            await self._sync.start()
        self.maintenance.start()

    async def close(self) -> None:
        """Stop following, refuse queued requests, remove all workers. Idempotent."""
        self._closed = True
        if self.queue is not None:
            # First: while this awaits the rest, an open queue would continue to route.
            self.queue.close()
        self.maintenance.close()
        if self.events is not None:
            await self.events.close()
        await super().close()
        if self._sync is not None:
            self._sync.close()
        # Before the last save: two writes at once could leave the older speed in the file.
        await self._tasks.close()
        if self._speeds is not None:
            await self._speeds.save(self.picker.active.prefill_speed())

    async def _save_speed(self, file: SpeedFile) -> None:
        """Keep what is learned, also for the router after one that is killed."""
        while True:
            await asyncio.sleep(_SAVE_S)
            await file.save(self.picker.active.prefill_speed())

    def _export_predictions(self) -> None:
        registry, labels, picker = self._runtime.metrics, self._labels, self.picker
        if picker.predicted is not None:
            picker.predicted.export(registry, labels, self._policy)
        if picker.optimistic is not None:
            picker.optimistic.export(registry, labels)

    def _add(self, worker_id: int) -> None:
        self.maintenance.forget(worker_id)
        card = self._cards.get(worker_id)
        block_size = self.workers.block_size
        size = block_size if card is None else card.kv_cache_block_size
        if self.events is not None and size != block_size:
            self._drop(worker_id)
            self.events.reject(worker_id, size)
            return
        publishes = card is None or card.runtime_config.kv_event_publishing_enabled is not False
        if not publishes or (card is not None and card.worker_type == "Decode"):
            self.maintenance.exempt(worker_id)
        self._remove_metrics(worker_id)  # a changed worker may have other ranks
        predicted = self.picker.predicted
        super()._add(worker_id)
        if self.picker.predicted is not predicted:  # of the first worker without events
            self._export_predictions()
        member = self.picker.worker_pool.members[worker_id]
        self._worker_metrics.added(member, self.picker.active)
        self.maintenance.age_predictions()
        if self.events is not None:
            self.events.add(member)
        if self._sync is not None:
            self._sync.worker_added(worker_id)

    def _remove(self, worker_id: int) -> None:
        self.maintenance.forget(worker_id)
        self._drop(worker_id)

    def _drop(self, worker_id: int) -> None:
        """Remove the worker from the picker; its instance stays known."""
        self._remove_metrics(worker_id)
        if self.events is not None:
            self.events.remove(worker_id)
        self.picker.remove_worker(worker_id)

    def _remove_metrics(self, worker_id: int) -> None:
        member = self.picker.worker_pool.members.get(worker_id)
        if member is not None:
            self._worker_metrics.removed(member)


async def connect(
    runtime: DistributedRuntime,
    workers: RoutedWorkers,
    settings: RouterSettings,
    admits: bool = False,
) -> ConnectedRouter:
    """Return the router of ``settings.mode`` with a client of its own, not started yet.

    ``admits``: only to workers that are admitted, see :class:`ConnectedRouter`.
    """
    client = await runtime.endpoint(".".join(workers.path)).client()
    if settings.mode == "kv":
        return ConnectedKvRouter(runtime, workers, settings, client, admits)
    if settings.queue_threshold is not None and workers.phase != "prefill":
        log.warning("--router-queue-threshold has no effect in mode %s, only in kv", settings.mode)
    picker = make_picker(settings, workers.block_size)
    return ConnectedRouter(runtime, workers, client, picker, admits)


def useless_sources(registry: Registry, labels: RouterLabels, endpoint: str) -> Gauge:
    """Return the gauge of workers whose KV events are missing or unusable."""
    return registry.child(
        _MISMATCHED_WORKERS,
        labels.component,
        labels.namespace,
        labels.model,
        labels.component,
        endpoint,
        labels.namespace,
        labels.router_id,
        labels.worker_type,
    )
