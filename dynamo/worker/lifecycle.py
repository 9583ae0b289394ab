"""The lifecycle of a worker process: its runtimes, signals and graceful shutdown.

The first SIGTERM or SIGINT deregisters every worker and drains its streams; a second SIGINT aborts
them. A worker whose lease was revoked drains alone. The process exits after its last worker.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from dynamo.errors import DynamoError, EngineDied, EngineShutdown
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.os_process import StopSignals
from dynamo.runtime.process.stop_order import is_supervised, wait_for_frontends
from dynamo.runtime.process.tasks import Tasks

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_FRONTENDS_TIMEOUT_S = 900.0
"""Time for the frontends to drain, as long as the default of their own drain timeout."""

log = logging.getLogger(__name__)


class WorkerLifecycle:
    """Runs workers until they have drained. The first signal sets ``stopping``."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._runtimes: set[DistributedRuntime] = set()
        self._signals = StopSignals()
        self._tasks = Tasks("lifecycle")
        self._failures: list[Exception] = []

    async def run(self, workers: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Run all ``workers`` until each returns.

        When one fails, the streams of the others are aborted. Raises an ExceptionGroup of all
        failures after the last worker has returned.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, functools.partial(self._on_signal, number))
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(self._run_worker(worker))
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            await self._tasks.close()
        if self._failures:
            raise ExceptionGroup("workers failed", self._failures)

    @asynccontextmanager
    async def runtime(self, runtime: DistributedRuntime) -> AsyncIterator[DistributedRuntime]:
        """Shut ``runtime`` down on a signal; close it on exit, after a failure without draining."""
        self._runtimes.add(runtime)
        try:
            yield runtime
        except BaseException:
            runtime.serving.abort()
            raise
        finally:
            self._runtimes.discard(runtime)
            await runtime.close()

    async def wait(self, seconds: float) -> bool:
        """Wait ``seconds``; return False as soon as the process is stopping."""
        try:
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        except TimeoutError:
            return True
        return False

    async def _run_worker(self, worker: Callable[[], Awaitable[None]]) -> None:
        try:
            await worker()
        except Exception as failure:  # noqa: BLE001 - run() raises it
            # A signal during start-up fails whatever needs the lease: that is a normal end.
            if self.stopping.is_set() and all(
                isinstance(error, EngineShutdown) and not isinstance(error, EngineDied)
                for error in leaf_errors(failure)
            ):
                return
            self._failures.append(failure)
            self.stopping.set()
            self._abort_streams()

    def _abort_streams(self) -> None:
        for runtime in self._runtimes:
            runtime.serving.abort()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        count = self._signals.received(number, asyncio.get_running_loop().time())
        if count == 1 and is_supervised():
            # Frontends drain first: their last requests still need this worker.
            self._tasks.spawn(self._shut_down_after_frontends(name), name="shutdown")
        elif count == 1:
            self._shut_down(name)
        elif count:
            log.warning("%s again: aborting requests in flight", name)
            self.stopping.set()
            self._abort_streams()

    async def _shut_down_after_frontends(self, name: str) -> None:
        await wait_for_frontends(_FRONTENDS_TIMEOUT_S)
        self._shut_down(name)

    def _shut_down(self, name: str) -> None:
        self.stopping.set()
        log.info("%s: draining, requests in flight finish", name)
        for runtime in self._runtimes:
            runtime.shutdown()


def run_workers(workers: Coroutine[Any, Any, None], log: logging.Logger) -> int:
    """Run ``workers``, which awaits a :class:`WorkerLifecycle`; return the exit status.

    1 after failures, each in ``log``: a DynamoError by its text, others with their traceback.
    """
    try:
        uvloop.run(workers)
    except ExceptionGroup as failures:
        for failure in leaf_errors(failures):
            expected = isinstance(failure, DynamoError)
            log.error("%s", failure, exc_info=None if expected else failure)
        return 1
    return 0


def leaf_errors(failure: BaseException) -> Iterator[BaseException]:
    """Yield the errors in nested groups; for a plain error, itself."""
    if isinstance(failure, BaseExceptionGroup):
        for error in failure.exceptions:
            yield from leaf_errors(error)
    else:
        yield failure
