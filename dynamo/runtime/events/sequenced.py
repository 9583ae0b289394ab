"""Sequenced events: their envelope on the wire, and the part that all subscribers share.

An event is packed as ``0x01 | u32 big-endian length | MessagePack Envelope``.
"""

from __future__ import annotations

import logging
import struct
import time
from typing import Any

import msgspec

from dynamo.runtime.events.base import OnEvent, OnGap

__all__ = ["MALFORMED", "Envelope", "SequencedSubscriber", "pack", "unpack"]

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
