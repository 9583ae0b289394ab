"""One model: its card, the workers that serve it, and what turns requests for it into work."""

from __future__ import annotations

import asyncio
import logging
import time

from dynamo.config.router import RouterSettings
from dynamo.frontend.disagg.metrics import PrefillMetrics
from dynamo.frontend.disagg.pool import PrefillPool
from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.frontend.models.workers import AdmittedWorkers
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.protocols.card import ModelCard
from dynamo.protocols.control import EndpointRecord
from dynamo.router.discovery.router import ConnectedRouter
from dynamo.router.eligibility.busy import Thresholds
from dynamo.router.picker import Picker
from dynamo.runtime import Client, DistributedRuntime

__all__ = ["ModelEntry"]

log = logging.getLogger(__name__)


class ModelEntry:
    """``preprocessor``, ``client``, ``picker`` and ``dispatch`` are there when ``ready``.

    ``workers`` are the cards by their keys; a model may be without workers for a while. ``prefill``
    has those of its prefill workers.
    """

    preprocessor: Preprocessor
    client: Client
    picker: Picker
    dispatch: Dispatch

    def __init__(self, card: ModelCard, metrics: FrontendMetrics) -> None:
        self.card = card
        self.name = card.display_name
        self.created_s = int(time.time())
        self.workers: dict[str, ModelCard] = {}
        self.types = frozenset(one.strip() for one in card.model_type.split("|"))
        self.metrics = metrics.model(self.name)
        self.prefill = PrefillPool(self.name, metrics)
        self.ready = False
        self.loading = False
        self._all_metrics = metrics
        self._accepted: AdmittedWorkers | None = None
        self._live: ConnectedRouter | None = None
        self._closed = False

    @property
    def served(self) -> bool:
        """Whether a request for the model can be answered now, as far as cards tell."""
        return self.ready and bool(self.workers)

    def agrees_with(self, card: ModelCard) -> str:
        """Why ``card`` can't be a worker of this model: ``checksum``, ``endpoint``, ``block_size``
        or "" (it can).

        Workers of one name must tokenize alike and be reached in one place.
        """
        mine = self.card
        if (mine.namespace, mine.component, mine.endpoint) != (
            card.namespace,
            card.component,
            card.endpoint,
        ):
            return "endpoint"
        if mine.kv_cache_block_size != card.kv_cache_block_size:
            return "block_size"
        return "" if mine.checksum == card.checksum else "checksum"

    def prefill_agrees_with(self, card: ModelCard) -> str:
        """The same of a prefill worker, which may be another component."""
        if card.namespace != self.card.namespace:
            return "endpoint"
        if card.checksum != self.card.checksum:
            return "checksum"
        return self.prefill.disagreement(card)

    def add_worker(self, key: str, card: ModelCard) -> None:
        """The worker whose ``card`` is at ``key`` may be sent requests."""
        self.workers[key] = card
        if self._accepted is not None:
            self._accepted.accept(card.instance_id)
        if self.ready:
            self.show()

    def remove_worker(self, key: str) -> ModelCard:
        """It may not any more."""
        card = self.workers.pop(key)
        if self._accepted is not None:
            self._accepted.refuse(card.instance_id)
        if self.ready:
            self.show()
        return card

    async def load(self, runtime: DistributedRuntime, settings: RouterSettings) -> None:
        """Load tokenizer and template in a thread, connect to the workers. Raises DynamoError."""
        card = self.card
        begun = time.monotonic()
        try:
            self.preprocessor = await asyncio.to_thread(Preprocessor, card)
            self.preprocessor.on_rendered = self._all_metrics.template.observe
            self.preprocessor.on_tokenized = self._all_metrics.tokenized
            path = f"{card.namespace}.{card.component}.{card.endpoint}"
            self.client = await runtime.endpoint(path).client()
            self._accepted = AdmittedWorkers(self.client)
            for worker in self.workers.values():
                self._accepted.accept(worker.instance_id)
            self._live = await self._start_router(runtime, settings, self._accepted)
            self._accepted.on_change(self._workers_changed)  # after the picker's own
            self.picker = self._live.picker
            self.dispatch = Dispatch(self.picker, self.client, self._live.queue)
            self.client.on_inhibited(self._live.picker.fleet.shun)
            self._open_prefill(runtime, settings)
            self.ready = not self._closed
        finally:
            self.loading = False
        if self._closed:
            await self.close()
            return
        self.show()
        log.info("model %s is ready after %.2f s", self.name, time.monotonic() - begun)

    async def limit(self, thresholds: Thresholds) -> None:
        """Above which load a worker is busy, from now on."""
        if self._live is not None:
            await self._live.limit(thresholds)
            await self.prefill.limit(thresholds)

    async def close(self) -> None:
        """Let go of workers and router."""
        self._closed = True
        self.ready = False
        await self.prefill.close()
        live, self._live = self._live, None
        if live is not None:
            await live.close()
            self.client.close()

    def show(self) -> None:
        """Bring the model's gauges up to date."""
        self._all_metrics.show_card(self.card, self.served)

    def _open_prefill(self, runtime: DistributedRuntime, settings: RouterSettings) -> None:
        metrics = PrefillMetrics(self._all_metrics, self.name)
        block_size = settings.kv_cache_block_size or self.card.kv_cache_block_size
        router = PrefillRouter(self.name, block_size, settings, metrics, self.dispatch)
        self.dispatch.prefill = router
        self.prefill.open(runtime, settings, router)

    async def _start_router(
        self, runtime: DistributedRuntime, settings: RouterSettings, workers: AdmittedWorkers
    ) -> ConnectedRouter:
        card = self.card
        live = ConnectedRouter(
            runtime,
            card.namespace,
            card.component,
            card.endpoint,
            settings.kv_cache_block_size or card.kv_cache_block_size,
            settings,
            workers,
            self.name,
        )
        await live.start()
        return live

    def _workers_changed(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for worker_id in removed:
            self._all_metrics.forget_worker(worker_id)
