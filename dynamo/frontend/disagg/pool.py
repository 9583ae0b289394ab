"""The prefill workers of one model: their cards, and a router of their own while there are some."""

from __future__ import annotations

import logging
from dataclasses import replace

from dynamo.config.router import RouterSettings
from dynamo.errors import DynamoError
from dynamo.frontend.disagg.queue_events import QueueStatePublisher
from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.frontend.models.workers import AdmittedWorkers
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.protocols.card import ModelCard, RuntimeConfig
from dynamo.protocols.control import EndpointRecord
from dynamo.protocols.load import PREFILL_QUEUE
from dynamo.router.discovery.router import ConnectedRouter
from dynamo.router.eligibility.busy import Thresholds
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.tasks import Tasks

__all__ = ["PrefillPool", "prefill_settings"]

log = logging.getLogger(__name__)
Place = tuple[str, str, str]


class PrefillPool:
    """Activates ``router`` with the first card and deactivates it after the last.

    Cards may come before :meth:`open`. ``block_size`` is that of the model's workers.
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
        """The model is loaded: workers known by now and later feed ``router``."""
        self._runtime, self._settings, self.router = runtime, settings, router
        self._change()

    async def limit(self, thresholds: Thresholds) -> None:
        """Above which load a prefill worker is busy, from now on."""
        self._thresholds = thresholds
        if self._active is not None:
            await self._active.limit(thresholds)

    async def close(self) -> None:
        """Let go of everything. Idempotent."""
        self._closed = True
        await self._tasks.close()
        active, self._active = self._active, None
        if active is not None:
            await active.close()

    def instances(self) -> list[EndpointRecord]:
        """The live instances of prefill workers."""
        return [] if self._active is None else self._active.instances()

    def disagreement(self, card: ModelCard) -> str:
        """Why ``card`` cannot join the others: ``endpoint`` or ""."""
        others = {_place(one) for one in self.cards.values()}
        return "endpoint" if others - {_place(card)} else ""

    def add(self, key: str, card: ModelCard) -> None:
        """The worker of ``card`` may be sent prompts."""
        self.cards[key] = card
        if self._active is not None and self._active.place == _place(card):
            self._active.accept(card)
        self._change()

    def remove(self, key: str) -> ModelCard:
        """It may not any more."""
        card = self.cards.pop(key)
        if self._active is not None:
            self._active.refuse(card.instance_id)
        self._change()
        return card

    def _change(self) -> None:
        if self.router is not None and not self._changing and not self._closed:
            self._changing = True
            self._tasks.spawn(self._follow(), name=f"prefill of {self.name}")

    async def _follow(self) -> None:
        """Bring the active router in line with the cards, however often they change meanwhile."""
        try:
            while True:
                wanted = next((_place(card) for card in self.cards.values()), None)
                active = self._active
                if wanted == (None if active is None else active.place):
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
        finally:
            self._changing = False

    async def _activate(self, place: Place) -> None:
        assert self._runtime is not None, "open() came before"
        assert self._settings is not None and self.router is not None, "open() came before"
        active = _Active(self._runtime, place, self.router, self._metrics)
        self._active = active
        for card in self.cards.values():
            active.accept(card)
        await active.start(self._settings, self.name)
        if self._thresholds is not None:
            await active.limit(self._thresholds)
        log.info("model %s: prompts go to %s first", self.name, ".".join(place))


class _Active:
    """The router over one prefill endpoint, at work."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        place: Place,
        router: PrefillRouter,
        metrics: FrontendMetrics,
    ) -> None:
        self.place = place
        self._runtime = runtime
        self._router = router
        self._metrics = metrics
        self._cards: dict[int, ModelCard] = {}
        self._client: Client | None = None
        self._workers: AdmittedWorkers | None = None
        self._live: ConnectedRouter | None = None
        self._news: QueueStatePublisher | None = None

    def instances(self) -> list[EndpointRecord]:
        """The live instances of the endpoint."""
        return [] if self._client is None else self._client.instances()

    def accept(self, card: ModelCard) -> None:
        """The worker's card is good."""
        known = card.instance_id in self._cards
        self._cards[card.instance_id] = card
        if self._workers is None:
            return
        self._workers.accept(card.instance_id)
        if known:
            self._add(card.instance_id)

    def refuse(self, worker_id: int) -> None:
        """Its card is gone."""
        self._cards.pop(worker_id, None)
        if self._workers is not None:
            self._workers.refuse(worker_id)

    async def start(self, settings: RouterSettings, model: str) -> None:
        """Connect. Raises DynamoError."""
        runtime, place, router = self._runtime, self.place, self._router
        client = self._client = await runtime.endpoint(".".join(place)).client()
        workers = self._workers = AdmittedWorkers(client)
        for worker_id in self._cards:
            workers.accept(worker_id)
        live = self._live = ConnectedRouter(
            runtime,
            *place,
            router.block_size,
            prefill_settings(settings),
            workers,
            model,
            "prefill",
        )
        await live.start()
        publisher = await runtime.publisher(*place[:2], PREFILL_QUEUE)
        self._news = QueueStatePublisher(model, router.line, publisher.publish)
        client.on_inhibited(live.picker.fleet.shun)
        router.attach(live.picker, client)
        router.on_change = self._news.look
        workers.on_change(self._changed)  # after the picker's own

    async def limit(self, thresholds: Thresholds) -> None:
        """Above which load a worker is busy."""
        if self._live is not None:
            await self._live.limit(thresholds)

    async def close(self) -> None:
        """Let go; what runs may end."""
        self._router.detach()
        if self._news is not None:
            self._news.close()
        if self._live is not None:
            await self._live.close()
        if self._client is not None:
            self._client.close()

    def _changed(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for worker_id in removed:
            self._router.remove_worker(worker_id)
            self._metrics.forget_worker(worker_id)
        for record in added:
            self._add(record.instance_id)

    def _add(self, worker_id: int) -> None:
        """Let it have prompts, if the picker does not refuse it (its blocks may be others)."""
        card = self._cards.get(worker_id)
        if self._live is not None and worker_id in self._live.picker.fleet.members:
            config = card.runtime_config if card is not None else RuntimeConfig()
            self._router.add_worker(worker_id, config)


def prefill_settings(settings: RouterSettings) -> RouterSettings:
    """The router's settings as they hold for prefill workers: nothing is decoded there. In mode
    ``direct`` the pin is that of a decode worker, and prompts go to the least loaded."""
    mode = "least-loaded" if settings.mode == "direct" else settings.mode
    return replace(settings, mode=mode, track_active_blocks=False, track_output_blocks=False)


def _place(card: ModelCard) -> Place:
    return card.namespace, card.component, card.endpoint
