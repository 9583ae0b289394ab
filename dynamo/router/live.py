"""A router over live workers: discovery, KV events and recovery feed the deciding rooms.

Events are applied in the callback that receives them; only questions to workers are tasks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import msgspec

from dynamo.config.router import RouterSettings
from dynamo.protocols import codec
from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.control import EndpointRecord
from dynamo.protocols.kv import KvEventBatch
from dynamo.protocols.load import KvMetrics
from dynamo.router.factory import make_index, make_picker
from dynamo.router.indexer import Indexer, Recovery
from dynamo.router.kv import KvPicker
from dynamo.router.line import Line, line_for
from dynamo.router.line_metrics import LineMetrics
from dynamo.router.metrics import (
    DecisionMetrics,
    EventMetrics,
    Place,
    WorkerMetrics,
    gates,
    predictions,
)
from dynamo.router.predicted import STEP_BLOCKS, PredictedCache
from dynamo.router.recovery import KV_QUERY, Questions
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.channels import Subscription
from dynamo.runtime.client import OnInstances
from dynamo.runtime.discovery import KeyEvent, Watch

__all__ = ["KV_EVENTS", "KV_METRICS", "InstanceSource", "LiveRouter"]

KV_EVENTS = "kv-events"
KV_METRICS = "kv_metrics"
SWEEP_S = 30.0

logger = logging.getLogger(__name__)
_decode_batch = codec.decoder(KvEventBatch).decode
_decode_loads = codec.decoder(list[KvMetrics]).decode


class InstanceSource(Protocol):
    """Tells of instances that come and go; a :class:`Client`, or a choice among its instances."""

    def on_change(self, callback: OnInstances) -> None:
        """Call ``callback`` for the instances known by now and for every change."""
        ...


class _CardPart(msgspec.Struct):
    """What the router reads of a model card."""

    instance_id: int
    runtime_config: RuntimeConfig = msgspec.field(default_factory=RuntimeConfig)


_decode_card = msgspec.json.Decoder(_CardPart).decode


class LiveRouter:
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
        self._runtime = runtime
        self._settings = settings
        self._client = client
        kind = "prefill" if phase == "prefill" else "decode"
        place = Place(namespace, component, model, f"{runtime.instance_id:x}", phase, kind)
        registry = runtime.metrics
        index = make_index(settings)
        kv_mode = settings.mode == "kv"
        self.picker = make_picker(
            settings,
            block_size,
            index=index,
            metrics=DecisionMetrics(registry, place) if kv_mode else None,
        )
        gates(registry, place, self.picker.gate)
        self.line: Line | None = None
        if settings.queue_threshold is not None and phase != "prefill":
            self.line = line_for(settings, self.picker, LineMetrics(registry, model, kind))
        self.indexer: Indexer | None = None
        self._rows = WorkerMetrics(registry, place) if kv_mode else None
        if index is not None and not settings.predicts:
            self._counts = EventMetrics(registry, place, index)
            self.indexer = Indexer(index, self._on_recovery, self._counts)
        predicted = self.picker.predicted if isinstance(self.picker, KvPicker) else None
        if index is not None and predicted is not None:
            policy = settings.approximate_cache_policy
            predictions(registry, place, index, predicted, policy)
        self._questions: Questions | None = None
        self._configs: dict[int, RuntimeConfig] = {}
        self._devices: dict[int, str] = {}
        self._cards: Watch | None = None
        self._events: Subscription | None = None
        self._loads: Subscription | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._age_timer: asyncio.TimerHandle | None = None
        self._quiet: set[int] = set()
        self._closed = False

    async def start(self) -> None:
        """Follow workers, cards and events. Raises ConfigError when discovery cannot be opened."""
        namespace, component, endpoint = self.path
        await self._runtime.start()
        prefix = f"v1/mdc/{namespace}/{component}/{endpoint}/"
        self._cards = self._runtime.discovery.watch(prefix, self._on_card)
        await self._cards.ready()
        if self.indexer is not None:
            query = await self._runtime.endpoint(f"{namespace}.{component}.{KV_QUERY}").client()
            self._questions = Questions(query, self.indexer)
            self._events = self._runtime.subscribe(
                namespace, component, KV_EVENTS, self._on_events, self._on_gap
            )
            await self._events.ready()
        if self.picker.gate.busy.thresholds.any:
            self._loads = self._runtime.subscribe(namespace, component, KV_METRICS, self._on_loads)
            await self._loads.ready()
        self._client.on_change(self._on_instances)
        if isinstance(self.picker, KvPicker):
            self._arm(self.picker)
            if self.picker.predicted is not None:
                self._age(self.picker.predicted)

    async def close(self) -> None:
        """Stop following, turn away who waits. Idempotent."""
        self._closed = True
        if self.line is not None:
            self.line.close()
        for timer in (self._sweep_timer, self._age_timer):
            if timer is not None:
                timer.cancel()
        if self._cards is not None:
            self._cards.close()
        for subscription in (self._events, self._loads):
            if subscription is not None:
                subscription.close()
        if self._questions is not None:
            await self._questions.close()
        for worker_id in list(self.picker.fleet.members):
            self._remove(worker_id)

    def _on_instances(self, added: list[EndpointRecord], removed: list[int]) -> None:
        if self._closed:
            return
        for worker_id in removed:
            self._remove(worker_id)
        for record in added:
            self._devices[record.instance_id] = record.device_type
            self._add(record.instance_id)

    def _on_card(self, event: KeyEvent) -> None:
        if event.value is None:
            self._configs.pop(int(event.key.rpartition("/")[2], 16), None)
            return
        try:
            card = _decode_card(event.value)
        except msgspec.MsgspecError as error:
            logger.warning("skipping the model card %s: %s", event.key, error)
            return
        if self._configs.get(card.instance_id) == card.runtime_config:
            return
        self._configs[card.instance_id] = card.runtime_config
        if card.instance_id in self.picker.fleet.members:
            self._add(card.instance_id)

    def _add(self, worker_id: int) -> None:
        config = self._configs.get(worker_id) or RuntimeConfig()
        self._hide(worker_id)
        self.picker.add_worker(worker_id, config, self._devices.get(worker_id, "cpu"))
        member = self.picker.fleet.members[worker_id]
        if self._rows is not None and isinstance(self.picker, KvPicker):
            self._rows.added(member, self.picker.active)
        if self.indexer is not None:
            for rank, slot in member.slots.items():
                self.indexer.add(worker_id, rank, slot, config.enable_local_indexer)

    def _remove(self, worker_id: int) -> None:
        self._hide(worker_id)
        if self.indexer is not None:
            self.indexer.remove(worker_id)
        self.picker.remove_worker(worker_id)
        self._devices.pop(worker_id, None)
        self._quiet.discard(worker_id)

    def _hide(self, worker_id: int) -> None:
        member = self.picker.fleet.members.get(worker_id)
        if member is not None and self._rows is not None:
            self._rows.removed(member)

    def _on_events(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        try:
            batch = _decode_batch(payload)
        except msgspec.MsgspecError as error:
            self._counts.warning("malformed")
            logger.warning("KV events of publisher %x cannot be read: %s", publisher_id, error)
            return
        if self.indexer is not None:
            self.indexer.apply(batch)

    def _on_loads(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        try:
            states = _decode_loads(payload)
        except msgspec.MsgspecError as error:
            logger.warning("the load of publisher %x cannot be read: %s", publisher_id, error)
            return
        for state in states:
            self.picker.gate.busy.report(state)

    def _on_gap(self, publisher_id: int, expected: int, got: int) -> None:
        """Messages were lost; event ids will tell which events, so only count."""
        self._counts.warning("sequence_gap", max(got - expected, 1))

    def _on_recovery(self, recovery: Recovery) -> None:
        if self._questions is not None and not self._closed:
            self._questions.ask(recovery)

    def _arm(self, picker: KvPicker) -> None:
        loop = asyncio.get_running_loop()
        self._sweep_timer = loop.call_later(SWEEP_S, self._sweep, picker)

    def _age(self, predicted: PredictedCache) -> None:
        """Forget old predictions also while nobody asks, a step at a time."""
        more = predicted.expire(time.perf_counter()) >= STEP_BLOCKS
        pause_s = 0.01 if more else 1.0
        self._age_timer = asyncio.get_running_loop().call_later(pause_s, self._age, predicted)

    def _sweep(self, picker: KvPicker) -> None:
        """Drop forgotten load, look for lost last events, name workers that publish nothing."""
        self._arm(picker)
        expired = picker.expire(self._settings.active_request_expiry_s)
        if expired:
            logger.warning("dropped the load of %d requests that never ended", len(expired))
        if self.indexer is None:
            return
        self.indexer.verify()
        for worker_id in picker.fleet.members:
            if not picker.served.get(worker_id) or not self.indexer.silent(worker_id):
                self._quiet.discard(worker_id)
            elif worker_id not in self._quiet:
                self._quiet.add(worker_id)
                logger.warning(
                    "worker %d has served prompts but published no KV event: "
                    "its cache stays unknown (does its engine publish them?)",
                    worker_id,
                )
