"""A picker connected to the admitted workers of one endpoint: cards, load, saved speed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamo.protocols import codec
from dynamo.protocols.control import (
    DEFAULT_BLOCK_SIZE,
    MODEL_CARDS,
    BlockSize,
    EndpointRecord,
    Id,
    RuntimeConfig,
    record_decoder,
)
from dynamo.protocols.kv import KV_METRICS, KvMetrics
from dynamo.router.eligibility.eligibility_filter import Thresholds, export_eligibility
from dynamo.router.labels import RouterLabels
from dynamo.router.load.prefill_model import MIN_SAMPLES, PrefillSpeed
from dynamo.router.modes.picker import Picker
from dynamo.router.queue.request_queue import RequestQueue
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery import Discovery, KeyEvent, Watch
from dynamo.runtime.endpoints.client import Client, OnInstances
from dynamo.runtime.events.channels import Subscription
from dynamo.runtime.process.paths import state_path, write_atomic
from dynamo.runtime.process.threads import in_file_thread

log = logging.getLogger(__name__)
_decode_load = codec.decoder(list[KvMetrics]).decode
DIRECTORY = ".prefill-speed"
"""In the directory of the statefiles; no namespace begins with a dot."""


class CardPart(msgspec.Struct):
    """The fields that the router reads. The defaults are those of the model card."""

    instance_id: Id
    kv_cache_block_size: BlockSize = DEFAULT_BLOCK_SIZE
    worker_type: str = "Aggregated"
    runtime_config: RuntimeConfig = msgspec.field(default_factory=RuntimeConfig)


_decode = record_decoder(CardPart)


class WorkerCards:
    """The model cards of one endpoint, by worker.

    A worker may have several, one for each adapter: the last one received counts. ``on_change`` is
    called with the worker of each new or changed card.
    """

    def __init__(self, on_change: Callable[[int], None]) -> None:
        self._on_change = on_change
        self._cards: dict[int, CardPart] = {}
        self._prefix = MODEL_CARDS
        self._watch: Watch | None = None

    async def start(self, discovery: Discovery, path: tuple[str, str, str]) -> None:
        """Follow the cards; existing ones are known on return."""
        self._prefix = MODEL_CARDS + "/".join(path) + "/"
        self._watch = discovery.watch(self._prefix, self._on_key)
        await self._watch.ready()

    def close(self) -> None:
        """Stop following. Idempotent."""
        if self._watch is not None:
            self._watch.close()

    def get(self, worker_id: int) -> CardPart | None:
        """The worker's card; None without one."""
        return self._cards.get(worker_id)

    def _on_key(self, event: KeyEvent) -> None:
        try:
            worker_id = int(event.key.removeprefix(self._prefix).partition("/")[0], 16)
            if event.value is None:
                self._cards.pop(worker_id, None)
                return
            card = _decode(event.value)
            if card.instance_id != worker_id:
                raise ValueError(f"`instance_id` is that of worker {card.instance_id:x}")
        except ValueError as error:
            log.warning("skipping the model card %s: %s", event.key, error)
            return
        if self._cards.get(card.instance_id) != card:
            self._cards[card.instance_id] = card
            self._on_change(card.instance_id)


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

    ``client`` follows the endpoint of ``workers``; the router closes it. With ``admits`` a worker
    is added once it is both alive and admitted (:meth:`admit`), in any order, and removed when
    either ends. After :meth:`start` the workers that exist already can be picked. End with
    :meth:`close`.
    """

    queue: RequestQueue | None = None

    def __init__(
        self,
        runtime: DistributedRuntime,
        workers: RoutedWorkers,
        client: Client,
        picker: Picker,
        admits: bool = False,
    ) -> None:
        self.workers = workers
        self.picker = picker
        self.client = client
        self._runtime = runtime
        self._alive: dict[int, EndpointRecord] = {}
        self._admitted: set[int] | None = set() if admits else None
        self._listeners: list[OnInstances] = []
        self._cards = WorkerCards(self._on_card)
        self._loads: Subscription | None = None
        self._closed = False
        labels = workers.labels(runtime.instance_id)
        export_eligibility(runtime.metrics, labels, picker.eligibility)

    async def start(self) -> None:
        """Follow workers, cards and loads; close if that fails.

        Raises ConfigError when discovery cannot be opened.
        """
        try:
            await self._follow()
        # Cancellation, too: watches and the client would stay open.
        except BaseException:
            await self.close()
            raise

    async def _follow(self) -> None:
        await self._runtime.start()
        # Cards before instances: workers that exist are then added once, with their configuration.
        await self._cards.start(self._runtime.discovery, self.workers.path)
        await self._follow_loads()
        client, pool = self.client, self.picker.worker_pool
        pool.is_silent = client.is_silent
        # The endpoint may have other models' workers; decode workers compute prompts, too.
        client.can_move = _always if self.workers.phase == "prefill" else pool.has_answering
        client.on_inhibited(self.picker.eligibility.avoid)
        client.on_change(self._on_instances)

    def on_change(self, callback: OnInstances) -> None:
        """Call ``callback`` with the current workers, if any, and with every change, after the
        picker has them."""
        self._listeners.append(callback)
        current = [record for record in self._alive.values() if self._admits(record.instance_id)]
        if current:
            callback(current, [])

    def admit(self, worker_id: int) -> None:
        """Admit the worker: its card was accepted."""
        if self._admitted is not None and worker_id not in self._admitted:
            self._admitted.add(worker_id)
            if worker_id in self._alive:
                self._notify([self._alive[worker_id]], [])

    def refuse(self, worker_id: int) -> None:
        """Remove the worker: its card was removed or is no longer valid."""
        if self._admitted is not None and worker_id in self._admitted:
            self._admitted.discard(worker_id)
            if worker_id in self._alive:
                self._notify([], [worker_id])

    async def limit(self, thresholds: Thresholds) -> None:
        """Set the load above which a worker is busy; follow reported loads once it matters."""
        self.picker.eligibility.thresholds = thresholds
        await self._follow_loads()

    async def close(self) -> None:
        """Stop following, remove all workers, close the client. Idempotent."""
        self._closed = True
        self._cards.close()
        if self._loads is not None:
            self._loads.close()
        for worker_id in list(self.picker.worker_pool.members):
            self._remove(worker_id)
        self.client.close()

    async def _follow_loads(self) -> None:
        """Subscribe to load reports once a threshold needs them."""
        if self._loads is None and self.picker.eligibility.busy.thresholds.any:
            here = self.workers.namespace, self.workers.component, KV_METRICS
            self._loads = self._runtime.subscribe(*here, self._on_loads)
            await self._loads.ready()

    def _on_loads(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        try:
            states = _decode_load(payload)
        except msgspec.MsgspecError as error:
            log.warning("invalid load report of publisher %x: %s", publisher_id, error)
            return
        for state in states:
            self.picker.eligibility.busy.report(state)

    def _admits(self, worker_id: int) -> bool:
        return self._admitted is None or worker_id in self._admitted

    def _on_instances(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for worker_id in removed:
            self._alive.pop(worker_id, None)
        for record in added:
            self._alive[record.instance_id] = record
        joined = [record for record in added if self._admits(record.instance_id)]
        left = [worker_id for worker_id in removed if self._admits(worker_id)]
        if joined or left:
            self._notify(joined, left)

    def _notify(self, added: list[EndpointRecord], removed: list[int]) -> None:
        if not self._closed:
            for worker_id in removed:
                self._remove(worker_id)
            for record in added:
                self._add(record.instance_id)
        for callback in tuple(self._listeners):
            callback(added, removed)

    def _on_card(self, worker_id: int) -> None:
        # A card may arrive before the instance: it is read when that is added.
        if worker_id in self._alive and self._admits(worker_id):
            self._add(worker_id)

    def _add(self, worker_id: int) -> None:
        card = self._cards.get(worker_id)
        config = RuntimeConfig() if card is None else card.runtime_config
        self.picker.add_worker(worker_id, config, self._alive[worker_id].device_type)

    def _remove(self, worker_id: int) -> None:
        self.picker.remove_worker(worker_id)


def _always() -> bool:
    return True


class SavedSpeed(msgspec.Struct, kw_only=True):
    """One file: the speed of the workers of ``model`` at ``endpoint`` that do this ``phase``."""

    model: str
    endpoint: str
    phase: str
    speed: PrefillSpeed


class SpeedFile:
    """The file of one router. Routers of the same workers share it: the last one to save wins.

    A file that cannot be read or written costs a warning, and the next router begins with a guess.
    """

    def __init__(self, path: Path, workers: RoutedWorkers) -> None:
        self._path = path
        self._workers = workers
        self._saved: PrefillSpeed | None = None
        self._failed = False

    def load(self) -> PrefillSpeed | None:
        """Return the saved speed; None without one, or where it is of another model."""
        try:
            saved = msgspec.json.decode(self._path.read_bytes(), type=SavedSpeed)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s: %s; the prefill speed is learned again", self._path, error)
            return None
        described = saved.model, saved.endpoint, saved.phase
        return saved.speed if described == self._described else None

    async def save(self, speed: PrefillSpeed | None) -> None:
        """Write ``speed`` unless it is a guess or was written before. Not on the loop: disks may be
        slow."""
        if speed is None or speed.samples < MIN_SAMPLES or speed == self._saved:
            return
        model, endpoint, phase = self._described
        content = SavedSpeed(model=model, endpoint=endpoint, phase=phase, speed=speed)
        try:
            await in_file_thread(self._write, msgspec.json.encode(content))
            self._saved = speed
        except OSError as error:
            if not self._failed:
                log.warning("%s: %s; what is learned of prefills is not kept", self._path, error)
            self._failed = True

    def _write(self, content: bytes) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(self._path, content)

    @property
    def _described(self) -> tuple[str, str, str]:
        return self._workers.model, "/".join(self._workers.path), self._workers.phase


def speed_file(runtime: DistributedRuntime, workers: RoutedWorkers) -> SpeedFile | None:
    """Return the file for ``workers``; None where nothing is kept (discovery is not on disk)."""
    if runtime.settings.discovery_backend != "file":
        return None
    # Hashed: the name of a model may have slashes, and be longer than a file name.
    key = "\n".join((workers.model, *workers.path, workers.phase)).encode()
    name = f"{workers.namespace}-{hashlib.sha256(key).hexdigest()[:16]}.json"
    return SpeedFile(state_path(runtime.settings) / DIRECTORY / name, workers)
