"""The models that the frontend serves, from the model cards of workers and prefill workers.

The first card of a model loads it; when the last worker leaves, the model is no longer listed. It
stays loaded, so that it is ready as soon as a worker returns, and requests in between get 503
(retry) instead of 404 (give up). Requests of a model that is started on demand wait (see
:class:`OnDemandModels`). A model that a reload has removed is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from dynamo.config.frontend import FrontendSettings
from dynamo.config.router import RouterSettings
from dynamo.errors import DynamoError, ModelNotFound, NoInstances, Unavailable, shorten
from dynamo.frontend.disagg.pool import AGAIN_S
from dynamo.frontend.models.graph import GraphModels
from dynamo.frontend.models.listing import AdapterParents, ListedModel, listed_model
from dynamo.frontend.models.model import (
    INPUTS,
    LoadedModel,
    ModelEntry,
    TokenModel,
    difference,
    missing_route,
    router_settings,
)
from dynamo.frontend.models.on_demand import OnDemandModels
from dynamo.frontend.models.prefill_cards import PrefillCards
from dynamo.frontend.prompt.field_rules import FieldRules
from dynamo.frontend.requests.metrics import UNKNOWN_MODEL, FrontendMetrics
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.protocols.control import MODEL_CARDS, EndpointRecord, ModelCard, decode_card
from dynamo.router.worker_pool import Saturation
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery import KeyEvent, Watch
from dynamo.runtime.endpoints.instances import Outage
from dynamo.runtime.process.paths import state_path
from dynamo.runtime.process.tasks import Tasks
from dynamo.serve.state.statefile import Statefile

_FILE_PREFIXES = ("/v1/audio/tran", "/v1/images/edits")
"""Of paths that take forms with files: transcriptions and translations of audio, images."""
_LOAD_S = 30.0
_ADAPTER_GONE_S = 2.0
"""Of a worker that dies, the card of an adapter is removed a little earlier than the model's."""
_GONE_MODELS = 64
"""Models without a worker that stay listed, beside those that one is started for."""
_ADAPTER_WAIT_S = 5.0
"""How long requests for an adapter wait after a worker of its model registers: its card follows."""
log = logging.getLogger(__name__)


