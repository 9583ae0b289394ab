"""The router of the kv mode, connected to workers, their KV events and other replicas."""

from __future__ import annotations

import logging

from dynamo.config.router import RouterSettings
from dynamo.router.caches.metrics import (
    predictions,
    show_optimistic_cache,
    useless_sources,
)
from dynamo.router.discovery.event_feed import EventFeed
from dynamo.router.discovery.maintenance import Maintenance
from dynamo.router.discovery.router import ConnectedRouter, InstanceSource, RoutedWorkers
from dynamo.router.factory import make_index, make_kv_picker, make_picker
from dynamo.router.kv_mode.kv import KvPicker
from dynamo.router.metrics import DecisionMetrics, WorkerMetrics
from dynamo.router.queue.request_queue import make_queue
from dynamo.router.sync.replicas import ReplicaSync
from dynamo.runtime import DistributedRuntime

__all__ = ["ConnectedKvRouter", "make_router"]

log = logging.getLogger(__name__)


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
        client: InstanceSource,
    ) -> None:
        registry, labels = runtime.metrics, workers.labels(runtime.instance_id)
        index = make_index(settings)
        metrics = DecisionMetrics(registry, labels)
        picker = make_kv_picker(settings, workers.block_size, index, metrics)
        super().__init__(runtime, workers, client, picker)
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

    async def start(self) -> None:
        """See the class. Raises ConfigError when discovery cannot be opened."""
        await self._runtime.start()
        if self.events is not None:
            # Before the first worker: events after its dump would be lost otherwise.
            await self.events.start()
        await super().start()
        if self._sync is not None:
            await self._sync.start()
        self.maintenance.start()

    async def close(self) -> None:
        """Stop following, refuse queued requests, remove all workers. Idempotent."""
        self._closed = True
        if self.queue is not None:
            self.queue.close()
        self.maintenance.close()
        if self.events is not None:
            await self.events.close()
        await super().close()
        if self._sync is not None:
            self._sync.close()

    def _export_predictions(self) -> None:
        registry, labels, picker = self._runtime.metrics, self._labels, self.picker
        if picker.index is not None and picker.predicted is not None:
            predictions(registry, labels, picker.index, picker.predicted, self._policy)
        if picker.optimistic is not None:
            show_optimistic_cache(registry, labels, picker.optimistic)

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
        self._devices.pop(worker_id, None)
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


def make_router(
    runtime: DistributedRuntime,
    workers: RoutedWorkers,
    settings: RouterSettings,
    client: InstanceSource,
) -> ConnectedRouter:
    """Return the router of ``settings.mode``, not started yet."""
    if settings.mode == "kv":
        return ConnectedKvRouter(runtime, workers, settings, client)
    if settings.queue_threshold is not None and workers.phase != "prefill":
        log.warning("--router-queue-threshold has no effect in mode %s, only in kv", settings.mode)
    picker = make_picker(settings, workers.block_size)
    return ConnectedRouter(runtime, workers, client, picker)
