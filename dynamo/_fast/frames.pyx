"""Split a byte stream into request plane frames, and build frames.

A frame is ``u32 size | u8 kind | u32 stream | size bytes``, little-endian, 9 bytes before the
payload. A byte stream begins with a fixed preamble (magic and version). Reference implementation:
``tests/oracle/frames.py``.

Most frames of a busy stream are plain tokens: response items of one token id and nothing else. A
:class:`TokenSink` takes those of one stream without an object for each frame.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t
from libc.string cimport memcmp, memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

__all__ = ["HEADER_SIZE_BYTES", "OPEN", "OVERSIZE", "Splitter", "TokenSink", "pack", "pack_open"]

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
cdef class TokenSink:
    """Turns the plain tokens of one stream into text.

    ``pieces[id]`` is the text of a token; it is appended to the caller's ``texts``, unless it is
    empty. Refused are ids without an entry or with None, and those in ``stop_ids``. After a refused
    item all are refused until ``active`` is set again: items are handled in their order. ``owner``
    is the caller's, too.
    """

    cdef public bint active
    cdef readonly object owner
    cdef list _pieces
    cdef frozenset _stop_ids
    cdef list _texts
    cdef list _ids
    cdef Py_ssize_t _size

    def __cinit__(
        self,
        object owner,
        list pieces not None,
        frozenset stop_ids not None,
        list texts not None,
    ):
        self.owner = owner
        self.active = True
        self._pieces = pieces
        self._stop_ids = stop_ids
        self._texts = texts
        self._ids = []
        self._size = 0

    def take(self):
        """Return ``(ids, size_bytes)`` of the items since the last call. O(1)."""
        ids, size = self._ids, self._size
        self._ids = []
        self._size = 0
        return ids, size

    cdef bint _push(self, uint32_t token, Py_ssize_t size) except -1:
        """Add one token, of an item of ``size`` bytes; False if it is refused."""
        if token >= <size_t> len(self._pieces):
            return False
        piece = self._pieces[token]
        if piece is None:
            return False
        number = <object> token
        if self._stop_ids and number in self._stop_ids:
            return False
        if piece:
            self._texts.append(piece)
        self._ids.append(number)
        self._size += size
        return True


@cython.final
cdef class Splitter:
    """Split bytes into complete frames, wherever the reads end.

    ``last_kind`` is the largest frame kind of this protocol version. After bytes that are not of
    this protocol, ``fault`` holds the reason and ``feed`` returns no more frames.
    A payload over ``limit_bytes`` is skipped as it arrives and replaced by one frame
    ``(OVERSIZE, stream, size as ASCII digits)``, so that the connection survives it.

    ``sinks`` are those of streams, by number: frames of ``token_kind`` whose payload is
    ``token_prefix`` and one MessagePack integer go to them and are not returned. ``touched`` are
    the sinks that got tokens in the last ``feed``, which took ``fed_s`` seconds; the frames that it
    returned came later on their streams.
    """

    cdef readonly str fault
    cdef readonly dict sinks
    cdef readonly list touched
    cdef readonly double fed_s
    cdef int _token_kind
    cdef bytes _token_prefix
    cdef Py_ssize_t _limit
    cdef int _last_kind
    cdef bytes _preamble
    cdef bint _preamble_seen
    cdef bytearray _pending
    cdef Py_ssize_t _need
    cdef Py_ssize_t _skip

    def __cinit__(
        self,
        Py_ssize_t limit_bytes,
        bytes preamble not None,
        int last_kind,
        int token_kind=0,
        bytes token_prefix not None=b"",
    ):
        self.fault = None
        self.sinks = {}
        self.touched = []
        self.fed_s = 0.0
        self._token_kind = token_kind
        self._token_prefix = token_prefix
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
        if not self.sinks:
            if self.touched:
                self.touched = []
            return self._feed(data)
        cdef double begun_s = _now_s()
        self.touched = []
        frames = self._feed(data)
        self.fed_s = _now_s() - begun_s
        return frames

    cdef list _feed(self, bytes data):
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
            if kind == self._token_kind and self.sinks:
                if self._pass_token(start + at + HEADER, size, stream):
                    at += HEADER + size
                    continue
            frames.append(
                (kind, stream, PyBytes_FromStringAndSize(start + at + HEADER, size))
            )
            at += HEADER + size

    cdef bint _pass_token(
        self, const char* payload, Py_ssize_t size, uint32_t stream
    ) except -1:
        """Pass a plain token to the sink of its stream; False for everything else."""
        found = self.sinks.get(stream)
        if found is None:
            return False
        cdef TokenSink sink = <TokenSink?> found
        if not sink.active:
            return False
        cdef Py_ssize_t prefix = PyBytes_GET_SIZE(self._token_prefix)
        cdef uint32_t token = 0
        cdef bint first = not sink._ids
        if (
            size <= prefix
            or memcmp(payload, PyBytes_AS_STRING(self._token_prefix), prefix) != 0
            or not _get_uint(<const unsigned char*> payload + prefix, size - prefix, &token)
            or not sink._push(token, size)
        ):
            sink.active = False
            return False
        if first:
            self.touched.append(sink)
        return True

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


cdef inline bint _get_uint(
    const unsigned char* at, Py_ssize_t size, uint32_t* value
) noexcept nogil:
    """Read a MessagePack integer of exactly ``size`` bytes; False for anything else."""
    cdef Py_ssize_t number
    if size == 1:
        value[0] = at[0]
        return at[0] < 0x80
    # uint 8, 16 and 32 have 1, 2 and 4 bytes behind their kind.
    if not 0xCC <= at[0] <= 0xCE or size != 1 + (1 << (at[0] - 0xCC)):
        return False
    value[0] = 0
    for number in range(1, size):
        value[0] = (value[0] << 8) | at[number]
    return True


cdef inline double _now_s() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <double> now.tv_sec + 1e-9 * <double> now.tv_nsec
