"""Workers that no deployment started, such as a ``python -m dynamo.vllm`` of a shell.

No statefile has them: their id, which is that of their lease in file discovery, names them.

Calls the endpoints of the planner of a deployment: explain, pause.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo.config.programs import PLANNER as PLANNER_PROGRAM
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import (
    DeadlineExceeded,
    DynamoError,
    InvalidArgument,
    StatefileError,
    Unavailable,
    WorkerUnavailable,
    shorten,
)
from dynamo.operations.steps.limits import ActionFailed
from dynamo.operations.steps.sleeping import RemoteEngines
from dynamo.protocols.control import (
    PLANNER,
    PLANNER_PAUSE,
    LeaseRecord,
    PlannerChange,
    PlannerState,
)
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery.layout import BadRecord, decode_lease, lease_path, names, read_file
from dynamo.runtime.discovery.leases import ProcessEnd
from dynamo.runtime.process.os_process import host_id, is_running
from dynamo.runtime.process.paths import state_path, store_path
from dynamo.runtime.process.threads import in_file_thread
from dynamo.serve.state.document import Document
from dynamo.serve.state.statefile import Statefile

_ID = re.compile(r"[0-9a-f]{1,16}")
_WAKE_TIMEOUT_S = 600.0
_Engines = AbstractAsyncContextManager[RemoteEngines]
_ANSWER_S = 5.0
MOST_GPUS = 1_000_000
"""The most GPUs or workers that a change of the planner may name."""
_MOST_MS = 1_000_000


async def call_planner(
    settings: RuntimeSettings, endpoint: str, request: object, timeout_s: float = _ANSWER_S
) -> Any:
    """Return the answer of the planner in the namespace of ``settings``; None without a planner.

    Raises DynamoError if it does not answer.
    """
    if settings.discovery_backend == "file" and not store_path(settings).exists():
        return None  # and nothing is created for a namespace that does not exist
    runtime = DistributedRuntime(asyncio.get_running_loop(), settings)
    try:
        return await call_planner_of(runtime, endpoint, request, timeout_s)
    finally:
        await runtime.close()


async def call_planner_of(
    runtime: DistributedRuntime, endpoint: str, request: object, timeout_s: float = _ANSWER_S
) -> Any:
    """Return the answer of the planner in the namespace of ``runtime``; None without a planner.

    Raises DynamoError if it does not answer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            path = f"{runtime.settings.namespace}.{PLANNER}.{endpoint}"
            client = await runtime.endpoint(path).client()
            if not client.instance_ids():
                return None
            async for item in await client.random(request):
                return item.data()
    except (TimeoutError, DeadlineExceeded, WorkerUnavailable):
        raise (await in_file_thread(no_planner, runtime.settings)) from None
    return None


def no_planner(settings: RuntimeSettings) -> DynamoError:
    """Return the error that no planner answers in the namespace of ``settings``. Blocks.

    One of the graph may be starting, or hang.
    """
    entries = _document(settings).components.values()
    name = next((one.name for one in entries if one.program == PLANNER_PROGRAM), "")
    if name:
        return Unavailable(
            f"{name} does not answer: it is starting, hangs, or was stopped; "
            f"see dynamo ps, or replace it with: dynamo restart {name}"
        )
    return InvalidArgument(
        f"no planner runs in namespace {settings.namespace!r}; add a service with "
        f"run: {PLANNER_PROGRAM} to the graph, or start one with: dynamo planner"
    )


def check_change(change: PlannerChange) -> None:
    """Raise InvalidArgument for a number that no planner takes; the wire has 64 bits."""
    counts = {"max_gpu_budget": change.max_gpu_budget, "min_gpu_budget": change.min_gpu_budget}
    counts |= {f"minima: {shorten(name)}": count for name, count in (change.minima or {}).items()}
    for name, count in counts.items():
        if count is not None and not 0 <= count <= MOST_GPUS:
            # str() refuses numbers of more than 4,300 digits.
            given = shorten(count) if abs(count) < 1 << 256 else "a longer number"
            raise InvalidArgument(f"{name} must be between 0 and {MOST_GPUS}, got {given}")
    for name, target in (("ttft_ms", change.ttft_ms), ("itl_ms", change.itl_ms)):
        if target is not None and not 0 < target <= _MOST_MS:
            raise InvalidArgument(f"{name} must be above 0 and at most {_MOST_MS}, got {target:g}")


