"""The event plane and the control plane of circus between simulated processes, in place of ZeroMQ.

Publishers and subscribers have the classes' interface of :mod:`dynamo.runtime.events.plane`; a
contract test runs against both. Of ZeroMQ's sockets there is what circus and its clients use.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import fake_os
import zmq
from engine_sockets import EngineSubscriber
from network import Network

if TYPE_CHECKING:
    from machine import Machine, Process

__all__ = ["BlockingContext", "EventHub", "SimulatedContext", "SimulatedPublisher",
           "SimulatedStream", "SimulatedSubscriber"]  # fmt: skip

_RECONNECT_S = 0.05


class EventHub:
    """Which publishers are bound, and the links to them."""

    _of: ClassVar[WeakKeyDictionary[Machine, EventHub]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.bound: dict[str, SimulatedPublisher] = {}
        self.links: dict[Link, None] = {}

    @classmethod
    def here(cls) -> EventHub:
        """The hub of the machine of this run."""
        return cls._of.setdefault(fake_os.machine(), cls())


class Link:
    """The connection of one subscriber to one address; it connects again after a loss."""

    def __init__(self, subscriber: SimulatedSubscriber, address: str) -> None:
        self.subscriber = subscriber
        self.address = address
        self.publisher: SimulatedPublisher | None = None
        self.closed = False
        self._arrives_s = 0.0
        self._machine = fake_os.machine()
        EventHub.here().links[self] = None
        self._dial()

    def cut(self) -> None:
        """Lose the connection and what is on its way."""
        if self.publisher is not None:
            self.publisher.links.pop(self, None)
            self.publisher = None
            self._generation += 1
            self._machine.after(_RECONNECT_S, self._dial)

    def close(self) -> None:
        """End it."""
        self.closed = True
        self._generation += 1
        EventHub.here().links.pop(self, None)
        if self.publisher is not None:
            self.publisher.links.pop(self, None)

    _generation = 0

    def _dial(self) -> None:
        if not self.closed:
            self._machine.after(Network.of(self._machine).latency_s(), self._connect)

    def _connect(self) -> None:
        if self.closed or self.publisher is not None or not self.subscriber.process.alive:
            return
        found = EventHub.here().bound.get(self.address)
        if found is None or not found.path_exists():
            self._machine.after(_RECONNECT_S, self._dial)
            return
        self.publisher = found
        found.links[self] = None

    def send(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        """Carry an event, after those before it."""
        when_s = self._machine.now_s + Network.of(self._machine).latency_s()
        self._arrives_s = max(self._arrives_s, when_s)
        event = publisher_id, sequence, payload
        self._machine.at(self._arrives_s, self._arrive, self._generation, event)

    def _arrive(self, generation: int, event: tuple[int, int, bytes]) -> None:
        if generation == self._generation and not self.closed:
            self.subscriber.arrived(event)


class SimulatedPublisher:
    """An ``EventPublisher``."""

    def __init__(self, topic: str, publisher_id: int, address: str) -> None:
        self.topic = topic
        self.publisher_id = publisher_id
        self.address = address
        self.published = 0
        self.dropped = 0
        self.closed = False
        self.links: dict[Link, None] = {}
        self._sequence = 0
        self._path = _bind_file(address)
        process = fake_os.machine().current
        assert process is not None
        EventHub.here().bound[address] = self
        process.on_death[self._died] = None

    def publish(self, payload: bytes) -> int:
        """See ``EventPublisher``."""
        if self.closed:
            raise RuntimeError(f"the publisher of {self.topic} is closed")
        sequence = self._sequence
        self._sequence += 1
        self.published += 1
        for link in list(self.links):
            link.send(self.publisher_id, sequence, bytes(payload))
        return sequence

    def close(self) -> None:
        """See ``EventPublisher``."""
        if not self.closed:
            self._died()
            self._path.unlink(missing_ok=True)

    def restore_file(self) -> None:
        """Bind again if the file was removed."""
        if not self.closed and not self._path.exists():
            _bind_file(self.address)

    def path_exists(self) -> bool:
        """Whether a new subscriber finds it."""
        return self._path.exists()

    def _died(self) -> None:
        self.closed = True
        if EventHub.here().bound.get(self.address) is self:
            del EventHub.here().bound[self.address]
        for link in list(self.links):
            link.publisher = None
            fake_os.machine().after(_RECONNECT_S, link._dial)
        self.links.clear()


def simulated_subscriber() -> type:  # noqa: C901 - one class
    """Make the class of subscribers; its base is imported late, after the installation."""
    from dynamo.runtime.events.plane import OnEvent, OnGap, SequencedSubscriber

    class Subscriber(SequencedSubscriber):
        """An ``EventSubscriber``."""

        def __init__(self, topic: str, on_event: OnEvent, on_gap: OnGap | None = None) -> None:
            super().__init__(topic, on_event, on_gap)
            process = fake_os.machine().current
            assert process is not None
            self.process: Process = process
            self._links: dict[str, Link] = {}
            self._queue: deque[tuple[int, int, bytes]] = deque()
            self._closed = False

        def connect(self, address: str, publisher_id: int | None = None) -> None:
            """See ``EventSubscriber``."""
            if address not in self._links and not self._closed:
                self._addresses[address] = publisher_id
                self._links[address] = Link(self, address)

        def disconnect(self, address: str) -> None:
            """See ``EventSubscriber``."""
            link = self._links.pop(address, None)
            if link is not None:
                self._forget(self._addresses.pop(address))
                link.close()

        def close(self) -> None:
            """See ``EventSubscriber``."""
            self._closed = True
            for link in self._links.values():
                link.close()
            self._links.clear()

        def arrived(self, event: tuple[int, int, bytes]) -> None:
            """An event has come to the socket."""
            self._queue.append(event)
            if len(self._queue) == 1:
                self.process.loop.call_soon(self._drain)

        def _drain(self) -> None:
            for _ in range(min(256, len(self._queue))):
                if self._closed:
                    return
                self._deliver(*self._queue.popleft())
            if self._queue:
                self.process.loop.call_soon(self._drain)

    return Subscriber


SimulatedSubscriber = Any


def _bind_file(address: str) -> Path:
    """Make the socket file of ``ipc://path``; nothing listens on it."""
    path = Path(address.removeprefix("ipc://"))
    path.unlink(missing_ok=True)
    before = os.umask(0o077)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
            bound.bind(str(path))
    finally:
        os.umask(before)
    return path


