"""The interfaces of the event plane, the envelope of events, and what subscribers share.

An event is packed as ``0x01 | u32 big-endian length | MessagePack Envelope``.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

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
_VERSION = 1
_HEAD = struct.Struct(">BI")
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

    def _deliver(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        self.received += 1
        # The first event of a publisher is never a gap: a late subscriber asks for what it needs.
        expected = self._expected.get(publisher_id, sequence)
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

    def _count_malformed(self, error: Exception) -> None:
        self.malformed += 1
        if self.malformed & (self.malformed - 1) == 0:  # a power of two: no log flood
            log.warning("%s: %d malformed events, last: %s", self.topic, self.malformed, error)


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
