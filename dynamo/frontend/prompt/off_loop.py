"""Threads that decode and tokenize large requests beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from dynamo.errors import Unavailable

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
_MAX_THREADS = 4
_LIMIT_BYTES = 256 << 20


class OffLoop:
    """A few threads, and a bound on the bodies that wait for them.

    Each thread works on one body at a time: their number bounds the memory that large requests
    take together. ``held_bytes`` is the size of the bodies in work or waiting.
    """

    def __init__(self, limit_bytes: int = _LIMIT_BYTES) -> None:
        count = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, "prompt")
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Count a body while it is worked on. Raises Unavailable above the limit.

        One body is always accepted, however large.
        """
        if self.held_bytes and self.held_bytes + size_bytes > self._limit_bytes:
            raise Unavailable(
                f"{self._limit_bytes >> 20} MiB of large requests are in preparation, please retry "
                "shortly"
            )
        # Without a lock: the event loop alone counts.
        self.held_bytes += size_bytes
        try:
            yield
        finally:
            self.held_bytes -= size_bytes

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` in a thread. Raises what it raises."""
        work = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Drop queued work; running work ends on its own."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def end_without_threads(delay_s: float, status: int) -> None:
    """End this process after ``delay_s``, with ``status``, if one of its threads still runs.

    Python waits for the threads of executors, and a thread cannot be cancelled.
    """

    def end() -> None:
        log.warning("a thread did not end within %g s: exiting without it", delay_s)
        logging.shutdown()
        os._exit(status)

    timer = threading.Timer(delay_s, end)
    timer.daemon = True
    timer.start()
