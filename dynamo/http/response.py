"""Heads of responses, built once a second for each kind instead of once a response."""

from __future__ import annotations

from collections.abc import Iterable
from email.utils import formatdate

from dynamo.http.errors import reason_phrase

__all__ = [
    "CHUNKS",
    "CLOSE",
    "LENGTH",
    "OLD_KEEP_ALIVE",
    "UNTIL_CLOSE",
    "ResponseHeads",
    "encode_headers",
]

# Bits of a framing.
LENGTH = 0  # the caller appends the digits of the length, then CRLF
CHUNKS = 1
UNTIL_CLOSE = 2  # a stream to an HTTP/1.0 client, which knows no chunks
CLOSE = 4
OLD_KEEP_ALIVE = 8  # an HTTP/1.0 client asked to keep the connection

_BREAKS = str.maketrans({"\r": " ", "\n": " ", "\0": " "})


class ResponseHeads:
    """The part of a response head that is equal for a second; ``renew`` drops the old ones."""

    def __init__(self) -> None:
        self._heads: dict[tuple[int, str, int], bytes] = {}
        self._date = b""
        self.renew()

    def renew(self) -> None:
        """Take the current second for the Date header."""
        date = formatdate(usegmt=True).encode("ascii")
        if date != self._date:
            self._date = date
            self._heads.clear()

    def get(self, status: int, content_type: str, framing: int) -> bytes:
        """Status line and fixed headers. A stream's head ends in the CRLF of its last header, any
        other in ``content-length: ``."""
        key = (status, content_type, framing)
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self._build(status, content_type, framing)
        return head

    def _build(self, status: int, content_type: str, framing: int) -> bytes:
        lines = [f"HTTP/1.1 {status} {reason_phrase(status)}", f"date: {self._date.decode()}"]
        if content_type:
            lines.append(f"content-type: {content_type}")
        if framing & CLOSE:
            lines.append("connection: close")
        elif framing & OLD_KEEP_ALIVE:
            lines.append("connection: keep-alive")
        if framing & CHUNKS:
            lines.append("transfer-encoding: chunked")
        lines.append("" if framing & (CHUNKS | UNTIL_CLOSE) else "content-length: ")
        return "\r\n".join(lines).encode("latin-1")


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """``name: value`` lines with CRLF; line breaks inside a value can't split the response."""
    return b"".join(
        f"{name}: {value.translate(_BREAKS)}\r\n".encode("latin-1", "replace")
        for name, value in headers
    )
