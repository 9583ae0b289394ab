"""Reference implementation of ``dynamo._fast.frames``, without state."""

from __future__ import annotations

import struct

__all__ = ["OPEN", "OVERSIZE", "pack", "pack_open", "split"]

OPEN = 1
OVERSIZE = 0x7F
_HEADER = struct.Struct("<IBI")


def pack(kind: int, stream: int, payload: bytes) -> bytes:
    """Build one frame."""
    return _HEADER.pack(len(payload), kind, stream) + payload


def pack_open(stream: int, endpoint: str, headers: bytes, payload: bytes) -> bytes:
    """Build an OPEN frame."""
    name = endpoint.encode()
    fields = struct.pack("<H", len(name)) + name + struct.pack("<I", len(headers)) + headers
    return pack(OPEN, stream, fields + payload)


def split(
    data: bytes, limit_bytes: int, preamble: bytes, last_kind: int
) -> tuple[list[tuple[int, int, bytes]], bool]:
    """Return the complete frames in ``data``, all bytes so far, and whether they are faulty."""
    frames: list[tuple[int, int, bytes]] = []
    if len(data) < len(preamble):
        return frames, False
    if not data.startswith(preamble):
        return frames, True
    at = len(preamble)
    while len(data) - at >= _HEADER.size:
        size, kind, stream = _HEADER.unpack_from(data, at)
        if not 1 <= kind <= last_kind:
            return frames, True
        body = data[at + _HEADER.size : at + _HEADER.size + size]
        if size > limit_bytes:
            frames.append((OVERSIZE, stream, str(size).encode()))
        elif len(body) == size:
            frames.append((kind, stream, body))
        else:
            break
        at += _HEADER.size + size
    return frames, False