class Models:
    """Watches the cards. :meth:`find` is on the path of every request: one dict look-up.

    ``again`` handles a request that has waited for its model, from the start. ``on_loaded`` is
    called after each model that was loaded. ``relays``: some model takes whole bodies, which
    ``on_relayed`` reports.
    ``saturation.count`` is not zero while some model may reject every request. ``rules`` change the
    fields of requests, by model; ``aliases`` are those of the graph.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        settings: FrontendSettings,
        router: RouterSettings,
        metrics: FrontendMetrics,
        tasks: Tasks,
        again: Callable[[Exchange], None],
        on_loaded: Callable[[], None],
        on_relayed: Callable[[], None],
    ) -> None:
        self.kv_mode = router.mode == "kv"
        self.saturation = Saturation()
        self.relays = False
        self.on_demand = OnDemandModels(runtime, settings, metrics, tasks, again)
        self._runtime = runtime
        self._settings = settings
        self._prefix = settings.namespace_prefix or ""
        self._router = router
        self._metrics = metrics
        self._tasks = tasks
        self._entries: dict[str, ModelEntry] = {}
        self._names: dict[str, ModelEntry] = {}
        self._owners: dict[str, ModelEntry] = {}
        self._rejected: dict[str, ModelCard] = {}
        self._problems: dict[str, tuple[ModelCard, str]] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._prefill = PrefillCards(self._entries, self._reject)
        self._watch: Watch | None = None
        self._forgot = False
        self._closed = False
        self._left: dict[str, None] = {}
        statefile = Statefile(state_path(runtime.settings), runtime.settings.namespace)
        is_alone = runtime.settings.discovery_backend == "file"
        self._graph = GraphModels(statefile, is_alone, self._use_args)
        self.rules: dict[str, FieldRules] = {}
        self.aliases: dict[str, str] = {}
        self._on_loaded = on_loaded
        self._on_relayed = on_relayed

    async def start(self) -> None:
        """Watch; the cards that exist have been seen when this returns, not yet loaded."""
        # First: rules and aliases have to be there for the first request.
        await self._graph.load()
        await self.on_demand.start()
        self._watch = self._runtime.discovery.watch(MODEL_CARDS, self._on_event)
        await self._watch.ready()
        self._tasks.spawn(self._graph.run(self._worker_ids, self._forget), name="graph")

    async def loaded(self) -> None:
        """Return when every model seen so far is loaded, or has failed to load."""
        if self._loads:
            await asyncio.wait(self._loads)

    async def close(self) -> None:
        """Stop watching, close all models."""
        self._closed = True
        self.on_demand.close()
        if self._watch is not None:
            self._watch.close()
        for entry in self._entries.values():
            await entry.close()

    def find(self, name: str, model_type: str) -> TokenModel:
        """The model for a request of ``model_type`` (Chat, Completions).

        Raises NoInstances for a known model without a worker, and :meth:`unregistered`.
        """
        entry = self._names.get(name)
        if entry is None:
            raise self.unregistered(name)
        if model_type not in entry.types:
            raise missing_route(name, model_type, entry)
        loaded = entry.loaded
        if not entry.served or not isinstance(loaded, TokenModel):
            raise NoInstances
        return loaded

    def unregistered(self, name: str) -> NoInstances | ModelNotFound:
        """The error of a request for a model that no worker has registered.

        NoInstances if the graph has the model. Until the first model registers, any name is
        unavailable, unless the graph has all names: clients repeat a request after 503, not after
        404.
        """
        none_yet = not self._names and not self._forgot
        if self._graph.has(name) or (none_yet and not self._graph.names):
            return NoInstances()
        hint = self._graph.hint if none_yet else ""
        return ModelNotFound(f"Model not found: {shorten(name)}{hint}")

    async def find_loaded(self, name: str, model_type: str) -> TokenModel:
        """As :meth:`find`, but wait for a model that is loading, at most 30 s."""
        try:
            return self.find(name, model_type)
        except NoInstances:
            if not self.is_loading(name):
                raise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOAD_S):
                await self.loaded()
        return self.find(name, model_type)

    def is_loading(self, name: str) -> bool:
        """Whether the model has workers and will be served in a moment."""
        entry = self._names.get(name)
        return entry is not None and entry.loading and bool(entry.workers)

    def named(self, name: str) -> ModelEntry | None:
        """The model called ``name``, served now or not."""
        return self._names.get(name)

    def entries(self) -> list[ModelEntry]:
        """Every known model, served now or not."""
        return list(self._entries.values())

    def loaded_models(self) -> list[LoadedModel]:
        """Every model that is loaded, served now or not."""
        return [entry.loaded for entry in self._entries.values() if entry.loaded is not None]

    def listed(self) -> list[ListedModel]:
        """Every model and alias that is served now, or started on demand."""
        adapters = AdapterParents(self._entries.values(), self.on_demand)
        served = [
            listed_model(name, entry, adapters)
            for name, entry in self._names.items()
            if entry.served or self._is_started(entry.name)
        ]
        return served + [row for row in self.on_demand.listed() if row.name not in self._names]

    def public(self) -> list[ListedModel]:
        """As :meth:`listed`, without the models and aliases that the graph hides."""
        hidden = {model: args.hidden for model, args in self._graph.args.items() if args.hidden}
        if not hidden:
            return self.listed()
        rows = []
        for row in self.listed():
            entry, record = self._names.get(row.name), self.on_demand.record(row.name)
            model = entry.name if entry is not None else record.model if record else row.name
            hides = hidden.get(model, "")
            if hides != "all" and (hides != "aliases" or row.name == model):
                rows.append(row)
        return rows

    def hold(
        self,
        registry: RequestRegistry,
        exchange: Exchange,
        endpoint: str,
        error: DynamoError,
        name: str,
    ) -> bool:
        """Let a request wait that failed with ``error``, if the first worker of its model ends it.

        Raises Unavailable if too many wait.
        """
        entry = self._names.get(name)
        if entry is not None and (entry.served or isinstance(error, ModelNotFound)):
            return False  # the model has no such API
        model = name if entry is None else entry.name
        if not self._is_started(model):
            return False
        if self._is_served_without(model):
            asyncio.get_running_loop().call_later(_ADAPTER_WAIT_S, self.on_demand.retry, model)
        return self.on_demand.hold(exchange, endpoint, model, registry)

    def _is_started(self, model: str) -> bool:
        """Whether a request starts a worker for ``model``, which has none, or will find it soon."""
        record = self.on_demand.record(model)
        if record is None or not self._is_served_without(model):
            return record is not None
        # Its workers serve the model of the record, too: one that serves that alone is not enough,
        # unless the card of the adapter is still on its way.
        since_s = self._entries[record.model].served_since_s
        return time.monotonic() - since_s < _ADAPTER_WAIT_S

    def _is_served_without(self, adapter: str) -> bool:
        """Whether the workers of the model that ``adapter`` belongs to serve that model alone."""
        record = self.on_demand.record(adapter)
        main = None if record is None else self._entries.get(record.model)
        return main is not None and main.name != adapter and main.served

    def rejections(self) -> dict[str, str]:
        """Why registered workers get no requests, by their ids in hexadecimal."""
        problems = [*self._problems.values(), *self._prefill.problems()]
        for entry in self._entries.values():
            if entry.problem:
                problems += [(card, entry.problem) for card in entry.workers.values()]
        return {f"{card.instance_id:x}": text for card, text in problems if card.lora_name is None}

    def max_images(self, name: str) -> int:
        """How many images a prompt for ``name`` may have; 0 too if nothing is known."""
        entry = self._names.get(name)
        loaded = None if entry is None else entry.loaded
        images = loaded.preprocessor.images if isinstance(loaded, TokenModel) else None
        return 0 if images is None else images.limit

    def takes_media(self) -> bool:
        """Whether a loaded model reads images in chat messages, or files in forms."""
        return any(
            (isinstance(entry.loaded, TokenModel) and entry.loaded.preprocessor.images is not None)
            or any(path.startswith(_FILE_PREFIXES) for path in entry.paths)
            for entry in self._entries.values()
            if entry.loaded is not None
        )

    def instances(self) -> list[EndpointRecord]:
        """Every live instance of every model, once: models may share an endpoint."""
        records = {
            (record.namespace, record.component, record.endpoint, record.instance_id): record
            for loaded in self.loaded_models()
            for record in (*loaded.client.records(), *loaded.prefill.instances())
        }
        return list(records.values())

    def outages(self) -> dict[int, Outage]:
        """Why each instance that is out of routing is out, by instance id."""
        outages: dict[int, Outage] = {}
        for loaded in self.loaded_models():
            outages |= loaded.client.outages() | loaded.prefill.outages()
        return outages

    def count(self) -> None:
        """Update the counters that the tokenizers keep, before a scrape or a removal."""
        for model in self.loaded_models():
            if isinstance(model, TokenModel):
                encoder = model.preprocessor.tokenizer.encoder
                stats = encoder.stats()
                self._metrics.tokenizer_cache(encoder, stats.hits, stats.misses)

    def _on_event(self, event: KeyEvent) -> None:
        self._problems.pop(event.key, None)
        if event.kind == "delete" or event.value is None:
            self._remove(event.key)
            return
        try:
            card = decode_card(event.value)
        except ValueError as error:
            self._reject(UNKNOWN_MODEL, "unreadable", f"{event.key}: {error}")
            return
        if not card.namespace.startswith(self._prefix):
            return
        if card.worker_type == "Prefill" or "Prefill" in card.model_type:
            # The card of this key may have been that of a decode worker.
            self._remove(event.key)
            self._prefill.add(event.key, card)
            return
        self._prefill.remove(event.key)
        own = card.kv_cache_block_size
        if card.model_input not in INPUTS:
            text = f"it takes {card.model_input}, this frontend sends {', '.join(INPUTS)}"
            self._reject_card(event.key, card, "model_input", text)
        elif (forced := router_settings(card, self._router).block_size_for(own)) != own:
            text = (
                f"it has KV blocks of {own} tokens, this frontend hashes blocks of {forced}: give "
                f"the frontend --kv-cache-block-size {own}, or leave that flag out, or start the "
                f"worker with blocks of {forced} tokens"
            )
            self._reject_card(event.key, card, "block_size", text)
        else:
            self._add(event.key, card)

    def _add(self, key: str, card: ModelCard) -> None:
        if key in self._owners:
            self._remove(key)
        name = card.display_name
        entry = self._entries.get(name)
        if entry is not None and (reason := entry.agrees_with(card)):
            if entry.workers:
                text = f"other workers of {name} have another {difference(reason)}"
                if reason == "block_size":
                    sizes = entry.card.kv_cache_block_size, card.kv_cache_block_size
                    text += ": they have KV blocks of {} tokens, it has {}".format(*sizes)
                text += "; another model needs another name"
                self._reject_card(key, card, reason, text)
                self._rejected[key] = card
                return
            self._drop(entry)
            entry = None
        if entry is None:
            entry = self._entries[name] = ModelEntry(
                card,
                self._metrics,
                self._settings,
                hold=partial(self.on_demand.hold_dispatch, name),
                on_worker=partial(self.on_demand.release, name),
            )
            self.relays = any(model.relayed for model in self._entries.values())
            if self.relays:
                self._on_relayed()
            self._update_names()
            self._prefill.assign(entry)
        self._left.pop(name, None)
        entry.add_worker(key, card)
        self._owners[key] = entry
        self._graph.joined(name, card.instance_id)
        if len(self._entries) > 1:
            self.on_demand.joined(card.instance_id, self._worker_ids())
        log.info("model %s: worker %x joined (%d)", name, card.instance_id, len(entry.workers))
        self._load_missing(entry)

    def _remove(self, key: str) -> None:
        self._prefill.remove(key)
        self._rejected.pop(key, None)
        entry = self._owners.pop(key, None)
        if entry is None:
            return
        card = entry.remove_worker(key)
        log.info("model %s: worker %x left (%d)", entry.name, card.instance_id, len(entry.workers))
        if not entry.workers:
            self._graph.left()
            self._reconsider(entry.name)
        # A card that was rejected may have brought it a worker, or taken its name.
        if not entry.workers and self._entries.get(entry.name) is entry:
            self._has_left(entry, card)

    def _reconsider(self, name: str) -> None:
        """Try the rejected cards again: the workers that they conflicted with have left."""
        for key, card in list(self._rejected.items()):
            # An earlier card of this loop may have removed this one.
            if card.display_name == name and self._rejected.pop(key, None) is not None:
                self._problems.pop(key, None)
                self._add(key, card)

    def _has_left(self, entry: ModelEntry, card: ModelCard) -> None:
        """Forget an adapter that its worker goes on without, and the oldest of many models."""
        if card.lora_name is not None:
            asyncio.get_running_loop().call_later(_ADAPTER_GONE_S, self._drop_adapter, entry, card)
        # To the end: the one that left first is forgotten first.
        self._left.pop(entry.name, None)
        self._left[entry.name] = None
        gone = [
            name for name in self._left if not (self._is_started(name) or self._graph.has(name))
        ]
        for name in gone[:-_GONE_MODELS]:
            if self._entries[name].metrics.active.value == 0:
                self._forget(name, f"the oldest of {_GONE_MODELS + 1} models without a worker")

    def _drop_adapter(self, entry: ModelEntry, card: ModelCard) -> None:
        """Forget an adapter whose last worker still serves others; a dead one serves none."""
        if self._closed or entry.workers or self._entries.get(entry.name) is not entry:
            return
        if entry.metrics.active.value:  # its last requests run on
            asyncio.get_running_loop().call_later(_ADAPTER_GONE_S, self._drop_adapter, entry, card)
        elif any(card.instance_id in ids for ids in self._worker_ids().values()):
            self._forget(entry.name, "its worker has unloaded the adapter")

    def _drop(self, entry: ModelEntry) -> None:
        """Close a model without workers: a different one has its name, or a reload removed it."""
        self.count()
        del self._entries[entry.name]
        self._left.pop(entry.name, None)
        self._update_names()
        self._tasks.spawn(entry.close(), name=f"close {entry.name}")

    def _use_args(self) -> None:
        """Take what the graph says about its models, at the start and after a reload."""
        args = self._graph.args
        self.rules = {
            model: FieldRules(model_args.defaults, model_args.forbid)
            for model, model_args in args.items()
            if model_args.defaults or model_args.forbid
        }
        self.aliases = {
            alias: model for model, model_args in args.items() for alias in model_args.aliases
        }
        self.on_demand.use(args)
        self._update_names()

    def _update_names(self) -> None:
        """Find models by their names, then by their aliases: an alias hides no model."""
        self._names = dict(self._entries)
        for entry in self._entries.values():
            for alias in entry.card.model_aliases:
                self._names.setdefault(alias, entry)
        for alias, model in self.aliases.items():
            if model in self._entries:
                self._names.setdefault(alias, self._entries[model])

    def _worker_ids(self) -> dict[str, list[int]]:
        """Return the worker ids of each model, known now or started on demand."""
        worker_ids = {
            name: [card.instance_id for card in entry.workers.values()]
            for name, entry in self._entries.items()
        }
        return {name: [] for name in self.on_demand.models()} | worker_ids

    def _forget(self, name: str, reason: str = "a reload has removed it from the graph") -> bool:
        """Forget a model that is gone; False while it has workers."""
        entry = self._entries.get(name)
        if (entry is not None and entry.workers) or not self.on_demand.forget(name):
            return False
        if entry is not None:
            self._drop(entry)
        self._forgot = True
        self._metrics.forget(name)
        log.info("model %s: forgotten, %s", name, reason)
        return True

    def _load_missing(self, entry: ModelEntry) -> None:
        if entry.wants_load:
            entry.loading = True
            load = self._tasks.spawn(self._load(entry), name=f"load {entry.name}")
            self._loads.add(load)
            load.add_done_callback(self._loads.discard)

    async def _load(self, entry: ModelEntry) -> None:
        try:
            loaded = await entry.load(self._runtime, self._router)
            entry.problem = ""
            loaded.dispatch.report_to(self.saturation)
            self._on_loaded()
            # on_worker calls nothing before the model is loaded: these joined too early.
            if loaded.picker.worker_pool.members:
                self.on_demand.release(entry.name)
        except DynamoError as error:
            if entry.problem != error.message:
                entry.problem = error.message
                self._reject(entry.name, "load", error.message)
            # A full disk, for example; after another error only a new card may help.
            if isinstance(error, Unavailable):
                asyncio.get_running_loop().call_later(AGAIN_S, self._load_missing, entry)

    def _reject_card(self, key: str, card: ModelCard, reason: str, text: str) -> None:
        self._problems[key] = card, text
        self._reject(card.display_name, reason, f"{key} gets no requests: {text}")

    def _reject(self, model: str, reason: str, text: str) -> None:
        log.error("model card rejected (%s): %s", reason, text)
        self._metrics.cards_rejected.labels(model, reason).value += 1
