"""The event plane: its interfaces, the envelope of events, and ZeroMQ without a broker.

An event is packed as ``0x01 | u32 big-endian length | MessagePack Envelope``. A message of ZeroMQ
(ipc on one host, TCP between hosts) has four frames: topic · publisher id (u64 big-endian) ·
sequence (u64 big-endian) · the packed event. Both ends exchange heartbeats, so that a silently
broken TCP link reconnects.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from dynamo.observability.logs import counted
from dynamo.runtime.process.paths import owner_only

FIRST_SEQUENCE = 0
"""The sequence number of a publisher's first event; each later one is one higher."""
OnEvent = Callable[[int, int, bytes], None]
"""``on_event(publisher_id, sequence, payload)``, called on the loop, in order per publisher."""
OnGap = Callable[[int, int, int], None]
"""``on_gap(publisher_id, expected, got)``, called before the event that revealed the gap.

``got > expected``: events were lost. Events before the first received one do not count as lost: a
late subscriber requests what it needs.
``got < expected``: the publisher restarted under the same id.
"""
MALFORMED = (ValueError, struct.error, msgspec.MsgspecError)
"""What :func:`unpack` raises for bytes that are no event."""
_MOST_LEFT = 256  # so many publishers that left are known, to drop what was on its way
_VERSION = 1
_HEAD = struct.Struct(">BI")
HIGH_WATER_MESSAGES = 100_000
MESSAGES_PER_TURN = 256
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
CONNECT_TIMEOUT_MS = 3000
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 4000
_U64 = struct.Struct(">Q")
_DONTWAIT = int(zmq.DONTWAIT)
log = logging.getLogger(__name__)


class Envelope(msgspec.Struct):
    """One event. ``published_at`` is milliseconds since the epoch."""

    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode


def pack(publisher_id: int, sequence: int, topic: str, payload: bytes) -> bytes:
    """Pack one event, published now."""
    now_ms = time.time_ns() // 1_000_000
    body = _encode(Envelope(publisher_id, sequence, now_ms, topic, payload))
    return _HEAD.pack(_VERSION, len(body)) + body


def unpack(packed: bytes | memoryview) -> Envelope:
    """Reverse :func:`pack`. Raises one of :data:`MALFORMED`."""
    version, size = _HEAD.unpack_from(packed)
    if version != _VERSION or size != len(packed) - _HEAD.size:
        raise ValueError(f"version {version}, {size} bytes announced")
    return _decode(memoryview(packed)[_HEAD.size :])


class SequencedSubscriber:
    """The base of subscribers: it counts events, detects gaps and survives failing callbacks."""

    def __init__(self, topic: str, on_event: OnEvent, on_gap: OnGap | None = None) -> None:
        self.topic = topic
        self.received = 0
        self.gaps = 0
        self.malformed = 0
        self._on_event = on_event
        self._on_gap = on_gap
        self._expected: dict[int, int] = {}
        self._addresses: dict[str, Any] = {}
        self._left: deque[int] = deque(maxlen=_MOST_LEFT)

    def _deliver(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        self.received += 1
        expected = self._expected.get(publisher_id)
        if expected is None:
            if publisher_id in self._left and publisher_id not in self._addresses.values():
                return  # it was on its way when its publisher left
            # A first event is never a gap: a late subscriber asks for what it needs.
            expected = sequence
        self._expected[publisher_id] = sequence + 1
        try:
            if sequence != expected:
                self.gaps += 1
                if self._on_gap is not None:
                    self._on_gap(publisher_id, expected, sequence)
            self._on_event(publisher_id, sequence, payload)
        except Exception:
            log.exception("%s: event %d of %x failed", self.topic, sequence, publisher_id)

    def _forget(self, publisher_id: int | None) -> None:
        if publisher_id is not None:
            self._expected.pop(publisher_id, None)
            self._left.append(publisher_id)

    def _count_malformed(self, error: Exception) -> None:
        self.malformed += 1
        if self.malformed & (self.malformed - 1) == 0:  # a power of two: no log flood
            malformed = counted(self.malformed, "malformed event")
            log.warning("%s: %s, last: %s", self.topic, malformed, error)


class EventPublisher(Protocol):
    """Publishes on one topic.

    ``dropped`` counts how often a subscriber's queue was full. From then until it reads again that
    subscriber, and no other, loses every event; it sees one gap.
    """

    topic: str
    publisher_id: int
    address: str
    published: int
    dropped: int

    def publish(self, payload: bytes) -> int:
        """Send one event without waiting; return its sequence number. A loss shows as a gap."""

    def close(self) -> None:
        """Release the address. Idempotent."""


class EventSubscriber(Protocol):
    """Receives from any number of publishers of one topic. ``malformed`` counts bad messages."""

    topic: str
    received: int
    gaps: int
    malformed: int

    def connect(self, address: str, publisher_id: int | None = None) -> None:
        """Add a publisher; it need not exist yet. Idempotent."""

    def disconnect(self, address: str) -> None:
        """Remove the publisher at ``address``. Idempotent."""

    def close(self) -> None:
        """Stop receiving; no callback runs after this. Idempotent."""


class EventPlane(Protocol):
    """A transport that needs a server: one connection for all publishers and subscribers."""

    async def start(self) -> None:
        """Connect. Raises ConfigError."""

    async def close(self) -> None:
        """Disconnect, after all publishers and subscribers. Idempotent."""

    def publisher(self, channel: tuple[str, str, str], publisher_id: int) -> EventPublisher:
        """Create a publisher on the channel (namespace, component, topic)."""

    def subscriber(
        self, topic: str, on_event: OnEvent, on_gap: OnGap | None = None
    ) -> EventSubscriber:
        """Create a subscriber without publishers."""


class ZmqPublisher:
    """An EventPublisher on a PUB socket. Use it from one thread.

    ``address`` is ``ipc:///path`` or ``tcp://host:port`` (port ``*``: the system chooses); the
    attribute holds the bound one. A subscriber with a full queue loses the event, the others
    receive it. zmq.ZMQError: the address cannot be bound.
    """

    def __init__(self, topic: str, publisher_id: int, address: str) -> None:
        self.topic = topic
        self.publisher_id = publisher_id
        self.published = 0
        self.dropped = 0
        self._frames = (topic.encode(), _U64.pack(publisher_id))
        self._sequence = FIRST_SEQUENCE
        self._socket = _socket(zmq.PUB)
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            with owner_only():
                self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        is_file = self.address.startswith("ipc://")
        self._path = Path(self.address.removeprefix("ipc://")) if is_file else None
        self._unreachable = False

    def publish(self, payload: bytes) -> int:
        """See EventPublisher. RuntimeError when closed."""
        if self._socket.closed:
            raise RuntimeError(f"the publisher of {self.topic} is closed")
        sequence = self._sequence
        packed = pack(self.publisher_id, sequence, self.topic, payload)
        self._send((*self._frames, _U64.pack(sequence), packed))
        self._sequence = sequence + 1
        self.published += 1
        return sequence

    def close(self) -> None:
        """See EventPublisher. Removes the file of an ipc socket."""
        if self._socket.closed:
            return
        self._socket.close(linger=0)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def restore_file(self) -> None:
        """Bind an ipc socket again if its file was removed. Subscribers stay connected.

        The old binding stays, too: ending it could unlink the new file.
        """
        if self._path is None or self._socket.closed or _exists(self._path):
            return
        try:
            with owner_only():
                self._socket.bind(self.address)
        except zmq.ZMQError as error:
            level = logging.DEBUG if self._unreachable else logging.ERROR
            text = "the event socket %s was removed, new subscribers cannot connect: %s"
            log.log(level, text, self._path, error)
            self._unreachable = True
        else:
            log.warning("the event socket %s was removed, bound again", self._path)
            self._unreachable = False

    def _send(self, frames: tuple[bytes, ...]) -> None:
        """Send one event; count a full subscriber queue.

        XPUB_NODROP makes a full queue an error, and then nothing is sent to any subscriber. The
        second try without it drops the event for the full ones alone.
        """
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            self.dropped += 1
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames, zmq.DONTWAIT)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)


