"""A running deployment, as actions on its workers read it and change it.

What the workers of this machine registered in file discovery, and the end of their leases.

Which GPUs have the free memory that an engine reserves when it starts.

Engines that sleep and programs outside the deployment hold memory of GPUs that are free according
to the statefile.

The GPU budget of the planner: what workers count in it. Pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path

from asyncinotify import Mask

from dynamo.config.planner import PlannerSettings
from dynamo.config.programs import memory_share
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, StatefileError
from dynamo.operations.steps.circus import CircusEndpoint
from dynamo.operations.steps.ports import (
    ActionFailed,
    CircusControl,
    CircusError,
    NoSuchWatcher,
    Registrations,
    retried,
)
from dynamo.runtime.discovery.layout import ensure_directories, lease_path
from dynamo.runtime.process.inotify import Inotify
from dynamo.runtime.process.paths import private_dir, run_dir, state_dir, store_dir
from dynamo.serve.gpus.gpus import Gpu
from dynamo.serve.gpus.ledger import GpuLedger
from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.entries import ServiceEntries, read_services
from dynamo.serve.state.process_table import is_reserved, reservation
from dynamo.serve.state.registered import RegisteredWorker, registered_workers
from dynamo.serve.state.statefile import Statefile
from dynamo.status.logs import last_line

_COMMAND_TIMEOUT_S = 30.0
_GRACEFUL_TIMEOUT_S = 30.0
# A renewal only touches the lease file, which causes none of these events.
_MASK = Mask.MOVED_TO | Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.ONLYDIR
_SHARE_FLAG = "--gpu-memory-utilization"
_BYTES_FLAG = "--kv-cache-memory-bytes"
_GIB = 1 << 30
log = logging.getLogger(__name__)


def budget_share(service: ServiceEntries, settings: PlannerSettings) -> float:
    """Return what a worker counts in the GPU budget: as the options say, else its GPUs, else 1."""
    given = (
        settings.prefill_engine_num_gpu if service.is_prefill else settings.decode_engine_num_gpu
    )
    return given or service.gpus or 1.0


def budget_held(
    ledger: GpuLedger, services: Collection[ServiceEntries], settings: PlannerSettings
) -> float:
    """Return the GPUs of the budget that ``services`` hold now, draining workers included.

    A worker without GPUs counts as what the options say, else as 1.
    """
    total = 0.0
    for service in services:
        each = budget_share(service, settings)
        for entry in service.entries:
            if entry.name in ledger.held:
                total += ledger.amount(entry.name)
            elif entry.asleep and entry.reserved_by is None:
                continue
            elif entry.pids or entry.reserved_by is not None:
                total += each * max(1, len(entry.pids))
    return total


async def probe_gpus() -> Sequence[Gpu] | None:
    """Return the GPUs of the driver, None without one."""
    from dynamo.serve.gpus.nvml import probe  # loads the driver's library: only where it is needed

    return await asyncio.to_thread(probe)


def reserved_share(argv: Sequence[str]) -> float:
    """Return the part of a GPU's memory that the engine of this command reserves; 0 if unknown."""
    share = max(memory_share(word) for word in argv)
    if not share or any(word.startswith(_BYTES_FLAG) for word in argv):
        return 0.0
    for word, following in zip(argv, (*argv[1:], ""), strict=True):
        flag, joined, value = word.partition("=")
        if flag == _SHARE_FLAG:
            try:
                return float(value if joined else following)
            except ValueError:
                return 0.0  # the engine reports it
    return share


def crowded_gpus(gpus: Iterable[str], share: float, devices: Sequence[Gpu]) -> dict[str, str]:
    """Return those of ``gpus`` of which less than ``share`` is free, and what is wrong. Pure."""
    found = {}
    for name in gpus:
        for gpu in devices:
            free_bytes = gpu.memory_bytes - gpu.used_bytes
            if gpu.is_named(name) and gpu.memory_bytes and free_bytes < share * gpu.memory_bytes:
                found[name] = (
                    f"GPU {name}: {free_bytes / _GIB:.1f} of {gpu.memory_bytes / _GIB:.1f} GiB "
                    f"are free, and a worker reserves {share:.0%}"
                )
    return found


async def without_room(
    gpus: Sequence[str], share: float, devices: Callable[[], Awaitable[Sequence[Gpu] | None]]
) -> frozenset[str]:
    """Return those of ``gpus`` that have too little free memory now, and log why."""
    if not share or not gpus:
        return frozenset()
    found = crowded_gpus(gpus, share, await devices() or ())
    for text in found.values():
        log.warning("%s", text)
    return frozenset(found)


class FileRegistrations:
    """The :class:`Registrations` of the store ``store``; also reports writes of ``statefile``.

    Close it after use.
    """

    def __init__(self, store: Path, statefile: Path) -> None:
        private_dir(store)
        ensure_directories(store)
        self._store = store
        self._change = asyncio.Event()
        self._inotify = Inotify(self._changed)
        for directory in (store / "leases", store / "v1/mdc"):
            self._inotify.add(directory, _MASK, lambda name, mask: self._changed())
        self._statefile = statefile.name
        self._inotify.add(statefile.parent, Mask.MOVED_TO | Mask.ONLYDIR, self._on_state_dir)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._inotify.close()

    def workers(self) -> Mapping[int, RegisteredWorker]:
        """See :class:`Registrations`."""
        return registered_workers(self._store)

    async def revoke(self, lease_id: int) -> None:
        """Unlink the lease: every client drops its records, and its worker drains."""
        lease_path(self._store, lease_id).unlink(missing_ok=True)

    def next_change(self) -> asyncio.Event:
        """See :class:`Registrations`."""
        return self._change

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()  # a waiter holds the one that is set now

    def _on_state_dir(self, name: str, mask: int) -> None:
        if name == self._statefile:
            self._changed()


