"""Applies a changed graph to a running deployment: additions first, then replacements, removals.

A graph with an error changes nothing. If a new process fails, the rest of the change is left out.
A command may also name services to add and to remove: then the file is changed as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamo.errors import ConfigError, DynamoError, Unavailable
from dynamo.runtime.process.threads import in_file_thread
from dynamo.serve.graph.changes import (
    GraphChanges,
    GraphEdit,
    added_workers,
    changed_settings,
    compare,
    follow,
    without_awakening,
    without_removed,
)
from dynamo.serve.graph.graph import read_text
from dynamo.serve.graph.watchers import DeploymentPlan, GraphSource, MakePlan, WatcherSpec
from dynamo.serve.readiness import check_port
from dynamo.serve.state.document import ASLEEP, DRAINING
from dynamo.serve.state.ledger import GpuLedger
from dynamo.serve.state.record import StatefileWriter
from dynamo.serve.supervision.arbiter import SupervisingArbiter, error_reply
from dynamo.serve.supervision.output import Announcer
from dynamo.serve.supervision.rolling import RollingRestart
from dynamo.serve.supervision.supervised import SupervisedWatcher
from dynamo.serve.supervision.watcher_factory import WatcherFactory

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Left:
    """What a reload that failed did not do: the next one does it."""

    to_add: Collection[str] = ()
    to_remove: Sequence[WatcherSpec] = ()


class GraphReload:
    """Reloads the graph of one deployment.

    GPUs are taken in the ledger of ``record`` first. ``on_plan`` is called with a plan that is
    applied.
    """

    def __init__(
        self,
        arbiter: SupervisingArbiter,
        factory: WatcherFactory,
        rolling: RollingRestart,
        announcer: Announcer,
        source: GraphSource,
        make_plan: MakePlan,
        record: StatefileWriter,
        on_plan: Callable[[DeploymentPlan], None],
    ) -> None:
        self._arbiter = arbiter
        self._factory = factory
        self._rolling = rolling
        self._announcer = announcer
        self._source = source
        self._make_plan = make_plan
        self._record = record
        self._on_plan = on_plan
        self._left = _Left()

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Apply the graph of ``request`` (see ReloadGraph); return the reply."""
        edit = GraphEdit.of(request)
        try:
            source = await in_file_thread(self._wanted, request, edit)
            plan, changes = await self._planned_changes(source)
        except (DynamoError, OSError) as error:
            return {**error_reply(str(error)), "graph_is_wrong": isinstance(error, ConfigError)}
        reply = {
            "changes": [*changes.lines(), *self._settings(plan, changes)],
            "summary": changes.summary(),
            "file": str(source.file),
            "warnings": list(plan.warnings),
            "added": edit.added if edit is not None else [],
        }
        if request.get("dry_run"):
            return reply
        self._announcer.announce(f"reloading the graph: {changes.summary()}")
        by, happened = str(request.get("by", "")), self._arbiter.deployment.happened
        # Stays after a graph that was applied in part; only a failed edit restores the former one.
        before, self._source = self._source, source
        problem = await self._change(plan, changes, edit is None)
        if edit is not None:
            problem = problem or await self._write(source.file, edit)
            if problem:
                happened.add("error", "graph", f"reload: {problem}", by=by)
                return error_reply(await self._take_back(before, problem))
        if problem:
            self._announcer.announce(f"the graph was reloaded in part: {problem}", logging.ERROR)
            happened.add("error", "graph", f"reloaded in part: {problem}", by=by)
            return error_reply(f"reloaded in part: {problem}")
        self._announcer.announce(f"reloaded the graph: {changes.summary()}")
        happened.reloaded(changes.added, changes.removed, changes.summary(), by)
        return reply

    def _wanted(self, request: Mapping[str, Any], edit: GraphEdit | None) -> GraphSource:
        """Return the graph to apply; what ``request`` leaves out is as last time. Blocks.

        An edit begins with the text that was applied last: what its owner has changed in the file
        since, and may not have finished, waits for ``dynamo reload``.
        """
        last = self._source
        if edit is not None:
            edit.choose_names(last.text, read_text(last.file))
            words = [word for word in last.overrides if not edit.is_of_removed(word)]
            return replace(last, text=edit.applied(last.text, last.label), overrides=words)
        graph, overrides = request.get("graph"), request.get("overrides") or ()
        source = replace(last, file=Path(graph), label=str(graph)) if graph else last
        if graph or overrides:
            source = replace(source, overrides=[str(word) for word in overrides])
        return replace(source, text=read_text(source.file))

    async def _planned_changes(self, source: GraphSource) -> tuple[DeploymentPlan, GraphChanges]:
        """Raises DynamoError or OSError for a graph that cannot be applied."""
        plan = await in_file_thread(self._make_plan, source)
        self._check_runs()
        changes = self._compare(plan)
        self._check_room(changes, self._record.ledger(plan.gpu_ids))
        self._check_ports(changes)
        return plan, changes

    async def _change(self, plan: DeploymentPlan, changes: GraphChanges, wait: bool) -> str:
        """Apply ``plan``; return "" or what failed, which the next reload does."""
        before = self._planned()
        problem = "it was interrupted"
        try:
            problem = await self._apply(plan, changes, wait)
        finally:
            self._left = self._not_done(before) if problem else _Left()
        return problem

    async def _write(self, file: Path, edit: GraphEdit) -> str:
        """Change the file of the graph; return "" or what failed."""
        try:
            await in_file_thread(edit.write, file)
        except (DynamoError, OSError) as error:
            return str(error)
        return ""

    async def _take_back(self, before: GraphSource, problem: str) -> str:
        """Apply the graph of ``before`` again after an edit that failed; return the error."""
        self._source = before
        try:
            plan, changes = await self._planned_changes(before)
            again = await self._change(plan, changes, wait=False)
        except (DynamoError, OSError) as error:
            again = str(error)
        text = f"{problem}; " + (
            f"taking it back failed too: {again}; try: dynamo reload"
            if again
            else "nothing was changed"
        )
        self._announcer.announce(f"the graph was not changed: {text}", logging.ERROR)
        return text

    def _compare(self, plan: DeploymentPlan) -> GraphChanges:
        running = self._running()
        planned, specs = self._planned(), self._factory.specs
        added = added_workers(running, planned)
        wanted = [*plan.specs, *follow(added, plan.all_specs)]
        started = [
            spec
            for spec in self._factory.plan.specs
            if spec.name in specs and spec.name not in self._left.to_add
        ]
        wanted = without_removed(wanted, started, running)
        changes = compare(running, wanted, {*added, *(spec.name for spec in planned)})
        states = self._record.states()
        asleep, draining = ([n for n in states if states[n] == s] for s in (ASLEEP, DRAINING))
        return without_awakening(changes, asleep, draining)

    def _settings(self, plan: DeploymentPlan, changes: GraphChanges) -> list[str]:
        """Return the lines of services that change without a process."""
        specs = self._factory.specs
        touched = {spec.service for spec in (*changes.added, *changes.changed)}
        touched |= {specs[name].service for name in changes.removed if name in specs}
        return changed_settings(self._factory.plan.config, plan.config, touched)

    def _running(self) -> dict[str, WatcherSpec]:
        present = {watcher.name for watcher in self._arbiter.watchers}
        specs = self._factory.specs
        return {name: specs[name] for name in specs if name in present}

    def _planned(self) -> list[WatcherSpec]:
        """Return the watchers of the last graph, and those that it failed to remove."""
        last = self._factory.plan
        return [*last.specs, *last.templates, *self._left.to_remove]

    def _not_done(self, before: Sequence[WatcherSpec]) -> _Left:
        """Return what a change left undone: ``before`` it these watchers were planned."""
        plan, running = self._factory.plan, self._running()
        names = {spec.name for spec in plan.all_specs}
        return _Left(
            to_add=frozenset(spec.name for spec in plan.specs) - running.keys(),
            to_remove=[spec for spec in before if spec.name not in names],
        )

    def _check_room(self, changes: GraphChanges, ledger: GpuLedger) -> None:
        """Raise ConfigError if the watchers of the changed graph do not fit on the GPUs."""
        allocator = ledger.allocator({*changes.removed, *(spec.name for spec in changes.changed)})
        for spec in (*changes.changed, *changes.added):
            if spec.gpus and not spec.pinned:
                allocator.assign(spec.name, spec.gpu)

    def _check_ports(self, changes: GraphChanges) -> None:
        """Raise ConfigError if another program has the port of a frontend."""
        ours = {spec.address for spec in self._factory.specs.values()}
        for spec in (*changes.changed, *changes.added):
            if spec.address not in ours:
                check_port(spec)

    async def _apply(self, plan: DeploymentPlan, changes: GraphChanges, wait: bool) -> str:
        # Stopped by an operator: they get the new command, and stay stopped.
        stopped = [spec for spec in changes.changed if self._is_stopped(spec)]
        try:
            try:
                for spec in (*changes.kept, *stopped):
                    await self._keep(spec)
                waiting = [spec for spec in changes.added if not await self._add(spec)]
            finally:
                self._on_plan(plan)  # not earlier: the report of readiness counts the added ones
            names = [spec.name for spec in changes.added if spec not in waiting]
            problem = await self._served(names) if wait else ""
            changed = [spec for spec in changes.changed if spec not in stopped]
            # One at a time: each one that has exited may free the GPUs of the next.
            while not problem and (following := self._next(changed := self._present(changed))):
                changed.remove(following)
                watcher = self._watcher(following.name)
                problem = await self._rolling.replace(watcher, following)
            if problem:
                return problem
            # Last: until the replacements serve, these still take requests.
            await self._remove(changes.removed)
            return await self._finish(self._present(changed), waiting, wait)
        except (DynamoError, OSError) as error:
            return str(error)

    async def _keep(self, spec: WatcherSpec) -> None:
        """Use the new graph for the next start of a watcher that is not touched now."""
        if spec.name not in self._running():
            return
        watcher, before = self._watcher(spec.name), self._factory.specs[spec.name]
        if spec.gpus != before.gpus:
            if watcher.processes:
                return  # it drains: its processes keep their GPUs, and no others start
            spec = await self._record.claim(spec)
        self._factory.configure(watcher, spec)

    async def _add(self, spec: WatcherSpec) -> bool:
        """Add a watcher and start it; False if its GPUs are not free yet."""
        try:
            spec = await self._record.claim(spec)
        except ConfigError as error:
            log.debug("%s: added later: %s", spec.name, error)
            return False
        self._check_runs()  # a stop that came during the claim would leave it without a process
        watcher = self._arbiter.adopt(self._factory.make(spec))
        await watcher._start()  # at once: else others would see one that was stopped
        return True

    def _check_runs(self) -> None:
        """Raise Unavailable if the deployment stops: it starts no process any more."""
        if self._arbiter.stopping:
            raise Unavailable("the deployment is stopping")

    async def _served(self, names: Sequence[str]) -> str:
        """Wait until added watchers serve; return "" or what failed."""
        for watcher in [self._watcher(name) for name in names]:
            if not await self._rolling.serving(watcher):
                return f"{watcher.name}: {watcher.given_up or 'stopped'}"
        return ""

    def _next(self, changed: Sequence[WatcherSpec]) -> WatcherSpec | None:
        """Return a watcher whose GPUs suffice or are free now, workers first."""
        ordered = sorted(changed, key=lambda spec: -spec.stop_stage)
        return next((s for s in ordered if self._rolling.fits(self._watcher(s.name), s)), None)

    def _present(self, changed: Sequence[WatcherSpec]) -> list[WatcherSpec]:
        """Leave out those that drain, or have drained and exited, since the reload has begun."""
        running, states = self._running(), self._record.states()
        return [s for s in changed if s.name in running and states.get(s.name) != DRAINING]

    def _is_stopped(self, spec: WatcherSpec) -> bool:
        """Whether an operator stopped the watcher: then it stays stopped."""
        watcher = self._watcher(spec.name)
        return bool(watcher.is_stopped()) and not watcher.given_up

    async def _remove(self, names: Sequence[str]) -> None:
        running = self._running()
        await self._arbiter.remove([self._watcher(name) for name in names if name in running])

    async def _finish(
        self, changed: Sequence[WatcherSpec], waiting: Sequence[WatcherSpec], wait: bool
    ) -> str:
        """Start what had to wait for GPUs of removed or of each other's processes."""
        left = list(changed)
        for spec in left:
            # All stop before the first starts: each may hold the GPUs that another needs.
            if spec.name in self._running():
                await self._watcher(spec.name).end()
        while left := self._present(left):
            # If none fits, replace() fails with an error that names the holders.
            following = self._next(left) or left[0]
            left.remove(following)
            if problem := await self._rolling.replace(self._watcher(following.name), following):
                return problem
        for spec in waiting:
            if not await self._add(spec):
                return f"{spec.name}: no GPU is free"
        return await self._served([spec.name for spec in waiting]) if wait else ""

    def _watcher(self, name: str) -> SupervisedWatcher:
        watcher: SupervisedWatcher = self._arbiter.get_watcher(name.lower())
        return watcher