class ZmqSubscriber(SequencedSubscriber):
    """An EventSubscriber on one SUB socket that connects to all publishers.

    The descriptor of a ZeroMQ socket is edge-triggered: it becomes readable once per change, and
    any call on the socket may consume that edge. So every wake-up reads until the socket is empty,
    and every other call on the socket schedules a read. After ``MESSAGES_PER_TURN`` messages the
    rest waits for the next turn of the loop.
    """

    def __init__(self, topic: str, on_event: OnEvent, on_gap: OnGap | None = None) -> None:
        super().__init__(topic, on_event, on_gap)
        self._topic = topic.encode()
        self._loop = asyncio.get_running_loop()
        self._scheduled: asyncio.Handle | None = None
        self._socket = subscribing_socket(topic)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)

    def connect(self, address: str, publisher_id: int | None = None) -> None:
        """See EventSubscriber. With ``publisher_id`` its sequence is dropped at disconnect.

        ValueError: ZeroMQ does not accept the address.
        """
        if address not in self._addresses and not self._socket.closed:
            self._socket.setsockopt(zmq.IPV6, int("[" in address))
            try:
                # Slow joiner: events are lost until the subscription reaches the publisher.
                # Subscribers ask for what they miss.
                self._socket.connect(address)
            except zmq.ZMQError as error:
                raise ValueError(
                    f"{address[:200]!r} is no address of a publisher: {error}"
                ) from None
            self._addresses[address] = publisher_id
            self._schedule_drain()

    def disconnect(self, address: str) -> None:
        """See EventSubscriber."""
        if address not in self._addresses or self._socket.closed:
            return
        self._forget(self._addresses.pop(address))
        self._socket.disconnect(address)
        self._schedule_drain()

    def close(self) -> None:
        """See EventSubscriber."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._descriptor)
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._socket.close(linger=0)

    def _schedule_drain(self) -> None:
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        socket = self._socket
        receive = socket.recv
        try:
            for _ in range(MESSAGES_PER_TURN):
                # recv_multipart asks the socket for RCVMORE after each frame, in Python; a frame
                # received without a copy carries that bit.
                frame = receive(_DONTWAIT, copy=False)
                frames = [frame]
                while frame.more:
                    frame = receive(_DONTWAIT, copy=False)
                    frames.append(frame)
                self._on_message(frames)
                if socket.closed:
                    return
        except zmq.Again:
            return
        self._schedule_drain()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            topic, publisher, number, packed = frames
            (publisher_id,) = _U64.unpack(publisher.buffer)
            (sequence,) = _U64.unpack(number.buffer)
            payload = unpack(packed.buffer).payload
        except MALFORMED as error:
            self._count_malformed(error)
            return
        if topic.bytes == self._topic:  # the socket subscribes to a prefix
            self._deliver(publisher_id, sequence, payload)


def subscribing_socket(topic: str) -> zmq.Socket[bytes]:
    """Return a SUB socket with the options of all subscribers, not connected."""
    socket = _socket(zmq.SUB)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
    return socket


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    # The peer's end of the same bound: it drops the link without a heartbeat of ours for this time.
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS)
    return socket
