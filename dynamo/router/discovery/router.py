"""A picker connected to the workers of one endpoint, as discovery reports them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.control import EndpointRecord
from dynamo.router.discovery.cards import WorkerCards
from dynamo.router.discovery.load_feed import LoadFeed
from dynamo.router.eligibility.busy import Thresholds
from dynamo.router.eligibility.eligibility_filter import export_eligibility
from dynamo.router.metrics import RouterLabels
from dynamo.router.picker import Picker
from dynamo.router.queue.request_queue import RequestQueue
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.endpoints.client import OnInstances

__all__ = ["ConnectedRouter", "InstanceSource", "RoutedWorkers"]


class InstanceSource(Protocol):
    """Reports instances that are added and removed: a :class:`Client`, or a filter on one."""

    def on_change(self, callback: OnInstances) -> None:
        """Call ``callback`` for the instances known now and for every change."""
        ...


class RoutedWorkers(NamedTuple):
    """The workers that a router routes to. ``phase`` labels their requests in the metrics."""

    namespace: str
    component: str
    endpoint: str
    block_size: int
    model: str = ""
    phase: str = "aggregated"

    @property
    def path(self) -> tuple[str, str, str]:
        """Namespace, component and endpoint."""
        return self[:3]

    def labels(self, router_id: int) -> RouterLabels:
        """The label values of the router of these workers."""
        kind = "prefill" if self.phase == "prefill" else "decode"
        return RouterLabels(
            self.namespace, self.component, self.model, f"{router_id:x}", self.phase, kind
        )


class ConnectedRouter:
    """Adds workers to ``picker`` and removes them, in a mode that needs no KV events.

    ``client`` follows the endpoint of ``workers``. After :meth:`start` the workers that exist
    already can be picked. End with :meth:`close`.
    """

    queue: RequestQueue | None = None

    def __init__(
        self,
        runtime: DistributedRuntime,
        workers: RoutedWorkers,
        client: InstanceSource,
        picker: Picker,
    ) -> None:
        self.workers = workers
        self.picker = picker
        self._runtime = runtime
        self._client = client
        self._devices: dict[int, str] = {}
        self._cards = WorkerCards(self._on_card)
        report = picker.eligibility.busy.report
        self._loads = LoadFeed(runtime, workers.namespace, workers.component, report)
        self._closed = False
        labels = workers.labels(runtime.instance_id)
        export_eligibility(runtime.metrics, labels, picker.eligibility)

    async def start(self) -> None:
        """Follow workers and cards. Raises ConfigError when discovery cannot be opened."""
        await self._runtime.start()
        await self._cards.start(self._runtime.discovery, self.workers.path)
        if self.picker.eligibility.busy.thresholds.any:
            await self._loads.start()
        self._client.on_change(self._on_instances)

    async def limit(self, thresholds: Thresholds) -> None:
        """Set the load above which a worker is busy; follow reported loads once it matters."""
        self.picker.eligibility.thresholds = thresholds
        if self.picker.eligibility.busy.thresholds.any:
            await self._loads.start()

    async def close(self) -> None:
        """Stop following and remove all workers. Idempotent."""
        self._closed = True
        self._cards.close()
        self._loads.close()
        for worker_id in list(self.picker.worker_pool.members):
            self._remove(worker_id)

    def _on_instances(self, added: list[EndpointRecord], removed: list[int]) -> None:
        if self._closed:
            return
        for worker_id in removed:
            self._remove(worker_id)
        for record in added:
            self._devices[record.instance_id] = record.device_type
            self._add(record.instance_id)

    def _on_card(self, worker_id: int) -> None:
        # A card may arrive before the instance: it is read when that is added.
        if worker_id in self._devices:
            self._add(worker_id)

    def _add(self, worker_id: int) -> None:
        card = self._cards.get(worker_id)
        config = RuntimeConfig() if card is None else card.runtime_config
        self.picker.add_worker(worker_id, config, self._devices.get(worker_id, "cpu"))

    def _remove(self, worker_id: int) -> None:
        self._devices.pop(worker_id, None)
        self.picker.remove_worker(worker_id)
