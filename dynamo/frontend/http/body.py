"""Frames a request body: a known length, or chunks. Strict, bounded, fed in any pieces.

Body framing is ours and not llhttp's because the connection must know where a request ends before
it looks at the next one, and because trailers need rules. RFC 9112 7.1.
"""

from __future__ import annotations

import re

from dynamo.frontend.http.refusal import Refusal

__all__ = ["ChunkedBody", "SizedBody"]

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t\x20-\x7e\x80-\xff]*")
_NOT_IN_TRAILERS = frozenset(
    b"host content-length transfer-encoding content-type content-encoding content-range trailer"
    b" authorization cookie set-cookie connection expect te upgrade cache-control".split()
)
_LINE_BYTES = 1024
_TRAILER_BYTES = 8 * 1024


class SizedBody:
    """Collects ``size_bytes`` bytes."""

    __slots__ = ("_parts", "_size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._parts = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """Take ``data``; what lies behind the body once it is complete, else None."""
        missing = self._size_bytes - len(self._parts)
        self._parts += data[:missing] if len(data) > missing else data
        return data[missing:] if len(data) >= missing else None

    def take(self) -> bytes:
        """The complete body."""
        return bytes(self._parts)


class ChunkedBody:
    """Decodes ``Transfer-Encoding: chunked`` up to ``limit_bytes`` of content."""

    __slots__ = ("_at", "_limit_bytes", "_parts", "_pending", "_remaining", "_trailer_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._parts = bytearray()
        self._pending = b""
        self._remaining = 0
        self._trailer_bytes = 0
        self._at = self._size_line

    def feed(self, data: bytes) -> bytes | None:
        """Take ``data``; what lies behind the body once it is complete, else None."""
        if self._pending:
            data = self._pending + data
            self._pending = b""
        position = 0
        while position >= 0:
            if self._at == self._end:
                return data[position:]
            start, position = position, self._at(data, position)
        self._pending = data[start:] if self._at != self._content else b""
        return None

    def take(self) -> bytes:
        """The complete content."""
        return bytes(self._parts)

    # Each state takes a position and returns the next one, or -1 when it needs more bytes.

    def _size_line(self, data: bytes, position: int) -> int:
        line, after = _line(data, position, _LINE_BYTES)
        if line is None:
            return -1
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise Refusal(400, "Malformed chunk size")
        self._remaining = int(match[1], 16)
        if len(self._parts) + self._remaining > self._limit_bytes:
            raise Refusal(413, f"Request body exceeds {self._limit_bytes} bytes")
        self._at = self._content if self._remaining else self._trailers
        return after

    def _content(self, data: bytes, position: int) -> int:
        piece = data[position : position + self._remaining]
        self._parts += piece
        self._remaining -= len(piece)
        if self._remaining:
            return -1
        self._at = self._content_end
        return position + len(piece)

    def _content_end(self, data: bytes, position: int) -> int:
        mark = data[position : position + 2]
        if not b"\r\n".startswith(mark):
            raise Refusal(400, "Chunk is longer than its size says")
        if len(mark) < 2:
            return -1
        self._at = self._size_line
        return position + 2

    def _trailers(self, data: bytes, position: int) -> int:
        line, after = _line(data, position, _TRAILER_BYTES)
        if line is None:
            return -1
        self._trailer_bytes += after - position
        if self._trailer_bytes > _TRAILER_BYTES:
            raise Refusal(431, f"Trailers exceed {_TRAILER_BYTES} bytes")
        if not line:
            self._at = self._end
            return after
        match = _TRAILER.fullmatch(line)
        if match is None:
            raise Refusal(400, "Malformed trailer")
        if match[1].lower() in _NOT_IN_TRAILERS:
            raise Refusal(400, f"Header '{match[1].decode('ascii').lower()}' in trailers")
        return after

    def _end(self, data: bytes, position: int) -> int:
        raise AssertionError("the body is complete")


def _line(data: bytes, position: int, limit_bytes: int) -> tuple[bytes | None, int]:
    end = data.find(b"\r\n", position, position + limit_bytes + 2)
    if end >= 0:
        return data[position:end], end + 2
    if len(data) - position > limit_bytes or b"\n" in data[position:]:
        raise Refusal(400, "Malformed or overlong line in chunked body")
    return None, -1
