"""Start of the engine in a thread, with progress in the log; its sockets and ports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
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
from dynamo.runtime.process.paths import private_dir, socket_dirs, socket_path
from dynamo.runtime.process.tasks import Tasks
from dynamo.vllm.engine import Engine
from dynamo.worker.tree_guard import TreeGuard

__all__ = ["free_ports", "preset_nixl_port", "rpc_directory", "start_engine"]

_PROGRESS_S = 10.0
_CHECK_S = 0.5
_PORT_ATTEMPTS = 64
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


def preset_nixl_port(ranks: int) -> None:
    """Give NIXL's side channel a free port for each data-parallel rank, unless the user has.

    vLLM's default is one port for every engine of a machine. It adds the rank to it.
    """
    preset("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_ports(ranks)))


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive TCP ports that are free now."""
    for _ in range(_PORT_ATTEMPTS):
        with contextlib.ExitStack() as stack:
            first = 0
            try:
                for number in range(count):
                    bound = stack.enter_context(socket.socket())
                    bound.bind(("", first + number if first else 0))
                    first = first or bound.getsockname()[1]
            except (OSError, OverflowError):  # in use, or above 65535
                continue
            return first
    raise EngineFailure(f"no {count} consecutive free TCP ports found; set the engine's ports")


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
