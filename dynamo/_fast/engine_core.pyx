"""The messages of vLLM's EngineCore as bytes: prompts in, frames of plain tokens out.

A plain token is an output (a MessagePack array: request id, token ids, further fields) with one
token and nothing else: all further fields are nil or 0. Most outputs of a step are plain, and they
become frames of the request plane (``_fast/frames``) without a Python object. Reference
implementation: ``tests/oracle/engine_core.py``.
"""

cimport cython
from cython.operator cimport dereference
from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

__all__ = ["TokenRouter", "pack_ids"]

ctypedef const unsigned char* Cursor

cdef struct Route:
    uint32_t connection
    uint32_t stream
    int64_t tokens
    uint64_t left_in  # the last message in which an output of the request was left
    double last_s  # when the engine sent its last token

cdef struct Output:
    Cursor start
    Cursor end
    Route* route  # NULL: not plain, or of a request that was not added
    uint32_t token


def pack_ids(array.array ids not None):
    """Return ``array('I')`` as a MessagePack array, and its largest number (0 if empty). O(n)."""
    if ids.ob_descr.typecode != c"I":
        raise ValueError(f"ids must be array('I'), not array({ids.typecode!r})")
    cdef const uint32_t* values = <const uint32_t*> ids.data.as_uints
    cdef Py_ssize_t count = len(ids), at, size = 0
    cdef uint32_t largest = 0
    for at in range(count):
        size += _uint_size(values[at])
        largest = max(largest, values[at])
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, _array_header_size(count) + size)
    cdef unsigned char* out = <unsigned char*> PyBytes_AS_STRING(packed)
    out = _put_array_header(out, <uint32_t> count)
    for at in range(count):
        out = _put_uint(out, values[at])
    return packed, largest