async def ask_planner(
    settings: RuntimeSettings, change: PlannerChange | None = None
) -> PlannerState | None:
    """Change the planner, or only ask it; return its state, None without a planner.

    Raises DynamoError.
    """
    check_change(change or PlannerChange())
    request = msgspec.to_builtins(change or PlannerChange())
    answer = await call_planner(settings, PLANNER_PAUSE, request)
    try:
        return None if answer is None else msgspec.convert(answer, PlannerState)
    except msgspec.ValidationError as error:
        raise DynamoError(f"the planner's answer cannot be read: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideWorker:
    """The worker with ``lease`` in ``store``."""

    store: Path
    lease: LeaseRecord

    @property
    def name(self) -> str:
        """How texts name it."""
        return f"worker {self.lease.lease_id:x}"

    async def drain(self) -> AsyncIterator[str]:
        """Revoke its lease: it finishes its requests, then its process exits."""
        lease = self.lease
        ended = asyncio.Event()
        try:
            process = ProcessEnd(lease.pid, lease.pid_start, ended.set)
        except ProcessLookupError:
            raise ActionFailed(f"{self.name}: its process has exited already") from None
        try:
            lease_path(self.store, lease.lease_id).unlink(missing_ok=True)
            others = [one for one in _leases(self.store) if one.pid == lease.pid]
            if others:
                yield f"draining {self.name}: it gets no more requests"
                yield f"{self.name}: left; its process {lease.pid} has {len(others)} more"
                return
            yield f"draining {self.name}: requests in flight finish, then it exits"
            await ended.wait()
        finally:
            process.close()
        yield f"{self.name}: drained"

    async def sleep(self, opened: _Engines) -> AsyncIterator[str]:
        """Let it finish its requests and free the memory of its GPUs."""
        async with opened as engines:
            await self._check(engines)
            yield f"putting {self.name} to sleep when its requests are finished"
            await engines.sleep(self.lease.lease_id)
        yield f"{self.name}: asleep; wake it with: dynamo wake {self.lease.lease_id:x}"

    async def wake(self, opened: _Engines) -> AsyncIterator[str]:
        """Restore its memory."""
        async with opened as engines:
            await self._check(engines)
            yield f"waking {self.name}"
            await engines.wake(self.lease.lease_id, _WAKE_TIMEOUT_S)
        yield f"{self.name}: awake, ready for requests"

    async def _check(self, engines: RemoteEngines) -> None:
        if not await engines.can_sleep(self.lease.lease_id):
            raise ActionFailed(
                f"{self.name}: its engine has no sleep mode (vLLM, mocker: --enable-sleep-mode); "
                f"free its GPU with: dynamo drain {self.lease.lease_id:x}"
            )


def find_outside(runtime: RuntimeSettings, name: str) -> OutsideWorker | None:
    """Return the living worker of this machine with the id ``name`` that no statefile has."""
    if runtime.discovery_backend != "file" or not _ID.fullmatch(name):
        return None
    store = store_path(runtime)
    lease = _read(store, f"{int(name, 16):x}")
    if lease is None or os.getsid(lease.pid) in _recorded(runtime):
        return None
    return OutsideWorker(store=store, lease=lease)


def _read(store: Path, name: str) -> LeaseRecord | None:
    try:
        lease = decode_lease(name, read_file(store / "leases" / name) or b"")
    except BadRecord:
        return None
    return lease if lease.host == host_id() and is_running(lease.pid, lease.pid_start) else None


def _leases(store: Path) -> Iterator[LeaseRecord]:
    for name in names(store / "leases"):
        if (lease := _read(store, name)) is not None:
            yield lease


def _recorded(runtime: RuntimeSettings) -> set[int]:
    """Return the processes in the statefile; each leads a session."""
    return {pid for entry in _document(runtime).components.values() for pid in entry.pids}


def _document(runtime: RuntimeSettings) -> Document:
    """Return the statefile; an empty one if there is none that can be read."""
    try:
        return Statefile(state_path(runtime), runtime.namespace).read() or Document()
    except StatefileError:
        return Document()