@dataclass(kw_only=True)
class LocalAccess:
    """The parts of a running deployment.

    ``logs`` has the watchers' log files. ``active`` are the watchers that an action of this process
    adds or removes now. ``needs_repair``: an action failed and could not be undone. ``devices``
    returns the GPUs with their free memory, None without a driver.
    """

    settings: PlannerSettings
    statefile: Statefile
    circus: CircusControl
    registrations: Registrations
    logs: Path
    active: set[str] = field(default_factory=set)
    needs_repair: bool = False
    devices: Callable[[], Awaitable[Sequence[Gpu] | None]] = probe_gpus

    def document(self) -> Document:
        """Read the statefile. Raises StatefileError, also without one."""
        return read_deployment(self.statefile)

    def entries(self) -> list[Entry]:
        """Return all entries of the statefile. Raises StatefileError."""
        return list(self.document().components.values())

    def service(self, document: Document, name: str) -> ServiceEntries:
        """Return a service of the statefile. Raises ActionFailed for one that is not scaled."""
        services = read_services(document)
        if name not in services:
            raise ActionFailed(
                f"{name}: not a service with workers that register a model; the statefile has "
                f"{', '.join(services) or 'none'}"
            )
        return services[name]

    @contextlib.contextmanager
    def acting_on(self, name: str) -> Iterator[None]:
        """Count ``name`` as active in the block. Raises ActionFailed if it is so already."""
        if name in self.active:
            raise ActionFailed(f"{name}: another action on it runs; wait for its end")
        self.active.add(name)
        try:
            yield
        finally:
            self.active.discard(name)

    async def statuses(self) -> Mapping[str, str]:
        """Return the status of each watcher, by name. Raises ActionFailed."""
        deadline_s = asyncio.get_running_loop().time() + _COMMAND_TIMEOUT_S
        try:
            return await retried(self.circus.statuses, deadline_s)
        except CircusError as error:
            raise ActionFailed(error.message) from error

    async def graceful_timeout_s(self, name: str) -> float:
        """Return how long the processes of a watcher may drain."""
        deadline_s = asyncio.get_running_loop().time() + _COMMAND_TIMEOUT_S
        try:
            options = await retried(lambda: self.circus.options(name), deadline_s)
        except CircusError:
            return _GRACEFUL_TIMEOUT_S
        return options.graceful_timeout_s

    async def remove_watcher(self, name: str, deadline_s: float) -> bool:
        """Remove a watcher; False if there was none. Raises CircusError."""
        try:
            await retried(lambda: self.circus.remove(name), deadline_s)
        except NoSuchWatcher:
            return False
        return True

    def leases(self, pids: Collection[int]) -> list[int]:
        """Return the leases that processes hold."""
        workers = self.registrations.workers()
        return [lease for pid in pids if pid in workers for lease in workers[pid].leases]

    def model(self, entry: Entry) -> str | None:
        """Return the model that a process of the watcher has registered, None before."""
        workers = self.registrations.workers()
        models = (workers[pid].model for pid in entry.pids if pid in workers)
        return next((model for model in models if model is not None), None)

    def last_line(self, name: str) -> str:
        """Return the last line that the watcher wrote, "" without one."""
        return last_line(self.logs / f"{name}.log")


def reserve(document: Document, name: str, operation: str) -> None:
    """Begin an ``operation`` of this process on a worker: write its record.

    Raises ActionFailed as :func:`check_unreserved`.
    """
    check_unreserved(document, name)
    document.components[name].reserved_by = reservation(operation)


def check_unreserved(document: Document, name: str) -> None:
    """Raise ActionFailed if a worker is gone, or another living process changes it."""
    entry = document.components.get(name)
    if entry is None:
        raise ActionFailed(f"{name}: removed by another command")
    owner = entry.reserved_by
    if owner is not None and is_reserved(entry, ()):
        begun = f" ({owner.operation})" if owner.operation else ""
        raise ActionFailed(f"{name}: process {owner.pid} changes it{begun}; wait for its end")
    if entry.replacing is not None:
        raise ActionFailed(f"{name}: the deployment replaces its process; wait for its end")


def read_deployment(statefile: Statefile) -> Document:
    """Read the statefile of a deployment. Raises StatefileError, also without one."""
    document = statefile.read()
    if document is None:
        raise StatefileError(
            f"no deployment runs in namespace {statefile.namespace!r} (no {statefile.path}); start "
            "it with dynamo serve, or name another one with --namespace"
        )
    return document


@contextlib.asynccontextmanager
async def open_access(
    runtime: RuntimeSettings, settings: PlannerSettings
) -> AsyncIterator[LocalAccess]:
    """Open the deployment of ``runtime``'s namespace for the block.

    Raises StatefileError without one, ConfigError if its workers do not register in files.
    """
    if runtime.discovery_backend != "file":
        raise ConfigError(
            f"--discovery-backend {runtime.discovery_backend}: workers are operated with file "
            "discovery only, where a lease names its process"
        )
    statefile = Statefile(state_dir(runtime), runtime.namespace)
    document = read_deployment(statefile)
    circus = CircusEndpoint(document.circus_endpoint)
    registrations = FileRegistrations(store_dir(runtime), statefile.path)
    try:
        yield LocalAccess(
            settings=settings,
            statefile=statefile,
            circus=circus,
            registrations=registrations,
            logs=run_dir(runtime) / "logs",
        )
    finally:
        registrations.close()
        circus.close()
