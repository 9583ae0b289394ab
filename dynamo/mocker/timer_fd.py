"""A timer with the kernel's precision.

uvloop rounds timers up to whole milliseconds; an iteration of a sped-up engine is shorter. A
timerfd is exact to some ten microseconds, on any event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from types import TracebackType

__all__ = ["TimerFd"]

_ABSOLUTE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Timerspec(ctypes.Structure):
    """``struct itimerspec``: interval, then value, each as seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerFd:
    """A timer for one waiting task; a context manager, on the running loop. Linux only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        flags = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK | TFD_CLOEXEC
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, flags)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> TimerFd:
        self._loop.add_reader(self._fd, self._on_expired)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    async def sleep_until(self, when_s: float) -> None:
        """Sleep until ``time.monotonic()`` reaches ``when_s``; only yield to the loop if it has."""
        if when_s <= time.monotonic():
            await asyncio.sleep(0)
            return
        whole_s = int(when_s)
        when = _Timerspec(0, 0, whole_s, int((when_s - whole_s) * 1e9))
        if _libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(when), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        self._waiter = self._loop.create_future()
        await self._waiter

    def _on_expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # settime() cleared an expiry that a cancelled sleep had not read
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
