"""One model: its card, what its workers take, its preprocessor and its router."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dynamo.config.frontend import FrontendSettings
from dynamo.config.router import RouterSettings
from dynamo.errors import ConfigError, ModelNotFound, shorten
from dynamo.frontend.disagg.metrics import PrefillMetrics
from dynamo.frontend.disagg.pool import PrefillPool
from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.frontend.prompt.preprocessor import Preprocessor, PromptMetrics
from dynamo.frontend.requests.dispatch import Dispatch, Hold
from dynamo.frontend.requests.metrics import FrontendMetrics, ModelMetrics
from dynamo.frontend.requests.migration import MigrationMetrics, Migrations
from dynamo.http.routes import RoutePatterns
from dynamo.protocols.control import EndpointRecord, ModelCard
from dynamo.protocols.engine import HTTP_INPUT, ROUTES
from dynamo.protocols.pooling import POOLING_PATHS, paths_of_type
from dynamo.router.connect.kv_router import connect
from dynamo.router.connect.router import ConnectedRouter, RoutedWorkers
from dynamo.router.eligibility.eligibility_filter import Thresholds
from dynamo.router.modes.picker import Picker
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.process.threads import in_daemon_thread

TEXT_INPUT = "Text"
INPUTS = ("Tokens", TEXT_INPUT, HTTP_INPUT)
"""Values of ``model_input`` that this frontend serves."""

_PATH = re.compile(r"/v1(/[A-Za-z0-9][A-Za-z0-9_.~-]*)+|/(de)?tokenize")
_MAX_PATHS = 128
log = logging.getLogger(__name__)


def api_paths(entry: ModelEntry) -> Collection[str]:
    """Return the paths of a relayed model, or of the APIs of one that takes tokens."""
    return entry.paths or {path for api in entry.types for path in paths_of_type(api) or (api,)}


def missing_route(name: str, path: str, entry: ModelEntry) -> ModelNotFound:
    """Return the error of a request to the model ``name`` for a path, or an API, it lacks."""
    missing, has = " or ".join(paths_of_type(path)) or path, sorted(api_paths(entry))
    return ModelNotFound(
        f"Route not found: model `{name}` has no {shorten(missing)}, it has {', '.join(has)}"
    )


def is_relayed(card: ModelCard) -> bool:
    """Whether workers get bodies whole, not token ids."""
    return card.model_input != "Tokens"


def paths_of(cards: Iterable[ModelCard]) -> frozenset[str]:
    """The paths to which all these workers of one relayed model take a POST that names it."""
    paths = [_paths(card) for card in cards]
    return frozenset.intersection(*paths) if paths else frozenset()


def patterns_of(cards: Iterable[ModelCard]) -> RoutePatterns:
    """The other routes of all these workers: with another method, or parameters in the path."""
    routes = [RoutePatterns(_listed(card)).routes for card in cards]
    return RoutePatterns(frozenset.intersection(*routes) if routes else ())


def router_settings(card: ModelCard, settings: RouterSettings) -> RouterSettings:
    """``settings`` for the workers of ``card``.

    Caches are predicted from decisions where no KV events can match: behind a server that publishes
    none (``enable_local_indexer`` is False), and in Text models, whose tokens only the worker has.
    """
    events = card.model_input == HTTP_INPUT and card.runtime_config.enable_local_indexer
    if not is_relayed(card) or events or not settings.kv_events:
        return settings
    return dataclasses.replace(settings, kv_events=False)


def load_preprocessor(
    card: ModelCard, settings: RouterSettings, frontend: FrontendSettings, metrics: PromptMetrics
) -> Preprocessor | None:
    """Load what makes token ids of prompts; None for a relayed model whose router needs none, or
    whose card names no directory with a tokenizer. Blocks. Raises ConfigError."""
    load = partial(Preprocessor, card, settings=frontend)
    if not is_relayed(card):
        return load(metrics=metrics)
    if settings.mode != "kv" or card.model_input != HTTP_INPUT:
        return None
    if not card.source_path or not Path(card.source_path, "tokenizer.json").is_file():
        return None
    try:
        return load()  # without metrics, which have no lock: it works in threads
    except ConfigError as error:
        log.warning("model %s is routed by its text: %s", card.display_name, error.message)
        return None


def _paths(card: ModelCard) -> frozenset[str]:
    if card.model_input == TEXT_INPUT:
        types = [api.strip() for api in card.model_type.split("|")]
        return frozenset(path for api in types for path in paths_of_type(api))
    return frozenset(
        path for path in _listed(card) if path in POOLING_PATHS or _PATH.fullmatch(path)
    )


def _listed(card: ModelCard) -> list[str]:
    """The routes in a card of an HTTP server."""
    if card.model_input != HTTP_INPUT:
        return []
    routes = (card.user_data or {}).get(ROUTES)
    listed = routes[:_MAX_PATHS] if isinstance(routes, list) else []
    return [route for route in listed if isinstance(route, str)]


def _endpoint(card: ModelCard) -> tuple[str, str, str]:
    return card.namespace, card.component, card.endpoint


def difference(reason: str) -> str:
    """Return for people what :meth:`ModelEntry.agrees_with` returned."""
    return "checksum of tokenizer, template and config" if reason == "checksum" else reason


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """What it takes to send a request to the workers of a model.

    ``preprocessor`` is None for a relayed model whose prompts are not tokenized here.
    """

    name: str
    card: ModelCard
    metrics: ModelMetrics
    router: ConnectedRouter
    dispatch: Dispatch
    prefill: PrefillPool
    preprocessor: Preprocessor | None

    @property
    def client(self) -> Client:
        """What sends requests to its (decode) workers."""
        return self.router.client

    @property
    def picker(self) -> Picker:
        """What chooses its (decode) workers."""
        return self.router.picker

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together, if card, model or tokenizer state them."""
        if self.preprocessor is not None:
            return self.preprocessor.context_length
        return self.card.context_length or self.card.runtime_config.context_length


