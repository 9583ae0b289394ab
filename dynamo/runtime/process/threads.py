"""Threads beside the event loop.

asyncio's default pool is left to users' code, in workers and extensions: what is stuck there stops
nothing of ours. What others time (a hub, a name server, code of users) has a pool or a thread of
its own; the rest, which reads and writes files of this machine, has one pool.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_files = ThreadPoolExecutor(8, "files")


def in_file_thread(
    function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]:
    """Call ``function``, which takes as long as files and processes of this machine do.

    The result raises what it raises.
    """
    work = partial(function, *args, **kwargs)
    return asyncio.get_running_loop().run_in_executor(_files, work)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs in this thread; None without one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` in a thread of its own, for which the end of the process does not wait.

    Raises what it raises.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # from here on it is not cancelled, only abandoned

    def call() -> None:
        try:
            result.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            result.set_exception(error)

    threading.Thread(target=call, name="load", daemon=True).start()
    return await asyncio.wrap_future(result)
