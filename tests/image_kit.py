"""Small images for tests, written without an image library."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from typing import Any

__all__ = ["data_url", "image_part", "png"]


def png(width: int = 56, height: int = 56, seed: int = 0) -> bytes:
    """A PNG of random pixels: eight bits a channel, RGB."""
    numbers = random.Random(seed)
    rows = b"".join(b"\0" + numbers.randbytes(3 * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*each) for each in chunks)


def data_url(image: bytes, media_type: str = "image/png") -> str:
    """The image as the URL that clients send."""
    return f"data:{media_type};base64,{base64.b64encode(image).decode()}"


def image_part(image: bytes) -> dict[str, Any]:
    """The image as a part of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
