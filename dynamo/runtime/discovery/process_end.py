"""A callback at the end of a process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from dynamo.runtime.process.os_process import is_running

__all__ = ["ProcessEnd"]


class ProcessEnd:
    """Calls ``on_end`` on the loop as soon as the process ends, through a pidfd.

    ProcessLookupError: it has ended already, or its pid belongs to another process. OSError: the
    system has no descriptor left.
    """

    def __init__(self, pid: int, ticks: int, on_end: Callable[[], None]) -> None:
        self._fd = os.pidfd_open(pid)
        # After opening: the pidfd pins one process, and the start time proves that it is ours.
        if not is_running(pid, ticks):
            os.close(self._fd)
            raise ProcessLookupError(f"process {pid} of that start time has ended")
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ended)

    def close(self) -> None:
        """Stop watching the process. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ended(self) -> None:
        self.close()
        self._on_end()
