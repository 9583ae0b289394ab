"""Decorators for a worker's main function and its handlers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from dynamo.errors import ConfigError, ModelUnreachable
from dynamo.runtime.distributed.runtime import DistributedRuntime, warn_enable_nats
from dynamo.runtime.logging import configure_dynamo_logging
from dynamo.runtime.process.os_process import StopSignals
from dynamo.runtime.process.stop_order import is_supervised, wait_for_frontends

R = TypeVar("R")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_RETURN_TIMEOUT_S = 10.0
log = logging.getLogger(__name__)


def dynamo_worker(
    enable_nats: bool | None = None, static: bool | None = None
) -> Callable[[Callable[..., Awaitable[R]]], Callable[..., Coroutine[Any, Any, R | None]]]:
    """Decorate ``async def main(runtime, …)``: create its runtime from the environment, close it.

    SIGTERM and SIGINT end the process gracefully with status 0: it leaves discovery, streams in
    flight finish, ``serve_endpoint`` returns. A second SIGINT aborts them. A function that serves
    nothing is cancelled by the first signal. A ConfigError prints one line on stderr and exits with
    status 1, or 75 if a later start may succeed. ``enable_nats`` is deprecated; neither argument
    has an effect.
    """
    if enable_nats is not None:
        warn_enable_nats()

    def decorate(
        function: Callable[..., Awaitable[R]],
    ) -> Callable[..., Coroutine[Any, Any, R | None]]:
        @functools.wraps(function)
        async def main(*args: Any, **kwargs: Any) -> R | None:
            if not logging.getLogger().handlers:
                configure_dynamo_logging()
            try:
                runtime = DistributedRuntime(asyncio.get_running_loop())
                try:
                    return await _Main(runtime, function(runtime, *args, **kwargs)).run()
                finally:
                    await runtime.close()
            except ModelUnreachable as error:  # `dynamo serve` repeats the start
                sys.stderr.write(f"error: {error.message}\n")
                raise SystemExit(error.exit_status) from error
            except ConfigError as error:
                raise SystemExit(f"error: {error.message}") from error

        return main

    return decorate


async def run_until_signalled(runtime: DistributedRuntime, work: Awaitable[R]) -> R | None:
    """Await ``work`` under the signals of :func:`dynamo_worker`; None if a signal ended it.

    The caller closes ``runtime``.
    """
    return await _Main(runtime, work).run()


class _Main(Generic[R]):
    """A main function under stop signals. It runs in the task of the caller."""

    def __init__(self, runtime: DistributedRuntime, work: Awaitable[R]) -> None:
        self._runtime = runtime
        self._work = work
        self._signals = StopSignals()
        self._cancelled = False

    async def run(self) -> R | None:
        """Return the result of the work; None if a signal ended it."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        installed = _install(loop, functools.partial(self._on_signal, task))
        try:
            return await self._work
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            # The signal is dealt with: timeouts in what the caller closes next must not see it.
            task.uncancel()
            return None
        finally:
            for number in installed:
                loop.remove_signal_handler(number)

    def _on_signal(self, task: asyncio.Task[object], number: int) -> None:
        count = self._signals.received(number, asyncio.get_running_loop().time())
        serving = self._runtime.serving
        if count > 1:
            log.warning("%s again: aborting requests in flight", signal.Signals(number).name)
            serving.abort()
            self._cancel(task)
        elif count and serving.is_serving() and is_supervised():
            self._runtime.tasks.spawn(
                self._shut_down_in_order(task, number), name="shut down in order"
            )
        elif count:
            self._shut_down(task, number)

    async def _shut_down_in_order(self, task: asyncio.Task[object], number: int) -> None:
        await wait_for_frontends(self._runtime.system.shutdown_timeout_s)
        self._shut_down(task, number)

    def _shut_down(self, task: asyncio.Task[object], number: int) -> None:
        log.info("%s: shutting down", signal.Signals(number).name)
        idle = not self._runtime.serving.is_serving()
        self._runtime.shutdown()
        if idle:
            self._cancel(task)
        else:
            self._runtime.tasks.spawn(self._enforce_return(task), name="enforce return")

    async def _enforce_return(self, task: asyncio.Task[object]) -> None:
        """Cancel a main function that still runs some time after the shutdown."""
        await self._runtime.serving.stopped.wait()
        await asyncio.sleep(_RETURN_TIMEOUT_S)
        log.warning(
            "the main function still runs %g s after the shutdown: cancelling it", _RETURN_TIMEOUT_S
        )
        self._cancel(task)

    def _cancel(self, task: asyncio.Task[object]) -> None:
        # Once only: run() takes one cancellation back.
        if not self._cancelled:
            self._cancelled = True
            task.cancel()


def dynamo_endpoint(
    request_model: Any, response_model: Any
) -> Callable[[Callable[..., AsyncIterator[Any]]], Callable[..., AsyncIterator[Any]]]:
    """Validate requests of a handler by a pydantic model (older API).

    The request may be a mapping, JSON text or a model. A bad request raises ValueError, which the
    caller receives as an invalid request. A type that is not a model, such as ``str``, disables
    validation. Items are passed on unchanged, whatever ``response_model``; a model as mapping.
    """

    def decorate(
        function: Callable[..., AsyncIterator[Any]],
    ) -> Callable[..., AsyncIterator[Any]]:
        position = _request_position(function)

        @functools.wraps(function)
        async def generate(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            arguments = list(args)
            arguments[position] = _parse(request_model, arguments[position])
            async for item in function(*arguments, **kwargs):
                yield item.model_dump() if _is_model(item) else item

        return generate

    return decorate


def _install(
    loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]
) -> list[signal.Signals]:
    installed = []
    for number in _SIGNALS:
        try:
            loop.add_signal_handler(number, on_signal, number)
        except (RuntimeError, ValueError) as error:  # not the main thread
            log.debug("no handler for %s: %s", number.name, error)
        else:
            installed.append(number)
    return installed


def _request_position(function: Callable[..., Any]) -> int:
    names = list(inspect.signature(function).parameters)
    return 1 if names[:1] == ["self"] else 0


def _is_model(value: Any) -> bool:
    return hasattr(value, "model_dump")


def _validates(model: Any) -> bool:
    return hasattr(model, "model_validate")


def _parse(model: Any, request: Any) -> Any:
    if _is_model(request) or not _validates(model):
        return request
    if isinstance(request, (str, bytes)):
        return model.model_validate_json(request)
    return model.model_validate(request)
