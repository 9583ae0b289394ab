"""The metrics of a running deployment: its event plane, and the pages of its frontends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec.structs import replace

from dynamo.errors import DynamoError
from dynamo.http.client import ResponseError
from dynamo.planner.capacity.observation import Pull, Traffic, WorkerLoad
from dynamo.planner.connector import READY, ScaledService
from dynamo.planner.live.traffic import FrontendPage, TrafficCounter, read_page
from dynamo.protocols import codec
from dynamo.protocols.control import MODEL_CARDS, ModelCard, decode_card
from dynamo.protocols.kv import (
    FORWARD_PASS,
    FORWARD_PASS_VERSION,
    KV_METRICS,
    PREFILL_QUEUE,
    ForwardPass,
    KvMetrics,
    PrefillQueueState,
)
from dynamo.runtime.process.threads import in_file_thread
from dynamo.serve.graph.facts import FrontendAddress
from dynamo.serve.readiness import ask
from dynamo.serve.state.document import Document
from dynamo.serve.state.frontends import frontends_in
from dynamo.serve.state.statefile import Statefile

if TYPE_CHECKING:
    from dynamo.config.planner import PlannerSettings
    from dynamo.planner.live.model_state import ScaledModel
    from dynamo.runtime import DistributedRuntime
    from dynamo.runtime.discovery import KeyEvent
    from dynamo.runtime.events.channels import Channel, Subscription

_STALE_INTERVALS = 3
_SILENT_INTERVALS = 2
"""Adjustment intervals after which the traffic is counted without a frontend that hangs."""
_STALE_S = 3.5  # workers and frontends repeat their reports every second
log = logging.getLogger(__name__)
_RANKS = 1024
_FRONTENDS = 64
_PAGE_BYTES = 16 << 20
_TIMEOUT_S = 2.0
_START_UP_S = 30.0
_REFUSED = "it does not listen"
_PREFILL = "Prefill"
_decode_loads = codec.decoder(list[KvMetrics]).decode
_decode_pass = codec.decoder(ForwardPass).decode
_decode_queue = codec.decoder(PrefillQueueState).decode


@dataclass(frozen=True, slots=True)
class _Report:
    at_s: float
    load: KvMetrics


@dataclass(frozen=True, slots=True)
class _PassReport:
    """The newest pass of a rank, and the one before: some engines alternate prefill and decode."""

    at_s: float
    newest: ForwardPass
    before: ForwardPass

    def highest(self, figure: Callable[[ForwardPass], int]) -> int:
        """Return the higher figure of the two; that of an idle rank is the newest."""
        if not self.newest.wall_time:
            return figure(self.newest)
        return max(figure(self.newest), figure(self.before))


@dataclass(frozen=True, slots=True)
class _QueueReport:
    at_s: float
    state: PrefillQueueState


class WorkerReports:
    """Follows the workers that :meth:`follow` names, and keeps the newest report of each.

    A worker reports its load, its forward passes, or both: figures that a load report lacks are
    those of the passes. Reports older than ``stale_after_s`` do not count: their sender is gone
    or hangs. ``clock`` is the planner's.
    """

    def __init__(
        self, runtime: DistributedRuntime, stale_after_s: float, clock: Callable[[], float]
    ) -> None:
        self._runtime = runtime
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._cards: dict[str, ModelCard] = {}
        self._followed: frozenset[int] = frozenset()
        self._subscriptions: dict[Channel, Subscription] = {}
        self._loads: dict[int, dict[int, _Report]] = {}
        self._passes: dict[int, dict[int, _PassReport]] = {}
        self._queues: dict[int, dict[str, _QueueReport]] = {}
        self._frontends: Counter[int] = Counter()
        """How many components each frontend reports queues of."""
        self._reported: set[int] = set()
        self._invalid: set[int] = set()

    async def start(self) -> None:
        """Follow the workers' model cards; those that exist are known on return."""
        watch = self._runtime.discovery.watch(MODEL_CARDS, self._on_card)
        self._runtime.on_close(watch.close)
        await watch.ready()

    def follow(self, worker_ids: Iterable[int]) -> None:
        """Follow these workers, and no others. A new one reports within a second."""
        self._followed = frozenset(worker_ids)
        self._reported &= self._followed
        self._invalid &= self._followed
        for reports in (self._loads, self._passes):
            for worker_id in reports.keys() - self._followed:
                del reports[worker_id]
        for card in list(self._cards.values()):
            if card.instance_id in self._followed:
                path = (card.namespace, card.component)
                self._subscribe((*path, KV_METRICS), self._on_loads, None)
                self._subscribe((*path, FORWARD_PASS), self._on_pass, None)
                if card.worker_type == _PREFILL:
                    self._subscribe((*path, PREFILL_QUEUE), self._on_queue, self._on_frontend)

    def loads(self, worker_ids: Collection[int]) -> tuple[WorkerLoad, ...]:
        """Return the loads of those workers whose KV use is known, all ranks together."""
        since_s = self._clock() - self._stale_after_s
        loads = []
        for worker_id in sorted(worker_ids):
            load = self._sum(worker_id, self._ranks(worker_id, since_s))
            if load is not None:
                loads.append(load)
        return tuple(loads)

    def served(self) -> dict[str, int]:
        """Return the names that the followed workers serve, adapters included, each with one."""
        cards = self._cards.values()
        return {c.display_name: c.instance_id for c in cards if c.instance_id in self._followed}

    def prefill_queue(self, *names: str) -> int | None:
        """Return the queued requests for ``names`` in all frontends; None if none reports them."""
        since_s = self._clock() - self._stale_after_s
        sizes = [
            queues[name].state.size
            for queues in self._queues.values()
            for name in names
            if name in queues and queues[name].at_s > since_s
        ]
        return sum(sizes) if sizes else None

    def _ranks(self, worker_id: int, since_s: float) -> list[KvMetrics]:
        """Return the loads of the ranks that have reported since then."""
        loads = self._loads.get(worker_id, {})
        passes = self._passes.get(worker_id, {})
        silent = [rank for rank, passed in passes.items() if passed.at_s <= since_s]
        for rank in silent:
            del passes[rank]
        if silent:
            log.warning(
                "worker %x: no forward-pass metrics for %.1f s; its load is what it reports "
                "without them", worker_id, self._stale_after_s,
            )  # fmt: skip
        metrics = []
        for rank in loads.keys() | passes.keys():
            load, passed = loads.get(rank), passes.get(rank)
            merged = None if load is None or load.at_s <= since_s else load.load
            if passed is not None:
                merged = self._with_pass(worker_id, merged or KvMetrics(worker_id, rank), passed)
            if merged is not None:
                metrics.append(merged)
        return metrics

    def _with_pass(self, worker_id: int, load: KvMetrics, passed: _PassReport) -> KvMetrics:
        """Return ``load`` with the figures of the forward passes that it lacks."""
        card = self._card(worker_id)
        size = None if card is None else card.kv_cache_block_size
        used = load.kv_used_blocks
        if used is None and size:
            # Rounded up: a block that is partly filled is in use.
            used = -(-passed.highest(lambda forward: forward.kv_tokens) // size)
        if load.num_requests_running is not None:
            return replace(load, kv_used_blocks=used)
        return replace(
            load,
            kv_used_blocks=used,
            num_requests_running=passed.highest(lambda forward: forward.running),
            num_requests_waiting=passed.newest.waiting,
            active_prefill_tokens=passed.highest(lambda forward: forward.prefill_tokens),
        )

    def _card(self, worker_id: int) -> ModelCard | None:
        return next((c for c in self._cards.values() if c.instance_id == worker_id), None)

    def _sum(self, worker_id: int, ranks: list[KvMetrics]) -> WorkerLoad | None:
        card = self._card(worker_id)
        used = total = 0
        for rank in ranks:
            blocks = rank.kv_total_blocks or (card and card.runtime_config.total_kv_blocks) or 0
            # All ranks or none: the rest of them would look like a low load.
            if rank.kv_used_blocks is None or not blocks:
                if worker_id not in self._reported:
                    self._reported.add(worker_id)
                    log.warning(
                        "worker %x does not report its KV use: its load is unknown", worker_id
                    )
                return None
            used, total = used + rank.kv_used_blocks, total + blocks
        if not ranks:
            return None
        return WorkerLoad(
            worker_id=worker_id,
            kv_used_blocks=used,
            kv_total_blocks=total,
            running=sum(rank.num_requests_running or 0 for rank in ranks),
            waiting=sum(rank.num_requests_waiting or 0 for rank in ranks),
            active_prefill_tokens=sum(rank.active_prefill_tokens or 0 for rank in ranks),
        )

    def _subscribe(
        self,
        channel: Channel,
        on_event: Callable[[int, int, bytes], None],
        on_publisher: Callable[[int, bool], None] | None,
    ) -> None:
        if channel not in self._subscriptions:
            self._subscriptions[channel] = self._runtime.subscribe(
                *channel, on_event, None, on_publisher
            )

    def _on_card(self, event: KeyEvent) -> None:
        self._cards.pop(event.key, None)
        if event.value is not None:
            try:
                self._cards[event.key] = decode_card(event.value)
            except ValueError as error:
                log.warning("skipping the model card %s: %s", event.key, error)

    def _on_loads(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        try:
            loads = _decode_loads(payload)
        except msgspec.MsgspecError as error:
            log.warning("invalid load report of publisher %x: %s", publisher_id, error)
            return
        for load in loads:
            if load.worker_id in self._followed:
                ranks = self._loads.setdefault(load.worker_id, {})
                if load.dp_rank in ranks or len(ranks) < _RANKS:
                    ranks[load.dp_rank] = _Report(self._clock(), load)

    def _on_pass(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        if publisher_id not in self._followed:
            return
        try:
            newest = _decode_pass(payload)
            if newest.version != FORWARD_PASS_VERSION:
                raise ValueError(f"version {newest.version}, expected {FORWARD_PASS_VERSION}")
        except (msgspec.MsgspecError, ValueError) as error:
            if publisher_id not in self._invalid:  # an engine sends hundreds a second
                self._invalid.add(publisher_id)
                log.warning("invalid forward-pass metrics of worker %x: %s", publisher_id, error)
            return
        ranks = self._passes.setdefault(publisher_id, {})
        previous = ranks.get(newest.dp_rank)
        if previous is not None or len(ranks) < _RANKS:
            before = newest if previous is None else previous.newest
            ranks[newest.dp_rank] = _PassReport(self._clock(), newest, before)

    def _on_queue(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        try:
            state = _decode_queue(payload)
        except msgspec.MsgspecError as error:
            log.warning("invalid prefill queue of frontend %x: %s", publisher_id, error)
            return
        if publisher_id not in self._frontends:  # sent before its frontend left
            return
        if publisher_id in self._queues or len(self._queues) < _FRONTENDS:
            queues = self._queues.setdefault(publisher_id, {})
            if state.model in queues or len(queues) < _FRONTENDS:
                queues[state.model] = _QueueReport(self._clock(), state)

    def _on_frontend(self, publisher_id: int, added: bool) -> None:
        self._frontends[publisher_id] += 1 if added else -1
        if self._frontends[publisher_id] <= 0:
            del self._frontends[publisher_id]
            self._queues.pop(publisher_id, None)


Frontends: TypeAlias = Callable[[], Awaitable[Mapping[str, tuple[FrontendAddress, str]]]]
"""Returns the frontends that run by URL: address and prefix of the metrics. Raises DynamoError."""


def frontends_of(statefile: Statefile) -> Frontends:
    """Return what finds the frontends of a statefile.

    One that was stopped, removed or given up has no traffic.
    """

    async def find() -> Mapping[str, tuple[FrontendAddress, str]]:
        document = await in_file_thread(statefile.read)
        frontends = frontends_in(document or Document())
        return {
            address.url: (address, frontend.listens.metrics_prefix)
            for frontend in frontends
            if frontend.runs and (address := frontend.listens.address)
        }

    return find


class FrontendPages:
    """Reads the page of each of ``frontends``, 64 at most; each has two seconds to answer."""

    def __init__(self, frontends: Frontends) -> None:
        self._frontends = frontends
        self._missing_since_s: dict[str, float] = {}
        self._reported: frozenset[str] = frozenset()
        self._answered: set[str] = set()

    async def read(self) -> tuple[dict[str, FrontendPage], frozenset[str]]:
        """Return the pages by address, and the addresses of those that did not answer."""
        try:
            frontends = await self._frontends()
        except DynamoError as error:
            log.warning("the frontends are unknown: %s", error.message)
            frontends = {}
        chosen = itertools.islice(frontends.items(), _FRONTENDS)
        async with asyncio.TaskGroup() as group:
            asked = {url: group.create_task(_page(*location)) for url, location in chosen}
        results = {url: task.result() for url, task in asked.items()}
        missing = frozenset(url for url, page in results.items() if isinstance(page, str))
        self._answered |= results.keys() - missing
        self._report(missing, results)
        return {url: page for url, page in results.items() if not isinstance(page, str)}, missing

    def _report(self, missing: frozenset[str], results: Mapping[str, object]) -> None:
        """Warn once per outage; one that never listened yet has some time to start."""
        now_s = time.monotonic()
        since_s = {url: self._missing_since_s.get(url, now_s) for url in missing}
        due = frozenset(
            url
            for url in missing
            if results[url] != _REFUSED
            or url in self._answered
            or now_s - since_s[url] > _START_UP_S
        )
        for url in due - self._reported:
            log.warning("frontend %s: no metrics: %s; its traffic is unknown", url, results[url])
        self._missing_since_s, self._reported = since_s, due


async def _page(address: FrontendAddress, prefix: str) -> FrontendPage | str:
    """Return the page, or why there is none."""
    try:
        answer = await ask(address, "/metrics", _PAGE_BYTES, _TIMEOUT_S)
        if answer.status != 200:
            return f"status {answer.status}"
        return read_page(bytes(answer.body), prefix)
    except TimeoutError:
        return f"no answer in {_TIMEOUT_S:g} s"
    except ConnectionRefusedError:
        return _REFUSED
    except (OSError, ResponseError, ValueError) as error:
        return str(error)


class LiveSources:
    """The metrics of the workers of ``runtime``, and of the ``frontends``.

    Requests for an adapter are traffic of the model whose workers serve it, or did last.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        frontends: Frontends,
        settings: PlannerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stale_s = max(_STALE_S, _STALE_INTERVALS * settings.metric_pulling_interval_s)
        self._reports = WorkerReports(runtime, stale_s, clock)
        self._pages = FrontendPages(frontends)
        self._adapters: dict[str, str] = {}
        self._clock = clock
        self._traffic = TrafficCounter(
            time.time(), clock(), _SILENT_INTERVALS * settings.adjustment_interval_s
        )

    async def start(self) -> None:
        """Follow the workers' model cards."""
        await self._reports.start()

    def follow(self, models: Iterable[ScaledModel]) -> None:
        """Follow the workers of these models and no others, and find their adapters."""
        services = [(model.name, service) for model in models for service in model.services]
        workers = {
            worker_id: name for name, service in services for worker_id in _ready_ids(service)
        }
        self._reports.follow(workers)
        served = {name: workers[worker_id] for name, worker_id in self._reports.served().items()}
        scaled = {name for name, _ in services}
        self._adapters = {
            name: model
            for name, model in (self._adapters | served).items()
            if model in scaled and name not in scaled
        }

    def pull(self, model: ScaledModel, now_s: float) -> Pull:
        """Return the newest load of the model's workers."""
        names = (model.name, *(name for name, base in self._adapters.items() if base == model.name))
        queued = None if model.prefill is None else self._reports.prefill_queue(*names)
        return Pull(
            at_s=now_s,
            decode=self._reports.loads(_ready_ids(model.decode)),
            prefill_queue=None if queued is None else queued / prefill_slots(model.prefill),
        )

    async def read_frontends(self) -> None:
        """Read the counters of all frontends, for the next traffic."""
        before = self._traffic.ignored
        pages, missing = await self._pages.read()
        self._traffic.add(pages, missing, self._clock(), self._adapters)
        for url in self._traffic.ignored - before:
            log.warning("frontend %s still does not answer; traffic is counted without it", url)

    def traffic(self, model: str, now_s: float, *, ends: bool) -> Traffic:
        """Return the traffic of the current interval; ``ends``: begin the next one."""
        return self._traffic.take(model, now_s) if ends else self._traffic.peek(model, now_s)


def prefill_slots(service: ScaledService | None) -> int:
    """Return the prefill slots: one for each worker that serves, at least 1."""
    return max(1, 0 if service is None else len(_ready_ids(service)))


def _ready_ids(service: ScaledService) -> list[int]:
    return [
        worker.worker_id
        for worker in service.workers
        if worker.state == READY and worker.worker_id is not None
    ]
