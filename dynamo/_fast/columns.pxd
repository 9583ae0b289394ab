"""How columns of integers enter and leave the compiled rooms: buffers in, ``array`` out.

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


cdef inline bytes item_kind(const Py_buffer *view):
    """The one-letter struct format of the items, without its byte-order prefix."""
    cdef bytes kind = view.format if view.format != NULL else b"B"
    return kind[1:] if kind[:1] in b"@=<" else kind


cdef inline Py_ssize_t open_u64(object column, str name, Py_buffer *view) except -1:
    """A column of 64-bit integers (signed ones are taken by their bits) or of raw bytes."""
    PyObject_GetBuffer(column, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    cdef bytes kind = item_kind(view)
    if view.itemsize == 8 and kind in (b"Q", b"L", b"q", b"l"):
        return view.len // 8
    if view.itemsize == 1 and kind in (b"B", b"b", b"c"):
        if view.len % 8 == 0:
            return view.len // 8
        PyBuffer_Release(view)
        raise ValueError(f"{name}: {view.len} bytes are not a whole number of 64-bit values")
    PyBuffer_Release(view)
    raise TypeError(f"{name} must be a buffer of 64-bit integers, not of {kind.decode()!r}")


cdef inline Py_ssize_t open_u32(object column, str name, Py_buffer *view, bint writable) except -1:
    """A column of unsigned 32-bit integers."""
    cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT
    PyObject_GetBuffer(column, view, flags | PyBUF_WRITABLE if writable else flags)
    cdef bytes kind = item_kind(view)
    if view.itemsize == 4 and kind in (b"I", b"L"):
        return view.len // 4
    PyBuffer_Release(view)
    raise TypeError(f"{name} must be a buffer of unsigned 32-bit integers, not of {kind.decode()!r}")
