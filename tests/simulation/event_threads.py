"""The compiled threads for KV events of a simulated process, and the ZeroMQ that they call.

The threads are real, and run the code of ``dynamo._fast.ingest``. One has its turn while the
machine waits, in no virtual time: it works off what its socket and its inbox have, until it polls
again. Virtual time and the seed decide when: a little after something came, later if its core is
busy, or in the middle of a callback, before the loop calls :class:`SteppedIngest`.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import functools
import itertools
import select
import struct
import threading
from collections import deque
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import fake_os
import zmq
from planes import Link

if TYPE_CHECKING:
    from machine import Process

__all__ = ["LOSSES", "connect_event_threads"]

_SOON_S = 0.0001
_LATE_S = (0.02, 0.3)
_LATE_SHARES = (0.05, 0.05, 0.5)
"""How late the threads of a router may be, and in which share of their turns."""
LOSSES: tuple[float, ...] = (0.0, 0.0, 0.3)
"""The share of messages that a socket loses when another of the same publisher follows."""
_AT_ONCE_SHARE = 0.5
"""Of the calls of the loop before which the threads have worked off what came."""
_STOPPED_S = 0.05
"""How often a thread of a stopped process is looked at."""
_U64 = struct.Struct(">Q")
_COMMANDS = {"connect", "disconnect", "push", "stop"}
_SHARED = {"add", "delegate", "next_handoff", "received_any", "reclaim", "remove"}


def connect_event_threads() -> None:
    """Let the event threads of routers use the simulated sockets. Once."""
    from dynamo.router.caches import event_threads

    simulated = _SimulatedZmq(event_threads._zmq_functions())
    vars(event_threads).update(
        Ingest=SteppedIngest,
        _zmq_functions=lambda: simulated.addresses,
        subscribing_socket=ThreadSocket,
        threading=SimpleNamespace(Thread=CompiledThread),
    )


class SteppedIngest:
    """``Ingest``; its threads may have their turn before each call of the loop."""

    def __init__(self, tree: Any, count: int, topic: str) -> None:
        from dynamo._fast.ingest import Ingest

        self._compiled = Ingest(tree, count, topic)
        self.sockets: dict[int, ThreadSocket] = {}
        self.threads: list[CompiledThread] = []
        self._machine = fake_os.machine()
        dice = self._machine.random
        self._late_s, self._late_share = dice.choice(_LATE_S), dice.choice(_LATE_SHARES)
        self._machine.files.pop(self._compiled.fileno(), None)  # a number used again

    def delay_s(self) -> float:
        """Return how long a thread takes until it looks at what has come."""
        dice = self._machine.random
        late = dice.random() < self._late_share
        return dice.random() * (self._late_s if late else _SOON_S)

    def set_socket(self, number: int, socket: int, functions: list[int]) -> None:
        """See ``Ingest``."""
        self.sockets[number] = ThreadSocket.known[socket]
        self._compiled.set_socket(number, socket, functions)

    def run(self, number: int) -> None:
        """See ``Ingest``. A thread whose process was killed executes nothing more."""
        self._compiled.run(number)
        if self.threads[number].killed:
            raise SystemExit

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._compiled, name)
        if name in _COMMANDS:
            return functools.partial(self._command, call)
        if name in _SHARED:
            return functools.partial(self._shared, call)
        return call

    def _command(self, call: Callable[..., Any], number: int, *args: Any) -> Any:
        result = call(number, *args)
        self.threads[number].wake()
        return result

    def _shared(self, call: Callable[..., Any], *args: Any) -> Any:
        for thread in self.threads:
            if thread.has_work and self._machine.random.random() < _AT_ONCE_SHARE:
                thread.turn()
        return call(*args)


class CompiledThread:
    """``threading.Thread`` of a router's event threads: runs in its turns only."""

    def __init__(self, target: Callable[[int], None], args: tuple[int], name: str) -> None:
        self._target = target
        (self._number,) = args
        self._machine = fake_os.machine()
        process = self._machine.current
        assert process is not None
        self.process: Process = process
        owner: Any = target
        self._ingest: SteppedIngest = owner.__self__.ingest
        self._ingest.threads.append(self)
        self.socket: ThreadSocket = self._ingest.sockets[self._number]
        self.socket.thread = self
        self.daemon = False
        self.ident: int | None = None
        self.has_work = False
        """Whether something has come since its last turn."""
        self.killed = False
        self._ended = False
        self._go, self._done = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._done.acquire()
        self._gone = _thread.allocate_lock()  # released when nothing of the thread is left
        self._wakeup = select.poll()
        self._wakeup_fd = -1

    def start(self) -> None:
        """Begin soon."""
        self.ident = _thread.start_new_thread(self._main, ())
        self._done.acquire()  # it waits for its first turn
        self.process.on_death[self._kill] = None
        self.wake()

    def join(self) -> None:
        """Give it turns until it has ended."""
        while not self._ended:
            self.turn()

    def wake(self) -> None:
        """Something has come: it has its turn soon."""
        if self.ident is not None and not self.has_work:
            self.has_work = True
            self._machine.after(self._ingest.delay_s(), self._due)

    def turn(self) -> None:
        """Let it run until it has worked off what has come."""
        self.has_work = False
        if not self._ended and self.process.alive:
            self._step()
            self._machine.files_changed = True  # it may have handed something over

    def _due(self) -> None:
        if self.process.state == "T":
            self._machine.after(_STOPPED_S, self._due)
        elif self.has_work:
            self._machine.enter(self.process)
            try:
                self.turn()
            finally:
                self._machine.current = None

    def _step(self) -> None:
        self._go.release()
        self._done.acquire()
        if self._ended:  # what it frees has an order, too
            self._gone.acquire()

    def _kill(self) -> None:
        """Its process has ended: let it return without another effect."""
        self.killed = True
        if not self._ended:
            self._step()
        self.socket.close()

    # -- in the thread

    def _main(self) -> None:
        self._gone = _thread._set_sentinel()  # type: ignore[attr-defined]
        self._gone.acquire()
        self._done.release()
        self._go.acquire()
        _SimulatedZmq.here.thread = self
        try:
            if not self.killed:
                self._target(self._number)
        finally:
            self._ended = True
            self._done.release()

    def poll(self, wakeup_fd: int) -> bool:
        """Return whether it has anything to do, at its next turn if nothing now; False: no more."""
        if self._wakeup_fd < 0:
            self._wakeup_fd = wakeup_fd
            self._wakeup.register(wakeup_fd, select.POLLIN)
            self._machine.files.pop(wakeup_fd, None)  # a number used again
        while not self.killed:
            if self.socket.poll() or self._wakeup.poll(0):
                return True
            self._done.release()
            self._go.acquire()
        return False


