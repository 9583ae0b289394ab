"""Reference implementation of ``dynamo._fast.frames``, without state."""

from __future__ import annotations

import struct

__all__ = ["OPEN", "OVERSIZE", "TokenSink", "pack", "pack_open", "split"]

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


class TokenSink:
    """The plain tokens of one stream: items of ``prefix`` and one MessagePack integer."""

    def __init__(
        self, prefix: bytes, pieces: list[str | None], stop_ids: frozenset[int], texts: list[str]
    ) -> None:
        self.active = True
        self.taken: list[int] = []
        self.size_bytes = 0
        self._prefix = prefix
        self._pieces = pieces
        self._stop_ids = stop_ids
        self._texts = texts

    def push(self, payload: bytes) -> bool:
        """Take ``payload`` if it is a plain token with a text; refuse all after one that is not."""
        token = self._token(payload)
        piece = None
        if token is not None and token < len(self._pieces) and token not in self._stop_ids:
            piece = self._pieces[token]
        self.active = self.active and piece is not None
        if token is None or piece is None or not self.active:
            return False
        if piece:
            self._texts.append(piece)
        self.taken.append(token)
        self.size_bytes += len(payload)
        return True

    def _token(self, payload: bytes) -> int | None:
        if not payload.startswith(self._prefix):
            return None
        number = payload[len(self._prefix) :]
        if len(number) == 1 and number[0] < 0x80:
            return number[0]
        if number and {0xCC: 2, 0xCD: 3, 0xCE: 5}.get(number[0]) == len(number):
            return int.from_bytes(number[1:], "big")
        return None