@cython.final
@cython.auto_pickle(False)
cdef class TokenRouter:
    """The streams of requests, and the frames of their plain tokens.

    ``kind`` is the frame kind of a response item, ``prefix`` an encoded item up to its token id.
    Connections are numbers that the caller chooses.

    Outputs that are left in a message are read later than its frames are written. So the tokens of
    a request are left, too, until that message was read: messages with outputs left have numbers,
    from 1, and the caller counts those that it has read.
    """

    cdef unordered_map[string, Route] _routes
    cdef string _prefix
    cdef unsigned char _kind
    cdef uint64_t _number
    cdef uint64_t _read
    cdef uint64_t _left_in  # as in Route, of all requests

    def __cinit__(self, int kind, bytes prefix not None):
        self._kind = <unsigned char> kind
        self._prefix = prefix

    def __len__(self):
        return self._routes.size()

    def add(
        self, str request_id not None, uint32_t connection, uint32_t stream, uint64_t left_in,
        double last_s,
    ):
        """Pass the plain tokens of ``request_id`` on to ``stream`` of ``connection``. O(1).

        Message ``left_in`` is the last that may have outputs of it which are not read yet. The
        engine sent its last token at ``last_s``.
        """
        cdef Route route = Route(connection, stream, 0, left_in, last_s)
        self._routes[request_id.encode()] = route

    def remove(self, str request_id not None):
        """Stop passing tokens on; return how many were, and when the engine sent the last token.

        (0, 0.0) for an unknown request. O(1).
        """
        cdef string key = request_id.encode()
        found = self._routes.find(key)
        if found == self._routes.end():
            return 0, 0.0
        cdef int64_t tokens = dereference(found).second.tokens
        cdef double last_s = dereference(found).second.last_s
        self._routes.erase(found)
        return tokens, last_s

    def stamp(self, str request_id not None, double time_s):
        """Note a token of a known request that was not passed on; return when its last one was."""
        cdef string key = request_id.encode()
        found = self._routes.find(key)
        if found == self._routes.end():
            return 0.0
        cdef double last_s = dereference(found).second.last_s
        dereference(found).second.last_s = time_s
        return last_s

    def leave(self, uint64_t number):
        """Message ``number`` is not split: it may have outputs of any request. O(1)."""
        self._left_in = number

    def split(self, bytes message not None, uint64_t number, uint64_t read):
        """Return ``(frames, rest, gaps)`` of an encoded EngineCoreOutputs.

        ``frames`` is a list of ``(connection, count, frames)`` in the order of their first token.
        ``rest`` is the message without the outputs in ``frames``; malformed ones are returned
        whole. ``gaps`` are ``(seconds, tokens)``: the times since the last token of the same
        request, equal ones in a row together; none without a time in the message. ``number`` is
        that of the message if outputs are left in it, and ``read`` that of the last one that was
        read. O(len(message)).
        """
        self._number, self._read = number, read
        cdef vector[Output] outputs
        cdef Cursor start = <Cursor> PyBytes_AS_STRING(message)
        cdef Cursor end = start + PyBytes_GET_SIZE(message)
        cdef Cursor header = NULL
        cdef Cursor tail = self._parse(start, end, &header, &outputs)
        if tail == NULL:
            self._left_in = number
            return [], message, []
        cdef vector[string] frames
        cdef vector[uint32_t] connections
        cdef vector[int64_t] counts
        cdef uint32_t plain = 0
        cdef size_t at, place
        cdef double time_s = _time(tail, end)
        cdef vector[double] gaps
        cdef vector[int64_t] gap_counts
        for at in range(outputs.size()):
            if outputs[at].route != NULL:
                place = _place(connections, outputs[at].route.connection)
                if place == connections.size():
                    connections.push_back(outputs[at].route.connection)
                    frames.push_back(string())
                    counts.push_back(0)
                self._append(frames[place], outputs[at])
                outputs[at].route.tokens += 1
                counts[place] += 1
                plain += 1
                if time_s > 0:
                    _add_gap(gaps, gap_counts, time_s - outputs[at].route.last_s)
                    outputs[at].route.last_s = time_s
        if not plain:
            return [], message, []
        rest = _without_plain(start, header, tail, end, outputs, plain)
        return [
            (connections[at], counts[at], _bytes(frames[at])) for at in range(frames.size())
        ], rest, [(gaps[at], gap_counts[at]) for at in range(gaps.size())]

    cdef Cursor _parse(
        self, Cursor start, Cursor end, Cursor* header, vector[Output]* outputs
    ) except? NULL:
        """Return where the outputs end; NULL for what is not such a message."""
        cdef int64_t count = 0, _number
        cdef Cursor at = _get_array_header(start, end, &count)
        if at == NULL or count < 2:
            return NULL
        at = header[0] = _skip(at, end)
        if at == NULL:
            return NULL
        at = _get_array_header(at, end, &count)
        if at == NULL:
            return NULL
        cdef Output output
        for _number in range(count):
            output.start = at
            at = self._output(at, end, &output)
            if at == NULL:
                return NULL
            output.end = at
            outputs.push_back(output)
        return at

    cdef Cursor _output(self, Cursor at, Cursor end, Output* output) except? NULL:
        """Read one output; return its end. NULL if it is malformed."""
        cdef int64_t fields = 0, tokens = 0, size = 0, _number
        cdef uint64_t token = 0
        cdef bint plain
        output.route = NULL
        at = _get_array_header(at, end, &fields)
        if at == NULL or fields < 2:
            return NULL
        at = _get_text_header(at, end, &size)
        if at == NULL or size > end - at:
            return NULL
        cdef const char* text = <const char*> at
        at += size
        cdef Cursor ids = at
        at = _skip(ids, end)
        if at == NULL:
            return NULL
        ids = _get_array_header(ids, end, &tokens)
        plain = ids != NULL and tokens == 1 and _get_uint(ids, end, &token) != NULL
        for _number in range(2, fields):
            if at < end and (at[0] == 0xC0 or at[0] == 0):
                at += 1
                continue
            plain = False
            at = _skip(at, end)
            if at == NULL:
                return NULL
        found = self._routes.find(string(text, <size_t> size))
        if found == self._routes.end():
            return at
        cdef Route* route = &dereference(found).second
        plain = plain and token <= 0xFFFFFFFF
        if plain and route.left_in <= self._read and self._left_in <= self._read:
            output.route = route
            output.token = <uint32_t> token
        else:
            route.left_in = self._number
        return at

    cdef int _append(self, string& frames, Output output) except -1:
        """Append the frame of one token: u32 size, u8 kind, u32 stream, item."""
        cdef unsigned char head[9]
        cdef unsigned char id_bytes[5]
        cdef Py_ssize_t id_size = _put_item_id(id_bytes, output.token) - id_bytes
        _put_u32(head, <uint32_t> (self._prefix.size() + id_size))
        head[4] = self._kind
        _put_u32(head + 5, output.route.stream)
        frames.append(<char*> head, 9)
        frames.append(self._prefix)
        frames.append(<char*> id_bytes, <size_t> id_size)
        return 0