class ThreadSocket:
    """A SUB socket that a compiled thread reads. ``closed`` links deliver nothing."""

    known: ClassVar[dict[int, ThreadSocket]] = {}
    _numbers = itertools.count(1)

    def __init__(self, topic: str) -> None:
        self.underlying = next(self._numbers)
        self.known[self.underlying] = self
        self.thread: CompiledThread | None = None
        self.frames: deque[bytes] = deque()
        """Those of the message that is being read."""
        self.error: int = 0
        self._topic = topic
        self._dice = fake_os.machine().random
        self._loss = self._dice.choice(LOSSES)
        self._peers: dict[str, _Peer] = {}
        self._messages: deque[tuple[_Peer, tuple[int, int, bytes]]] = deque()
        self._first: _Peer | None = None
        """Whose message ``zmq_poll`` has begun to take off its pipe."""

    def close(self, linger: int = 0) -> None:
        """Disconnect from all. Idempotent."""
        self.known.pop(self.underlying, None)
        for peer in self._peers.values():
            peer.link.close()
        self._peers.clear()

    def connect(self, address: str) -> None:
        """Connect to a publisher, as soon as there is one."""
        assert self.thread is not None
        if address not in self._peers:
            self._peers[address] = _Peer(self, self.thread.process, address)

    def disconnect(self, address: str) -> None:
        """Disconnect, and drop what has come from there."""
        peer = self._peers.pop(address, None)
        if peer is None:
            self.error = errno.ENOENT
            return
        peer.link.close()
        if peer is self._first:
            text = "a thread ends a connection whose message it has begun: libzmq would abort"
            fake_os.machine().failures.append(text)
        self._messages = deque(one for one in self._messages if one[0] is not peer)

    def arrived(self, peer: _Peer, event: tuple[int, int, bytes]) -> None:
        """A message has come; the one before it is lost at times, as if a queue had been full."""
        last = self._messages[-1][0] if self._messages else None
        if last is peer and self._dice.random() < self._loss:
            self._messages.pop()
        self._messages.append((peer, event))
        if self.thread is not None:
            self.thread.wake()

    def poll(self) -> bool:
        """Whether there is a message; its first frame is off its pipe then."""
        if self._messages:
            self._first = self._messages[0][0]
        return bool(self._messages)

    def receive(self) -> bytes | None:
        """Return the next frame; None: there is none."""
        from dynamo.runtime.events.plane import pack

        if not self.frames:
            if not self._messages:
                self.error = errno.EAGAIN
                return None
            self._first = None
            _, (publisher, sequence, payload) = self._messages.popleft()
            packed = pack(publisher, sequence, self._topic, payload)
            topic = self._topic.encode()
            self.frames.extend((topic, _U64.pack(publisher), _U64.pack(sequence), packed))
        return self.frames.popleft()


