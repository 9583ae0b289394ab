"""The wire format of the request plane, without I/O: frame kinds and their payloads.

Each direction begins with :data:`PREAMBLE`; then frames of ``u32 size | u8 kind | u32 stream |
payload``, little-endian. The client numbers the streams; stream 0 is the connection itself (ping).

========  ===============  =====================================================================
kind      direction        payload
========  ===============  =====================================================================
OPEN      client → server  u16 length, endpoint; u32 length, headers (MessagePack map); request
DATA      server → client  one response item
END       server → client  empty: the stream is complete
ERROR     server → client  u8 length, code; message. Ends the stream
STOP      client → server  empty: end early, in order
KILL      client → server  empty: the client dropped the stream
PAUSE     client → server  empty: the reader of this stream is behind, wait for RESUME
RESUME    client → server  empty
PING      client → server  any bytes, returned unchanged
PONG      server → client  the payload of the ping
========  ===============  =====================================================================

A peer ignores frames of an unknown stream: they may have crossed the frame that ended it.
"""

from __future__ import annotations

import struct

import msgspec

from dynamo._fast.frames import (
    HEADER_SIZE_BYTES,
    OPEN,
    OVERSIZE,
    Splitter,
    TokenSink,
    pack,
    pack_open,
)
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
    "TokenSink",
    "encode_headers",
    "pack",
    "pack_error",
    "pack_open",
    "parse_error",
    "parse_open",
]

PREAMBLE = b"DYNR\x01"
"""Magic and protocol version, sent first by both ends."""

DATA, END, ERROR, STOP, KILL, PAUSE, RESUME, PING, PONG = range(OPEN + 1, OPEN + 10)
LAST_KIND = PONG

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
encode_headers = msgspec.msgpack.Encoder().encode
"""Encode the headers of an OPEN frame."""

_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode


class FrameError(DynamoError):
    """The peer broke the protocol; the connection is closed."""

    code = "frame"


def parse_open(body: bytes) -> tuple[str, dict[str, str], bytes]:
    """Return endpoint, headers and request of an OPEN frame's payload. Raises FrameError."""
    try:
        (length,) = _U16.unpack_from(body)
        at = _U16.size + length
        endpoint = body[_U16.size : at].decode()
        (length,) = _U32.unpack_from(body, at)
        at += _U32.size
        end = at + length
        # A slice beyond the end is silently shorter.
        if end > len(body):
            raise FrameError("an OPEN frame's headers reach beyond its end")
        headers = _decode_headers(body[at:end]) if length else {}
    except (struct.error, ValueError, msgspec.MsgspecError) as error:
        raise FrameError(f"malformed OPEN frame: {error}") from error
    return endpoint, headers, body[end:]


def pack_error(stream: int, error: DynamoError, limit_bytes: int) -> bytes:
    """Build an ERROR frame; a message that is too long for one frame is truncated."""
    code = error.wire_code().encode()
    # One byte of the limit holds the length of the code.
    text = error.message.encode(errors="replace")[: limit_bytes - len(code) - 1]
    return pack(ERROR, stream, bytes((len(code),)) + code + text)


def parse_error(body: bytes) -> DynamoError:
    """Return the error in an ERROR frame's payload; an unknown code gives a plain DynamoError."""
    length = body[0] if body else 0
    code = body[1 : 1 + length].decode(errors="replace")
    error = from_code(code, body[1 + length :].decode(errors="replace"))
    error.relayed = True
    return error
