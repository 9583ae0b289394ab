"""A router over live workers: discovery, KV events and recovery feed the deciding rooms.

Events are applied in the callback that receives them; only questions to workers are tasks.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from dynamo.config.router import RouterSettings
from dynamo.protocols import codec
from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.control import EndpointRecord
from dynamo.protocols.kv import KV_EVENTS, KV_QUERY, KvEventBatch
from dynamo.router.caches.event_threads import EventThreads
from dynamo.router.caches.indexer import Indexer, Recovery
from dynamo.router.caches.metrics import (
    EventMetrics,
    predictions,
    show_optimistic_cache,
    useless_sources,
)
from dynamo.router.caches.recovery import RecoveryClient
from dynamo.router.discovery.block_sizes import events_differ, worker_differs
from dynamo.router.discovery.cards import WorkerCards
from dynamo.router.discovery.load_feed import LoadFeed
from dynamo.router.discovery.maintenance import Maintenance
from dynamo.router.eligibility.busy import Thresholds
from dynamo.router.eligibility.eligibility_filter import export_eligibility
from dynamo.router.factory import make_index, make_picker
from dynamo.router.kv import KvPicker
from dynamo.router.metrics import DecisionMetrics, RouterLabels, WorkerMetrics
from dynamo.router.queue.request_queue import make_queue
from dynamo.router.sync.replicas import ReplicaSync
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.client import OnInstances
from dynamo.runtime.events.channels import ZMQ, Subscription

__all__ = ["ConnectedRouter", "InstanceSource"]


log = logging.getLogger(__name__)
_decode_batch = codec.decoder(KvEventBatch).decode


class InstanceSource(Protocol):
    """Tells of instances that come and go; a :class:`Client`, or a choice among its instances."""

    def on_change(self, callback: OnInstances) -> None:
        """Call ``callback`` for the instances known by now and for every change."""
        ...


class ConnectedRouter:
    """Keeps ``picker`` true to the workers of ``namespace.component.endpoint``.

    ``client`` follows that endpoint; ``phase`` is what metrics call the requests routed there.
    :meth:`start` returns when the workers that exist already can be picked; their caches become
    known shortly after. End with :meth:`close`.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        namespace: str,
        component: str,
        endpoint: str,
        block_size: int,
        settings: RouterSettings,
        client: InstanceSource,
        model: str = "",
        phase: str = "aggregated",
    ) -> None:
        self.path = (namespace, component, endpoint)
        self.block_size = block_size
        self._runtime = runtime
        self._settings = settings
        self._client = client
        kind = "prefill" if phase == "prefill" else "decode"
        place = RouterLabels(namespace, component, model, f"{runtime.instance_id:x}", phase, kind)
        registry = runtime.metrics
        index = make_index(settings)
        kv_mode = settings.mode == "kv"
        self.picker = make_picker(
            settings,
            block_size,
            index=index,
            metrics=DecisionMetrics(registry, place) if kv_mode else None,
        )
        export_eligibility(registry, place, self.picker.eligibility)
        self.queue = make_queue(settings, self.picker, registry, place)
        self.indexer: Indexer | None = None
        self._threads: EventThreads | None = None
        self._rows = WorkerMetrics(registry, place) if kv_mode else None
        if index is not None and not settings.predicts:
            self._counts = EventMetrics(registry, place, index)
            if settings.event_threads > 1:
                topic, threads = KV_EVENTS, settings.event_threads
                self._threads = EventThreads(index, threads, topic, self._counts)
            ingest = None if self._threads is None else self._threads.ingest
            self.indexer = Indexer(index, self._on_recovery, self._counts, ingest)
        if settings.predicts and settings.event_threads > 1:
            log.warning("without KV events --router-event-threads has no effect")
        self._recovery: RecoveryClient | None = None
        self._devices: dict[int, str] = {}
        self._cards = WorkerCards(self._on_card)
        self._events: Subscription | None = None
        self._loads = LoadFeed(runtime, namespace, component, self.picker.eligibility.busy.report)
        self._maintenance: Maintenance | None = None
        self._sync: ReplicaSync | None = None
        if isinstance(self.picker, KvPicker):
            self._show_beliefs(place, self.picker)
            expiry_s = settings.active_request_expiry_s
            useless = useless_sources(registry, place, endpoint)
            self._maintenance = Maintenance(self.picker, self.indexer, expiry_s, useless)
            if settings.replica_sync:
                self._sync = ReplicaSync(runtime, place, self.picker)
        self._closed = False

    async def start(self) -> None:
        """Follow workers, cards and events. Raises ConfigError when discovery cannot be opened."""
        namespace, component, _ = self.path
        await self._runtime.start()
        await self._cards.start(self._runtime.discovery, self.path)
        if self.indexer is not None:
            query = await self._runtime.endpoint(f"{namespace}.{component}.{KV_QUERY}").client()
            self._recovery = RecoveryClient(
                query, self.indexer, self.block_size, self._on_foreign_blocks
            )
            on_events, over = self._on_events, None
            if self._threads is not None:
                self._threads.start(self.indexer)
                self._runtime.metrics.before_render.append(self._threads.flush)
                on_events, over = self._threads.push, {ZMQ: self._threads.subscriber}
            self._events = self._runtime.subscribe(
                namespace, component, KV_EVENTS, on_events, self._on_gap, over=over
            )
            await self._events.ready()
        if self.picker.eligibility.busy.thresholds.any:
            await self._loads.start()
        self._client.on_change(self._on_instances)
        if self._sync is not None:
            await self._sync.start()
        if self._maintenance is not None:
            self._maintenance.start()

    async def limit(self, thresholds: Thresholds) -> None:
        """Above which load a worker is busy, from now on. Loads are followed when they matter."""
        self.picker.eligibility.thresholds = thresholds
        if self.picker.eligibility.busy.thresholds.any:
            await self._loads.start()

    async def close(self) -> None:
        """Stop following, turn away who waits. Idempotent."""
        self._closed = True
        if self.queue is not None:
            self.queue.close()
        if self._maintenance is not None:
            self._maintenance.close()
        self._cards.close()
        self._loads.close()
        if self._events is not None:
            self._events.close()
        if self._threads is not None:
            self._threads.close()
            before_render = self._runtime.metrics.before_render
            if self._threads.flush in before_render:
                before_render.remove(self._threads.flush)
        if self._recovery is not None:
            await self._recovery.close()
        for worker_id in list(self.picker.worker_pool.members):
            self._remove(worker_id)
        if self._sync is not None:
            self._sync.close()

    def _show_beliefs(self, place: RouterLabels, picker: KvPicker) -> None:
        """What decisions predict of the caches, for good or for a moment."""
        registry = self._runtime.metrics
        if picker.index is not None and picker.predicted is not None:
            policy = self._settings.approximate_cache_policy
            predictions(registry, place, picker.index, picker.predicted, policy)
        if picker.optimistic is not None:
            show_optimistic_cache(registry, place, picker.optimistic)

    def _on_instances(self, added: list[EndpointRecord], removed: list[int]) -> None:
        if self._closed:
            return
        for worker_id in removed:
            self._remove(worker_id)
        for record in added:
            self._devices[record.instance_id] = record.device_type
            self._add(record.instance_id)

    def _on_card(self, worker_id: int) -> None:
        if worker_id in self._devices:
            self._add(worker_id)

    def _add(self, worker_id: int) -> None:
        if self._maintenance is not None:
            self._maintenance.forget(worker_id)
        card = self._cards.get(worker_id)
        size = self.block_size if card is None else card.kv_cache_block_size
        if self.indexer is not None and size != self.block_size:
            self._drop(worker_id)
            self._unusable(worker_id)
            worker_differs(worker_id, size, self.block_size)
            return
        if self._maintenance is not None and card is not None and card.worker_type == "Decode":
            self._maintenance.exempt(worker_id)
        config = RuntimeConfig() if card is None else card.runtime_config
        self._hide(worker_id)
        self.picker.add_worker(worker_id, config, self._devices.get(worker_id, "cpu"))
        member = self.picker.worker_pool.members[worker_id]
        if self._rows is not None and isinstance(self.picker, KvPicker):
            self._rows.added(member, self.picker.active)
        if self.indexer is not None:
            for rank, slot in member.slots.items():
                self.indexer.add(worker_id, rank, slot, config.enable_local_indexer)
        if self._sync is not None:
            self._sync.worker_added(worker_id)

    def _remove(self, worker_id: int) -> None:
        self._devices.pop(worker_id, None)
        if self._maintenance is not None:
            self._maintenance.forget(worker_id)
        self._drop(worker_id)

    def _drop(self, worker_id: int) -> None:
        self._hide(worker_id)
        if self.indexer is not None:
            self.indexer.remove(worker_id)
        self.picker.remove_worker(worker_id)

    def _on_foreign_blocks(self, worker_id: int, block_size: int) -> None:
        if self.indexer is not None:
            self.indexer.remove(worker_id)
        self._unusable(worker_id)
        events_differ(worker_id, block_size, self.block_size)

    def _unusable(self, worker_id: int) -> None:
        self._counts.warning("block_size")
        if self._maintenance is not None:
            self._maintenance.unusable(worker_id)

    def _hide(self, worker_id: int) -> None:
        member = self.picker.worker_pool.members.get(worker_id)
        if member is not None and self._rows is not None:
            self._rows.removed(member)

    def _on_events(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        try:
            batch = _decode_batch(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._counts.warning("malformed")
            log.warning("invalid KV events from publisher %x: %s", publisher_id, error)
            return
        if self.indexer is not None:
            self.indexer.apply(batch)

    def _on_gap(self, publisher_id: int, expected: int, got: int) -> None:
        """Messages were lost; event ids will tell which events, so only count. One that counts from
        an earlier number has begun anew, and its event ids with it."""
        if got < expected and self.indexer is not None:
            self.indexer.publisher_restarted(publisher_id)
        self._counts.warning("sequence_gap", max(got - expected, 1))

    def _on_recovery(self, recovery: Recovery) -> None:
        if self._recovery is not None and not self._closed:
            self._recovery.send(recovery)
