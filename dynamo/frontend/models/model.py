"""One model: its card, its workers, its preprocessor and its router."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dynamo.config.frontend import FrontendSettings
from dynamo.config.router import RouterSettings
from dynamo.frontend.disagg.metrics import PrefillMetrics
from dynamo.frontend.disagg.pool import PrefillPool
from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.frontend.models.inputs import (
    is_relayed,
    load_preprocessor,
    paths_of,
    patterns_of,
    router_settings,
)
from dynamo.frontend.models.workers import AdmittedWorkers
from dynamo.frontend.prompt.off_loop import in_daemon_thread
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.frontend.requests.migration import MigrationMetrics, Migrations
from dynamo.http.routes import RoutePatterns
from dynamo.protocols.card import ModelCard
from dynamo.protocols.control import EndpointRecord
from dynamo.router.discovery.kv_router import make_router
from dynamo.router.discovery.router import ConnectedRouter, RoutedWorkers
from dynamo.router.eligibility.busy import Thresholds
from dynamo.router.picker import Picker
from dynamo.runtime import Client, DistributedRuntime

log = logging.getLogger(__name__)


def difference(reason: str) -> str:
    """Return for people what :meth:`ModelEntry.agrees_with` returned."""
    return "checksum of tokenizer, template and config" if reason == "checksum" else reason


class ModelEntry:
    """``client``, ``picker`` and ``dispatch`` are set once ``ready``, and so is ``preprocessor``,
    except for a model that is ``relayed`` and whose prompts are not tokenized here.

    ``workers`` maps keys to cards and may be empty for a while; ``prefill`` holds the cards of the
    prefill workers. ``served``: a request can be answered now, according to the cards. ``types``
    are the APIs of a model that takes tokens, ``paths`` those of a relayed one, and ``patterns``
    its routes whose requests do not name the model in the body. ``on_worker`` is called when
    requests can be sent to a new worker. ``problem`` says why it could not be loaded.
    """

    preprocessor: Preprocessor
    client: Client
    picker: Picker
    dispatch: Dispatch

    def __init__(
        self, card: ModelCard, metrics: FrontendMetrics, settings: FrontendSettings
    ) -> None:
        self.card = card
        self.name = card.display_name
        self.created_s = int(time.time())
        self.workers: dict[str, ModelCard] = {}
        self.relayed = is_relayed(card)
        types = () if self.relayed else card.model_type.split("|")
        self.types = frozenset(one.strip() for one in types)
        self.paths: frozenset[str] = frozenset()
        self.patterns = RoutePatterns()
        self.has_preprocessor = False
        self.metrics = metrics.model(self.name)
        self.prefill = PrefillPool(self.name, metrics)
        # A worker's own limit is that of old versions of Dynamo, whose frontends had none.
        self._migrations = Migrations(
            settings.migration_limit or card.migration_limit,
            settings.migration_max_seq_len,
            MigrationMetrics(metrics, self.name),
        )
        self.ready = False
        self.served = False
        self.loading = False
        self.problem = ""
        self.on_worker: Callable[[], None] | None = None
        self._all_metrics = metrics
        self._admitted: AdmittedWorkers | None = None
        self._router: ConnectedRouter | None = None
        self._closed = False

    def agrees_with(self, card: ModelCard) -> str:
        """Why ``card`` can't be a worker of this model: ``model_input``, ``checksum``,
        ``endpoint``, ``block_size`` or the name of a parser; "" if it can.

        All workers of a model need the same tokenizer, endpoint, block size and format of answers.
        """
        mine = self.card
        if mine.model_input != card.model_input:
            return "model_input"
        if (mine.namespace, mine.component, mine.endpoint) != (
            card.namespace,
            card.component,
            card.endpoint,
        ):
            return "endpoint"
        if mine.kv_cache_block_size != card.kv_cache_block_size:
            return "block_size"
        if mine.checksum != card.checksum:
            return "checksum"
        ours, theirs = mine.runtime_config, card.runtime_config
        for name in ("tool_call_parser", "reasoning_parser"):
            if getattr(ours, name) != getattr(theirs, name):
                return name
        return ""

    def prefill_agrees_with(self, card: ModelCard) -> str:
        """The same for a prefill worker, which may belong to another component."""
        if card.namespace != self.card.namespace:
            return "endpoint"
        if card.checksum != self.card.checksum:
            return "checksum"
        return self.prefill.disagreement(card)

    def add_worker(self, key: str, card: ModelCard) -> None:
        """Send requests to the worker whose ``card`` is at ``key``."""
        self.workers[key] = card
        if self._admitted is not None:
            self._admitted.admit(card.instance_id)
        self._update()

    def remove_worker(self, key: str) -> ModelCard:
        """Send nothing more to the worker of the card at ``key``; return the card."""
        card = self.workers.pop(key)
        if self._admitted is not None:
            self._admitted.refuse(card.instance_id)
        self._update()
        return card

    async def load(self, runtime: DistributedRuntime, settings: RouterSettings) -> None:
        """Load tokenizer and template in a thread, connect to the workers. Raises DynamoError."""
        card = self.card
        settings = settings.overridden(card.router_config) if card.router_config else settings
        begun = time.monotonic()
        try:
            settings = router_settings(card, settings)
            await self._load_preprocessor(settings)
            path = f"{card.namespace}.{card.component}.{card.endpoint}"
            self.client = await runtime.endpoint(path).client()
            self._admitted = AdmittedWorkers(self.client)
            for worker in self.workers.values():
                self._admitted.admit(worker.instance_id)
            self._router = await self._start_router(runtime, settings, self._admitted)
            self._admitted.on_change(self._workers_changed)  # after the picker's own
            self.picker = self._router.picker
            self.dispatch = Dispatch(self.picker, self.client, self._router.queue, self._migrations)
            self.client.on_inhibited(self._router.picker.worker_pool.avoid)
            self._router.picker.worker_pool.is_silent = self.client.is_silent
            self._open_prefill(runtime, settings)
            self.ready = not self._closed
        finally:
            self.loading = False
        if self._closed:
            await self.close()
            return
        self._update()
        log.info("model %s is ready after %.2f s", self.name, time.monotonic() - begun)

    async def limit(self, thresholds: Thresholds) -> None:
        """Set the load above which a worker is busy."""
        if self._router is not None:
            await self._router.limit(thresholds)
            await self.prefill.limit(thresholds)

    async def close(self) -> None:
        """Close router and client."""
        self._closed = True
        self.ready = self.served = False
        await self.prefill.close()
        router, self._router = self._router, None
        if router is not None:
            await router.close()
            self.client.close()

    @property
    def queued(self) -> int:
        """Requests that wait for a decode worker or a prefill worker."""
        router, prefill = self._router, self.prefill.router
        waiting = len(router.queue) if router is not None and router.queue is not None else 0
        return waiting + (len(prefill.queue) if prefill is not None else 0)

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together, if the card or the model states them."""
        if self.has_preprocessor:
            return self.preprocessor.context_length
        return self.card.context_length or self.card.runtime_config.context_length

    async def _load_preprocessor(self, settings: RouterSettings) -> None:
        """Load the tokenizer, if prompts need one."""
        found = await in_daemon_thread(load_preprocessor, self.card, settings)
        if found is None:
            return
        self.preprocessor = found
        self.has_preprocessor = True
        if not self.relayed:  # those of a relayed model work in threads, and metrics have no lock
            found.metrics = self._all_metrics

    def _update(self) -> None:
        """Recompute ``served``, ``paths``, ``patterns`` and the model's gauges."""
        if self.relayed and self.workers:
            self.paths = paths_of(self.workers.values())
            self.patterns = patterns_of(self.workers.values())
        self.served = self.ready and bool(self.workers)
        if self.ready:
            self._all_metrics.show_card(self.card, self.served, self._migrations.limit)

    def _open_prefill(self, runtime: DistributedRuntime, settings: RouterSettings) -> None:
        metrics = PrefillMetrics(self._all_metrics, self.name)
        block_size = settings.kv_cache_block_size or self.card.kv_cache_block_size
        router = PrefillRouter(self.name, block_size, settings, metrics, self.dispatch)
        self.prefill.open(runtime, settings, router)

    async def _start_router(
        self, runtime: DistributedRuntime, settings: RouterSettings, workers: AdmittedWorkers
    ) -> ConnectedRouter:
        card = self.card
        block_size = settings.kv_cache_block_size or card.kv_cache_block_size
        routed = RoutedWorkers(card.namespace, card.component, card.endpoint, block_size, self.name)
        router = make_router(runtime, routed, settings, workers)
        await router.start()
        return router

    def _workers_changed(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for worker_id in removed:
            self._all_metrics.workers.forget(worker_id)
        if added and self.on_worker is not None:
            self.on_worker()
