"""Split a byte stream into request plane frames, and build frames.

A frame is ``u32 size | u8 kind | u32 stream | size bytes``, little-endian, 9 bytes before the
payload. A byte stream begins with a fixed preamble (magic and version). Reference implementation:
``tests/oracle/frames.py``.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t
from libc.string cimport memcpy

__all__ = ["HEADER_SIZE_BYTES", "OPEN", "OVERSIZE", "Splitter", "pack", "pack_open"]

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef Py_ssize_t HEADER = 9
cdef int OPEN_KIND = 1
cdef int OVERSIZE_KIND = 0x7F

OPEN = OPEN_KIND
OVERSIZE = OVERSIZE_KIND
HEADER_SIZE_BYTES = HEADER


def pack(int kind, uint32_t stream, bytes payload not None):
    """Build one frame. OverflowError when ``payload`` has 4 GiB or more. O(len(payload))."""
    cdef Py_ssize_t length = PyBytes_GET_SIZE(payload)
    cdef bytes frame = _new_frame(kind, stream, length)
    memcpy(PyBytes_AS_STRING(frame) + HEADER, PyBytes_AS_STRING(payload), length)
    return frame


def pack_open(
    uint32_t stream, str endpoint not None, bytes headers not None, bytes payload not None
):
    """Build an OPEN frame: u16 length and endpoint, u32 length and headers, payload. One copy.

    ValueError when ``endpoint`` has more than 65535 bytes or is no valid text; OverflowError when
    the frame would hold 4 GiB or more.
    """
    cdef Py_ssize_t name_size = 0
    # The str object caches its UTF-8 form, so a repeated endpoint is not encoded again.
    cdef const char* name = PyUnicode_AsUTF8AndSize(endpoint, &name_size)
    cdef Py_ssize_t headers_size = PyBytes_GET_SIZE(headers)
    cdef Py_ssize_t payload_size = PyBytes_GET_SIZE(payload)
    if name_size > 0xFFFF:
        raise ValueError(f"an endpoint name of {name_size} bytes is too long")
    cdef bytes frame = _new_frame(
        OPEN_KIND, stream, 2 + name_size + 4 + headers_size + payload_size
    )
    cdef char* out = PyBytes_AS_STRING(frame) + HEADER
    out[0] = <char> (name_size & 0xFF)
    out[1] = <char> (name_size >> 8)
    memcpy(out + 2, name, name_size)
    out += 2 + name_size
    _put_u32(out, <uint32_t> headers_size)
    memcpy(out + 4, PyBytes_AS_STRING(headers), headers_size)
    memcpy(out + 4 + headers_size, PyBytes_AS_STRING(payload), payload_size)
    return frame


@cython.final
cdef class Splitter:
    """Split bytes into complete frames, wherever the reads end.

    ``last_kind`` is the largest frame kind of this protocol version. After bytes that are not of
    this protocol, ``fault`` holds the reason and ``feed`` returns no more frames.
    A payload over ``limit_bytes`` is skipped as it arrives and replaced by one frame
    ``(OVERSIZE, stream, size as ASCII digits)``, so that the connection survives it.
    """

    cdef readonly str fault
    cdef Py_ssize_t _limit
    cdef int _last_kind
    cdef bytes _preamble
    cdef bint _preamble_seen
    cdef bytearray _pending
    cdef Py_ssize_t _need
    cdef Py_ssize_t _skip

    def __cinit__(self, Py_ssize_t limit_bytes, bytes preamble not None, int last_kind):
        self.fault = None
        self._limit = limit_bytes
        self._last_kind = last_kind
        self._preamble = preamble
        self._preamble_seen = not preamble
        self._pending = bytearray()
        self._need = 0
        self._skip = 0

    def feed(self, bytes data not None):
        """Return the frames that ``data`` completes: ``list[tuple[kind, stream, payload]]``.

        O(len(data)) however small the pieces are: an unfinished frame is joined once.
        """
        cdef list frames = []
        if self.fault is not None:
            return frames
        if self._need:
            # Collect until the frame is complete: splitting at each piece would be O(pieces²).
            self._pending += data
            if len(self._pending) < self._need:
                return frames
            data = bytes(self._pending)
            self._pending = bytearray()
            self._need = 0
        cdef Py_ssize_t used = self._split(data, frames)
        if self._need and self.fault is None:
            self._pending += data[used:]
        return frames

    cdef Py_ssize_t _split(self, bytes data, list frames) except -1:
        cdef const char* start = PyBytes_AS_STRING(data)
        cdef Py_ssize_t length = PyBytes_GET_SIZE(data)
        cdef Py_ssize_t at = 0, size
        cdef uint32_t stream
        cdef int kind
        if not self._preamble_seen:
            if not self._check_preamble(data):
                return 0
            at = PyBytes_GET_SIZE(self._preamble)
        while True:
            if self._skip:  # the rest of an oversized payload
                size = min(self._skip, length - at)
                self._skip -= size
                at += size
            if at == length:
                return at
            if length - at < HEADER:
                self._need = HEADER
                return at
            size = <Py_ssize_t> _get_u32(start + at)
            kind = <unsigned char> start[at + 4]
            stream = _get_u32(start + at + 5)
            if kind == 0 or kind > self._last_kind:
                self.fault = f"unknown frame kind {kind}"
                return at
            if size > self._limit:
                frames.append((OVERSIZE_KIND, stream, str(size).encode()))
                self._skip = size
                at += HEADER
                continue
            if length - at - HEADER < size:
                self._need = HEADER + size
                return at
            frames.append(
                (kind, stream, PyBytes_FromStringAndSize(start + at + HEADER, size))
            )
            at += HEADER + size

    cdef bint _check_preamble(self, bytes data) except -1:
        cdef Py_ssize_t size = PyBytes_GET_SIZE(self._preamble)
        if PyBytes_GET_SIZE(data) < size:
            self._need = size
            return False
        if data[:size] != self._preamble:
            self.fault = f"peer speaks another protocol or version: {data[:size]!r}"
            return False
        self._preamble_seen = True
        return True


cdef bytes _new_frame(int kind, uint32_t stream, Py_ssize_t size):
    """Return a frame with its header filled in and ``size`` bytes of payload to fill in."""
    if size > 0xFFFFFFFF:
        raise OverflowError("a frame holds less than 4 GiB")
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, size + HEADER)
    cdef char* out = PyBytes_AS_STRING(frame)
    _put_u32(out, <uint32_t> size)
    out[4] = <char> kind
    _put_u32(out + 5, stream)
    return frame


cdef inline void _put_u32(char* out, uint32_t value) noexcept nogil:
    out[0] = <char> (value & 0xFF)
    out[1] = <char> ((value >> 8) & 0xFF)
    out[2] = <char> ((value >> 16) & 0xFF)
    out[3] = <char> ((value >> 24) & 0xFF)


cdef inline uint32_t _get_u32(const char* at) noexcept nogil:
    cdef const unsigned char* raw = <const unsigned char*> at
    return (
        <uint32_t> raw[0]
        | (<uint32_t> raw[1] << 8)
        | (<uint32_t> raw[2] << 16)
        | (<uint32_t> raw[3] << 24)
    )
