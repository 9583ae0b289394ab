"""The active-load tracker: which blocks and prompt tokens running requests hold on each slot."""

from random import getrandbits

cimport cython
from cpython cimport array
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool

from dynamo._fast.columns cimport check_items

__all__ = ["ActiveSequences"]

cdef extern from "sequences.hpp" namespace "dynamo":
    cdef cppclass Sequences:
        Sequences(uint64_t multiplier)
        uint64_t book(uint32_t slot, const uint64_t *hashes, size_t count, int64_t unique,
                      int64_t prefill) except +
        cbool end_prefill(uint64_t handle) noexcept
        cbool grow(uint64_t handle, int64_t blocks, double faded) noexcept
        cbool release(uint64_t handle) except +
        size_t clear(uint32_t slot) except +
        size_t slots() noexcept
        int64_t prefill(size_t slot) noexcept
        int64_t requests(size_t slot) noexcept
        int64_t blocks(size_t slot) noexcept
        size_t depth(size_t slot, const uint64_t *hashes, size_t count) noexcept
        size_t memory_bytes() noexcept
        const char *broken() except +


@cython.final
@cython.auto_pickle(False)
cdef class ActiveSequences:
    """Ref-counted blocks and active prefill tokens by slot."""

    cdef Sequences *_sequences

    def __cinit__(self):
        # Clients choose tokens, and with a known multiplier could make all blocks collide.
        self._sequences = new Sequences(<uint64_t>getrandbits(64))

    def __dealloc__(self):
        del self._sequences

    def book(self, uint32_t slot, array.array sequence_hashes, int64_t unique_blocks,
             int64_t prefill_tokens):
        """Hold the blocks and the prefill on ``slot``; the handle ends it."""
        check_items(sequence_hashes, "sequence_hashes", c"Q")
        cdef size_t count = 0 if sequence_hashes is None else <size_t>len(sequence_hashes)
        cdef const uint64_t *first = _hashes(sequence_hashes)
        if unique_blocks < 0 or prefill_tokens < 0:
            raise ValueError("unique_blocks and prefill_tokens must not be negative")
        return self._sequences.book(slot, first, count, unique_blocks, prefill_tokens)

    def end_prefill(self, uint64_t handle):
        """Release the prefill tokens; False for a handle that has ended."""
        return self._sequences.end_prefill(handle)

    def grow(self, uint64_t handle, int64_t blocks, double faded=0.0):
        """Add ``blocks`` output blocks; False for a handle that has ended."""
        if blocks < 0 or not 0.0 <= faded <= 1.0:
            raise ValueError(f"blocks must be >= 0 and faded in 0..1, got {blocks} and {faded}")
        return self._sequences.grow(handle, blocks, faded)

    def release(self, uint64_t handle):
        """End the request; False for a handle that has ended already."""
        return self._sequences.release(handle)

    def clear(self, uint32_t slot):
        """End all requests of ``slot``; how many there were."""
        return self._sequences.clear(slot)

    def project_into(self, array.array sequence_hashes, int64_t unique_blocks,
                     array.array prefill_tokens not None, array.array decode_blocks not None,
                     array.array depths=None):
        """Write active prefill tokens and the blocks as they would be with this request; raise
        ``depths`` to the leading blocks that running requests hold."""
        check_items(sequence_hashes, "sequence_hashes", c"Q")
        check_items(prefill_tokens, "prefill_tokens", c"q")
        check_items(decode_blocks, "decode_blocks", c"q")
        check_items(depths, "depths", c"I")
        cdef size_t count = 0 if sequence_hashes is None else <size_t>len(sequence_hashes)
        cdef const uint64_t *first = _hashes(sequence_hashes)
        cdef Py_ssize_t width = len(prefill_tokens)
        cdef Py_ssize_t known = <Py_ssize_t>self._sequences.slots()
        cdef int64_t wanted = <int64_t>count + unique_blocks
        cdef int64_t *prefill = <int64_t *>prefill_tokens.data.as_longlongs
        cdef int64_t *decode = <int64_t *>decode_blocks.data.as_longlongs
        cdef uint32_t *raised = <uint32_t *>NULL if depths is None else depths.data.as_uints
        cdef Py_ssize_t slot
        cdef uint32_t depth
        if len(decode_blocks) != width or (depths is not None and len(depths) < width):
            raise ValueError("the columns must have the same length")
        for slot in range(width):
            prefill[slot] = 0
            decode[slot] = wanted
            if slot < known:
                prefill[slot] = self._sequences.prefill(slot)
                # Leading blocks that running requests of the slot hold already count once.
                depth = <uint32_t>self._sequences.depth(slot, first, count)
                decode[slot] += self._sequences.blocks(slot) - <int64_t>depth
                if raised != NULL and depth > raised[slot]:
                    raised[slot] = depth

    def load(self, Py_ssize_t slot):
        """(active prefill tokens, active blocks, active requests) of ``slot``."""
        if slot < 0 or slot >= <Py_ssize_t>self._sequences.slots():
            return 0, 0, 0
        return (self._sequences.prefill(slot), self._sequences.blocks(slot),
                self._sequences.requests(slot))

    def memory_bytes(self):
        """Bytes held by the tables."""
        return self._sequences.memory_bytes()

    def _check(self):
        """Assert every invariant; O(blocks × slots)."""
        cdef const char *fault = self._sequences.broken()
        assert fault == NULL, fault.decode()


cdef const uint64_t *_hashes(array.array column) noexcept:
    """The items of an optional column; NULL without one or without items."""
    if column is None or len(column) == 0:
        return NULL
    return <const uint64_t *>column.data.as_ulonglongs