def _forget(routers: dict[str, SimulatedSocket], endpoint: str) -> None:
    routers.pop(endpoint, None)


class SimulatedContext:
    """A ZeroMQ context; sockets find each other by the name of the endpoint."""

    def socket(self, kind: int) -> Any:
        """Return a socket of this process."""
        return EngineSubscriber() if kind == zmq.SUB else SimulatedSocket(kind)

    @classmethod
    def instance(cls) -> SimulatedContext:
        """The context of this process."""
        return cls()

    def destroy(self, linger: int | None = None) -> None:
        """Sockets end with their process."""

    term = destroy


class SimulatedSocket:
    """A ROUTER (arbiter), DEALER (client) or PUB socket (circus's events, without a reader)."""

    _routers: ClassVar[WeakKeyDictionary[Machine, dict[str, SimulatedSocket]]] = WeakKeyDictionary()

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.linger = -1
        self.closed = False
        self._machine = fake_os.machine()
        self._process = self._machine.current
        assert self._process is not None
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._path: Path | None = None
        self._endpoint = ""
        self.on_request: Callable[[list[Any]], None] = lambda request: None

    def bind(self, endpoint: str) -> None:
        """Bind the endpoint; its file belongs to the owner only."""
        self._path = _bind_file(endpoint)
        self._endpoint = endpoint
        routers = self._routers.setdefault(self._machine, {})
        if self.kind == zmq.ROUTER:
            routers[endpoint] = self
            assert self._process is not None
            self._process.on_death[partial(_forget, routers, endpoint)] = None

    def connect(self, endpoint: str) -> None:
        """Connect."""
        self._endpoint = endpoint

    async def send(self, data: bytes) -> None:
        """Send one message to the router of the endpoint."""
        self._send_later(data)

    def _send_later(self, data: bytes) -> None:
        delay_s = Network.of(self._machine).latency_s()
        self._machine.after(delay_s, self._arrive, data)

    def _arrive(self, data: bytes) -> None:
        router = self._routers.get(self._machine, {}).get(self._endpoint)
        if router is None:
            self._machine.after(_RECONNECT_S, self._arrive, data)  # ZeroMQ waits for the endpoint
        elif not self.closed:
            assert router._process is not None
            router._process.loop.call_soon(router.on_request, [self, data])

    def reply(self, data: bytes) -> None:
        """A message from the router."""
        if not self.closed and self._process is not None and self._process.alive:
            self._process.loop.call_soon(self._received.put_nowait, data)

    async def poll(self, timeout_ms: float) -> bool:
        """Whether a message is there within the time."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                first = await self._received.get()
        except TimeoutError:
            return False
        self._received._queue.appendleft(first)  # type: ignore[attr-defined]
        return True

    async def recv(self) -> bytes:
        """Return the next message."""
        return await self._received.get()

    def send_multipart(self, parts: Any, *args: Any) -> None:
        """Do nothing: circus's events have no reader."""

    def setsockopt(self, *args: Any) -> None:
        """Options have no effect here."""

    def close(self, linger: int | None = None) -> None:
        """Close it; the file of a bound one goes, too."""
        self.closed = True
        if self._path is not None:
            self._routers.get(self._machine, {}).pop(self._endpoint, None)
            self._path.unlink(missing_ok=True)