class _Peer:
    """One publisher of a socket: what :class:`Link` takes for a subscriber."""

    def __init__(self, socket: ThreadSocket, process: Process, address: str) -> None:
        self.process = process
        self._socket = socket
        self.link = Link(self, address)

    def arrived(self, event: tuple[int, int, bytes]) -> None:
        """A message has come."""
        self._socket.arrived(self, event)


class _Here(threading.local):
    thread: CompiledThread | None = None


class _PollItem(ctypes.Structure):
    _fields_ = (
        ("socket", ctypes.c_void_p),
        ("descriptor", ctypes.c_int),
        ("events", ctypes.c_short),
        ("found", ctypes.c_short),
    )


_INT, _POINTER = ctypes.c_int, ctypes.c_void_p


class _SimulatedZmq:
    """The functions of libzmq that compiled threads call: messages are its own, sockets are not."""

    here = _Here()

    def __init__(self, real: list[int]) -> None:
        from dynamo._fast.ingest import ZMQ_FUNCTIONS

        library = ctypes.CDLL(import_module("zmq.backend.cython._zmq").__file__)
        self._init, self._data = library.zmq_msg_init_size, library.zmq_msg_data
        self._init.argtypes, self._data.argtypes = (_POINTER, ctypes.c_size_t), (_POINTER,)
        self._data.restype = _POINTER
        text = ctypes.c_char_p
        self._kept = {  # callbacks must live as long as they may be called
            "zmq_poll": _callback(self._poll, ctypes.POINTER(_PollItem), _INT, ctypes.c_long),
            "zmq_connect": _callback(self._connect, _POINTER, text),
            "zmq_disconnect": _callback(self._disconnect, _POINTER, text),
            "zmq_msg_recv": _callback(self._receive, _POINTER, _POINTER, _INT),
            "zmq_msg_more": _callback(self._more, _POINTER),
            "zmq_errno": _callback(self._errno),
            "zmq_setsockopt": _callback(lambda *args: 0, _POINTER, _INT, _POINTER, ctypes.c_size_t),
        }
        own = {name: ctypes.cast(call, _POINTER).value or 0 for name, call in self._kept.items()}
        self.addresses = [
            own.get(name, address) for name, address in zip(ZMQ_FUNCTIONS, real, strict=True)
        ]

    @property
    def _thread(self) -> CompiledThread:
        thread = self.here.thread
        assert thread is not None
        return thread

    def _poll(self, items: Any, count: int, timeout_ms: int) -> int:
        if self._thread.poll(items[1].descriptor):
            return 1
        self._thread.socket.error = int(zmq.ETERM)
        return -1

    def _connect(self, socket: int, address: bytes) -> int:
        ThreadSocket.known[socket].connect(address.decode())
        return 0

    def _disconnect(self, socket: int, address: bytes) -> int:
        ThreadSocket.known[socket].disconnect(address.decode())
        return 0

    def _receive(self, message: int, socket: int, flags: int) -> int:
        frame = ThreadSocket.known[socket].receive()
        if frame is None:
            return -1
        self._init(message, len(frame))
        ctypes.memmove(self._data(message), frame, len(frame))
        return len(frame)

    def _more(self, message: int) -> int:
        return len(self._thread.socket.frames)

    def _errno(self) -> int:
        return self._thread.socket.error


def _callback(call: Callable[..., int], *types: Any) -> Any:
    """Return a C function that calls ``call``; an exception fails the run."""

    def guarded(*args: Any) -> int:
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - ctypes would print and ignore it
            fake_os.machine().failures.append(f"simulated ZeroMQ: {error!r}")
            return -1

    return ctypes.CFUNCTYPE(_INT, *types)(guarded)
