"""The request plane's wire, without I/O: frame kinds and what the larger ones carry.

Each direction begins with :data:`PREAMBLE`; then frames of ``u32 size | u8 kind | u32 stream |
payload``, little-endian. The client numbers the streams; stream 0 is the connection's own (ping).

========  ===============  =====================================================================
kind      direction        payload
========  ===============  =====================================================================
OPEN      client → server  u16 length, endpoint; u32 length, headers (MessagePack map); request
DATA      server → client  one response item
END       server → client  nothing: the stream is complete
ERROR     server → client  u8 length, code; message. Ends the stream
STOP      client → server  nothing: end early, orderly
KILL      client → server  nothing: nobody listens any more
PAUSE     client → server  nothing: the reader of this stream is behind, wait for RESUME
RESUME    client → server  nothing
PING      client → server  anything, sent back as it is
PONG      server → client  the payload of the ping
========  ===============  =====================================================================

A peer ignores frames of a stream it does not know: the other end may not have heard of its end yet.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import msgspec

from dynamo._fast.frames import HEADER_SIZE_BYTES, OVERSIZE, Splitter, pack
from dynamo.errors import DynamoError, from_code

__all__ = [
    "DATA",
    "END",
    "ERROR",
    "HEADER_SIZE_BYTES",
    "KILL",
    "LAST_KIND",
    "OPEN",
    "OVERSIZE",
    "PAUSE",
    "PING",
    "PONG",
    "PREAMBLE",
    "RESUME",
    "STOP",
    "FrameError",
    "Splitter",
    "pack",
    "pack_error",
    "pack_open",
    "parse_error",
    "parse_open",
]

PREAMBLE = b"DYNR\x01"
"""Magic and protocol version, sent first by both ends."""

OPEN, DATA, END, ERROR, STOP, KILL, PAUSE, RESUME, PING, PONG = range(1, 11)
LAST_KIND = PONG

_HEADER = struct.Struct("<IBI")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_encode_headers = msgspec.msgpack.Encoder().encode
_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode


class FrameError(DynamoError):
    """The peer sent bytes that are not of this protocol; the connection is closed."""

    code = "frame"


def pack_open(stream: int, endpoint: str, headers: dict[str, str], payload: bytes) -> bytes:
    """An OPEN frame. One copy of ``payload``. ValueError: the endpoint is too long."""
    name = _endpoint_field(endpoint)
    packed = _encode_headers(headers) if headers else b""
    size = len(name) + _U32.size + len(packed) + len(payload)
    return b"".join(
        (_HEADER.pack(size, OPEN, stream), name, _U32.pack(len(packed)), packed, payload)
    )


def parse_open(body: bytes) -> tuple[str, dict[str, str], bytes]:
    """Endpoint, headers and request of an OPEN frame's payload. Raises FrameError."""
    try:
        (length,) = _U16.unpack_from(body)
        at = _U16.size + length
        endpoint = body[_U16.size : at].decode()
        (length,) = _U32.unpack_from(body, at)
        at += _U32.size
        end = at + length
        if end > len(body):
            raise FrameError("an OPEN frame's headers reach beyond its end")
        headers = _decode_headers(body[at:end]) if length else {}
    except (struct.error, ValueError, msgspec.MsgspecError) as error:
        raise FrameError(f"malformed OPEN frame: {error}") from error
    return endpoint, headers, body[end:]


def pack_error(stream: int, error: DynamoError, limit_bytes: int) -> bytes:
    """An ERROR frame; a message too long for one frame is cut."""
    code = error.wire_code().encode()
    text = error.message.encode(errors="replace")[: limit_bytes - len(code) - 1]
    return pack(ERROR, stream, bytes((len(code),)) + code + text)


def parse_error(body: bytes) -> DynamoError:
    """The error an ERROR frame carries; an unknown code is a plain DynamoError."""
    length = body[0] if body else 0
    code = body[1 : 1 + length].decode(errors="replace")
    error = from_code(code, body[1 + length :].decode(errors="replace"))
    error.relayed = True
    return error


@lru_cache(maxsize=1024)
def _endpoint_field(endpoint: str) -> bytes:
    raw = endpoint.encode()
    if len(raw) > 0xFFFF:
        raise ValueError(f"an endpoint name of {len(raw)} bytes is too long")
    return _U16.pack(len(raw)) + raw
