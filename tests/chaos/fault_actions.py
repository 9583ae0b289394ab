"""Carries out the planned faults on a :class:`World`: signals, cut sockets, removed files."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
from chaos_load import REQUEST_TIMEOUT_S
from chaos_world import FATAL_SEED, World, send
from fault_schedule import FAULTS, PlannedFault
from history import Answer, Fault
from recording_client import Plan, RecordingClient
from small_disk import SmallDisk
from socket_cutter import cut_one
from validator import Violation

__all__ = ["SPACING_S", "FaultActions"]

TARGET_TIMEOUT_S = 3.0
"""How long a fault waits for a target: a worker that is not the last one, a frontend."""

SPACING_S = 0.4
LAST_WORKER_SHARE = 0.2
STARTING_SHARE = 0.1
STARTING_S = 5.0
_EVENTS = ".events.sock"


class FaultActions:
    """Every fault reports itself to ``on_fault`` when it happens.

    ``missed`` counts the planned faults without a target at their time, ``impossible`` the kinds
    that this machine forbids, with the reason.
    """

    def __init__(
        self,
        world: World,
        disk: SmallDisk,
        on_fault: Callable[[Fault], None],
        spacing_s: float = SPACING_S,
    ) -> None:
        self.world = world
        self.disk = disk
        self._spacing_s = spacing_s
        self.missed = 0
        self.impossible: dict[str, str] = {}
        self.violations: list[Violation] = []
        self.fatal_requests = 0
        self._on_fault = on_fault
        self._stopped: set[int] = set()
        self._next_s = 0.0
        self._actions: dict[str, Callable[[random.Random], Awaitable[str]]] = {
            "worker killed": self._kill_worker,
            "worker terminated": self._terminate_worker,
            "worker stopped": self._stop_worker,
            "fatal request": self._send_fatal_request,
            "requests cut": self._cut_requests,
            "events cut": self._cut_events,
            "socket removed": self._remove_socket,
            "lease removed": self._remove_lease,
            "statefile removed": self._remove_statefile,
            "disk full": self._fill_disk,
            "frontend killed": self._kill_frontend,
            "frontend terminated": self._terminate_frontend,
            "frontend stopped": self._stop_frontend,
            "arbiter stopped": self._stop_arbiter,
            "guard stopped": self._stop_guard,
            "all workers killed": self._kill_all_workers,
            "arbiter killed": self._kill_arbiter,
            "guard killed": self._kill_guard,
            "deployment terminated": self._terminate_deployment,
        }
        assert self._actions.keys() == FAULTS.keys()
        if not disk.mounted:
            self.impossible["disk full"] = "a tmpfs needs root"

    async def run(self, schedule: list[PlannedFault]) -> None:
        """Carry out ``schedule``; return when the last fault is over.

        While the deployment starts again, faults would find no target: all later ones wait as long.
        """
        late_s = 0.0
        async with asyncio.TaskGroup() as group:
            for planned in schedule:
                await asyncio.sleep(max(0.0, planned.at_s + late_s - self.world.clock()))
                if planned.kind in _WHOLE_DEPLOYMENT:
                    since_s = self.world.clock()
                    await self._act(planned)
                    late_s += self.world.clock() - since_s
                else:
                    group.create_task(self._act(planned))

    def heal(self) -> None:
        """Continue stopped processes, free the disk."""
        for pid in self._stopped:
            send(pid, signal.SIGCONT)
        if self.disk.mounted:
            self.disk.free()

    async def _act(self, planned: PlannedFault) -> None:
        if planned.kind in self.impossible:
            return
        dice = random.Random(planned.dice)
        deadline_s = self.world.clock() + TARGET_TIMEOUT_S
        at_s, target = 0.0, ""
        try:
            while not target and self.world.clock() < deadline_s:
                await self._slot()
                at_s = self.world.clock()
                target = await self._actions[planned.kind](dice)
        except PermissionError as error:
            self.impossible[planned.kind] = str(error)
            return
        if target:
            self._on_fault(Fault(planned.kind, target, at_s))
        else:
            self.missed += 1

    async def _slot(self) -> None:
        """Keep faults apart: those that waited for a target would hit it all at once."""
        now_s = self.world.clock()
        self._next_s = max(self._next_s + self._spacing_s, now_s)
        await asyncio.sleep(self._next_s - now_s)

    # -- workers

    def _spare_worker(self, dice: random.Random) -> int:
        """A worker that may be harmed: a prefill worker, or a decode worker but not the last.

        Mostly two decode workers are left: with one, every fault hits every request, and its
        migrations are used up in seconds. Rarely one that starts: deaths at the start delay the
        next one longer and longer.
        """
        live = self.world.live_workers()
        left = 1 if dice.random() < LAST_WORKER_SHARE else 2
        others = set(self.world.pids("dynamo.mocker")) - set(self.world.leases().values())
        others -= self._stopped
        if dice.random() >= STARTING_SHARE:
            others = {pid for pid in others if _age_s(pid) > STARTING_S}
        able = sorted(others) + (sorted(live.values()) if len(live) > left else [])
        return dice.choice(able) if able else 0

    async def _kill_worker(self, dice: random.Random) -> str:
        return self._signal_worker(dice, signal.SIGKILL)

    async def _terminate_worker(self, dice: random.Random) -> str:
        return self._signal_worker(dice, signal.SIGTERM)

    def _signal_worker(self, dice: random.Random, signum: signal.Signals) -> str:
        pid = self._spare_worker(dice)
        if not pid:
            return ""
        self.world.doom(pid)
        return str(pid) if send(pid, signum) else ""

    async def _send_fatal_request(self, dice: random.Random) -> str:
        """A request that kills its worker; at most two, so only where more live."""
        if len(self.world.live_workers()) < self.world.workers:
            return ""
        self.fatal_requests += 1
        name = f"fatal {self.fatal_requests}"
        body = {"model": "tiny", "prompt": f"{name} {dice.random()}", "seed": FATAL_SEED}
        client = RecordingClient(self.world.target, self.world.clock)
        plan = Plan(name, "completions", {**body, "max_tokens": 4}, Answer("", "", 0, 0))
        record = await client.perform(plan, REQUEST_TIMEOUT_S)
        client.close()
        if record.status == 200 or record.ending == "timeout":
            self._violation("fatal request", f"{record.ending} with status {record.status}")
        return f"status {record.status}"

    async def _kill_all_workers(self, dice: random.Random) -> str:
        pids = self.world.pids("dynamo.mocker")
        self.world.doom(*pids)
        killed = [pid for pid in pids if send(pid, signal.SIGKILL)]
        return " ".join(map(str, killed))

    async def _stop_worker(self, dice: random.Random) -> str:
        """Some stops are short, some longer than the silence that is allowed, one of these at a
        time: a request that waits for several hung workers in turn uses up its migrations."""
        hangs = dice.random() < 0.3 and not self._stopped
        seconds = dice.uniform(3.0, 6.0) if hangs else dice.uniform(0.05, 1.5)
        return await self._stop(self._spare_worker(dice), seconds)

    async def _stop(self, pid: int, seconds: float) -> str:
        if not pid:
            return ""
        self.world.paused(pid, True)
        self._stopped.add(pid)
        try:
            if not send(pid, signal.SIGSTOP):
                return ""
            await asyncio.sleep(seconds)
        finally:
            send(pid, signal.SIGCONT)
            self._stopped.discard(pid)
            self.world.paused(pid, False)
        return f"{pid} for {seconds:.2f} s"

    # -- connections and files

    async def _cut_requests(self, dice: random.Random) -> str:
        return self._cut(dice, lambda path: path.endswith(".sock") and not path.endswith(_EVENTS))

    async def _cut_events(self, dice: random.Random) -> str:
        return self._cut(dice, lambda path: path.endswith(_EVENTS))

    def _cut(self, dice: random.Random, wanted: Callable[[str], bool]) -> str:
        for pid in self.world.pids("dynamo.frontend"):
            try:
                path = cut_one(pid, wanted, dice)
            except PermissionError:
                raise
            except OSError:  # the frontend exits
                continue
            if path:
                return Path(path).name
        return ""

    async def _remove_socket(self, dice: random.Random) -> str:
        """A request socket without its file accepts no new connection; half of them need one."""
        leases = sorted(self.world.live_workers())
        if len(leases) < 2:
            return ""
        path = self.world.run_directory / f"{dice.choice(leases)}.sock"
        removed = _unlink(path)
        if removed and dice.random() < 0.5:
            self._cut(dice, lambda peer: Path(peer).name == path.name)
        return removed

    async def _remove_lease(self, dice: random.Random) -> str:
        """A removed lease is a revoked one: its worker drains and exits."""
        live = self.world.live_workers()
        if len(live) < 2:
            return ""
        lease, pid = dice.choice(sorted(live.items()))
        self.world.doom(pid)
        return _unlink(self.world.run_directory / "store/leases" / lease)

    async def _remove_statefile(self, dice: random.Random) -> str:
        return _unlink(self.world.serving.statefile)

    async def _fill_disk(self, dice: random.Random) -> str:
        seconds = dice.uniform(0.5, 3.0)
        try:
            await asyncio.to_thread(self.disk.fill)
            await asyncio.sleep(seconds)
        finally:
            self.disk.free()
        return f"for {seconds:.2f} s"

    # -- frontends

    def _frontend(self) -> int:
        return next(iter(self.world.pids("dynamo.frontend")), 0)

    async def _kill_frontend(self, dice: random.Random) -> str:
        pid = self._frontend()
        self.world.doom(pid)
        return str(pid) if pid and send(pid, signal.SIGKILL) else ""

    async def _terminate_frontend(self, dice: random.Random) -> str:
        pid = self._frontend()
        self.world.closing(pid)
        return str(pid) if pid and send(pid, signal.SIGTERM) else ""

    async def _stop_frontend(self, dice: random.Random) -> str:
        return await self._stop(self._frontend(), dice.uniform(0.05, 1.5))

    # -- the deployment

    async def _stop_arbiter(self, dice: random.Random) -> str:
        return await self._stop(self.world.arbiter, dice.uniform(0.5, 3.0))

    async def _stop_guard(self, dice: random.Random) -> str:
        return await self._stop(self.world.serving.pid, dice.uniform(0.5, 3.0))

    async def _kill_arbiter(self, dice: random.Random) -> str:
        pid = self.world.arbiter
        self._doom_all()
        send(pid, signal.SIGKILL)
        return await self._restart(str(pid), 128 + signal.SIGKILL)

    async def _kill_guard(self, dice: random.Random) -> str:
        return await self._end(signal.SIGKILL, -signal.SIGKILL)

    async def _terminate_deployment(self, dice: random.Random) -> str:
        return await self._end(signal.SIGTERM, 0)

    async def _end(self, signum: signal.Signals, status: int) -> str:
        """Signal the guard; frontends drain first then, so only they are about to leave."""
        pid = self.world.serving.pid
        self.world.is_stopping = True
        for frontend in self.world.pids("dynamo.frontend"):
            self.world.closing(frontend)
        send(pid, signum)
        return await self._restart(str(pid), status)

    def _doom_all(self) -> None:
        world = self.world
        world.doom(*world.pids("dynamo.frontend"), *world.pids("dynamo.mocker"))

    async def _restart(self, target: str, expected: int) -> str:
        """Wait until nothing is left of the deployment, and start it again."""
        try:
            status = await self.world.ended()
            if status != expected:
                self._violation("exit status", f"{status} instead of {expected}")
            if left := self.world.leftovers():
                self._violation("left on disk", left)
        except AssertionError as error:
            self._violation("left running", str(error))
            self.world.serving.close()
        self.world.restarts += 1
        self.world.is_stopping = False
        await self.world.start()
        return target

    def _violation(self, rule: str, detail: str) -> None:
        self.violations.append(Violation("deployment", rule, detail[:2000]))


_WHOLE_DEPLOYMENT = ("arbiter killed", "guard killed", "deployment terminated")


def _age_s(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        return time.time() - psutil.Process(pid).create_time()
    return 0.0


def _unlink(path: Path) -> str:
    try:
        path.unlink()
    except OSError:
        return ""
    return path.name
