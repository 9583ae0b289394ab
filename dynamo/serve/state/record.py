"""Keeps the statefile up to date while a deployment runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from dynamo.errors import ConfigError, StatefileError, Unavailable
from dynamo.runtime.process.os_process import host_id
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import in_file_thread
from dynamo.serve.gpus.gpus import fits
from dynamo.serve.graph.watchers import DeploymentPlan, WatcherSpec, with_gpus
from dynamo.serve.state.document import (
    ABSENT,
    ACTIVE,
    ASLEEP,
    DRAINING,
    RUNNING,
    SLEEP,
    WAKE,
    Arbiter,
    Document,
    Entry,
    Environment,
    RecordedProcess,
    Replacement,
    Supervision,
    SystemResources,
    written_gpus,
)
from dynamo.serve.state.ledger import GpuLedger
from dynamo.serve.state.process_table import ledger_of, reclaim, runs_here, stat
from dynamo.serve.state.statefile import Statefile

_AGAIN_S = 1.0
_CHECK_S = 2.0
"""How long a statefile that was removed or damaged from outside stays so."""
log = logging.getLogger(__name__)


_ACTIVE = Supervision(ACTIVE)


@dataclass(frozen=True)
class RecordedComponent:
    """A watcher of the arbiter, or a removed one whose processes still run."""

    spec: WatcherSpec
    processes: Sequence[RecordedProcess]
    lease: int | None
    supervision: Supervision = _ACTIVE


def document_of(plan: DeploymentPlan) -> Document:
    """Return the statefile of ``plan`` before its first process, with this process as arbiter.

    Holds only the variables that the planner needs: others may be secrets.
    """
    me = stat(os.getpid())
    return Document(
        namespace=plan.namespace,
        circus_endpoint=plan.endpoint,
        pubsub_endpoint=plan.pubsub_endpoint,
        arbiter=Arbiter(
            pid=os.getpid(),
            start_ticks=me.start_ticks if me else 0,
            guard_pid=os.getppid(),
            host=host_id(),
        ),
        components={spec.name: _entry(spec) for spec in plan.all_specs},
        environment=_environment(plan),
        services=dict(plan.services),
    )


def _entry(spec: WatcherSpec) -> Entry:
    """Return the entry of ``spec`` before its first process."""
    entry = Entry(
        name=spec.name,
        service=spec.service,
        argv=spec.argv,
        gpus_per_worker=spec.gpu,
        watcher=Supervision(ACTIVE if spec.starts else ABSENT),
        pinned=_pins(spec),
        listens=spec.listens,
    )
    entry.assign(spec.gpus)
    return entry


def _pins(spec: WatcherSpec) -> tuple[str | int, ...]:
    return written_gpus(spec.gpus) if spec.pinned else ()


class StatefileWriter:
    """Writes the statefile of a running deployment; concurrent changes are written once."""

    def __init__(
        self,
        statefile: Statefile,
        plan: DeploymentPlan,
        components: Callable[[], Sequence[RecordedComponent]],
    ) -> None:
        self._statefile = statefile
        self._components = components
        self._written = {spec.name for spec in plan.specs}
        self._plan = plan
        self._dirty = asyncio.Event()
        self._replacing: set[str] = set()
        self._taken: Set[str] = frozenset()
        self._failed = False
        self._closed = False
        # Held from reading the components to the end of the write: otherwise an older state of
        # them could be written after a newer one.
        self._writing = asyncio.Lock()

    def create(self) -> DeploymentPlan:
        """Write the statefile; return the plan, with other GPUs for those taken since it was made.

        Raises StatefileError, ConfigError if other deployments hold too many GPUs.
        """

        def settle(document: Document) -> None:
            if ledger_of(document).elsewhere:
                specs = [_claim(document, spec) for spec in self._plan.specs]
                self._plan = replace(self._plan, specs=specs)

        self._statefile.create(document_of(self._plan), settle)
        return self._plan

    def plan(self, plan: DeploymentPlan) -> None:
        """Write the commands of a changed graph, those of services without workers too."""
        # Templates have no watcher: without this, those of removed services would stay.
        self._written |= {spec.name for spec in self._plan.all_specs if not spec.index}
        self._plan = plan
        self.changed()

    def start(self, tasks: Tasks) -> None:
        """Write every change until ``tasks`` closes."""
        tasks.spawn(self._write_changes(), name="statefile")

    async def close(self) -> None:
        """Wait for a write in progress; from then on nothing is written. Idempotent."""
        async with self._writing:
            self._closed = True

    def changed(self) -> None:
        """Schedule a write: a process, a watcher or a lease appeared or disappeared."""
        self._dirty.set()

    def is_draining(self, name: str, or_asleep: bool = True) -> bool:
        """Whether an exit is the end of a component: it drains, or sleeps and has no GPU."""
        return self.states().get(name) in (DRAINING, ASLEEP if or_asleep else DRAINING)

    def states(self) -> dict[str, str]:
        """Return the ``state`` of each component."""
        return {name: entry.state for name, entry in self._read().components.items()}

    def ledger(self, ids: Sequence[str] | None = None) -> GpuLedger:
        """Return the GPU ledger as it is written; ``ids``: of other GPUs than those of the plan."""
        return ledger_of(self._read(), self._plan.gpu_ids if ids is None else ids)

    def holds(self, spec: WatcherSpec) -> bool:
        """Whether a watcher may start processes on the GPUs of ``spec``; true without GPUs.

        They are not its own while others hold them too: its command named them, unreserved.
        """
        if not spec.gpus:
            return True
        awake = self.states().get(spec.name) != ASLEEP  # awake again, its entry says so first
        ledger = self.ledger()
        covered = spec.shares.keys() <= ledger.held.get(spec.name, {}).keys()
        return awake and covered and ledger.can_hold(spec.name)

    def refusal(self, name: str) -> str:
        """Return why the processes of a watcher are not to be replaced now: it drains, or another
        process puts it to sleep or wakes it; else ""."""
        entry = self._read().components.get(name)
        return "" if entry is None else _refusal(entry)

    async def claim(self, spec: WatcherSpec) -> WatcherSpec:
        """Assign to a watcher without processes the GPUs of ``spec``, or others if they are held.

        Returns ``spec`` on these GPUs. Raises ConfigError if there are none.
        """
        claimed = [spec]

        def claim(document: Document) -> None:
            claimed[0] = _claim(document, spec)

        await self._change(claim, assigns=True)
        return claimed[0]

    async def replace(self, spec: WatcherSpec, beside: bool) -> WatcherSpec:
        """Begin the replacement of the processes of a watcher: reserve GPUs for ``spec``.

        ``beside``: GPUs that nothing holds, the old processes included. Returns ``spec`` on these
        GPUs. Raises ConfigError if there are none, Unavailable with a :meth:`refusal`; then nothing
        has begun.
        """
        reserved = [spec]
        change = partial(_replace, spec=spec, beside=beside, reserved=reserved)
        await self._change(change, assigns=True)
        self._replacing.add(spec.name)  # before anything else can write
        return reserved[0]

    async def replaced(self, name: str) -> None:
        """End the replacement: the entry holds what its processes use and what is assigned."""
        # Before the write, which keeps ``replacing`` of the names in the set.
        self._replacing.discard(name)
        await self._write_change()
        if self._failed:
            self.changed()

    async def _change(self, change: Callable[[Document], object], assigns: bool = False) -> None:
        """Write the components and apply ``change`` to them, in one update.

        Raises Unavailable after :meth:`close`.
        """
        async with self._writing:
            if self._closed:
                raise Unavailable("the deployment is stopping")
            components = self._components()
            # In a thread: another process may hold the lock of the statefile.
            write = in_file_thread(self.write, components, change, assigns)
            try:
                await asyncio.shield(write)
            except asyncio.CancelledError:
                await asyncio.wait([write])  # the thread goes on: a later write must not overtake
                raise

    def _read(self) -> Document:
        try:
            return self._statefile.read() or document_of(self._plan)
        except StatefileError as error:
            log.warning("%s", error)
            return document_of(self._plan)

    async def _write_changes(self) -> None:
        while True:
            # After a while, too: a write has failed, or the end of an operation is no event here.
            again = self._failed or self._taken
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S if again else _CHECK_S):
                    await self._dirty.wait()
            if not again and not self._dirty.is_set() and self._is_intact():
                continue
            # Cleared before the components are read: a change during the write causes another one.
            self._dirty.clear()
            await self._write_change()

    async def _write_change(self) -> None:
        try:
            await self._change(lambda document: None)
        except Unavailable:  # closed: the statefile is removed
            return
        except (StatefileError, OSError) as error:
            if not self._failed:  # once per outage
                log.error("cannot write the statefile: %s; trying again every second", error)
            self._failed = True
        else:
            self._failed = False

    def write(
        self,
        components: Sequence[RecordedComponent],
        then: Callable[[Document], object] = lambda document: None,
        assigns: bool = False,
    ) -> None:
        """Write ``components``, those that run now, and what ``then`` changes.

        ``assigns``: GPUs, too. Blocks; raises StatefileError, OSError, and what ``then`` raises:
        then nothing is written.
        """
        present = {component.spec.name for component in components}
        gone = self._written - present
        templates = {spec.name: spec for spec in self._plan.all_specs if not spec.index}
        apply = partial(
            _apply,
            plan=self._plan,
            components=components,
            templates=templates,
            gone=gone,
        )
        replacing = frozenset(self._replacing)

        def change(document: Document) -> None:
            apply(document)
            for name, entry in document.components.items():
                if name not in replacing:
                    entry.replacing = None
            # Last: it may begin a replacement, whose name is not in the set yet.
            then(document)

        try:
            document = self._statefile.update(change, assigns)
        except StatefileError as error:
            if self._is_intact():  # the disk is full, or another process holds the lock
                raise
            # Removed or damaged from outside: write a complete one.
            log.warning("replacing the statefile: %s", error)
            document = document_of(self._plan)
            change(document)
            self._statefile.create(document)
        # What another process still adds is deleted when that process has ended.
        left = gone & document.components.keys()
        self._written = present | left
        self._taken = left - templates.keys()

    def _is_intact(self) -> bool:
        try:
            return self._statefile.read() is not None
        except StatefileError:
            return False


def _claim(document: Document, spec: WatcherSpec) -> WatcherSpec:
    placed = _placed(spec, ledger_of(document), beside=False)
    entry = document.components.setdefault(spec.name, _entry(spec))
    if entry.asleep:
        entry.state = RUNNING  # its next process is awake
    entry.holds_gpus = True
    entry.assign(placed.gpus)
    entry.pinned = _pins(placed)
    entry.gpus_per_worker = placed.gpu
    entry.watcher = Supervision(ACTIVE)
    return placed


def _replace(
    document: Document, spec: WatcherSpec, beside: bool, reserved: list[WatcherSpec]
) -> None:
    entry = document.components.setdefault(spec.name, _entry(spec))
    if refusal := _refusal(entry):
        raise Unavailable(refusal)
    ledger = ledger_of(document)
    reserved[0] = placed = _placed(spec, ledger, beside)
    current = ledger.held.get(spec.name, {})
    gpus = dict(current)
    for gpu, share in placed.shares.items():
        before = current.get(gpu, 0.0)
        # Beside the old process both use the GPU; else the new one takes its share over.
        gpus[gpu] = before + share if beside else max(before, share)
    entry.replacing = Replacement(since=time.time(), gpus=gpus)
    if entry.reserved_by is not None and entry.reserved_by.operation in (SLEEP, WAKE):
        entry.reserved_by = None  # it was interrupted: the next process is awake


def _refusal(entry: Entry) -> str:
    """Return why the processes of an entry are not to be replaced now, else ""."""
    if entry.draining:
        return "it is being drained and is not started again"
    owner = entry.reserved_by
    if owner is not None and owner.operation in (SLEEP, WAKE) and runs_here(owner):
        return f"process {owner.pid} changes it ({owner.operation}); wait for its end"
    return ""


def _placed(spec: WatcherSpec, ledger: GpuLedger, beside: bool) -> WatcherSpec:
    """Return ``spec`` on GPUs that are free, its own if possible. Raises ConfigError."""
    if not spec.gpus or spec.pinned:  # none, or the user places the workers
        return spec
    without = () if beside else (spec.name,)
    free = ledger.free(without)
    if not beside and all(fits(free.get(gpu, 1.0), share) for gpu, share in spec.shares.items()):
        return spec
    if spec.service == spec.name:  # added by command, with the GPUs that its environment names
        holders = ", ".join(ledger.holders(spec.gpus, without=spec.name))
        raise ConfigError(f"{spec.name}: GPU {', '.join(spec.gpus)} is in use by {holders}")
    return with_gpus(spec, ledger.assign(spec.name, spec.gpu, without))


def _environment(plan: DeploymentPlan) -> Environment:
    return Environment(
        service_config=json.dumps(plan.config, ensure_ascii=False, default=str),
        system_resources=SystemResources(
            total_gpus=len(plan.gpu_ids), gpu_info=written_gpus(plan.gpu_ids)
        ),
    )


def _apply(
    document: Document,
    plan: DeploymentPlan,
    components: Iterable[RecordedComponent],
    templates: Mapping[str, WatcherSpec],
    gone: Set[str],
) -> None:
    environment = _environment(plan)
    document.environment.service_config = environment.service_config
    document.environment.system_resources = environment.system_resources
    document.services = dict(plan.services)
    entries = document.components
    present = set()
    for component in components:
        spec = component.spec
        present.add(spec.name)
        entry = entries.setdefault(spec.name, _entry(spec))
        _set_command(entry, spec)
        if spec.gpus and entry.gpus != spec.gpus:
            entry.assign(spec.gpus)
        _forget_interrupted(entry, component.processes)
        entry.processes = tuple(component.processes)
        entry.lease = component.lease
        entry.watcher = component.supervision
    for name in gone - templates.keys():
        taken = entries.get(name)
        if taken is not None and _is_taken(taken):
            taken.processes, taken.lease = (), None
        else:
            entries.pop(name, None)
    reclaim(document)  # after the processes are written: an entry that has one is not void
    for name in templates.keys() - present:
        entry = entries.setdefault(name, _entry(templates[name]))
        entry.clear()
        _set_command(entry, templates[name])
        entry.watcher = Supervision(ABSENT)


def _forget_interrupted(entry: Entry, processes: Sequence[RecordedProcess]) -> None:
    """End the reservation of an operation that was interrupted, and whose worker is another now.

    A repair would put the new one to sleep.
    """
    owner, pids = entry.reserved_by, {process.pid for process in processes}
    if owner is None or not pids or not pids.isdisjoint(entry.pids):
        return
    if owner.operation in (SLEEP, WAKE) and not runs_here(owner):
        entry.reserved_by = None


def _is_taken(entry: Entry) -> bool:
    """Whether a process is adding a worker under this name; that process deletes the entry."""
    owner = entry.reserved_by
    return owner is not None and not entry.draining and runs_here(owner)


def _set_command(entry: Entry, spec: WatcherSpec) -> None:
    entry.set_command(spec.argv)
    entry.gpus_per_worker = spec.gpu
    entry.pinned = _pins(spec)
    entry.listens = spec.listens
