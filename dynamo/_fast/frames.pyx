"""Cut a byte stream into request plane frames, and make frames: the wire under every token.

A frame is ``u32 size | u8 kind | u32 stream | size bytes``, little-endian, 9 bytes before the
payload. A stream of bytes begins with a fixed preamble (magic and version). Readable twin:
``tests/oracle/frames.py``.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t
from libc.string cimport memcpy

__all__ = ["HEADER_SIZE_BYTES", "OVERSIZE", "Splitter", "pack"]

cdef Py_ssize_t HEADER = 9
cdef int OVERSIZE_KIND = 0x7F

OVERSIZE = OVERSIZE_KIND
HEADER_SIZE_BYTES = HEADER


def pack(int kind, uint32_t stream, bytes payload not None):
    """One frame. OverflowError when ``payload`` has 4 GiB or more. O(len(payload))."""
    cdef Py_ssize_t length = PyBytes_GET_SIZE(payload)
    if length > 0xFFFFFFFF:
        raise OverflowError("a frame holds less than 4 GiB")
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, length + HEADER)
    cdef char* out = PyBytes_AS_STRING(frame)
    cdef uint32_t size = <uint32_t> length
    _put_u32(out, size)
    out[4] = <char> kind
    _put_u32(out + 5, stream)
    memcpy(out + HEADER, PyBytes_AS_STRING(payload), length)
    return frame


@cython.final
cdef class Splitter:
    """Bytes in, whole frames out, wherever the reads were cut.

    ``last_kind`` is the largest frame kind of this protocol version. After a byte sequence that no
    peer of ours sends, ``fault`` says why and nothing more comes out: the connection is lost.
    A payload over ``limit_bytes`` is skipped as it arrives; in its place comes one
    ``(OVERSIZE, stream, size as ASCII digits)``, so the connection lives on.
    """

    cdef readonly str fault
    cdef Py_ssize_t _limit
    cdef int _last_kind
    cdef bytes _preamble
    cdef bint _greeted
    cdef bytearray _pending
    cdef Py_ssize_t _need
    cdef Py_ssize_t _skip

    def __cinit__(self, Py_ssize_t limit_bytes, bytes preamble not None, int last_kind):
        self.fault = None
        self._limit = limit_bytes
        self._last_kind = last_kind
        self._preamble = preamble
        self._greeted = not preamble
        self._pending = bytearray()
        self._need = 0
        self._skip = 0

    def feed(self, bytes data not None):
        """The frames completed by ``data``: ``list[tuple[kind, stream, payload]]``.

        O(len(data)) however small the pieces are: unfinished frames are joined once.
        """
        cdef list frames = []
        if self.fault is not None:
            return frames
        if self._need:
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
        if not self._greeted:
            if not self._greet(data):
                return 0
            at = PyBytes_GET_SIZE(self._preamble)
        while True:
            if self._skip:
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

    cdef bint _greet(self, bytes data) except -1:
        cdef Py_ssize_t size = PyBytes_GET_SIZE(self._preamble)
        if PyBytes_GET_SIZE(data) < size:
            self._need = size
            return False
        if data[:size] != self._preamble:
            self.fault = f"peer speaks another protocol or version: {data[:size]!r}"
            return False
        self._greeted = True
        return True


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
