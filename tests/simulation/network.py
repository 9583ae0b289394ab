"""Byte streams between simulated processes: delays, partial reads, cuts, back-pressure, deaths."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from machine import Machine, Process
    from process_loop import ProcessLoop

__all__ = ["Listener", "Network", "StreamTransport"]

Address = str | tuple[str, int]
"""The path of a UNIX socket, or host and port."""

_KERNEL_BYTES = 128 << 10
_FIRST_PORT = 40_000
_LATENCY_S = 0.0004


class Network:
    """The listeners and connections of one machine."""

    _of: ClassVar[WeakKeyDictionary[Machine, Network]] = WeakKeyDictionary()

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.listeners: dict[Address, Listener] = {}
        self.connections: dict[StreamTransport, None] = {}
        """The accepting end of each connection."""
        self.on_listen: Callable[[Process, Address], None] = lambda process, address: None
        self.on_close: Callable[[Process, Address], None] = lambda process, address: None
        self._port = _FIRST_PORT

    @classmethod
    def of(cls, machine: Machine) -> Network:
        """The network of ``machine``."""
        return cls._of.setdefault(machine, cls(machine))

    def latency_s(self) -> float:
        """How long some bytes travel: mostly well below a millisecond, sometimes longer."""
        dice = self.machine.random.random()
        return _LATENCY_S * (0.1 + dice) if dice < 0.95 else _LATENCY_S * 40 * dice

    def serve(
        self, loop: ProcessLoop, factory: Any, address: Address, start: bool, sock: Any
    ) -> Listener:
        """Bind ``address``. OSError: it is in use."""
        if isinstance(address, tuple):
            host, port = address[0] or "127.0.0.1", address[1]
            if not port:
                self._port += 1
                port = self._port
            address = host, port
            if address in self.listeners:
                raise OSError(errno.EADDRINUSE, "Address already in use")
        listener = Listener(self, loop, factory, address, start)
        if sock is not None:
            loop.process.held.append(sock)
        self.listeners[address] = listener
        loop.process.on_death[listener.close] = None
        return listener

    async def connect(
        self, loop: ProcessLoop, factory: Callable[[], asyncio.Protocol], address: Address
    ) -> tuple[StreamTransport, asyncio.Protocol]:
        """Connect to ``address``. FileNotFoundError, ConnectionRefusedError."""
        if isinstance(address, tuple):
            host = "127.0.0.1" if address[0] in ("localhost", None) else address[0]
            address = host, int(address[1])
        await asyncio.sleep(self.latency_s())
        listener = self.listeners.get(address)
        if isinstance(address, str) and not Path(address).exists():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if listener is None or not listener.serving:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        near, far = StreamTransport(self, loop), StreamTransport(self, listener.loop)
        near.peer, far.peer = far, near
        near.address = far.address = address
        self.connections[far] = None
        listener.loop.call_soon_threadsafe(far.open, listener.factory)
        near.open(factory)
        assert near.protocol is not None
        return near, near.protocol


class Listener:
    """A listening socket."""

    def __init__(
        self, network: Network, loop: ProcessLoop, factory: Any, address: Address, start: bool
    ) -> None:
        self.network = network
        self.loop = loop
        self.factory = factory
        self.address = address
        self.serving = start
        self.sockets = (BoundSocket(address),)

    def close(self) -> None:
        """Listen no more."""
        if self.serving:
            self.network.on_close(self.loop.process, self.address)
        self.serving = False
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]

    async def start_serving(self) -> None:
        """Accept connections."""
        self.serving = True
        self.network.on_listen(self.loop.process, self.address)

    async def wait_closed(self) -> None:
        """Return when it is closed."""
        await asyncio.sleep(0)

    def is_serving(self) -> bool:
        """Whether it accepts connections."""
        return self.serving


class BoundSocket:
    """What a program reads from a listening socket."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def getsockname(self) -> Address:
        return self._address

    def setsockopt(self, *args: Any) -> None:
        """Options have no effect here."""


