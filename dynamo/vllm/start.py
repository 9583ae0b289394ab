"""Start of the engine in a thread, with progress in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from dynamo.errors import EngineFailure
from dynamo.runtime.tasks import Tasks
from dynamo.vllm.engine import Engine
from dynamo.worker.tree_guard import TreeGuard

__all__ = ["start_engine"]

_PROGRESS_S = 10.0
_CHECK_S = 0.5
log = logging.getLogger(__name__)


async def start_engine(
    build: Callable[[], Engine], guard: TreeGuard, stopping: asyncio.Event
) -> Engine | None:
    """Return what ``build`` returns; None when the process is stopping.

    ``build`` runs in a thread, so that the lease is kept alive. A stop kills the processes that it
    has started. Raises EngineFailure if it fails.
    """
    tasks = Tasks("engine start")
    begun, reported = time.monotonic(), _PROGRESS_S
    building = tasks.spawn(_attempt(build), name="engine")
    stop = tasks.spawn(stopping.wait(), name="stop")
    while not building.done():
        waiting = {building} if stop.done() else {building, stop}
        await asyncio.wait(waiting, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        guard.update()
        if stopping.is_set() and not building.done():
            guard.kill()  # again until build() notices that its processes are gone
        passed = time.monotonic() - begun
        if passed >= reported:
            reported += _PROGRESS_S
            log.info("loading the engine: %.0f s", passed)
    await tasks.close()
    made = building.result()
    if stopping.is_set():
        if not isinstance(made, Exception):
            await made.close()
        return None
    if isinstance(made, Exception):
        raise EngineFailure(f"the vLLM engine did not start: {made}") from made
    log.info("engine ready after %.1f s: %s", time.monotonic() - begun, made.info)
    return made


async def _attempt(build: Callable[[], Engine]) -> Engine | Exception:
    try:
        return await asyncio.to_thread(build)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return error
