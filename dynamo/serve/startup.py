"""Reports when a deployment is ready, and what it waits for while it is not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from shlex import quote

from dynamo.config.programs import PLANNER
from dynamo.observability.logs import counted
from dynamo.serve.graph.facts import FrontendAddress
from dynamo.serve.graph.watchers import DeploymentPlan, WatcherSpec
from dynamo.serve.readiness import FrontendHealth, wait_until_ready
from dynamo.serve.state.registered import Leases
from dynamo.serve.supervision.arbiter import SupervisingArbiter
from dynamo.serve.supervision.output import Announcer

_REMIND_EVERY_S = 15.0
_ANNOUNCED_WITHIN_S = 10.0


class StartupReport:
    """The report of one start of ``plan``; its clock starts now.

    ``last_line`` returns the last output of a watcher.
    """

    def __init__(
        self,
        plan: DeploymentPlan,
        logs: Path,
        announcer: Announcer,
        last_line: Callable[[str], str],
        arbiter: SupervisingArbiter,
        leases: Leases,
    ) -> None:
        self._plan = plan
        self._logs = logs
        self._announcer = announcer
        self._last_line = last_line
        self._arbiter = arbiter
        self._leases = leases
        self._change = asyncio.Event()
        self._started_s = time.monotonic()

    def changed(self) -> None:
        """Check again: a process, a lease or a model card appeared or disappeared."""
        self._change.set()

    async def run(self) -> None:
        """Wait until the deployment is ready and announce it; remind the user while it is not."""
        async with asyncio.TaskGroup() as group:
            reminder = group.create_task(self._remind())
            what = await self._wait_until_ready()
            reminder.cancel()
        self._announce_ready(what)

    async def _wait_until_ready(self) -> str:
        """Wait, and return a message; it says "ready" only if a frontend or a lease proves it."""
        frontends = [spec for spec in self._plan.specs if spec.is_frontend]
        if frontends:
            return f"ready: {await self._wait_for_frontends(frontends)}"
        registering = self._registering()
        if registering:
            await self._wait_for_leases(registering)
            count = len(self._kept() & set(registering))
            are = counted(count, "process is", "processes are")
            return f"ready: {are} registered; no dynamo.frontend"
        return "started: all processes; readiness is unknown without a dynamo.frontend in the graph"

    async def _wait_for_frontends(self, frontends: Sequence[WatcherSpec]) -> str:
        urls: list[str] = []
        for spec in frontends:
            address = spec.address
            assert address is not None  # a plan has none without
            is_ours = partial(self._listens, spec.name, address.port)
            if urls:  # a further frontend may serve only some of the workers, so one is enough
                await wait_until_ready(address, lambda: min(self._workers(), 1), is_ours)
            else:
                partly = partial(self._announce_part, address)
                health = await wait_until_ready(
                    address, self._workers, is_ours, self._loading, partly, self._leases.models
                )
            urls.append(f"{address.url}/v1")
        models = ", ".join(health.models) or "none yet"
        line = f"{', '.join(urls)}   model: {models}   workers: {health.instances}"
        cold = ", ".join(spec.service for spec in self._plan.templates)
        if not cold:
            return line
        planned = any(spec.program == PLANNER for spec in self._plan.specs)
        how = "started on demand" if planned else "started by dynamo load"
        return f"{line}   {how}: {cold}"

    def _workers(self) -> int:
        """The number of processes besides the frontends that are not given up."""
        kept = self._kept()
        return sum(spec.stop_stage > 0 and spec.name in kept for spec in self._plan.specs)

    def _kept(self) -> set[str]:
        """The watchers that are neither given up nor removed."""
        return {watcher.name for watcher in self._arbiter.watchers if not watcher.given_up}

    def _failures(self) -> list[str]:
        """The watchers that are given up, and those whose process had to be restarted."""
        return [
            f"given up: {watcher.name}"
            if watcher.given_up
            else f"restarted: {watcher.name} ({watcher.deaths} exits)"
            for watcher in self._arbiter.watchers
            if watcher.given_up or watcher.deaths
        ] + list(self._different_models())

    def _different_models(self) -> Iterator[str]:
        alive = self._arbiter.alive()
        for model, sessions in self._leases.different().items():
            names = [
                name for name, processes in alive.items() if sessions & {p.pid for p in processes}
            ]
            yield (
                f"different models named {model}: {', '.join(names)}, of which some get no "
                "requests, see: dynamo ps"
            )

    def _loading(self) -> list[str]:
        """The workers whose model is not registered yet; without those that are given up."""
        kept = self._kept()
        waiting = [s.name for s in self._plan.specs if s.registers_model and s.name in kept]
        if waiting:
            serving, alive = self._leases.with_model(), self._arbiter.alive()
            waiting = [name for name in waiting if not any(p.pid in serving for p in alive[name])]
        return waiting + self._unannounced(kept)

    def _unannounced(self, kept: Collection[str]) -> list[str]:
        """The services without workers that no planner has announced: requests would be refused.

        Not for long: a planner that only observes, or has other models, never announces them.
        """
        planned = any(s.program == PLANNER and s.name in kept for s in self._plan.specs)
        overdue = time.monotonic() - self._started_s > _ANNOUNCED_WITHIN_S
        if overdue or not planned or not self._plan.templates:
            return []
        announced = self._leases.on_demand()
        return [s.name for s in self._plan.templates if s.service not in announced]

    def _listens(self, name: str, port: int) -> bool:
        processes = self._arbiter.alive().get(name, ())
        return any(process.is_listening(port) for process in processes)

    def _registering(self) -> list[str]:
        """Return the watchers whose processes hold a lease in file discovery."""
        return [
            spec.name
            for spec in self._plan.specs
            if spec.program.startswith("dynamo.")
            and spec.env.get("DYN_DISCOVERY_BACKEND") == "file"
        ]

    async def _wait_for_leases(self, names: Sequence[str]) -> None:
        while True:
            self._change.clear()
            leases, alive = self._leases.by_session(), self._arbiter.alive()
            kept = self._kept()
            wanted = [name for name in names if name in kept]
            leased = all(any(p.pid in leases for p in alive[name]) for name in wanted)
            if wanted and leased and not self._loading():
                return
            await self._change.wait()

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(_REMIND_EVERY_S)
            if self._arbiter.stopping:
                return
            waited_s = time.monotonic() - self._started_s
            lines = [f"not ready after {waited_s:.0f} s; {self._state()}; still waiting"]
            loading = self._loading()
            lines += [self._describe(name) for name in loading or self._frontends()]
            self._announcer.announce("\n  ".join(lines))

    def _state(self) -> str:
        up = sum(len(processes) for processes in self._arbiter.alive().values())
        return f"{up} of {len(self._plan.specs)} processes are running"

    def _frontends(self) -> list[str]:
        """The frontends: with all models registered, it is they that do not list them."""
        return [spec.name for spec in self._plan.specs if spec.is_frontend]

    def _describe(self, name: str) -> str:
        """Describe a process that does not serve yet, with its last output."""
        running = self._arbiter.alive().get(name)
        waits = "loading" if name not in self._frontends() else "lists no model yet"
        state = waits if running else "not running"
        last = self._last_line(name)
        return f"{name}: {state}" + (f"; last output: {last}" if last else "; no output yet")

    def _announce_part(
        self, address: FrontendAddress, health: FrontendHealth, missing: Collection[str]
    ) -> None:
        self._announcer.announce(
            f"serving: {address.url}/v1   model: {', '.join(health.models)}   "
            f"workers: {health.instances}; still waiting for {', '.join(missing)}"
        )

    def _announce_ready(self, what: str) -> None:
        took_s = time.monotonic() - self._started_s
        failures = "".join(f"   {failure}" for failure in self._failures())
        self._announcer.announce(
            f"{what}{failures}   ({took_s:.1f} s)\n"
            f"  stop: Ctrl-C   logs: {self._logs}\n"
            f"  control: circusctl --endpoint {quote(self._plan.endpoint)} status",
            logging.WARNING if failures else logging.INFO,
        )
