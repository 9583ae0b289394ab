"""The framing of a piece of a streamed HTTP/1.1 response: chunk size, data, line ends.

Each token is one chunk. Reference implementation: ``tests/oracle/http_chunk.py``.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy

__all__ = ["http_chunk"]


def http_chunk(bytes data not None):
    """Return ``data`` as one chunk. Empty ``data`` would be the last chunk. O(len(data))."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
    # Hexadecimal digits of any 64-bit size, filled from the end.
    cdef char[16] digits
    cdef int at = 16
    cdef Py_ssize_t rest = size
    while True:
        at -= 1
        digits[at] = b"0123456789abcdef"[rest & 15]
        rest >>= 4
        if not rest:
            break
    cdef int width = 16 - at
    cdef bytes chunk = PyBytes_FromStringAndSize(NULL, width + 2 + size + 2)
    cdef char* out = PyBytes_AS_STRING(chunk)
    memcpy(out, digits + at, width)
    memcpy(out + width, b"\r\n", 2)
    memcpy(out + width + 2, PyBytes_AS_STRING(data), size)
    memcpy(out + width + 2 + size, b"\r\n", 2)
    return chunk
