"""The event plane over ZeroMQ PUB and SUB: ipc on one host, tcp between hosts. Spec 7.6.

A message has four frames: topic · publisher id (u64 big-endian) · sequence (u64 big-endian) ·
``0x01 | u32 big-endian length | MessagePack Envelope``.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from pathlib import Path

import msgspec
import zmq

from dynamo.runtime.events.base import FIRST_SEQUENCE, OnEvent, OnGap

__all__ = ["Envelope", "ZmqPublisher", "ZmqSubscriber"]

HIGH_WATER_MESSAGES = 100_000
MESSAGES_PER_TURN = 256
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
_VERSION = 1
_HEAD = struct.Struct(">BI")
_U64 = struct.Struct(">Q")
_log = logging.getLogger(__name__)


class Envelope(msgspec.Struct):
    """What the fourth frame holds; ``published_at`` is milliseconds since the epoch."""

    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode


class ZmqPublisher:
    """An EventPublisher on a PUB socket. Use it from one thread.

    ``address`` is ``ipc:///path`` or ``tcp://host:port`` (port ``*``: the system chooses); the
    attribute holds the real one. A subscriber with a full queue loses the event, the others get it.
    zmq.ZMQError: the address can't be bound.
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
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, payload: bytes) -> int:
        """See EventPublisher. RuntimeError when closed."""
        if self._socket.closed:
            raise RuntimeError(f"the publisher of {self.topic} is closed")
        sequence = self._sequence
        now_ms = time.time_ns() // 1_000_000
        body = _encode(Envelope(self.publisher_id, sequence, now_ms, self.topic, payload))
        packed = _HEAD.pack(_VERSION, len(body)) + body
        self._send((*self._frames, _U64.pack(sequence), packed))
        self._sequence = sequence + 1
        self.published += 1
        return sequence

    def close(self) -> None:
        """See EventPublisher. An ipc file is gone when this returns."""
        if self._socket.closed:
            return
        self._socket.close(linger=0)
        if self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _send(self, frames: tuple[bytes, ...]) -> None:
        """A full subscriber queue is an error under NODROP: count it, then only that one loses."""
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            self.dropped += 1
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames, zmq.DONTWAIT)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)


class ZmqSubscriber:
    """An EventSubscriber on one SUB socket that connects to all publishers.

    The socket's file descriptor tells only that *something* changed, and any call on the
    socket may swallow that news: so every wake-up reads until the socket is empty, and every other
    call on the socket is followed by a look. At most ``MESSAGES_PER_TURN`` events are handed out
    before the loop gets its turn.
    """

    def __init__(self, topic: str, on_event: OnEvent, on_gap: OnGap | None = None) -> None:
        self.topic = topic
        self.received = 0
        self.gaps = 0
        self.malformed = 0
        self._topic = topic.encode()
        self._on_event = on_event
        self._on_gap = on_gap
        self._expected: dict[int, int] = {}
        self._addresses: dict[str, int | None] = {}
        self._loop = asyncio.get_running_loop()
        self._soon: asyncio.Handle | None = None
        self._socket = _socket(zmq.SUB)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._socket.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)

    def connect(self, address: str, publisher_id: int | None = None) -> None:
        """See EventSubscriber. With ``publisher_id`` its state goes away at disconnect."""
        if address not in self._addresses and not self._socket.closed:
            self._addresses[address] = publisher_id
            self._socket.connect(address)
            self._look()

    def disconnect(self, address: str) -> None:
        """See EventSubscriber."""
        if address not in self._addresses or self._socket.closed:
            return
        publisher_id = self._addresses.pop(address)
        if publisher_id is not None:
            self._expected.pop(publisher_id, None)
        self._socket.disconnect(address)
        self._look()

    def close(self) -> None:
        """See EventSubscriber."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._descriptor)
        if self._soon is not None:
            self._soon.cancel()
        self._socket.close(linger=0)

    def _look(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        receive = self._socket.recv_multipart
        try:
            for _ in range(MESSAGES_PER_TURN):
                self._take(receive(zmq.DONTWAIT))
                if self._socket.closed:
                    return
        except zmq.Again:
            return
        self._look()

    def _take(self, frames: list[bytes]) -> None:
        try:
            topic, publisher, number, packed = frames
            (publisher_id,), (sequence,) = _U64.unpack(publisher), _U64.unpack(number)
            version, size = _HEAD.unpack_from(packed)
            if version != _VERSION or size != len(packed) - _HEAD.size:
                raise ValueError(f"version {version}, {size} bytes announced")
            payload = _decode(memoryview(packed)[_HEAD.size :]).payload
        except (ValueError, struct.error, msgspec.MsgspecError) as error:
            self._count_malformed(error)
            return
        if topic == self._topic:
            self._deliver(publisher_id, sequence, payload)

    def _deliver(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        self.received += 1
        expected = self._expected.get(publisher_id, FIRST_SEQUENCE)
        self._expected[publisher_id] = sequence + 1
        try:
            if sequence != expected:
                self.gaps += 1
                if self._on_gap is not None:
                    self._on_gap(publisher_id, expected, sequence)
            self._on_event(publisher_id, sequence, payload)
        except Exception:  # noqa: BLE001 - one event must not end the subscription
            _log.exception("%s: event %d of %x failed", self.topic, sequence, publisher_id)

    def _count_malformed(self, error: Exception) -> None:
        self.malformed += 1
        if self.malformed & (self.malformed - 1) == 0:
            _log.warning("%s: %d malformed events, last: %s", self.topic, self.malformed, error)


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    return socket
