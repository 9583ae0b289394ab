"""MessagePack with one extension: arrays of uint32 are sent as raw little-endian bytes.

Token ids are ``array('I')`` from the tokenizer to the engine: a prompt of 22k ids is one memcpy
instead of 22k integers.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

# array[int] is an error at run time before Python 3.12.
if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array

T = TypeVar("T")
TOKENS_EXT = 1
_BIG_ENDIAN = sys.byteorder == "big"


def tokens(ids: Any) -> Tokens:
    """Return ``ids`` (list, buffer of uint32) as ``array('I')``; such an array is not copied."""
    if isinstance(ids, array) and ids.typecode == "I":
        return ids
    return array("I", ids)


def _enc_hook(value: Any) -> Any:
    if not isinstance(value, array) or value.typecode != "I":
        raise TypeError(f"cannot encode {type(value).__name__}")
    if _BIG_ENDIAN:
        value = array("I", value)  # the caller's array keeps its byte order
        value.byteswap()
    # Ext reads the array's buffer itself, which saves a copy of a long prompt.
    return msgspec.msgpack.Ext(TOKENS_EXT, value)


def _ext_array(code: int, data: memoryview) -> Any:
    if code != TOKENS_EXT:
        raise ValueError(f"unknown extension {code}")
    ids = array("I")
    ids.frombytes(data)
    if _BIG_ENDIAN:
        ids.byteswap()
    return ids


def _ext_list(code: int, data: memoryview) -> Any:
    ids: Tokens = _ext_array(code, data)
    return ids.tolist()


def _dec_hook(kind: type, value: Any) -> Any:
    """Return the token ids of a field, sent as an array or as a list. O(ids)."""
    if kind is not array or type(value) is array:
        return value
    try:
        if type(value) is list:
            return array("I", value)
    except (TypeError, OverflowError):
        pass
    raise ValueError("Expected token ids: integers from 0 to 4294967295, as a list or as an array")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_PLAIN = msgspec.msgpack.Decoder(ext_hook=_ext_list)

encode = _ENCODER.encode
"""Encode a wire value as MessagePack."""

plain_decode = _PLAIN.decode
"""Decode to plain dicts and lists, token arrays as ``list[int]``, for user handlers."""


def decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return a decoder of ``kind`` with token ids as ``array('I')``; build it at import.

    A list of ids is accepted too: handlers get one, and may send their request on.
    """
    return msgspec.msgpack.Decoder(kind, ext_hook=_ext_array, dec_hook=_dec_hook)
