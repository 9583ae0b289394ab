"""Small images for tests, written without an image library."""

from __future__ import annotations

import base64
import json
import random
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

from deployment import MODEL

__all__ = ["IMAGE", "IMAGE_ID", "data_url", "image_part", "png", "write_eyes"]

IMAGE = "<tool_call>"
"""A token of the example model, which stands for an image here."""

IMAGE_ID = 4099
_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<tool_call>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def write_eyes(directory: Path) -> Path:
    """The files of a model that takes images, as far as a frontend reads them."""
    shutil.copytree(MODEL, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"vision_config": {"hidden_size": 8}, "image_token_id": IMAGE_ID}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    return directory


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
