"""What a JSON text will cost to decode, before anything is decoded.

The reference implementation is tests/oracle/json_shape.py.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t
from libc.string cimport memchr

__all__ = ["measure"]

# One unit is about 40 ns of msgspec.
cdef enum:
    VALUE = 1
    CONTAINER = 4
    MEMBER = 8
    EXPONENT = 8
    LONG_EXPONENT = 1024  # may need arithmetic of any precision
    PLAIN_CHARACTERS = 19

cdef struct Shape:
    int64_t weight
    int64_t depth
    Py_ssize_t name_start
    Py_ssize_t name_end


def measure(text, int64_t max_weight, int64_t max_depth):
    """(weight, depth, name) of ``text``; stops above a limit, in the top-level member ``name``."""
    cdef Py_buffer view
    cdef Shape shape
    PyObject_GetBuffer(text, &view, PyBUF_SIMPLE)
    cdef const unsigned char *data = <const unsigned char *> view.buf
    try:
        with nogil:
            shape = scan(data, view.len, max_weight, max_depth)
        return shape.weight, shape.depth, data[shape.name_start:shape.name_end]
    finally:
        PyBuffer_Release(&view)


cdef Shape scan(
    const unsigned char *text, Py_ssize_t size, int64_t max_weight, int64_t max_depth
) noexcept nogil:
    cdef Shape shape = Shape(0, 0, 0, 0)
    cdef int64_t depth = 0
    cdef Py_ssize_t start, at = 0, string_start = 0, string_end = 0
    cdef unsigned char byte
    while at < size and shape.weight <= max_weight and shape.depth <= max_depth:
        byte = text[at]
        start = at
        at += 1
        if byte == c'"':
            shape.weight += VALUE
            at = after_string(text, size, at)
            string_start, string_end = start + 1, at - 1 if at > start + 1 else start + 1
        elif byte == c"{" or byte == c"[":
            shape.weight += CONTAINER
            depth += 1
            shape.depth = max(depth, shape.depth)
        elif byte == c"}" or byte == c"]":
            depth -= 1
        elif byte == c":":
            shape.weight += MEMBER
            if depth == 1:
                shape.name_start, shape.name_end = string_start, string_end
        elif byte == c"-" or c"0" <= byte <= c"9":
            while at < size and in_number(text[at]):
                at += 1
            shape.weight += number_weight(text + start, at - start)
        elif c"a" <= byte <= c"z":
            while at < size and c"a" <= text[at] <= c"z":
                at += 1
            shape.weight += VALUE
    return shape


cdef Py_ssize_t after_string(
    const unsigned char *text, Py_ssize_t size, Py_ssize_t at
) noexcept nogil:
    """The place behind the quote that ends the string that begins at ``at``."""
    cdef Py_ssize_t first = at, quote, slash
    cdef const void *found
    while True:
        found = memchr(text + at, c'"', <size_t> (size - at))
        if found == NULL:
            return size
        quote = <const unsigned char *> found - text
        slash = quote
        while slash > first and text[slash - 1] == c"\\":
            slash -= 1
        at = quote + 1
        # An even number of backslashes escapes each other, not the quote.
        if (quote - slash) % 2 == 0:
            return at
        # Backslashes up to here are counted: O(size), also for a text of nothing else.
        first = at


cdef int64_t number_weight(const unsigned char *text, Py_ssize_t size) noexcept nogil:
    cdef bint long_form = size > PLAIN_CHARACTERS
    if memchr(text, c"e", <size_t> size) != NULL or memchr(text, c"E", <size_t> size) != NULL:
        return max(LONG_EXPONENT, size) if long_form else EXPONENT
    return size // 2 if long_form else VALUE


cdef inline bint in_number(unsigned char byte) noexcept nogil:
    return (
        c"0" <= byte <= c"9"
        or byte == c"."
        or byte == c"e"
        or byte == c"E"
        or byte == c"+"
        or byte == c"-"
    )
