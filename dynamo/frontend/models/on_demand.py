"""The models that the planner starts on demand: their records, and the requests that wait.

A record in discovery says that a model may have no worker and that the planner starts one when its
requests wait. It exists as long as the planner; a restarted planner has some time to write it
again, before the waiting requests fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from dynamo.config.frontend import FrontendSettings
from dynamo.errors import DynamoError, ModelNotFound, Unavailable, as_argument
from dynamo.frontend.models.listing import ListedModel
from dynamo.frontend.requests.cold_start import (
    ColdStartQueue,
    HeldDispatch,
    HeldExchange,
    LoadProgress,
)
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.metrics import FrontendMetrics, ModelMetrics
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.protocols.codec import encode
from dynamo.protocols.control import ON_DEMAND, OnDemandModel, record_decoder
from dynamo.protocols.engine import HTTP_INPUT
from dynamo.protocols.kv import ON_DEMAND_STATE, OnDemandState
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery import KeyEvent, Watch
from dynamo.runtime.events import EventPublisher
from dynamo.runtime.process.paths import run_dir
from dynamo.runtime.process.stop_order import STOP_STAGE, is_supervised
from dynamo.runtime.process.tasks import Tasks
from dynamo.serve.graph.service import ModelArgs

_PLANNER = "planner"
_PLANNER_RESTART_S = 30.0
_TICK_S = 1.0
_WAITING_TICK_S = 0.2
"""While requests wait: another model may make room for theirs as soon as it is idle."""
_HELD_LIMIT_BYTES = 256 << 20
_decode = record_decoder(OnDemandModel)
_NO_ARGS = ModelArgs()
_ALMOST = 99
"""The per cent of a load that takes longer than the last one."""
log = logging.getLogger(__name__)


class OnDemandModels:
    """The records by their keys, and a queue for each of their models.

    ``again`` handles a request from the start: the route table of the server.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        settings: FrontendSettings,
        metrics: FrontendMetrics,
        tasks: Tasks,
        again: Callable[[Exchange], None],
    ) -> None:
        self._again = again
        self._runtime = runtime
        self._settings = settings
        self._metrics = metrics
        self._tasks = tasks
        self._records: dict[str, OnDemandModel] = {}
        self._names: dict[str, OnDemandModel] = {}
        self._together: dict[str, set[str]] = {}
        self._created_s: dict[str, int] = {}
        self._activity: dict[str, _Activity] = {}
        self._queues: dict[str, ColdStartQueue] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._publishers: dict[str, EventPublisher] = {}
        self._advertising: set[str] = set()
        self._args: Mapping[str, ModelArgs] = {}
        self._watch: Watch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = 0.0
        self._stopped = False
        self._stop_stage: Path | None = None

    async def start(self) -> None:
        """Watch; the records that exist have been seen when this returns."""
        self._watch = self._runtime.discovery.watch(ON_DEMAND, self._on_event)
        await self._watch.ready()

    def use(self, args: Mapping[str, ModelArgs]) -> None:
        """Take what the graph says about its models, by name."""
        self._args = args
        self._update_names()

    def joined(self, worker_id: int, workers: Mapping[str, Collection[int]]) -> None:
        """Note that a worker may serve several models, such as one and its adapters, by the
        ``workers`` of each: a request of any of them starts it, and keeps it from being idle."""
        names = {name for name, ids in workers.items() if worker_id in ids}
        if len(names) > 1:
            for name in names:
                self._together.setdefault(name, set()).update(names)
            self._update_names()

    def together(self, model: str) -> Collection[str]:
        """Return the names of the models that the workers of ``model`` serve, its own included."""
        return self._together.get(model, (model,))

    def drain(self) -> None:
        """Let requests wait on, unless ``dynamo serve`` stops as well: then no worker comes."""
        if is_supervised():
            self._stop_stage = run_dir(self._runtime.settings) / STOP_STAGE

    def stop(self) -> None:
        """End every waiting request, and let none wait from now on."""
        self._stopped = True
        for queue in self._queues.values():
            queue.fail_all(
                Unavailable(
                    f"Service is shutting down before model `{queue.model}` has a worker, please "
                    "retry elsewhere"
                )
            )

    def close(self) -> None:
        """Stop watching, stop the timers."""
        if self._watch is not None:
            self._watch.close()
        for timer in (self._timer, *self._expiries.values()):
            if timer is not None:
                timer.cancel()

    def idle_s(self, model: str) -> float | None:
        """Return how long a model on demand is idle, as the planner counts; None for others."""
        record = self._names.get(model)
        if record is None or record.model not in self._activity:
            return None
        models = [self._metrics.model(name) for name in self.together(record.model)]
        return self._activity[record.model].idle_s(len(self._queue(record.model)), models)

    def record(self, name: str) -> OnDemandModel | None:
        """The record of the model called ``name``."""
        return self._names.get(name)

    def not_loaded(self, name: str) -> Unavailable | None:
        """Return the error of a request that starts no worker, for a model that has had none.

        None if the model is not started on demand.
        """
        record = self._names.get(name)
        if record is None:
            return None
        if record.stopped:
            return _unavailable(record)
        return Unavailable(
            f"Model `{name}` is not loaded, and this request does not start it. Send it a request "
            f"that generates, or use: dynamo load {as_argument(record.model)}"
        )

    @property
    def relays(self) -> bool:
        """Whether the server of some model has paths that are unknown until a worker serves."""
        return any(record.model_input == HTTP_INPUT for record in self._records.values())

    def listed(self) -> list[ListedModel]:
        """Every model and alias."""
        return [
            ListedModel(name, self._created_s[record.model], record.context_length)
            for name, record in self._names.items()
        ]

    def models(self) -> set[str]:
        """The names of the models, aliases aside."""
        return {record.model for record in self._records.values()}

    def forget(self, model: str) -> bool:
        """Forget a model without waiting for its planner; False while a planner starts it."""
        keys = [key for key, record in self._records.items() if record.model == model]
        if any(key not in self._expiries for key in keys):
            return False
        for key in keys:
            self._expiries.pop(key).cancel()
            del self._records[key]
        self._update_names()
        queue = self._queues.pop(model, None)
        if queue is not None:
            queue.fail_all(ModelNotFound(f"Model not found: {model}"))
        self._activity.pop(model, None)
        self._together.pop(model, None)
        for names in self._together.values():
            names.discard(model)
        self._created_s.pop(model, None)
        return True

    def hold(self, exchange: Exchange, endpoint: str, name: str, registry: RequestRegistry) -> bool:
        """Let a request for ``name`` wait if the planner starts the model. Raises Unavailable."""
        record = self._names.get(name)
        if record is None or self._stopped or exchange.gone:
            return False
        _check_not_stopped(record)
        queue = self._queue(record.model)
        bodies = sum(queue.held_bytes for queue in self._queues.values())
        # One request alone may exceed the limit: it would never find more room.
        if bodies and bodies + len(exchange.body) > _HELD_LIMIT_BYTES:
            raise Unavailable(
                f"{_HELD_LIMIT_BYTES >> 20} MiB of requests wait for the first worker of their "
                "model already. Please retry later."
            )
        progress = None
        if self._args.get(record.model, _NO_ARGS).show_loading:
            text = partial(self._progress, record.model)
            progress = LoadProgress(text, name, self._settings.reasoning_field_name)
        comments = record.model_input != HTTP_INPUT
        HeldExchange(exchange, endpoint, queue, registry, self._again, comments, progress).wait()
        return True

    def hold_dispatch(
        self, name: str, engine_request: EngineRequest, send: Callable[[EngineRequest], None]
    ) -> bool:
        """The same for an engine request whose model has no worker left. Raises Unavailable."""
        record = self._names.get(name)
        if record is None or self._stopped:
            return False
        _check_not_stopped(record)
        HeldDispatch(engine_request, self._queue(record.model), send).wait()
        return True

    def release(self, name: str) -> None:
        """Continue the requests of the model, which has a worker: its idle time begins now."""
        record = self._names.get(name)
        if record is not None and record.model in self._activity:
            self._activity[record.model].begin()
        self.retry(name)

    def retry(self, name: str) -> None:
        """Let the waiting requests of the model find out whether they still have to wait."""
        record = self._names.get(name)
        queue = self._queues.get(name if record is None else record.model)
        if queue is not None:
            queue.release()

    def _progress(self, model: str) -> str:
        """Return how far the load of ``model`` is, from what is known of it and of the last one."""
        record = self._names.get(model)
        if record is None or record.loading_since is None:
            return f"waiting for a GPU, {self._queue(model).oldest_s():.0f} s"
        elapsed_s = max(0.0, time.time() - record.loading_since)
        if not record.load_s:
            return f"loading, {elapsed_s:.0f} s"
        return f"loading {min(_ALMOST, 100 * elapsed_s / record.load_s):.0f} %"

    def _queue(self, model: str) -> ColdStartQueue:
        queue = self._queues.get(model)
        if queue is None:
            gauge = self._metrics.model(model).cold_start_queue
            limit = self._settings.cold_start_queue_limit
            queue = self._queues[model] = ColdStartQueue(model, limit, gauge, self._changed)
        return queue

    # -- records

    def _on_event(self, event: KeyEvent) -> None:
        key = event.key
        if event.value is None:
            record = self._records.get(key)
            if record is not None and key not in self._expiries:
                loop = asyncio.get_running_loop()
                self._expiries[key] = loop.call_later(_PLANNER_RESTART_S, self._expired, key)
            return
        try:
            record = _decode(event.value)
        except ValueError as error:
            log.warning("skipping the on-demand model %s: %s", key, error)
            return
        if not record.namespace.startswith(self._settings.namespace_prefix or ""):
            return
        expiry = self._expiries.pop(key, None)
        if expiry is not None:
            expiry.cancel()
        self._records[key] = record
        self._created_s.setdefault(record.model, int(time.time()))
        self._activity.setdefault(record.model, _Activity())
        self._update_names()
        # Stopped by an operator: waiting would end with the time limit alone.
        if record.stopped and (queue := self._queues.get(record.model)) is not None:
            queue.fail_all(_unavailable(record))
        if self._timer is None:  # the first record, or the first one since the planner was away
            self._ticked_s = time.monotonic()
            self._tick()

    def _expired(self, key: str) -> None:
        """The planner has not come back."""
        del self._expiries[key]
        record = self._records.pop(key)
        self._update_names()
        queue = self._queues.get(record.model)
        if queue is not None and record.model not in self._names:
            queue.fail_all(
                Unavailable(
                    f"Model `{record.model}` has no worker, and the planner that starts it does "
                    "not run. Please retry later."
                )
            )

    def _update_names(self) -> None:
        self._names = {record.model: record for record in self._records.values()}
        # setdefault: an alias or an adapter hides no model of its name.
        for record in self._records.values():
            for alias in (*record.aliases, *self._args.get(record.model, _NO_ARGS).aliases):
                self._names.setdefault(alias, record)
            for name in self._together.get(record.model, ()):
                self._names.setdefault(name, record)

    # -- the planner's view

    async def _advertise(self, namespace: str) -> None:
        """Make the publisher before the first request waits, so that the planner is subscribed."""
        try:
            self._publishers[namespace] = await self._runtime.publisher(
                namespace, _PLANNER, ON_DEMAND_STATE
            )
        except DynamoError as error:
            log.warning("the planner of %s sees no waiting requests: %s", namespace, error)

    def _changed(self, queue: ColdStartQueue) -> None:
        """The first request waits, or none waits any more."""
        if queue:
            log.info("model %s has no worker: its requests wait for one", queue.model)
        record = self._names.get(queue.model)
        if record is not None:
            self._publish(record)

    def _tick(self) -> None:
        """Run every second while there is a record, more often while a request waits.

        Each wait ends here.
        """
        loop = asyncio.get_running_loop()
        waiting = any(self._queues.values())
        interval_s = _WAITING_TICK_S if waiting else _TICK_S
        again = self._records or waiting
        self._timer = loop.call_later(interval_s, self._tick) if again else None
        if self._stop_stage is not None and self._stop_stage.exists():
            self.stop()
        now_s = time.monotonic()
        elapsed_s, self._ticked_s = now_s - self._ticked_s, now_s
        for model, queue in self._queues.items():
            record = self._names.get(model)
            reason = "" if record is None else record.waits_for
            queue.tick(elapsed_s, self._settings.cold_start_timeout_s, reason)
        for record in {record.model: record for record in self._records.values()}.values():
            self._publish(record)

    def _publish(self, record: OnDemandModel) -> None:
        namespace = record.namespace
        publisher = self._publishers.get(namespace)
        if publisher is None:
            if namespace not in self._advertising:
                self._advertising.add(namespace)
                task = self._tasks.spawn(self._advertise(namespace), name="on-demand state")
                task.add_done_callback(lambda _: self._advertising.discard(namespace))
            # The state of this tick is not sent; there is a publisher at one of the next.
            return
        queue, idle_s = self._queue(record.model), self.idle_s(record.model) or 0.0
        state = OnDemandState(
            record.model, len(queue), round(queue.oldest_s(), 3), round(idle_s, 3)
        )
        publisher.publish(encode(state))


def _check_not_stopped(record: OnDemandModel) -> None:
    """Raise Unavailable if an operator has stopped the model: no request starts it."""
    if record.stopped:
        raise _unavailable(record)


def _unavailable(record: OnDemandModel) -> Unavailable:
    return Unavailable(f"Model `{record.model}` has no worker: {record.waits_for}.")


class _Activity:
    """When a request of a model was last in progress, by its metrics, or its worker began."""

    def __init__(self) -> None:
        self._ended = 0
        self._last_s = time.monotonic()

    def begin(self) -> None:
        """Count from now on: a worker has begun to serve, perhaps started by an operator."""
        self._last_s = time.monotonic()

    def idle_s(self, waiting: int, models: Collection[ModelMetrics]) -> float:
        """How long no request of ``models``, which share their workers, is in progress; 0 while
        one is, or ``waiting`` ones are."""
        now_s = time.monotonic()
        ended = sum(sum(metrics.duration.counts) for metrics in models)
        # Not only while one is active: it may have come and ended since the last tick.
        if waiting or any(metrics.active.value for metrics in models) or ended != self._ended:
            self._ended, self._last_s = ended, now_s
        return now_s - self._last_s
