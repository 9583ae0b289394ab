"""The life of a worker process: one runtime or several, signals, and an orderly end. Spec 7.9.

The first SIGTERM or SIGINT makes every worker leave discovery and finish its streams, a second
SIGINT cuts them. A worker whose lease was revoked leaves alone. When the last one has left, the
process ends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from dynamo.errors import EngineShutdown
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.stop_order import is_supervised, wait_for_frontends
from dynamo.runtime.stop_signals import StopSignals
from dynamo.runtime.tasks import Tasks

__all__ = ["WorkerLife", "leaves"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_FRONTENDS_TIMEOUT_S = 900.0
log = logging.getLogger(__name__)


class WorkerLife:
    """Runs workers until they have left. ``stopping`` is set by the first signal."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._runtimes: set[DistributedRuntime] = set()
        self._signals = StopSignals()
        self._tasks = Tasks("life")
        self._failures: list[Exception] = []

    async def run(self, workers: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Run all ``workers``; each ends by itself.

        When one fails the others are cut and leave; then an ExceptionGroup tells of all failures.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, functools.partial(self._on_signal, number))
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(self._guarded(worker))
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            await self._tasks.close()
        if self._failures:
            raise ExceptionGroup("workers failed", self._failures)

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

    async def _guarded(self, worker: Callable[[], Awaitable[None]]) -> None:
        try:
            await worker()
        except Exception as failure:  # noqa: BLE001 - raised by run() when all have left
            if self.stopping.is_set() and all(_is_leaving(error) for error in leaves(failure)):
                return
            self._failures.append(failure)
            self.stopping.set()
            self._cut()

    def _cut(self) -> None:
        for runtime in self._runtimes:
            runtime.serving.cut()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        count = self._signals.received(number, asyncio.get_running_loop().time())
        if count == 1 and is_supervised():
            self._tasks.spawn(self._leave_in_turn(name), name="leave in turn")
        elif count == 1:
            self._leave(name)
        elif count:
            log.warning("%s again: cutting what is in flight", name)
            self.stopping.set()
            self._cut()

    async def _leave_in_turn(self, name: str) -> None:
        await wait_for_frontends(_FRONTENDS_TIMEOUT_S)
        self._leave(name)

    def _leave(self, name: str) -> None:
        self.stopping.set()
        log.info("%s: leaving, streams in flight finish", name)
        for runtime in self._runtimes:
            runtime.shutdown()


def leaves(failure: BaseException) -> Iterator[BaseException]:
    """The errors in nested groups, one by one; of a plain error, itself."""
    if isinstance(failure, BaseExceptionGroup):
        for error in failure.exceptions:
            yield from leaves(error)
    else:
        yield failure


def _is_leaving(error: BaseException) -> bool:
    """A signal during start-up: whatever needs the lease is told that the process is leaving."""
    return isinstance(error, EngineShutdown)
