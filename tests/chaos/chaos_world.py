"""The deployment of a chaos run: a real ``dynamo serve``, and when each of its processes lived."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
from deployment import free_port
from history import Life
from serving import ROOT, Serving
from small_disk import FILLER

from dynamo.http.client import ResponseError, Target, call

__all__ = ["FATAL_SEED", "PROFILES", "World"]

FATAL_SEED = 1_234_567
"""A request with this seed kills the worker that computes it."""

POLL_S = 0.02
START_TIMEOUT_S = 60.0
_WORKER = """
  run: dynamo.mocker
  model-path: {model}
  model-name: tiny
  reply: {reply}
  block-size: 16
  max-num-seqs: 32
  kv-bytes-per-token: 16384
  fatal-seed: {fatal_seed}
  stream-interval: {tokens}
"""
_FRONTEND = """
Frontend:
  run: dynamo.frontend
  router-mode: kv
  http-port: {port}
"""
ELDER = "elder"
_ELDERS = """
Elder:
  run: dynamo.mocker
  model-path: {model}
  model-name: elder
  endpoint: {namespace}.elder.generate
  reply: {reply}
  block-size: 16
  kv-bytes-per-token: 16384
  ServiceArgs: {{workers: 2}}

Planner:
  run: dynamo.planner
  served-model-name: tiny
  mode: load
  adjustment-interval: 10
  max-gpu-budget: 5
  min-gpu-budget: 3
  decode-kv-scale-up-threshold: 0.5
  decode-kv-scale-down-threshold: 0.2
