"""A running deployment, as actions on its workers read it and change it.

Engines that sleep and programs outside the deployment hold memory of GPUs that are free according
to the statefile: :func:`without_room` asks the driver.
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
from functools import partial
from pathlib import Path

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DynamoError, StatefileError
from dynamo.operations.steps.circus import (
    STOPPED,
    STOPPING,
    CircusEndpoint,
    CircusError,
    NoSuchWatcher,
    retried,
)
from dynamo.operations.steps.limits import ActionFailed, ActionLimits, budget_held
from dynamo.runtime.discovery.layout import ensure_directories, lease_path
from dynamo.runtime.process.inotify import Inotify, Mask
from dynamo.runtime.process.paths import private_dir, run_dir, state_dir, store_dir
from dynamo.runtime.process.threads import in_daemon_thread
from dynamo.serve.gpus.gpus import Gpu
from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.entries import ServiceEntries, read_services
from dynamo.serve.state.process_table import is_reserved, ledger_of, runs_here
from dynamo.serve.state.registered import RegisteredWorker, registered_workers
from dynamo.serve.state.room import crowded_gpus
from dynamo.serve.state.statefile import Statefile
from dynamo.serve.state.view import DeploymentView
from dynamo.status.deployment import check_answers
from dynamo.status.logs import last_line

_GRACEFUL_TIMEOUT_S = 30.0
_RECHECK_S = 1.0  # for what causes no event, such as a watcher that is given up
# A renewal only touches the lease file, which causes none of these events.
_MASK = Mask.MOVED_TO | Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.ONLYDIR
log = logging.getLogger(__name__)


async def probe_gpus() -> Sequence[Gpu] | None:
    """Return the GPUs of the driver, None without one."""
    from dynamo.serve.gpus.nvml import probe  # loads the driver's library: only where it is needed

    return await in_daemon_thread(probe)


async def without_room(
    gpus: Sequence[str], share: float, devices: Callable[[], Awaitable[Sequence[Gpu] | None]]
) -> frozenset[str]:
    """Return those of ``gpus`` that have too little free memory now, and log why."""
    if not share or not gpus:
        return frozenset()
    crowded = crowded_gpus(gpus, share, await devices() or ())
    for text in crowded.values():
        log.warning("%s", text)
    return frozenset(crowded)


class FileRegistrations:
    """The leases and model cards that ``store`` has of the workers on this machine.

    Writes of ``statefile`` count as changes, too. Close it after use. FileNotFoundError: the store
    is being removed.
    """

    def __init__(self, store: Path, statefile: Path) -> None:
        private_dir(store)
        ensure_directories(store)
        self._store = store
        self._change = asyncio.Event()
        self._inotify = Inotify(self._changed)
        self._statefile = statefile.name
        try:
            for directory in (store / "leases", store / "v1/mdc"):
                self._inotify.add(directory, _MASK, lambda name, mask: self._changed())
            # The directory, not the file, which each write replaces by a rename.
            self._inotify.add(statefile.parent, Mask.MOVED_TO | Mask.ONLYDIR, self._on_state_dir)
        except OSError:
            self._inotify.close()
            raise

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._inotify.close()

    def workers(self) -> Mapping[int, RegisteredWorker]:
        """Return what is registered now, by the pid of the process that the arbiter started."""
        return registered_workers(self._store)

    async def revoke(self, lease_id: int) -> None:
        """Unlink the lease: every client drops its records, and its worker drains."""
        lease_path(self._store, lease_id).unlink(missing_ok=True)

    def next_change(self) -> asyncio.Event:
        """Return an event that is set at the next change of leases, cards or statefile."""
        return self._change

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()  # a waiter holds the one that is set now

    def _on_state_dir(self, name: str, mask: int) -> None:
        if name == self._statefile:
            self._changed()


async def wait_until(
    condition: Callable[[], Awaitable[bool]], registrations: FileRegistrations, deadline_s: float
) -> bool:
    """Wait until ``condition()`` holds; False if it does not at ``deadline_s`` on the loop's clock.

    Checks again at each change of the registrations, and every second.
    """
    loop = asyncio.get_running_loop()
    while True:
        change = registrations.next_change()  # before the check: a change during it counts
        if await condition():
            return True
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            return False
        try:
            async with asyncio.timeout(min(left_s, _RECHECK_S)):
                await change.wait()
        except TimeoutError:
            continue


async def complete_all(work: Iterable[Awaitable[object]]) -> None:
    """Await all at once. Raises ActionFailed with all problems, when all have ended."""
    problems: list[str] = []

    async def run(part: Awaitable[object]) -> None:
        try:
            await part
        except DynamoError as error:
            # Collected: the first error would make the task group cancel the others.
            problems.append(error.message)

    async with asyncio.TaskGroup() as group:
        for part in work:
            group.create_task(run(part))
    if problems:
        raise ActionFailed("; ".join(problems))


@dataclass(kw_only=True)
class LocalAccess:
    """The parts of a running deployment.

    ``logs`` has the watchers' log files. ``active`` are the watchers that an action of this process
    adds or removes now. ``needs_repair``: an action failed and could not be undone. ``devices``
    returns the GPUs with their free memory, None without a driver.
    """

    limits: ActionLimits
    statefile: Statefile
    circus: CircusEndpoint
    registrations: FileRegistrations
    logs: Path
    active: set[str] = field(default_factory=set)
    needs_repair: bool = False
    devices: Callable[[], Awaitable[Sequence[Gpu] | None]] = probe_gpus

    def document(self) -> Document:
        """Read the statefile. Raises StatefileError, also without one."""
        return read_deployment(self.statefile)

    def view(self, statuses: Mapping[str, str]) -> DeploymentView:
        """Return the deployment now; ``statuses`` are those of its watchers. See :meth:`document`.

        What was recorded of a process counts until the arbiter has written that it ended.
        """
        return DeploymentView(
            document=self.document(),
            registered=self.registrations.workers(),
            changes=lambda entry: is_reserved(entry, self.active),
            keeps=lambda entry: statuses.get(entry.name, STOPPED) not in (STOPPED, STOPPING),
        )

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
        try:
            return await retried(self.circus.statuses)
        except CircusError as error:
            raise ActionFailed(error.message) from error

    async def graceful_timeout_s(self, name: str) -> float:
        """Return how long the processes of a watcher may drain."""
        try:
            options = await retried(lambda: self.circus.options(name))
        except CircusError:
            return _GRACEFUL_TIMEOUT_S
        return options.graceful_timeout_s

    async def remove_watcher(self, name: str, deadline_s: float | None = None) -> bool:
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

    def adapters(self, entry: Entry) -> set[str]:
        """Return the further names that processes of the watcher serve."""
        workers = self.registrations.workers()
        return {name for pid in entry.pids if pid in workers for name in workers[pid].adapters}

    def check_budget(self, document: Document, service: ServiceEntries) -> None:
        """Raise ActionFailed if one more worker of ``service`` is more than the budget has left."""
        scaled = [
            candidate
            for candidate in read_services(document).values()
            if self.limits.scales(candidate.model)
            or any(self.model(entry) == self.limits.model for entry in candidate.entries)
        ]
        needed = self.limits.worker_gpus(service.gpus, service.is_prefill)
        try:
            self.limits.check(budget_held(ledger_of(document), scaled, self.limits), needed)
        except ActionFailed as error:
            raise ActionFailed(f"{service.name}: {error.message}") from None

    def last_output(self, name: str) -> str:
        """Return ``; last output: …`` with the last line of the watcher, "" without one."""
        line = last_line(self.logs / f"{name}.log")
        return f"; last output: {line}" if line else ""

    def why_stopped(self, name: str) -> str:
        """Return why a watcher starts no process, and its last output. Raises StatefileError."""
        entry = self.document().components.get(name)
        reason = entry.watcher.reason if entry is not None and entry.watcher is not None else ""
        why = f"given up: {reason}" if reason else "stopped, or given up"
        return why + self.last_output(name)


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
    runtime: RuntimeSettings,
    limits: ActionLimits,
    active: set[str] | None = None,
    bound: bool = False,
) -> AsyncIterator[LocalAccess]:
    """Open the deployment of ``runtime``'s namespace for the block.

    If ``bound``, what begins with this deployment fails when it has ended, and does not go on with
    the next one of the namespace. Raises StatefileError without a deployment, or, if bound, for one
    that has crashed; ConfigError if its workers do not register in files.
    """
    if runtime.discovery_backend != "file":
        raise ConfigError(
            f"--discovery-backend {runtime.discovery_backend}: workers are operated with file "
            "discovery only, where a lease names its process"
        )
    statefile = Statefile(state_dir(runtime), runtime.namespace)
    document = read_deployment(statefile)
    is_running = partial(runs_here, document.arbiter)
    if is_running():
        await in_daemon_thread(check_answers, document)
    elif bound:
        raise StatefileError(
            f"the deployment in namespace {runtime.namespace!r} has crashed; see: "
            "dynamo state repair --dry-run"
        )
    if bound:
        statefile = Statefile(state_dir(runtime), runtime.namespace, document.arbiter)
        circus = CircusEndpoint(document.circus_endpoint, is_running=is_running)
    else:
        circus = CircusEndpoint(document.circus_endpoint)
    with (
        contextlib.closing(circus),
        contextlib.closing(_open_registrations(runtime, statefile)) as registrations,
    ):
        yield LocalAccess(
            limits=limits,
            statefile=statefile,
            circus=circus,
            registrations=registrations,
            logs=run_dir(runtime) / "logs",
            active=set() if active is None else active,
        )


def _open_registrations(runtime: RuntimeSettings, statefile: Statefile) -> FileRegistrations:
    """Raises StatefileError if the deployment ends at this moment."""
    try:
        return FileRegistrations(store_dir(runtime), statefile.path)
    except FileNotFoundError as error:
        # Raises if the statefile is gone, too.
        read_deployment(statefile)
        raise StatefileError(
            f"the deployment in namespace {statefile.namespace!r} ended while this command began, "
            "and another one has started: repeat the command"
        ) from error
