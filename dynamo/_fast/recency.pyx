"""Blocks per slot in the order in which they were last touched; running requests pin theirs.

The reference implementation is tests/oracle/recency.py.
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
    cdef struct Dropped:
        uint32_t slot
        vector[uint64_t] blocks

    cdef cppclass Lists "dynamo::Recency":
        Lists(uint64_t multiplier) except +
        size_t blocks() noexcept
        size_t leases() noexcept
        cbool is_open(size_t slot) noexcept
        size_t blocks_of(size_t slot) noexcept
        cbool has_own_list(size_t slot) noexcept
        size_t memory_bytes() noexcept
        void open(uint32_t slot, cbool own_list) except +
        size_t close(uint32_t slot) noexcept
        void touch(uint32_t slot, const uint64_t *blocks, size_t count, double now_s) except +
        uint64_t pin(uint32_t slot, const uint64_t *blocks, size_t count, double now_s) except +
        cbool release(uint64_t handle, double now_s) noexcept
        size_t age(double before_s, size_t limit, vector[Dropped] *out) except +
        size_t evict(uint32_t slot, size_t limit, vector[Dropped] *out) except +
        size_t prune(size_t limit, vector[Dropped] *out) except +
        const char *complaint() except +

cdef array.array BLOCKS = new_array("Q")
cdef uint32_t MAX_SLOTS = 65536


@cython.final
@cython.auto_pickle(False)
cdef class Recency:
    """The predicted blocks of each slot, in the order in which they are dropped."""

    cdef Lists *_lists

    def __cinit__(self):
        # Clients choose tokens, and with a known multiplier could make all blocks collide.
        self._lists = new Lists(<uint64_t>getrandbits(64))

    def __dealloc__(self):
        del self._lists

    def open(self, uint32_t slot, bint own_list):
        """Add ``slot``; with ``own_list`` its blocks are kept in their own list from now on."""
        if slot >= MAX_SLOTS:
            raise IndexError(f"slot {slot} is beyond {MAX_SLOTS - 1}")
        self._lists.open(slot, own_list)

    def close(self, uint32_t slot):
        """Remove ``slot`` and end its leases; return the number of its blocks."""
        return self._lists.close(slot) if self._lists.is_open(slot) else 0

    def is_open(self, uint32_t slot):
        """Return whether ``slot`` was added."""
        return self._lists.is_open(slot)

    def has_own_list(self, uint32_t slot):
        """Return whether ``slot`` has its own list."""
        return self._lists.is_open(slot) and self._lists.has_own_list(slot)

    def touch(self, uint32_t slot, blocks, double now_s):
        """Make a chain of blocks the newest of ``slot``."""
        cdef Py_buffer view
        self._expect(slot)
        cdef Py_ssize_t count = open_u64(blocks, "blocks", &view)
        try:
            self._lists.touch(slot, <const uint64_t *> view.buf, <size_t> count, now_s)
        finally:
            PyBuffer_Release(&view)

    def pin(self, uint32_t slot, blocks, double now_s):
        """The same, and keep them until ``release`` of the returned lease."""
        cdef Py_buffer view
        self._expect(slot)
        cdef Py_ssize_t count = open_u64(blocks, "blocks", &view)
        try:
            return self._lists.pin(slot, <const uint64_t *> view.buf, <size_t> count, now_s)
        finally:
            PyBuffer_Release(&view)

    def release(self, uint64_t lease, double now_s):
        """End a lease: its blocks become the newest; return False if it has ended already."""
        return self._lists.release(lease, now_s)

    def age(self, double before_s, size_t limit):
        """Drop blocks of the common list last touched at ``before_s`` or earlier."""
        cdef vector[Dropped] dropped
        self._lists.age(before_s, limit, &dropped)
        return chains(dropped)

    def evict(self, uint32_t slot, size_t limit):
        """Drop the oldest blocks of a slot that has its own list."""
        cdef vector[Dropped] dropped
        self._expect(slot)
        if not self._lists.has_own_list(slot):
            raise ValueError(f"slot {slot} has no list of its own")
        self._lists.evict(slot, limit, &dropped)
        return chains(dropped)

    def prune(self, size_t limit):
        """Drop the oldest blocks of all lists."""
        cdef vector[Dropped] dropped
        self._lists.prune(limit, &dropped)
        return chains(dropped)

    def blocks(self):
        """Return the number of (block, slot) pairs."""
        return self._lists.blocks()

    def blocks_of(self, uint32_t slot):
        """Return the number of blocks of one slot; 0 if it is unknown."""
        return self._lists.blocks_of(slot) if self._lists.is_open(slot) else 0

    def leases(self):
        """Return the number of active leases."""
        return self._lists.leases()

    def memory_bytes(self):
        """Return the allocated bytes: whole tables, not only their used part."""
        return self._lists.memory_bytes()

    def _check(self):
        """Assert every invariant. O(blocks)."""
        cdef const char *fault = self._lists.complaint()
        assert fault == NULL, fault.decode()

    cdef int _expect(self, uint32_t slot) except -1:
        if not self._lists.is_open(slot):
            raise ValueError(f"slot {slot} is unknown")
        return 0


cdef list chains(const vector[Dropped] &dropped):
    """Return (slot, blocks) in the order of dropping."""
    return [(dropped[i].slot, column(dropped[i].blocks)) for i in range(dropped.size())]


cdef array.array column(const vector[uint64_t] &values):
    cdef array.array copy = array.clone(BLOCKS, <Py_ssize_t> values.size(), False)
    if not values.empty():
        memcpy(copy.data.as_chars, values.data(), values.size() * 8)
    return copy
