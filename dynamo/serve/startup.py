"""Reports when a deployment is ready, and reminds the user while it is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dynamo.config import environ
from dynamo.serve.arbiter import SupervisingArbiter
from dynamo.serve.leases import Leases
from dynamo.serve.output import Announcer
from dynamo.serve.readiness import frontend_address, wait_until_ready
from dynamo.serve.watchers import DeploymentPlan, WatcherSpec

__all__ = ["StartupReport"]

_REMIND_EVERY_S = 15.0


class StartupReport:
    """The report of one start of ``plan``; its clock starts now."""

    _arbiter: SupervisingArbiter
    _leases: Leases

    def __init__(self, plan: DeploymentPlan, logs: Path, announcer: Announcer) -> None:
        self._plan = plan
        self._logs = logs
        self._announcer = announcer
        self._change = asyncio.Event()
        self._started_s = time.monotonic()

    def changed(self) -> None:
        """Check again: a process or a lease appeared or disappeared."""
        self._change.set()

    async def run(self, arbiter: SupervisingArbiter, leases: Leases) -> None:
        """Wait until the deployment is ready and announce it; remind the user while it is not."""
        self._arbiter, self._leases = arbiter, leases
        async with asyncio.TaskGroup() as group:
            reminder = group.create_task(self._remind())
            what = await self._wait_until_ready()
            reminder.cancel()
        self._announce_ready(what)

    async def _wait_until_ready(self) -> str:
        """Wait, and return a message; it says "ready" only if a frontend or a lease proves it."""
        frontends = [spec for spec in self._plan.specs if spec.is_frontend]
        if frontends:
            workers = sum(spec.stop_stage > 0 for spec in self._plan.specs)
            return f"ready: {await self._wait_for_frontends(frontends, workers)}"
        registering = self._registering()
        if registering:
            await self._wait_for_leases(registering)
            return f"ready: {len(registering)} processes are registered; no dynamo.frontend"
        return "started: all processes; readiness is unknown without a dynamo.frontend in the graph"

    async def _wait_for_frontends(self, frontends: Sequence[WatcherSpec], workers: int) -> str:
        urls: list[str] = []
        for spec in frontends:
            address = frontend_address(spec.options, {**environ(), **spec.env})
            is_ours = partial(self._listens, spec.name, address.port)
            # A further frontend may serve only some of the workers, so one is enough.
            health = await wait_until_ready(address, min(workers, 1) if urls else workers, is_ours)
            if not urls:
                found = health
            urls.append(f"{address.url}/v1")
        models = ", ".join(found.models) or "none yet"
        return f"{', '.join(urls)}   model: {models}   workers: {found.instances}"

    def _listens(self, name: str, port: int) -> bool:
        processes = self._arbiter.alive().get(name, ())
        return any(process.is_listening(port) for process in processes)

    def _registering(self) -> list[str]:
        """Return the watchers whose processes hold a lease in file discovery."""
        return [
            spec.name
            for spec in self._plan.specs
            if spec.argv[1:2] == ("-m",)
            and spec.argv[2].startswith("dynamo.")
            and spec.env.get("DYN_DISCOVERY_BACKEND") == "file"
        ]

    async def _wait_for_leases(self, names: Sequence[str]) -> None:
        while True:
            self._change.clear()
            leases, alive = self._leases.by_session(), self._arbiter.alive()
            working = [w.name for w in self._arbiter.watchers if not w.given_up]
            wanted = [name for name in names if name in working]
            if wanted and all(any(p.pid in leases for p in alive[name]) for name in wanted):
                return
            await self._change.wait()

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(_REMIND_EVERY_S)
            up = sum(len(processes) for processes in self._arbiter.alive().values())
            waited_s = time.monotonic() - self._started_s
            self._announcer.announce(
                f"not ready after {waited_s:.0f} s; {up} of "
                f"{len(self._plan.specs)} processes are running; still waiting"
            )

    def _announce_ready(self, what: str) -> None:
        took_s = time.monotonic() - self._started_s
        self._announcer.announce(
            f"{what}   ({took_s:.1f} s)\n"
            f"  stop: Ctrl-C   logs: {self._logs}\n"
            f"  control: circusctl --endpoint {self._plan.endpoint} status"
        )