class StreamTransport(asyncio.Transport):
    """One end of a connection. Bytes arrive in order, in other pieces than they were written."""

    peer: StreamTransport
    address: Address = ""

    def __init__(self, network: Network, loop: ProcessLoop) -> None:
        super().__init__()
        self.network = network
        self.loop = loop
        self.protocol: asyncio.Protocol | None = None
        self._machine = network.machine
        self._inbox = bytearray()
        self._eof: str = ""
        self._scheduled = False
        self._reading = True
        self._closing = False
        self._lost = False
        self._unread = 0
        self._high, self._low = 64 << 10, 16 << 10
        self._paused = False
        self._arrives_s = 0.0
        loop.process.on_death[self._died] = None

    def open(self, factory: Callable[[], asyncio.Protocol]) -> None:
        """Make the protocol and connect it."""
        self.protocol = factory()
        self.protocol.connection_made(self)
        self._schedule()

    # -- asyncio.Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername":
            return ("127.0.0.1", 1) if isinstance(self.address, tuple) else ""
        return default

    def write(self, data: Any) -> None:
        if self._closing or self._lost or not data:
            return
        size = len(data)
        self._unread += size
        self._send(self.peer._arrive, bytes(data))
        if self._unsent() > self._high and not self._paused and self.protocol is not None:
            self._paused = True
            self.protocol.pause_writing()

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._send(self.peer._end, "eof")

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._send(self.peer._end, "reset" if self._inbox else "eof")
            self.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            self._send(self.peer._end, "reset")
            self.loop.call_soon(self._lose, None)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 << 10 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._schedule()

    def is_reading(self) -> bool:
        return self._reading

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol  # type: ignore[assignment]

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.protocol is not None
        return self.protocol

    # -- the network

    def cut(self) -> None:
        """Break the connection: what is on its way is lost, both ends see a reset."""
        for end in (self, self.peer):
            end._inbox.clear()
            end._end("reset")

    def _unsent(self) -> int:
        return max(0, self._unread - _KERNEL_BYTES)

    def _send(self, call: Callable[..., None], *args: Any) -> None:
        """Deliver to the other end, after what was sent before."""
        machine = self._machine
        self._arrives_s = max(self._arrives_s, machine.now_s + self.network.latency_s())
        machine.at(self._arrives_s, call, *args)

    def _arrive(self, data: bytes) -> None:
        if self._lost or self._eof == "reset":
            return
        self._inbox += data
        self._schedule()

    def _end(self, kind: str) -> None:
        if not self._lost and self._eof != "reset":
            self._eof = kind
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and self._reading and self.protocol is not None:
            self._scheduled = True
            self.loop.call_soon(self._readable)

    def _readable(self) -> None:
        self._scheduled = False
        if self._lost or self._closing or not self._reading or self.protocol is None:
            return
        if self._inbox:
            size = len(self._inbox)
            dice = self._machine.random.random()
            if dice < 0.25 and size > 1:  # a read that ends anywhere, also within a frame
                size = 1 + int(self._machine.random.random() * (size - 1))
            data = bytes(self._inbox[:size])
            del self._inbox[:size]
            self.peer._read_by_peer(size)
            self.protocol.data_received(data)
            if self._inbox or self._eof:
                self._schedule()
        elif self._eof == "eof":
            self._eof = "seen"
            if not self.protocol.eof_received():
                self.close()
        elif self._eof == "reset":
            self._closing = True
            self._lose(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def _read_by_peer(self, size: int) -> None:
        self._unread -= size
        if self._paused and self._unsent() <= self._low and not self._lost:
            self._paused = False
            if self.protocol is not None:
                self.loop.call_soon(self.protocol.resume_writing)

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        self.loop.process.on_death.pop(self._died, None)
        self.network.connections.pop(self, None)
        self.network.connections.pop(self.peer, None)
        if self.protocol is not None:
            self.protocol.connection_lost(error)

    def _died(self) -> None:
        """The process of this end has ended: the kernel closes its socket."""
        if not self._lost:
            self._lost = self._closing = True
            self.network.connections.pop(self, None)
            self.network.connections.pop(self.peer, None)
            self._send(self.peer._end, "reset" if self._inbox else "eof")