cdef double _time(Cursor at, Cursor end) noexcept nogil:
    """The time of a message behind its outputs: a float after the statistics. 0 without one."""
    cdef uint64_t bits = 0
    cdef double time_s
    at = _skip(at, end)
    if at == NULL or end - at < 9 or at[0] != 0xCB:
        return 0
    bits = <uint64_t> _get_big_endian(at + 1, 8)
    memcpy(&time_s, &bits, sizeof(time_s))
    return time_s


cdef void _add_gap(vector[double]& gaps, vector[int64_t]& counts, double gap) noexcept nogil:
    """Add a gap: the requests of a step have mostly the same one."""
    if gaps.size() and gaps.back() == gap:
        counts[counts.size() - 1] += 1
        return
    gaps.push_back(gap)
    counts.push_back(1)


cdef size_t _place(const vector[uint32_t]& connections, uint32_t connection) noexcept nogil:
    """The index of ``connection``; there are as many as frontends."""
    cdef size_t at
    for at in range(connections.size()):
        if connections[at] == connection:
            return at
    return connections.size()


cdef bytes _without_plain(
    Cursor start, Cursor header, Cursor tail, Cursor end, const vector[Output]& outputs,
    uint32_t plain,
):
    cdef string rest
    cdef unsigned char count[5]
    cdef Py_ssize_t size = _put_array_header(count, <uint32_t> outputs.size() - plain) - count
    cdef size_t at
    rest.append(<const char*> start, <size_t> (header - start))
    rest.append(<char*> count, <size_t> size)
    for at in range(outputs.size()):
        if outputs[at].route == NULL:
            rest.append(
                <const char*> outputs[at].start, <size_t> (outputs[at].end - outputs[at].start)
            )
    rest.append(<const char*> tail, <size_t> (end - tail))
    return _bytes(rest)


cdef bytes _bytes(const string& text):
    return PyBytes_FromStringAndSize(text.data(), <Py_ssize_t> text.size())


# -- MessagePack: each function returns the position behind what it has read, NULL beyond the end


cdef Cursor _skip(Cursor at, Cursor end) noexcept nogil:
    """One value of any type; containers are counted, not entered recursively."""
    cdef int64_t values = 1, size
    cdef unsigned char kind
    cdef int width
    while values:
        if at >= end:
            return NULL
        values -= 1
        kind = at[0]
        at += 1
        size = 0
        if kind < 0x80 or kind >= 0xE0 or kind in (0xC0, 0xC2, 0xC3):
            continue
        if kind < 0x90:
            # A map of n pairs is followed by 2 n values.
            values += 2 * (kind & 0x0F)
        elif kind < 0xA0:
            values += kind & 0x0F
        elif kind < 0xC0:
            size = kind & 0x1F
        elif kind in (0xCC, 0xD0):
            size = 1
        elif kind in (0xCD, 0xD1):
            size = 2
        elif kind in (0xCA, 0xCE, 0xD2):
            size = 4
        elif kind in (0xCB, 0xCF, 0xD3):
            size = 8
        elif 0xD4 <= kind <= 0xD8:  # fixext: a type byte and 1 to 16 bytes
            size = 1 + (1 << (kind - 0xD4))
        # The one byte that MessagePack never uses.
        elif kind == 0xC1:
            return NULL
        else:
            width = _length_width(kind)
            if end - at < width:
                return NULL
            size = _get_big_endian(at, width)
            at += width
            if kind >= 0xDC:
                values += size if kind < 0xDE else 2 * size
                size = 0
            # An ext has a type byte before its data.
            elif 0xC7 <= kind <= 0xC9:
                size += 1
        if size > end - at:
            return NULL
        at += size
    return at


