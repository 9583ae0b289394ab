"""The life of a worker process: one runtime or several, signals, and an orderly end. Spec 7.9.

The first SIGTERM or SIGINT makes every worker leave discovery and finish its streams, the second
cuts them. A worker whose lease was revoked leaves alone. When the last one has left, the
process ends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from dynamo.runtime import DistributedRuntime

__all__ = ["WorkerLife", "leaves"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_SIGNAL_S = 0.5  # a process group and a parent may both pass on the same signal
_log = logging.getLogger(__name__)


class WorkerLife:
    """Runs workers until they have left. ``stopping`` is set by the first signal."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._runtimes: set[DistributedRuntime] = set()
        self._stopped_at = 0.0

    async def run(self, workers: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Run all ``workers``; each ends by itself. The first failure ends the others, too."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, functools.partial(self._on_signal, number))
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(_awaited(worker))
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    @asynccontextmanager
    async def runtime(self, runtime: DistributedRuntime) -> AsyncIterator[DistributedRuntime]:
        """Own ``runtime``: signals reach it, and it is closed at the end; gracefully if all is
        well, without waiting for streams after a failure."""
        self._runtimes.add(runtime)
        try:
            yield runtime
        except BaseException:
            runtime.serving.cut()
            raise
        finally:
            self._runtimes.discard(runtime)
            await runtime.close()

    async def wait(self, seconds: float) -> bool:
        """Wait ``seconds``; False as soon as the process is to stop."""
        try:
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        except TimeoutError:
            return True
        return False

    def _on_signal(self, number: int) -> None:
        name, now = signal.Signals(number).name, asyncio.get_running_loop().time()
        if not self.stopping.is_set():
            self.stopping.set()
            self._stopped_at = now
            _log.info("%s: leaving, streams in flight finish", name)
            for runtime in self._runtimes:
                runtime.shutdown()
        elif now - self._stopped_at >= _SAME_SIGNAL_S:
            _log.warning("%s again: cutting what is in flight", name)
            for runtime in self._runtimes:
                runtime.serving.cut()


def leaves(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The errors in nested groups, one by one."""
    for error in failures.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


async def _awaited(worker: Callable[[], Awaitable[None]]) -> None:
    await worker()
