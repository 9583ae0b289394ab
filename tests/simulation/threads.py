"""Code of simulated processes that waits without an event loop: threads, verbs, their sockets.

Such code runs as a callback that is a job of an executor: while it waits, others run, and the loop
of its own process, too. Only in machines with an :class:`overlap.Overlap`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import fake_os
from network import Listener, Network, StreamTransport

__all__ = ["SimulatedThread", "ThreadEvent", "is_threaded", "run_here", "sockets", "threading"]

_T = TypeVar("_T")


def is_threaded() -> bool:
    """Whether the machine of this run has threads."""
    return fake_os.machine().has_threads


class Waiters:
    """The calls that wait for a change of something."""

    def __init__(self) -> None:
        self._resumes: list[Callable[[], None]] = []

    def wake(self) -> None:
        """Let them look again."""
        resumes, self._resumes = self._resumes, []
        for resume in resumes:
            resume()

    def wait(self, ready: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Wait until it is ready; False: it is not after ``timeout_s``."""
        machine = fake_os.machine()
        assert machine.overlap is not None
        until_s = None if timeout_s is None else machine.now_s + timeout_s

        def arm(resume: Callable[[], None]) -> None:
            self._resumes.append(resume)
            if until_s is not None:
                machine.at(until_s, resume)

        while not ready():
            if until_s is not None and machine.now_s >= until_s:
                return False
            machine.overlap.pause(arm)
        return True


def run_here(main: Coroutine[Any, Any, _T], **options: Any) -> _T:
    """Stand in for ``asyncio.run`` in a verb: run ``main`` on the loop of the process, and wait."""
    process = fake_os.machine().current
    assert process is not None
    waiters = Waiters()
    task = process.loop.create_task(main)
    task.add_done_callback(lambda _: waiters.wake())
    waiters.wait(task.done)
    result: _T = task.result()
    return result


class ThreadEvent:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._waiters = Waiters()
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._waiters.wake()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self._waiters.wait(self.is_set, timeout)


class SimulatedThread:
    """``threading.Thread`` of a process that lives on while it waits."""

    def __init__(
        self,
        target: Callable[..., None],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args = target, args
        self._waiters = Waiters()
        self._ended = False

    def start(self) -> None:
        """Begin soon."""
        process = fake_os.machine().current
        assert process is not None
        process.loop.call_soon(self._run)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._waiters.wait(lambda: self._ended, timeout)

    def _run(self) -> None:
        machine = fake_os.machine()
        machine.in_job = True
        try:
            self._target(*self._args)
        finally:
            machine.in_job = False
            self._ended = True
            self._waiters.wake()


threading = SimpleNamespace(Thread=SimulatedThread, Event=ThreadEvent)
"""What modules whose threads wait import as ``threading``."""


class _Received(asyncio.Protocol):
    """What a blocking socket has received and not been asked for."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended: Exception | bool = False
        self.waiters = Waiters()
        self.transport: StreamTransport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.waiters.wake()

    def eof_received(self) -> bool:
        self.ended = True
        self.waiters.wake()
        return True  # it may still write

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = self.ended or error or True
        self.waiters.wake()


class BlockingSocket:
    """``socket.socket`` for streams: blocks the code that uses it, for its timeout at most."""

    def __init__(self, *kind: Any) -> None:
        self._timeout_s: float | None = None
        self._stream: _Received | None = None
        self._listener: Listener | None = None
        self._file: socket.socket | None = None
        self._accepted: deque[_Received] = deque()
        self._waiters = Waiters()

    def __enter__(self) -> BlockingSocket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    # -- clients

    def connect(self, address: Any) -> None:
        """Connect. OSError."""
        machine = fake_os.machine()
        assert machine.current is not None
        if not is_threaded():
            raise ConnectionRefusedError
        task = machine.current.loop.create_task(
            Network.of(machine).connect(machine.current.loop, _Received, address)
        )
        waiters = Waiters()
        task.add_done_callback(lambda _: waiters.wake())
        if not waiters.wait(task.done, self._timeout_s):
            task.cancel()
            raise TimeoutError("timed out")
        _, self._stream = task.result()

    def sendall(self, data: bytes) -> None:
        """Send all: what the other end reads slowly waits in the kernel."""
        assert self._stream is not None
        if self._stream.ended not in (True, False):
            raise BrokenPipeError
        self._stream.transport.write(data)

    def recv(self, size: int) -> bytes:
        """Return some bytes, none at the end. OSError."""
        stream = self._stream
        assert stream is not None
        if not stream.waiters.wait(lambda: stream.data or stream.ended, self._timeout_s):
            raise TimeoutError("timed out")
        if not stream.data and isinstance(stream.ended, Exception):
            raise stream.ended
        data = bytes(stream.data[:size])
        del stream.data[:size]
        return data

    def close(self) -> None:
        """Close it. Idempotent."""
        if self._stream is not None:
            self._stream.transport.close()
        self.shutdown(socket.SHUT_RDWR)
        if self._file is not None:
            self._file.close()

    # -- servers

    def bind(self, path: str) -> None:
        """Make the file of the socket. OSError."""
        self._file = socket.socket(socket.AF_UNIX)
        self._file.bind(path)

    def listen(self, backlog: int = 0) -> None:
        """Accept connections from now on."""
        machine = fake_os.machine()
        assert machine.current is not None and self._file is not None

        def connected() -> _Received:
            stream = _Received()
            self._accepted.append(stream)
            self._waiters.wake()
            return stream

        self._listener = Network.of(machine).serve(
            machine.current.loop, connected, self._file.getsockname(), True, self._file
        )

    def accept(self) -> tuple[BlockingSocket, str]:
        """Wait for a connection. OSError: it was closed."""
        listener = self._listener
        assert listener is not None
        self._waiters.wait(lambda: self._accepted or not listener.serving)
        if not self._accepted:
            raise OSError("the socket is closed")
        connection = BlockingSocket()
        connection._stream = self._accepted.popleft()
        return connection, ""

    def shutdown(self, how: int) -> None:
        """End what waits in :meth:`accept`."""
        if self._listener is not None:
            self._listener.close()
            self._waiters.wake()


def _create_connection(address: Any, timeout: float | None = None) -> BlockingSocket:
    made = BlockingSocket()
    made.settimeout(timeout)
    made.connect(address)
    return made


sockets = SimpleNamespace(
    socket=BlockingSocket,
    create_connection=_create_connection,
    AF_UNIX=socket.AF_UNIX,
    SOCK_STREAM=socket.SOCK_STREAM,
    SHUT_RDWR=socket.SHUT_RDWR,
)
"""What modules with blocking sockets import as ``socket``."""
