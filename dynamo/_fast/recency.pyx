"""Blocks per slot in the order in which they were last touched; running requests pin theirs.

The readable twin is tests/oracle/recency.py.
"""

from array import array as new_array
from random import getrandbits

cimport cython
from cpython cimport array
from cpython.buffer cimport PyBuffer_Release
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from dynamo._fast.columns cimport open_u64

__all__ = ["Recency"]

cdef extern from "recency.hpp" namespace "dynamo":
    cdef struct Forgotten:
        uint32_t slot
        vector[uint64_t] blocks

    cdef cppclass Lines "dynamo::Recency":
        Lines(uint64_t multiplier) except +
        size_t blocks() noexcept
        size_t leases() noexcept
        cbool is_open(size_t slot) noexcept
        size_t blocks_of(size_t slot) noexcept
        cbool has_own_line(size_t slot) noexcept
        size_t memory_bytes() noexcept
        void open(uint32_t slot, cbool own_line) except +
        size_t close(uint32_t slot) noexcept
        void touch(uint32_t slot, const uint64_t *blocks, size_t count, double now_s) except +
        uint64_t pin(uint32_t slot, const uint64_t *blocks, size_t count, double now_s) except +
        cbool release(uint64_t handle, double now_s) noexcept
        size_t age(double before_s, size_t most, vector[Forgotten] *out) except +
        size_t evict(uint32_t slot, size_t most, vector[Forgotten] *out) except +
        size_t prune(size_t most, vector[Forgotten] *out) except +
        const char *complaint() except +

cdef array.array BLOCKS = new_array("Q")
cdef uint32_t MAX_SLOTS = 65536


@cython.final
@cython.auto_pickle(False)
cdef class Recency:
    """Which blocks are believed on each slot, and which of them go first. Spec 2.5."""

    cdef Lines *_lines

    def __cinit__(self):
        self._lines = new Lines(<uint64_t>getrandbits(64))

    def __dealloc__(self):
        del self._lines

    def open(self, uint32_t slot, bint own_line):
        """Make ``slot`` known; with ``own_line`` its blocks line up apart from now on."""
        if slot >= MAX_SLOTS:
            raise IndexError(f"slot {slot} is beyond {MAX_SLOTS - 1}")
        self._lines.open(slot, own_line)

    def close(self, uint32_t slot):
        """Forget ``slot`` and end its leases; how many blocks it had."""
        return self._lines.close(slot) if self._lines.is_open(slot) else 0

    def is_open(self, uint32_t slot):
        """Whether ``slot`` is known."""
        return self._lines.is_open(slot)

    def has_own_line(self, uint32_t slot):
        """Whether the blocks of ``slot`` line up apart."""
        return self._lines.is_open(slot) and self._lines.has_own_line(slot)

    def touch(self, uint32_t slot, blocks, double now_s):
        """Make a chain of blocks the newest of ``slot``."""
        cdef Py_buffer view
        self._expect(slot)
        cdef Py_ssize_t count = open_u64(blocks, "blocks", &view)
        try:
            self._lines.touch(slot, <const uint64_t *> view.buf, <size_t> count, now_s)
        finally:
            PyBuffer_Release(&view)

    def pin(self, uint32_t slot, blocks, double now_s):
        """The same, and hold them until ``release`` of the lease that is returned."""
        cdef Py_buffer view
        self._expect(slot)
        cdef Py_ssize_t count = open_u64(blocks, "blocks", &view)
        try:
            return self._lines.pin(slot, <const uint64_t *> view.buf, <size_t> count, now_s)
        finally:
            PyBuffer_Release(&view)

    def release(self, uint64_t lease, double now_s):
        """End a lease: its blocks are the newest; False when it has ended already."""
        return self._lines.release(lease, now_s)

    def age(self, double before_s, size_t most):
        """Forget blocks of the common line last touched at ``before_s`` or earlier."""
        cdef vector[Forgotten] gone
        self._lines.age(before_s, most, &gone)
        return chains(gone)

    def evict(self, uint32_t slot, size_t most):
        """Forget the oldest blocks of a slot with a line of its own."""
        cdef vector[Forgotten] gone
        self._expect(slot)
        if not self._lines.has_own_line(slot):
            raise ValueError(f"slot {slot} has no line of its own")
        self._lines.evict(slot, most, &gone)
        return chains(gone)

    def prune(self, size_t most):
        """Forget the oldest blocks of all lines."""
        cdef vector[Forgotten] gone
        self._lines.prune(most, &gone)
        return chains(gone)

    def blocks(self):
        """(block, slot) pairs held."""
        return self._lines.blocks()

    def blocks_of(self, uint32_t slot):
        """Blocks of one slot; 0 if it is not known."""
        return self._lines.blocks_of(slot) if self._lines.is_open(slot) else 0

    def leases(self):
        """Leases that have not ended."""
        return self._lines.leases()

    def memory_bytes(self):
        """Bytes allocated: whole tables, not only their used part."""
        return self._lines.memory_bytes()

    def _check(self):
        """Assert every invariant. O(blocks)."""
        cdef const char *fault = self._lines.complaint()
        assert fault == NULL, fault.decode()

    cdef int _expect(self, uint32_t slot) except -1:
        if not self._lines.is_open(slot):
            raise ValueError(f"slot {slot} is not known")
        return 0


cdef list chains(const vector[Forgotten] &gone):
    """(slot, blocks) in the order of forgetting."""
    return [(gone[i].slot, column(gone[i].blocks)) for i in range(gone.size())]


cdef array.array column(const vector[uint64_t] &values):
    cdef array.array copy = array.clone(BLOCKS, <Py_ssize_t> values.size(), False)
    if not values.empty():
        memcpy(copy.data.as_chars, values.data(), values.size() * 8)
    return copy
