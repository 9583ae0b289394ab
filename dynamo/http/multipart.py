"""A field of a ``multipart/form-data`` body, found without decoding the rest. RFC 7578, 2046.

A body may be large, and its files are not needed: only the heads of its parts are read.
"""

from __future__ import annotations

import re

__all__ = ["field_span", "is_multipart"]

_TYPE = "multipart/form-data"
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="([^"\r\n]*)"', re.IGNORECASE)
_MAX_PARTS = 64
_MAX_HEAD_BYTES = 4096


def is_multipart(content_type: str | None) -> bool:
    """Return whether a body of this type is a form with files."""
    return content_type is not None and content_type[: len(_TYPE)].lower() == _TYPE


def field_span(body: bytes, content_type: str, name: str) -> tuple[int, int] | None:
    """Return where the value of the field ``name`` begins and ends in ``body``; None without one.

    At most 64 parts are searched. O(bytes), most of it in :meth:`bytes.find`.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    delimiter = b"--" + (found[1] or found[2]).encode()
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter)
    for _ in range(_MAX_PARTS):
        if at < 0:
            return None
        begins = body.find(b"\r\n\r\n", at, at + _MAX_HEAD_BYTES)
        if begins < 0:
            return None
        ends = body.find(b"\r\n" + delimiter, begins + 2)
        named = _NAME.search(body, at, begins)
        if named is not None and named[1] == name.encode() and ends >= 0:
            return min(begins + 4, ends), ends  # an empty value shares a line end with its head
        at = ends
    return None
