"""The prefill workers of one model: their cards, and a router while there are some."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial

from dynamo.config.router import RouterSettings
from dynamo.errors import DynamoError, Unavailable
from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.protocols.control import EndpointRecord, ModelCard, RuntimeConfig
from dynamo.protocols.kv import PREFILL_QUEUE
from dynamo.router.connect.kv_router import connect
from dynamo.router.connect.router import ConnectedRouter, RoutedWorkers
from dynamo.router.eligibility.eligibility_filter import Thresholds
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.endpoints.instances import Outage
from dynamo.runtime.endpoints.serving import EndpointPath
from dynamo.runtime.events import EventPublisher
from dynamo.runtime.process.tasks import Tasks

AGAIN_S = 1.0
"""After so long a router that could not be started, such as on a full disk, is tried again."""
log = logging.getLogger(__name__)


class PrefillPool:
    """Activates ``router`` with the first card and deactivates it after the last.

    Cards may be added before :meth:`open`.
    """

    def __init__(self, name: str, metrics: FrontendMetrics) -> None:
        self.name = name
        self.cards: dict[str, ModelCard] = {}
        self.router: PrefillRouter | None = None
        self._metrics = metrics
        self._tasks = Tasks(f"prefill of {name}")
        self._runtime: DistributedRuntime | None = None
        self._settings: RouterSettings | None = None
        self._active: _Active | None = None
        self._thresholds: Thresholds | None = None
        self._changing = False
        self._closed = False

    def open(
        self, runtime: DistributedRuntime, settings: RouterSettings, router: PrefillRouter
    ) -> None:
        """Connect ``router`` to the workers added so far and later: the model is loaded."""
        self._runtime, self._settings, self.router = runtime, settings, router
        self._cards_changed()

    async def limit(self, thresholds: Thresholds) -> None:
        """Set the load above which a prefill worker is busy."""
        self._thresholds = thresholds
        if self._active is not None:
            await self._active.limit(thresholds)

    async def close(self) -> None:
        """Close router and clients. Idempotent."""
        self._closed = True
        await self._tasks.close()
        active, self._active = self._active, None
        if active is not None:
            await active.close()

    def instances(self) -> list[EndpointRecord]:
        """The live instances of prefill workers."""
        return [] if self._active is None else self._active.instances()

    @property
    def endpoint(self) -> EndpointPath | None:
        """Where prefill workers are called; None without any."""
        return None if self._active is None else self._active.endpoint

    def outages(self) -> dict[int, Outage]:
        """Why each avoided prefill worker is avoided."""
        return {} if self._active is None else self._active.outages()

    def disagreement(self, card: ModelCard) -> str:
        """Why ``card`` conflicts with the others: ``endpoint`` or ""."""
        others = {_endpoint(other) for other in self.cards.values()}
        return "endpoint" if others - {_endpoint(card)} else ""

    def add(self, key: str, card: ModelCard) -> None:
        """Send prompts to the worker of ``card``."""
        self.cards[key] = card
        if self._active is not None and self._active.endpoint == _endpoint(card):
            self._active.admit(card)
        self._cards_changed()

    def remove(self, key: str) -> ModelCard:
        """Send nothing more to the worker of the card at ``key``; return the card."""
        card = self.cards.pop(key)
        if self._active is not None:
            self._active.refuse(card.instance_id)
        self._cards_changed()
        return card

    def _cards_changed(self) -> None:
        # One task at a time: it looks at the cards again before it ends.
        if self.router is not None and not self._changing and not self._closed:
            self._changing = True
            self._tasks.spawn(self._update(), name=f"prefill of {self.name}")

    async def _update(self) -> None:
        """Make the active router match the cards; repeat while they change."""
        try:
            while True:
                wanted = next((_endpoint(card) for card in self.cards.values()), None)
                active = self._active
                # At each turn: cards may have come or gone while the last step waited.
                if wanted == (None if active is None else active.endpoint):
                    return
                if active is not None:
                    self._active = None
                    await active.close()
                    log.info("model %s: no prefill worker is left", self.name)
                if wanted is not None:
                    await self._activate(wanted)
        except DynamoError as error:
            failed, self._active = self._active, None
            if failed is not None:
                await failed.close()
            log.error("model %s: no prefill router: %s", self.name, error.message)
            if isinstance(error, Unavailable):
                asyncio.get_running_loop().call_later(AGAIN_S, self._cards_changed)
        finally:
            self._changing = False

    async def _activate(self, endpoint: EndpointPath) -> None:
        assert self._runtime is not None, "open() came before"
        assert self._settings is not None and self.router is not None, "open() came before"
        active = _Active(self._runtime, endpoint, self.router, self._metrics)
        self._active = active
        for card in self.cards.values():
            active.admit(card)
        await active.start(self._settings, self.name)
        if self._thresholds is not None:
            await active.limit(self._thresholds)
        log.info("model %s: prompts go to %s first", self.name, ".".join(endpoint))


class _Active:
    """The connected router of one prefill endpoint."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: EndpointPath,
        router: PrefillRouter,
        metrics: FrontendMetrics,
    ) -> None:
        self.endpoint = endpoint
        self._runtime = runtime
        self._router = router
        self._metrics = metrics
        self._cards: dict[int, ModelCard] = {}
        self._live: ConnectedRouter | None = None

    def instances(self) -> list[EndpointRecord]:
        """The live instances of the endpoint."""
        return [] if self._live is None else self._live.client.records()

    def outages(self) -> dict[int, Outage]:
        """Why each avoided instance is avoided."""
        return {} if self._live is None else self._live.client.outages()

    def admit(self, card: ModelCard) -> None:
        """Admit the worker of ``card``."""
        replaced = card.instance_id in self._cards
        self._cards[card.instance_id] = card
        if self._live is None:
            return
        self._live.admit(card.instance_id)
        if replaced:
            self._add(card.instance_id)

    def refuse(self, worker_id: int) -> None:
        """Stop admitting the worker: its card was removed."""
        self._cards.pop(worker_id, None)
        if self._live is not None:
            self._live.refuse(worker_id)

    async def start(self, settings: RouterSettings, model: str) -> None:
        """Connect. Raises DynamoError."""
        runtime, endpoint, router = self._runtime, self.endpoint, self._router
        workers = RoutedWorkers(*endpoint, router.block_size, model, "prefill")
        live = self._live = await connect(runtime, workers, prefill_settings(settings), admits=True)
        for worker_id in self._cards:
            live.admit(worker_id)
        await live.start()
        router.attach(live.picker, live.client)
        live.on_change(self._changed)
        publish = partial(self._publish, live.client)
        await runtime.publish_when_possible(*endpoint[:2], PREFILL_QUEUE, publish)

    def _publish(self, client: Client, publisher: EventPublisher) -> None:
        if self._router.workers.client is client:  # not closed before it could be registered
            self._router.publish(publisher.publish)

    async def limit(self, thresholds: Thresholds) -> None:
        """Set the load above which a worker is busy."""
        if self._live is not None:
            await self._live.limit(thresholds)

    async def close(self) -> None:
        """Disconnect; running prefills may finish."""
        self._router.detach()
        if self._live is not None:
            await self._live.close()

    def _changed(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for worker_id in removed:
            self._router.remove_worker(worker_id)
            self._metrics.workers.forget(worker_id)
        for record in added:
            self._add(record.instance_id)

    def _add(self, worker_id: int) -> None:
        """Send prompts to the worker, unless the picker refused it (for another block size)."""
        card = self._cards.get(worker_id)
        if self._live is not None and worker_id in self._live.picker.worker_pool.members:
            config = card.runtime_config if card is not None else RuntimeConfig()
            self._router.add_worker(worker_id, config)
            if self._live.client.is_inhibited(worker_id):
                self._router.suspend(worker_id, True)


def prefill_settings(settings: RouterSettings) -> RouterSettings:
    """The router's settings for prefill workers, which decode nothing.

    In mode ``direct`` the client's pin names a decode worker, so prompts go to the least loaded.
    """
    mode = "least-loaded" if settings.mode == "direct" else settings.mode
    settings = replace(settings, mode=mode, track_active_blocks=False, track_output_blocks=False)
    return settings.at_stage("prefill")


def _endpoint(card: ModelCard) -> EndpointPath:
    return card.namespace, card.component, card.endpoint