"""
PROFILES = {
    "agg": _FRONTEND + "Worker:" + _WORKER + "  ServiceArgs: {{workers: 4}}\n",
    "disagg": _FRONTEND
    + "PrefillWorker:"
    + _WORKER
    + "  disaggregation-mode: prefill\n  ServiceArgs: {{workers: 2}}\n"
    + "Worker:"
    + _WORKER
    + "  disaggregation-mode: decode\n  ServiceArgs: {{workers: 3}}\n",
    "soak": _FRONTEND + "Worker:" + _WORKER + "  ServiceArgs: {{workers: 3}}\n" + _ELDERS,
}
"""The graphs: four workers; three with two prefill workers before them; three that the planner
makes five under load, and two that no fault ends."""

TOKENS = {"agg": 1, "disagg": 7, "soak": 1}
"""The tokens in an output of the workers."""

DECODE_WORKERS = {"agg": 4, "disagg": 3, "soak": 3}
"""How many there are; in ``soak`` at least."""

_DECODE_INSTANCE = re.compile(r"%2Fbackend%2Fgenerate%2F([0-9a-f]+)$")


class World:
    """Start it, let faults happen, stop it.

    ``lives`` are the spans in which frontends and decode workers lived, as the validator needs: a
    worker lives while it is registered and runs, a frontend from its first healthy answer to
    its death. Faults report what they are about to do (:meth:`doom`, :meth:`paused`), so that a
    span never ends too late. While ``is_stopping`` a new frontend counts as one that drains: a
    stopped guard may still have to pass the signal on.
    """

    def __init__(
        self,
        directory: Path,
        profile: str,
        frontend: str,
        clock: Callable[[], float],
        poll_s: float = POLL_S,
    ) -> None:
        self.serving = Serving(directory)
        self.clock = clock
        self.poll_s = poll_s
        self.workers = DECODE_WORKERS[profile]
        self.port = free_port()
        self.target = Target("127.0.0.1", self.port, False)
        self.lives: list[Life] = []
        self.restarts = 0
        self._live: dict[str, Life] = {}
        self._doomed: set[int] = set()
        self._paused: dict[int, float] = {}
        self._frontend_pid = 0
        self.is_stopping = False
        text = PROFILES[profile].format(
            model=ROOT / "examples/model",
            reply="sequence",
            port=self.port,
            fatal_seed=FATAL_SEED,
            tokens=TOKENS[profile],
            namespace=self.serving.namespace,
        )
        text = text.replace("  router-mode: kv", f"  router-mode: kv{frontend}")
        self._graph = self.serving.graph(text)

    @property
    def state(self) -> Path:
        """The state directory."""
        return self.serving.state_dir

    @property
    def run_directory(self) -> Path:
        """Sockets, store and logs."""
        return self.state / self.serving.namespace

    # -- processes

    async def start(self) -> None:
        """Start ``dynamo serve`` and wait until it is ready."""
        await asyncio.to_thread(
            self.serving.start,
            self._graph,
            "--quiet",
            wait="ready: ",
            # Faults are frequent here: without a back-off between the starts of a worker.
            DYN_SERVE_RESTART_BURST="100000",
            DYN_SERVE_RESTART_WINDOW_S="1",
            DYN_SERVE_LOG_SIZE_MB="1",
            DYN_SYSTEM_PORT="0",
            DYN_LOG="info",
        )

    @property
    def arbiter(self) -> int:
        """The pid of the arbiter, the guard's child that leads a session; 0 without one."""
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            for child in psutil.Process(self.serving.pid).children():
                if os.getsid(child.pid) == child.pid:
                    return child.pid
        return 0

    def pids(self, module: str) -> list[int]:
        """The processes of ``python -m module`` under the arbiter, without the elders."""
        found = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.arbiter).children() if self.arbiter else []:
                with contextlib.suppress(psutil.Error):
                    words = child.cmdline()
                    if module in words and ELDER not in words and child.pid not in self._doomed:
                        found.append(child.pid)
        return found

    def leases(self) -> dict[str, int]:
        """The registered decode workers: lease id in hexadecimal, pid."""
        store = self.run_directory / "store"
        found = {}
        with contextlib.suppress(OSError):
            for path in (store / "v1/instances").iterdir():
                match = _DECODE_INSTANCE.search(path.name)
                if match is not None:
                    with contextlib.suppress(OSError, msgspec.MsgspecError, KeyError):
                        lease = (store / "leases" / match[1]).read_bytes()
                        found[match[1]] = int(msgspec.json.decode(lease)["pid"])
        return found

    def live_workers(self) -> dict[str, int]:
        """The decode workers that are registered and run, and whose socket has its file."""
        harmed = {*self._doomed, *self._paused}
        return {
            lease: pid
            for lease, pid in self.leases().items()
            if pid not in harmed and _runs(pid) and (self.run_directory / f"{lease}.sock").exists()
        }

    def complete(self) -> bool:
        """Whether all decode workers and a frontend live."""
        return bool(self._frontend_pid) and len(self.live_workers()) >= self.workers

    # -- lives

    def doom(self, *pids: int) -> None:
        """These processes are about to die or to leave: their lives end now."""
        self._doomed |= set(pids)
        self._end(lambda pid: pid in self._doomed)

    def closing(self, pid: int) -> None:
        """The frontend ``pid`` is about to drain: it lives on, and accepts nothing new.

        One that is stopped has accepted nothing since then.
        """
        for life in self._live.values():
            if life.pid == pid and life.closing_s is None:
                life.closing_s = self._paused.get(pid, self.clock())

    def paused(self, pid: int, is_paused: bool) -> None:
        """The process is about to be stopped, or runs again."""
        if is_paused:
            self._paused[pid] = self.clock()
            self._end(lambda one: one == pid and one != self._frontend_pid)
        else:
            self._paused.pop(pid, None)

    async def watch(self) -> None:
        """Follow the lives until cancelled."""
        while True:
            self._watch_workers()
            await self._watch_frontend()
            await asyncio.sleep(self.poll_s)

    def finish(self) -> None:
        """End all lives: the run is over."""
        self._live.clear()

    def _watch_workers(self) -> None:
        live = self.live_workers()
        self._doomed = {pid for pid in self._doomed if _runs(pid)}  # their numbers are used again
        self._end(lambda pid: pid != self._frontend_pid and pid not in live.values())
        for lease, pid in live.items():
            if lease not in self._live:
                self._begin(Life("worker", lease, self.clock(), pid=pid))

    async def _watch_frontend(self) -> None:
        pid = self._frontend_pid
        if pid and not _runs(pid):
            self._end(lambda one: one == pid)
            self._frontend_pid = pid = 0
        if not pid and (pids := self.pids("dynamo.frontend")) and await self.healthy():
            self._frontend_pid = pids[0]
            self._begin(Life("frontend", f"{pids[0]}", self.clock(), pid=pids[0]))
            if self.is_stopping:
                self.closing(pids[0])

    async def healthy(self) -> bool:
        """Whether a frontend answers that it serves the model."""
        try:
            answer = await call(self.target, "GET", "/health", 1 << 20, 0.5)
        except (OSError, ResponseError):
            return False
        return answer.status == 200 and b'"instances":[{' in answer.body

    def _begin(self, life: Life) -> None:
        self._live[life.name] = life
        self.lives.append(life)

    def _end(self, gone: Callable[[int], bool]) -> None:
        for name, life in list(self._live.items()):
            if gone(life.pid):
                life.until_s = self.clock()
                del self._live[name]

    # -- the whole deployment

    async def ended(self, timeout_s: float = 60.0) -> int:
        """Wait until ``dynamo serve`` and all its processes have exited; return its status."""
        assert self.serving.process is not None
        await asyncio.to_thread(self.serving.process.wait, timeout_s)
        await asyncio.to_thread(self.serving.wait_until_gone, timeout_s)
        return await asyncio.to_thread(self.serving.wait)

    def leftovers(self) -> str:
        """What is left on disk after the end, except logs and what fills the disk."""
        return " ".join(name for name in self.serving.leftovers() if name != FILLER)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Poll ``condition``; return whether it held in time."""
        deadline_s = self.clock() + timeout_s
        while not condition():
            if self.clock() > deadline_s:
                return False
            await asyncio.sleep(POLL_S)
        return True


def _runs(pid: int) -> bool:
    """Whether the process runs: neither exited nor a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return fields[fields.rindex(")") + 2] not in "ZX"


def send(pid: int, signum: signal.Signals) -> bool:
    """Send a signal; return whether the process was there."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True
