"""Replaces the processes of watchers one watcher after another, so that requests are served.

The new process starts beside the old one and takes over once it serves, if that can be observed
and there is room: no port, no GPU and no lock that both need. Otherwise the old one stops first,
and the next watcher is not touched before the new process serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from dynamo.config.programs import PLANNER
from dynamo.errors import ConfigError, StatefileError, Unavailable
from dynamo.observability.logs import counted
from dynamo.serve.graph.watchers import WatcherSpec
from dynamo.serve.state.document import ASLEEP
from dynamo.serve.state.record import StatefileWriter
from dynamo.serve.supervision.output import Announcer
from dynamo.serve.supervision.supervised import SupervisedWatcher
from dynamo.serve.supervision.supervised_process import SupervisedProcess, describe_exit
from dynamo.serve.supervision.watcher_factory import WatcherFactory

UNKNOWN, LEASE, MODEL = range(3)
"""What a process has registered in file discovery: nothing that is known, a lease, a model."""

_SURVIVES_S = 1.0  # a process that registers nothing counts as serving after this time
_FIXED_PORTS = ("DYN_SYSTEM_PORT", "DYN_TCP_RPC_PORT")


class RollingRestart:
    """Replaces processes. GPUs are reserved in ``record`` first, and released when the processes
    that used them have exited. ``registered(pid)`` is one of UNKNOWN, LEASE and MODEL; call
    :meth:`changed` when it may have changed."""

    def __init__(
        self,
        factory: WatcherFactory,
        record: StatefileWriter,
        registered: Callable[[int], int],
        announcer: Announcer,
    ) -> None:
        self._factory = factory
        self._record = record
        self._registered = registered
        self._announcer = announcer
        self._change = asyncio.Event()

    def changed(self) -> None:
        """Check again: a process, a lease or a model appeared or disappeared."""
        self._change.set()

    async def restart(self, watchers: Iterable[SupervisedWatcher], stop_first: bool) -> str:
        """Replace the processes of ``watchers``, workers first; start those that are stopped.

        Returns "", or what failed: then the watchers after the failed one are untouched. One that
        another operation changes is left out.
        """
        left_out = []
        for watcher in sorted(watchers, key=lambda candidate: -candidate.stop_stage):
            if watcher not in watcher.arbiter.watchers:
                continue  # it was drained, and has exited in the meantime
            if refusal := self._record.refusal(watcher.name):
                left_out.append(f"{watcher.name}: not replaced: {refusal}")
                continue
            if watcher.is_stopped():
                await watcher._start()
                continue
            spec = self._factory.specs[watcher.name]
            if problem := await self.replace(watcher, spec, stop_first):
                return "; ".join((problem, *left_out))
        return "; ".join(left_out)

    async def replace(
        self, watcher: SupervisedWatcher, spec: WatcherSpec, stop_first: bool = False
    ) -> str:
        """Replace the processes of ``watcher`` by those of ``spec``; return "" or what failed.

        Returns when the new ones serve and the old ones have exited.
        """
        problem = await self._replace(watcher, spec, stop_first)
        if problem:
            self._announcer.announce(problem, logging.ERROR)
        return problem

    async def _replace(
        self, watcher: SupervisedWatcher, spec: WatcherSpec, stop_first: bool
    ) -> str:
        level = self._level(watcher, spec)
        try:
            if not stop_first and self._may_overlap(watcher, spec, level):
                beside = await self._reserved(spec, beside=True)
                if beside is not None:
                    return await self._start_then_stop(watcher, beside, level)
            reserved = await self._reserved(spec, beside=False)
            if reserved is not None:
                return await self._stop_then_start(watcher, reserved, level)
        except (StatefileError, Unavailable, OSError) as error:
            return f"{watcher.name}: not replaced: {error}"
        finally:
            await self._record.replaced(watcher.name)
        holders = self._record.ledger().holders(self._factory.plan.gpu_ids, without=watcher.name)
        others = ", ".join(holders)
        needed = counted(spec.gpu, "GPU")
        return f"{watcher.name}: not replaced: it needs {needed}, held by {others}"

    async def _reserved(self, spec: WatcherSpec, beside: bool) -> WatcherSpec | None:
        try:
            return await self._record.replace(spec, beside)
        except ConfigError:  # no GPU is free
            return None

    async def serving(self, watcher: SupervisedWatcher, level: int | None = None) -> bool:
        """Wait until a process of ``watcher`` serves; False if it is given up or stopped."""
        if level is None:
            level = self._level(watcher, self._factory.specs[watcher.name])
        while True:
            self._change.clear()
            if level > UNKNOWN and any(self._registered(pid) >= level for pid in watcher.processes):
                return True
            exited = watcher.rolling and not watcher.processes
            ended = watcher.given_up or watcher.is_stopped() or watcher.arbiter.stopping
            if exited or ended or watcher not in watcher.arbiter.watchers:
                return False
            processes = [process for process in watcher.processes.values() if process.is_alive()]
            if level > UNKNOWN or not processes:
                await self._change.wait()
            elif await self._survive(processes):  # a wrong command exits, and is started again
                return True

    async def _survive(self, processes: Sequence[SupervisedProcess]) -> bool:
        """Wait a moment; False if one of ``processes`` exits before."""
        try:
            async with asyncio.timeout(_SURVIVES_S):
                while all(process.is_alive() for process in processes):
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            return True
        return False

    def fits(self, watcher: SupervisedWatcher, spec: WatcherSpec) -> bool:
        """Whether there are GPUs for ``spec`` once ``watcher`` has stopped."""
        if not spec.gpus or spec.pinned:
            return True
        try:
            return bool(self._record.ledger().assign(spec.name, spec.gpu, without=(watcher.name,)))
        except ConfigError:
            return False

    def _level(self, watcher: SupervisedWatcher, spec: WatcherSpec) -> int:
        """Return what a new process must register to count as serving."""
        if spec.registers_model:
            return MODEL
        own = spec.program.startswith("dynamo.") and spec.uses_file_discovery
        before = [self._registered(pid) for pid in watcher.processes]
        return max(before, default=LEASE if own else UNKNOWN)

    def _may_overlap(self, watcher: SupervisedWatcher, spec: WatcherSpec, level: int) -> bool:
        """Whether new processes may run beside the old ones, if there are GPUs for both."""
        ports = (watcher.env.get(name, "") for name in _FIXED_PORTS)
        taken = any(port.isdigit() and int(port) for port in ports)
        if level == UNKNOWN or taken or not watcher.get_active_processes():
            return False
        # A worker that sleeps or loads serves nothing, and its GPUs may be those of others by now.
        if self._record.states().get(watcher.name) == ASLEEP:
            return False
        if level == MODEL and all(self._registered(pid) < MODEL for pid in watcher.processes):
            return False
        if spec.is_frontend and not watcher.listener.is_shared:
            return False
        if spec.program == PLANNER:  # one planner holds the lock of its deployment
            return False
        # Else the user places the workers.
        return not spec.gpu or (bool(spec.gpus) and not spec.pinned)

    async def _start_then_stop(
        self, watcher: SupervisedWatcher, spec: WatcherSpec, level: int
    ) -> str:
        before = self._factory.specs[watcher.name]
        self._factory.configure(watcher, spec)
        watcher.rolling = True
        try:
            for old in watcher.get_active_processes():
                new = watcher.start_beside()
                if new is None or not await self._takes_over(new, level):
                    self._factory.configure(watcher, before)
                    return await self._failed(watcher, new)
                await watcher.kill_process(old)
        finally:
            watcher.rolling = False
        return ""

    async def _takes_over(self, process: SupervisedProcess, level: int) -> bool:
        while process.is_alive() and not process.stopping:
            self._change.clear()
            if self._registered(process.pid) >= level:
                process.on_trial = False
                return True
            await self._change.wait()
        return False

    async def _failed(self, watcher: SupervisedWatcher, new: SupervisedProcess | None) -> str:
        watcher.rolling = False
        await watcher.manage_processes()  # the old process may have died since
        if watcher.arbiter.stopping:
            return f"{watcher.name}: the deployment stops"
        ended = "could not be started" if new is None else describe_exit(new.exit_status)
        last = self._factory.output(watcher.name).last_line()
        return (
            f"{watcher.name}: the new process {ended} before it served; the old one continues"
            + (f"; last output: {last}" if last else "")
        )

    async def _stop_then_start(
        self, watcher: SupervisedWatcher, spec: WatcherSpec, level: int
    ) -> str:
        before = self._factory.specs[watcher.name]
        await watcher._stop()
        if watcher not in watcher.arbiter.watchers:  # it drained or slept, and has exited since
            return f"{watcher.name}: not replaced: it has exited and is removed"
        on_trial = spec is not before  # with another command, a failure leads back to the old one
        if await self._starts(watcher, spec, level, on_trial) or watcher.arbiter.stopping:
            return ""
        last = self._factory.output(watcher.name).last_line()
        if on_trial:
            await watcher.end()
            await self._starts(watcher, before, level)
        return (
            f"{watcher.name}: the new process exited before it served"
            + ("; the old command runs again" if on_trial else "")
            + (f"; last output: {last}" if last else "")
        )

    async def _starts(
        self, watcher: SupervisedWatcher, spec: WatcherSpec, level: int, on_trial: bool = False
    ) -> bool:
        self._factory.configure(watcher, spec)
        watcher.rolling = on_trial
        try:
            await watcher._start()
            for process in watcher.processes.values():
                process.on_trial = on_trial
            served = await self.serving(watcher, level)
        finally:
            watcher.rolling = False
        for process in watcher.processes.values():
            process.on_trial = False
        return served