class BlockingContext(SimulatedContext):
    """The context of code without an event loop, whose only question is whether circus answers."""

    def __enter__(self) -> BlockingContext:
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    def socket(self, kind: int) -> Any:
        """Return a socket of this process; a DEALER blocks."""
        return BlockingDealer() if kind == zmq.DEALER else super().socket(kind)


class BlockingDealer:
    """Asks a router, which answers at once unless its process is stopped: a callback is atomic."""

    def __init__(self) -> None:
        self.linger = -1
        self._endpoint = ""

    def __enter__(self) -> BlockingDealer:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def connect(self, endpoint: str) -> None:
        """Connect."""
        self._endpoint = endpoint

    def send(self, data: bytes) -> None:
        """Ask; the answer is that of :meth:`poll`."""

    def poll(self, timeout_ms: float) -> bool:
        """Whether the router's process runs."""
        router = SimulatedSocket._routers.get(fake_os.machine(), {}).get(self._endpoint)
        process = None if router is None else router._process
        return process is not None and process.alive and process.state != "T"


class SimulatedStream:
    """circus's ``ZMQStream`` over a ROUTER socket."""

    def __init__(self, socket: SimulatedSocket, loop: Any) -> None:
        self._socket = socket
        self._client: SimulatedSocket | None = None

    def on_recv(self, call: Callable[[list[Any]], None]) -> None:
        """Call ``call`` with each request."""
        self._socket.on_request = call

    def send(self, part: Any, flags: int = 0) -> None:
        """Send the identity, then the message."""
        if self._client is None:
            self._client = part
            return
        client, self._client = self._client, None
        data = part if isinstance(part, bytes) else str(part).encode()
        machine = fake_os.machine()
        machine.after(Network.of(machine).latency_s(), client.reply, data)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Receive nothing more."""
        self._socket.on_request = lambda request: None
