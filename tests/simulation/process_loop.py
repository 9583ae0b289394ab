"""The event loop of one simulated process."""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from network import Network
from process_end import ProcessKilled

if TYPE_CHECKING:
    from machine import Machine, Process

__all__ = ["ProcessLoop"]

_THREAD_S = 0.004


if TYPE_CHECKING:
    AnyLoop = Any  # its methods are those that the programs call, with looser types
else:
    AnyLoop = asyncio.AbstractEventLoop


class LoopHandle(asyncio.Handle):
    """A handle of a loop without a debug mode."""

    __slots__ = ()

    def __init__(
        self, callback: Any, args: Any, loop: Any, context: contextvars.Context | None
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


class LoopTimer(LoopHandle):
    """As asyncio's TimerHandle."""

    __slots__ = ("when_s",)
    when_s: float

    def when(self) -> float:
        return self.when_s


class ProcessLoop(AnyLoop):  # type: ignore[misc]
    """What asyncio programs use of a loop, in the virtual time of ``machine``."""

    def __init__(self, machine: Machine, process: Process) -> None:
        self.machine = machine
        self.process = process
        self.ready_callbacks: deque[asyncio.Handle] = deque()
        self.is_queued = False
        self._once: set[int] = set()
        self._exception_handler: Callable[..., None] | None = None
        self._last_timer_s = 0.0

    # -- callbacks

    def time(self) -> float:
        return self.machine.now_s

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = LoopHandle(callback, args, self, context)
        self._add(handle)
        return handle

    call_soon_threadsafe = call_soon

    def _add(self, handle: asyncio.Handle) -> None:
        if self.process.state == "Z":
            self.machine.graveyard.append(handle)
            return
        self.ready_callbacks.append(handle)
        if not self.is_queued and self.process.state == "R":
            self.is_queued = True
            self.machine.ready(self)

    def call_soon_once(self, key: int, callback: Callable[[], None]) -> None:
        """Add ``callback`` unless the one of this key has not run yet."""
        if key not in self._once:
            self._once.add(key)
            self.call_soon(self._run_once, key, callback)

    def _run_once(self, key: int, callback: Callable[[], None]) -> None:
        self._once.discard(key)
        self.machine.files_changed = True  # it may leave something unread
        if key in self.machine.readers:
            callback()

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> LoopTimer:
        return self.call_at(self.machine.now_s + max(0.0, delay), callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> LoopTimer:
        handle = LoopTimer(callback, args, self, context)
        handle.when_s = when
        self.machine.at(when, self._timer, handle)
        return handle

    def _timer(self, handle: LoopTimer) -> None:
        if not handle._cancelled:
            self._add(handle)

    def callback_failed(self, error: BaseException, handle: LoopHandle) -> None:
        """A callback raised ``error``."""
        if not isinstance(error, ProcessKilled):
            text = f"Exception in callback {handle._callback!r}"
            self.call_exception_handler({"message": text, "exception": error, "handle": handle})

    # -- tasks and futures

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        return task

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run ``func`` a little later, as a thread would."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            self.machine.in_job = True
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)
            finally:
                self.machine.in_job = False

        self.call_later(self.machine.random.random() * _THREAD_S, run)
        return future

    def set_default_executor(self, executor: Any) -> None:
        """No executor is used."""

    # -- state

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """There is no debug mode."""

    def stop(self) -> None:
        """The machine stops, not a loop."""

    def close(self) -> None:
        """The end of the process closes its loop."""

    async def shutdown_asyncgens(self) -> None:
        """Generators end with the run."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There are no threads."""

    def get_exception_handler(self) -> Callable[..., None] | None:
        return self._exception_handler

    def set_exception_handler(self, handler: Callable[..., None] | None) -> None:
        self._exception_handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), ProcessKilled):
            return
        if self._exception_handler is not None:
            self._exception_handler(self, context)
            return
        self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Note an exception without a handler: a failure of the run."""
        error = context.get("exception")
        text = f"{self.process.name}: {context.get('message')}: {error!r}"
        self.machine.note(text)
        self.machine.failures.append(f"unhandled: {text}")

    # -- signals and descriptors

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
        self.process.handlers[int(sig)] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.process.handlers.pop(int(sig), None) is not None

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        self.machine.add_reader(self, number, lambda: callback(*args))

    def remove_reader(self, fd: Any) -> bool:
        return self.machine.forget_reader(fd if isinstance(fd, int) else fd.fileno())

    # -- connections

    async def getaddrinfo(self, host: Any, port: Any, **rest: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host or "127.0.0.1", port))]

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **rest: Any
    ) -> Any:
        return await Network.of(self.machine).connect(self, protocol_factory, (host, port))

    async def create_unix_connection(
        self, protocol_factory: Any, path: Any = None, **rest: Any
    ) -> Any:
        return await Network.of(self.machine).connect(self, protocol_factory, str(path))

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        sock = options.get("sock")
        address = sock.getsockname()[:2] if sock is not None else (host, port)
        start = options.get("start_serving", True)
        return Network.of(self.machine).serve(self, protocol_factory, address, start, sock)

    async def create_unix_server(
        self, protocol_factory: Any, path: Any = None, **options: Any
    ) -> Any:
        sock = options.get("sock")
        if sock is None:
            sock = socket.socket(socket.AF_UNIX)
            Path(path).unlink(missing_ok=True)
            sock.bind(str(path))  # the file; what connects is simulated
        where = sock.getsockname()
        server = Network.of(self.machine).serve(self, protocol_factory, where, True, sock)
        self.machine.on_file(where, True)
        return server
