"""Start of the engine in a thread, with progress in the log, and the directory of its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from dynamo.config import preset
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import EngineFailure
from dynamo.runtime.discovery.stale_sockets import (
    StaleSockets,
    engine_directory_name,
    remove_sockets,
)
from dynamo.runtime.paths import private_dir, socket_dirs, socket_path
from dynamo.runtime.tasks import Tasks
from dynamo.vllm.engine import Engine
from dynamo.worker.tree_guard import TreeGuard

__all__ = ["rpc_directory", "start_engine"]

_PROGRESS_S = 10.0
_CHECK_S = 0.5
log = logging.getLogger(__name__)


@contextlib.contextmanager
def rpc_directory(runtime: RuntimeSettings, worker_id: int) -> Iterator[Path]:
    """Let vLLM create its own sockets in a private directory, and remove it at the end.

    vLLM gives them random names and leaves them when its processes are killed: by default in the
    temp directory. Those of other killed engines are removed, too. A ``VLLM_RPC_BASE_PATH`` that
    the user has set wins.
    """
    StaleSockets(lambda: socket_dirs(runtime)).sweep(lambda instance_id: False)
    longest = f"{engine_directory_name(worker_id)}/{uuid.UUID(int=0)}"
    directory = private_dir(Path(socket_path(runtime, longest)).parent)
    preset("VLLM_RPC_BASE_PATH", str(directory))
    try:
        yield directory
    finally:
        remove_sockets(directory)


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