@dataclass(frozen=True, eq=False)
class TokenModel(LoadedModel):
    """One whose prompts are tokenized here."""

    preprocessor: Preprocessor


class ModelEntry:
    """A model that is known, loaded or not; ``loaded`` once it is.

    ``workers`` maps keys to cards and may be empty for a while; ``prefill`` holds the cards of the
    prefill workers. ``served``: a request can be answered now, according to the cards. ``types``
    are the APIs of a model that takes tokens, ``paths`` those of a relayed one, and ``patterns``
    its routes whose requests do not name the model in the body. ``hold`` is that of its
    :class:`Dispatch`; ``on_worker`` is called when requests can be sent to a worker again.
    ``problem`` says why it could not be loaded.
    """

    def __init__(
        self,
        card: ModelCard,
        metrics: FrontendMetrics,
        settings: FrontendSettings,
        hold: Hold,
        on_worker: Callable[[], None],
    ) -> None:
        self.card = card
        self.name = card.display_name
        self.created_s = int(time.time())
        self.workers: dict[str, ModelCard] = {}
        self.relayed = is_relayed(card)
        types = () if self.relayed else card.model_type.split("|")
        self.types = frozenset(api.strip() for api in types)
        self.paths: frozenset[str] = frozenset()
        self.patterns = RoutePatterns()
        self.metrics = metrics.model(self.name)
        self.prefill = PrefillPool(self.name, metrics)
        # A worker's own limit is that of old versions of Dynamo, whose frontends had none.
        self._migrations = Migrations(
            settings.migration_limit or card.migration_limit,
            settings.migration_max_seq_len,
            MigrationMetrics(metrics, self.name),
        )
        self.loaded: LoadedModel | None = None
        self.served = False
        self.served_since_s = 0.0
        self.loading = False
        self.problem = ""
        self._hold = hold
        self._on_worker = on_worker
        self._all_metrics = metrics
        self._router: ConnectedRouter | None = None
        self._closed = False
        self._settings = settings
        self._awaited = settings.min_initial_workers

    def agrees_with(self, card: ModelCard) -> str:
        """Why ``card`` can't be a worker of this model: ``model_input``, ``checksum``,
        ``endpoint``, ``block_size`` or the name of a parser; "" if it can.

        All workers of a model need the same tokenizer, endpoint, block size and format of answers.
        """
        own = self.card
        if own.model_input != card.model_input:
            return "model_input"
        if _endpoint(own) != _endpoint(card):
            return "endpoint"
        if own.kv_cache_block_size != card.kv_cache_block_size:
            return "block_size"
        if own.checksum != card.checksum:
            return "checksum"
        for name in ("tool_call_parser", "reasoning_parser"):
            if getattr(own.runtime_config, name) != getattr(card.runtime_config, name):
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
        if self._router is not None:
            self._router.admit(card.instance_id)
        self._update()

    def remove_worker(self, key: str) -> ModelCard:
        """Send nothing more to the worker of the card at ``key``; return the card."""
        card = self.workers.pop(key)
        if self._router is not None:
            self._router.refuse(card.instance_id)
        self._update()
        return card

    @property
    def wants_load(self) -> bool:
        """Whether it has workers, and is not loaded, loading or closed."""
        return bool(self.workers) and not (self.loaded or self.loading or self._closed)

    async def load(self, runtime: DistributedRuntime, settings: RouterSettings) -> LoadedModel:
        """Load tokenizer and template in a thread, connect to the workers. Raises DynamoError."""
        card = self.card
        settings = settings.overridden(card.router_config) if card.router_config else settings
        begun = time.monotonic()
        try:
            stage = "decode" if card.worker_type == "Decode" else "aggregated"
            settings = router_settings(card, settings).at_stage(stage)
            preprocessor = await in_daemon_thread(
                load_preprocessor, card, settings, self._settings, self._all_metrics.prompt
            )
            loaded = await self._connect(runtime, settings, preprocessor)
        finally:
            self.loading = False
        # Removed while it loaded: close() saw nothing to disconnect.
        if self._closed:
            await loaded.router.close()
            return loaded
        self.loaded = loaded
        self._open_prefill(runtime, settings, loaded.dispatch)
        self._update()
        log.info("model %s is ready after %.2f s", self.name, time.monotonic() - begun)
        return loaded

    async def limit(self, thresholds: Thresholds) -> None:
        """Set the load above which a worker is busy."""
        if self.loaded is not None:
            await self.loaded.router.limit(thresholds)
            await self.prefill.limit(thresholds)

    async def close(self) -> None:
        """Close router and client."""
        self._closed = True
        self.served = False
        loaded, self.loaded = self.loaded, None
        await self.prefill.close()
        if loaded is not None:
            await loaded.router.close()

    @property
    def queued(self) -> int:
        """Requests that wait for a decode worker or a prefill worker."""
        decode = 0 if self.loaded is None else self.loaded.dispatch.waiting
        return decode + (0 if self.prefill.router is None else len(self.prefill.router.queue))

    async def _connect(
        self,
        runtime: DistributedRuntime,
        settings: RouterSettings,
        preprocessor: Preprocessor | None,
    ) -> LoadedModel:
        card, name = self.card, self.name
        block_size = settings.kv_cache_block_size or card.kv_cache_block_size
        routed = RoutedWorkers(*_endpoint(card), block_size, name)
        router = self._router = await connect(runtime, routed, settings, admits=True)
        # Those that came while it connected; add_worker admits later ones, as there is a router.
        for worker in self.workers.values():
            router.admit(worker.instance_id)
        await router.start()
        router.on_change(self._workers_changed)
        router.client.on_inhibited(partial(self._on_inhibited, router.picker))
        dispatch = Dispatch(
            router.picker, router.client, router.queue, self._migrations, self._hold
        )
        parts = name, card, self.metrics, router, dispatch, self.prefill
        if preprocessor is None:
            return LoadedModel(*parts, preprocessor)
        return TokenModel(*parts, preprocessor)

    def _update(self) -> None:
        """Recompute ``served``, ``paths``, ``patterns`` and the model's gauges."""
        # Without workers it keeps its routes: requests for them get 503, not 404.
        if self.relayed and self.workers:
            self.paths = paths_of(self.workers.values())
            self.patterns = patterns_of(self.workers.values())
        # Only at first: a model that has had its workers is served with fewer.
        if len(self.workers) >= self._awaited:
            self._awaited = 0
        served = self.loaded is not None and bool(self.workers) and not self._awaited
        if served and not self.served:
            self.served_since_s = time.monotonic()
        self.served = served
        if self.loaded is not None:
            limit, workers = self._migrations.limit, len(self.workers)
            self._all_metrics.show_card(self.card, self.served, limit, workers)

    def _open_prefill(
        self, runtime: DistributedRuntime, settings: RouterSettings, dispatch: Dispatch
    ) -> None:
        metrics = PrefillMetrics(self._all_metrics, self.name)
        block_size = settings.kv_cache_block_size or self.card.kv_cache_block_size
        router = PrefillRouter(self.name, block_size, settings, metrics, dispatch)
        self.prefill.open(runtime, settings, router)

    def _on_inhibited(self, picker: Picker, worker_id: int, avoided: bool) -> None:
        if not avoided and worker_id in picker.worker_pool.members and self.loaded is not None:
            self._on_worker()  # the connection was lost, not the worker

    def _workers_changed(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for worker_id in removed:
            self._all_metrics.workers.forget(worker_id)
        if added and self.loaded is not None:
            self._on_worker()