cdef int _length_width(unsigned char kind) noexcept nogil:
    """Bytes of the length that follows bin, ext, str, array and map of variable size."""
    if kind in (0xC4, 0xC7, 0xD9):
        return 1
    if kind in (0xC5, 0xC8, 0xDA, 0xDC, 0xDE):
        return 2
    return 4


cdef Cursor _get_array_header(Cursor at, Cursor end, int64_t* count) noexcept nogil:
    cdef int width
    if at >= end:
        return NULL
    if at[0] & 0xF0 == 0x90:
        count[0] = at[0] & 0x0F
        return at + 1
    if at[0] != 0xDC and at[0] != 0xDD:
        return NULL
    width = _length_width(at[0])
    if end - at < 1 + width:
        return NULL
    count[0] = _get_big_endian(at + 1, width)
    return at + 1 + width


cdef Cursor _get_text_header(Cursor at, Cursor end, int64_t* size) noexcept nogil:
    cdef int width
    if at >= end:
        return NULL
    if at[0] & 0xE0 == 0xA0:
        size[0] = at[0] & 0x1F
        return at + 1
    if not 0xD9 <= at[0] <= 0xDB:
        return NULL
    width = _length_width(at[0])
    if end - at < 1 + width:
        return NULL
    size[0] = _get_big_endian(at + 1, width)
    return at + 1 + width


cdef Cursor _get_uint(Cursor at, Cursor end, uint64_t* value) noexcept nogil:
    cdef int width
    if at >= end:
        return NULL
    if at[0] < 0x80:
        value[0] = at[0]
        return at + 1
    if not 0xCC <= at[0] <= 0xCE:
        return NULL
    width = 1 << (at[0] - 0xCC)
    if end - at < 1 + width:
        return NULL
    value[0] = <uint64_t> _get_big_endian(at + 1, width)
    return at + 1 + width


cdef int64_t _get_big_endian(Cursor at, int width) noexcept nogil:
    cdef int64_t value = 0
    cdef int number
    for number in range(width):
        value = (value << 8) | at[number]
    return value


cdef unsigned char* _put_big_endian(unsigned char* out, uint32_t value, int width) noexcept nogil:
    cdef int number
    for number in range(width):
        out[number] = <unsigned char> (value >> (8 * (width - 1 - number)))
    return out + width


cdef Py_ssize_t _uint_size(uint32_t value) noexcept nogil:
    if value < 0x80:
        return 1
    if value < 0x100:
        return 2
    return 3 if value < 0x10000 else 5


cdef unsigned char* _put_uint(unsigned char* out, uint32_t value) noexcept nogil:
    if value < 0x80:
        out[0] = <unsigned char> value
        return out + 1
    if value < 0x100:
        out[0] = 0xCC
        return _put_big_endian(out + 1, value, 1)
    return _put_item_id(out, value)


cdef unsigned char* _put_item_id(unsigned char* out, uint32_t value) noexcept nogil:
    """A token id in the item of one token: 1, 3 or 5 bytes of msgpack."""
    if value < 0x80:
        out[0] = <unsigned char> value
        return out + 1
    if value < 0x10000:
        out[0] = 0xCD
        return _put_big_endian(out + 1, value, 2)
    out[0] = 0xCE
    return _put_big_endian(out + 1, value, 4)


cdef Py_ssize_t _array_header_size(Py_ssize_t count) noexcept nogil:
    if count < 16:
        return 1
    return 3 if count < 0x10000 else 5


cdef unsigned char* _put_array_header(unsigned char* out, uint32_t count) noexcept nogil:
    if count < 16:
        out[0] = <unsigned char> (0x90 | count)
        return out + 1
    if count < 0x10000:
        out[0] = 0xDC
        return _put_big_endian(out + 1, count, 2)
    out[0] = 0xDD
    return _put_big_endian(out + 1, count, 4)


cdef void _put_u32(unsigned char* out, uint32_t value) noexcept nogil:
    cdef int number
    for number in range(4):
        out[number] = <unsigned char> (value >> (8 * number))
