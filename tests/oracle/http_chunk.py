"""Reference implementation of ``dynamo._fast.http_chunk``."""

from __future__ import annotations

__all__ = ["http_chunk"]


def http_chunk(data: bytes) -> bytes:
    """Return ``data`` as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)
