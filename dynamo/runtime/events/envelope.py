"""What an event looks like on the wire: ``0x01 | u32 big-endian length | MessagePack Envelope``."""

from __future__ import annotations

import struct
import time

import msgspec

__all__ = ["Envelope", "pack", "unpack"]

_VERSION = 1
_HEAD = struct.Struct(">BI")


class Envelope(msgspec.Struct):
    """``published_at`` is milliseconds since the epoch."""

    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode


def pack(publisher_id: int, sequence: int, topic: str, payload: bytes) -> bytes:
    """One event, published now."""
    now_ms = time.time_ns() // 1_000_000
    body = _encode(Envelope(publisher_id, sequence, now_ms, topic, payload))
    return _HEAD.pack(_VERSION, len(body)) + body


def unpack(packed: bytes) -> Envelope:
    """The reverse of :func:`pack`. ValueError, struct.error or MsgspecError if it is none."""
    version, size = _HEAD.unpack_from(packed)
    if version != _VERSION or size != len(packed) - _HEAD.size:
        raise ValueError(f"version {version}, {size} bytes announced")
    return _decode(memoryview(packed)[_HEAD.size :])
