"""How columns of integers enter and leave the compiled modules: buffers in, ``array`` out.

``open_*`` fills ``view`` and returns the number of values; the caller releases the view. Columns
of u64 may also be raw little-endian bytes (what the wire carries), at any alignment.
"""

from cpython cimport array
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)


cdef inline int check_items(array.array column, str name, char kind) except -1:
    """Raise TypeError unless ``column`` is None or an array of the type code ``kind``.

    For columns that a request reads several times: an array's items are reached without the cost
    of a buffer view.
    """
    if column is not None and column.ob_descr.typecode != kind:
        raise TypeError(f"{name} must be an array of type code {chr(kind)!r}")
    return 0


cdef inline char item_kind(const Py_buffer *view) noexcept:
    """The struct letter of the items, past a native or little-endian prefix; else 0."""
    cdef const char *kind = view.format
    if kind == NULL:
        return c"B"
    if kind[0] == c"@" or kind[0] == c"=" or kind[0] == c"<":
        kind += 1
    return kind[0] if kind[0] != 0 and kind[1] == 0 else 0


cdef inline Py_ssize_t open_u64(object column, str name, Py_buffer *view) except -1:
    """A column of 64-bit integers (signed ones are taken by their bits) or of raw bytes."""
    PyObject_GetBuffer(column, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    cdef char kind = item_kind(view)
    if view.itemsize == 8 and kind in (c"Q", c"L", c"q", c"l"):
        return view.len // 8
    if view.itemsize == 1 and kind in (c"B", c"b", c"c"):
        if view.len % 8 == 0:
            return view.len // 8
        PyBuffer_Release(view)
        raise ValueError(f"{name}: {view.len} bytes are not a whole number of 64-bit values")
    PyBuffer_Release(view)
    raise TypeError(f"{name} must be a buffer of 64-bit integers or of their bytes")


cdef inline Py_ssize_t open_u32(object column, str name, Py_buffer *view, bint writable) except -1:
    """A column of unsigned 32-bit integers."""
    cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT
    PyObject_GetBuffer(column, view, flags | PyBUF_WRITABLE if writable else flags)
    cdef char kind = item_kind(view)
    if view.itemsize == 4 and kind in (c"I", c"L"):
        return view.len // 4
    PyBuffer_Release(view)
    raise TypeError(f"{name} must be a buffer of unsigned 32-bit integers")
