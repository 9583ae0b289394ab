"""The prefix index: which worker holds which leading blocks of a prompt.

Layout, complexity and invariants are described in docs/radix.md; the reference implementation is
tests/oracle/radix.py.
"""

from array import array as new_array
from heapq import heappop, heappush

cimport cython
from cpython cimport array
from cpython.buffer cimport PyBuffer_Release
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from libcpp cimport bool as cpp_bool
from libcpp.string cimport string
from libcpp.vector cimport vector

from dynamo._fast.columns cimport open_u32, open_u64

__all__ = ["InvalidSequence", "ParentNotFound", "RadixTree"]

cdef extern from "radix_shared.hpp" namespace "dynamo::radix":
    cdef enum class Stored:
        OK
        NO_PARENT
        OWN_PARENT

    cdef struct Run:
        uint32_t slot
        cpp_bool has_parent
        uint64_t parent_hash
        size_t begin
        size_t end

    cdef cppclass Dump:
        vector[Run] runs
        vector[uint64_t] block_hashes
        vector[uint64_t] tokens_hashes

    cdef cppclass SharedIndex:
        void share() noexcept
        void set_cap(size_t blocks) noexcept
        size_t blocks() noexcept
        size_t nodes() noexcept
        size_t dropped() noexcept
        size_t memory_bytes() noexcept
        void open_slot(uint32_t slot) except +
        Stored store(
            uint32_t slot,
            cpp_bool has_parent,
            uint64_t parent_hash,
            const uint8_t *block_hashes,
            const uint8_t *tokens_hashes,
            size_t count,
            size_t *added,
        ) except +
        size_t remove(uint32_t slot, const uint8_t *block_hashes, size_t count) noexcept
        size_t clear(uint32_t slot) noexcept
        size_t clear_all(uint32_t number) noexcept
        size_t held(uint32_t slot) noexcept
        cpp_bool is_open(uint32_t slot) noexcept
        size_t match(
            const uint8_t *tokens_hashes, size_t count, uint32_t *depths, cpp_bool early_exit
        ) except +
        size_t extend(
            const uint8_t *tokens_hashes,
            size_t count,
            const uint32_t *depths,
            uint32_t *extensions,
            uint32_t tier,
        ) except +
        size_t adopt(uint32_t slot, const uint8_t *block_hashes, size_t count) except +
        void ranges(
            const uint8_t *tokens_hashes, size_t count, uint32_t tier, vector[uint32_t] *out
        ) except +
        uint32_t tiers() noexcept
        void dump(Dump *out, cpp_bool all_tiers) except +
        string complaint() except +

cdef enum:
    TIERS = 4
    TIER_SHIFT = 28

cdef array.array HASHES = new_array("Q")
cdef array.array DEPTHS = new_array("I")


class ParentNotFound(RuntimeError):
    """The parent of a chain is unknown in that slot."""


class InvalidSequence(RuntimeError):
    """A block names itself as its parent."""


@cython.final
cdef class RadixTree:
    """Blocks held per (worker, dp_rank), found by the local hashes of their tokens.

    Each pair gets a *slot*, a small dense integer. Columns of hashes are buffers of 64-bit integers
    or raw little-endian bytes. ``max_blocks`` bounds the blocks held and the nodes that carry them
    (0: no bound); what it refuses is counted by ``dropped()``.

    Blocks lie in storage tiers: 0 device, 1 host, 2 disk, 3 external. A pair has a slot per tier;
    that of the device is the dense one, and the only one in the result of ``match_into``.
    """

    cdef SharedIndex _index
    cdef dict _slots
    cdef list _owners
    cdef list _free_slots

    def __cinit__(self, size_t max_blocks=0):
        if max_blocks:
            self._index.set_cap(max_blocks)
        self._slots = {}
        self._owners = []
        self._free_slots = []

    def slot(self, worker, dp_rank, uint32_t tier=0):
        """Return the slot of (worker, dp_rank); the first use assigns the lowest free one. O(1).

        A ``tier`` above 0 has its own slot for ``store``, ``remove`` and ``clear``. A parent
        that a tier does not hold is looked for in the pair's other tiers.
        """
        owner = (worker, dp_rank)
        slot = self._slots.get(owner)
        if slot is None:
            slot = self._open(owner)
        return slot if tier == 0 else self._open_tier(slot, tier)

    def slots(self):
        """Return every registered (worker, dp_rank, slot), in order of registration."""
        return [(*owner, slot) for owner, slot in self._slots.items()]

    def capacity(self):
        """Return the highest slot ever assigned plus one: the length that ``match_into`` needs."""
        return len(self._owners)

    def store(self, uint32_t slot, parent_hash, block_hashes, tokens_hashes):
        """Add a chain of blocks under ``parent_hash`` (None: the root); return how many are new.

        Storing again is harmless; an id stored at another place moves there. Raises ParentNotFound
        or InvalidSequence and then changes nothing. Amortised O(blocks).
        """
        self._expect(slot)
        cdef cpp_bool has_parent = parent_hash is not None
        cdef uint64_t parent = unsigned(parent_hash) if has_parent else 0
        cdef Py_buffer blocks
        cdef Py_buffer locals_
        cdef Py_ssize_t count = open_u64(block_hashes, "block_hashes", &blocks)
        try:
            if open_u64(tokens_hashes, "tokens_hashes", &locals_) != count:
                PyBuffer_Release(&locals_)
                raise ValueError("block_hashes and tokens_hashes differ in length")
            try:
                return self._store(
                    slot,
                    has_parent,
                    parent,
                    <const uint8_t *> blocks.buf,
                    <const uint8_t *> locals_.buf,
                    <size_t> count,
                )
            finally:
                PyBuffer_Release(&locals_)
        finally:
            PyBuffer_Release(&blocks)

    def remove(self, uint32_t slot, block_hashes):
        """Remove blocks from ``slot``; return how many it did not have. Amortised O(blocks)."""
        self._expect(slot)
        cdef Py_buffer blocks
        cdef Py_ssize_t count = open_u64(block_hashes, "block_hashes", &blocks)
        try:
            return self._index.remove(slot, <const uint8_t *> blocks.buf, <size_t> count)
        finally:
            PyBuffer_Release(&blocks)

    def adopt(self, uint32_t slot, block_hashes):
        """Add blocks that other tiers of the slot's owner hold under these ids.

        Returns how many of the ids are not known there. Amortised O(blocks).
        """
        self._expect(slot)
        cdef Py_buffer blocks
        cdef Py_ssize_t count = open_u64(block_hashes, "block_hashes", &blocks)
        try:
            return self._index.adopt(slot, <const uint8_t *> blocks.buf, <size_t> count)
        finally:
            PyBuffer_Release(&blocks)

    def clear(self, uint32_t slot):
        """Remove all blocks of ``slot``, which stays registered; return how many. O(those)."""
        self._expect(slot)
        return self._index.clear(slot)

    def clear_all(self, uint32_t slot):
        """The same for all tiers of the pair with this device slot."""
        self._expect(slot)
        # The bits above the number of the slot are its tier.
        return self._index.clear_all(slot & ((1 << TIER_SHIFT) - 1))

    def remove_worker(self, worker):
        """Remove all blocks of ``worker``, all ranks and tiers; free its slots; return how many."""
        cdef size_t removed = 0
        for owner in [owner for owner in self._slots if owner[0] == worker]:
            slot = self._slots.pop(owner)
            removed += self._index.clear_all(slot)
            self._owners[slot] = None
            # The lowest one is reused first: columns stay as short as they can.
            heappush(self._free_slots, slot)
        return removed

    def match_into(self, tokens_hashes, depths, bint early_exit=False):
        """Write to ``depths[slot]`` how many leading blocks the slot holds; 0 where none.

        ``depths`` is a writable buffer of uint32 with at least ``capacity()`` places; those behind
        stay as they are. Returns the number of slots above 0. ``early_exit`` stops when at most
        one slot is left, whose depth may then be too low. O(matched depth + slots).
        """
        cdef Py_buffer view
        cdef Py_buffer out
        cdef Py_ssize_t count = open_u64(tokens_hashes, "tokens_hashes", &view)
        try:
            self._open_column(depths, "depths", &out, True)
            try:
                memset(out.buf, 0, <size_t> len(self._owners) * 4)
                return self._index.match(
                    <const uint8_t *> view.buf, <size_t> count, <uint32_t *> out.buf, early_exit
                )
            finally:
                PyBuffer_Release(&out)
        finally:
            PyBuffer_Release(&view)

    def extend_into(self, tokens_hashes, depths, extensions, uint32_t tier):
        """Write to ``extensions[slot]`` how many blocks after ``depths[slot]`` are in ``tier``.

        Only those without a hole count; whether another tier holds them too does not matter. Both
        columns are uint32 with at least ``capacity()`` places and indexed by the device's slots.
        Returns the number of slots above 0. O(matched depth + slots); O(slots) for an unused tier.
        """
        if tier == 0 or tier >= TIERS:
            raise ValueError(f"tier must be 1 to {TIERS - 1}, got {tier}")
        cdef Py_buffer view
        cdef Py_buffer known
        cdef Py_buffer out
        cdef Py_ssize_t count = open_u64(tokens_hashes, "tokens_hashes", &view)
        try:
            self._open_column(depths, "depths", &known, False)
            try:
                self._open_column(extensions, "extensions", &out, True)
                try:
                    memset(out.buf, 0, <size_t> len(self._owners) * 4)
                    return self._index.extend(
                        <const uint8_t *> view.buf,
                        <size_t> count,
                        <const uint32_t *> known.buf,
                        <uint32_t *> out.buf,
                        tier,
                    )
                finally:
                    PyBuffer_Release(&out)
            finally:
                PyBuffer_Release(&known)
        finally:
            PyBuffer_Release(&view)

    def ranges(self, tokens_hashes, uint32_t tier):
        """Return the parts of the sequence that any slot holds in ``tier``: (begin, end) pairs.

        Ends are exclusive. O(depth of what anybody holds).
        """
        if tier == 0 or tier >= TIERS:
            raise ValueError(f"tier must be 1 to {TIERS - 1}, got {tier}")
        cdef Py_buffer view
        cdef vector[uint32_t] borders
        cdef Py_ssize_t count = open_u64(tokens_hashes, "tokens_hashes", &view)
        try:
            self._index.ranges(<const uint8_t *> view.buf, <size_t> count, tier, &borders)
        finally:
            PyBuffer_Release(&view)
        return [(borders[i], borders[i + 1]) for i in range(0, borders.size(), 2)]

    def tiers(self):
        """Return the lower tiers that were ever used, as bits: 2 host, 4 disk, 8 external. O(1)."""
        return self._index.tiers()

    def match(self, tokens_hashes, bint early_exit=False):
        """Return the same as a dict from (worker, dp_rank) to depth, without zeros."""
        cdef array.array depths = array.clone(DEPTHS, len(self._owners), False)
        if self.match_into(tokens_hashes, depths, early_exit) == 0:
            return {}
        return {
            owner: depth for owner, depth in zip(self._owners, depths) if depth
        }

    def dump(self):
        """Return chains that rebuild the index: (worker, dp_rank, parent, block and tokens hashes).

        Parents come first. Blocks behind a hole, which no match reaches, are left out, and so are
        lower tiers. O(blocks).
        """
        return [chain[:5] for chain in self._dump(False)]

    def dump_tiers(self):
        """The same for all tiers; the tier is the sixth element. Parents may be in another tier."""
        return self._dump(True)

    def blocks(self):
        """Return the number of blocks, counted once per slot and tier."""
        return self._index.blocks()

    def held(self, uint32_t slot):
        """Return the number of blocks of one slot; 0 if it is unknown. O(1)."""
        return self._index.held(slot)

    def nodes(self):
        """Return the number of distinct prefixes with blocks."""
        return self._index.nodes()

    def memory_bytes(self):
        """Return the allocated bytes: whole tables, not only their used part. O(slots)."""
        return self._index.memory_bytes()

    def dropped(self):
        """Return the number of blocks rejected by the cap so far."""
        return self._index.dropped()

    def _share(self):
        """Enable locking, and return a capsule with the index's address for threads.

        Call it before the first thread starts. The capsule does not own the index: the holder keeps
        a reference to this object.
        """
        self._index.share()
        return PyCapsule_New(&self._index, "dynamo.radix.SharedIndex", NULL)

    def _check(self):
        """Assert every invariant. O(blocks + nodes)."""
        complaint = self._index.complaint().decode()
        if complaint:
            raise AssertionError(complaint)
        for owner, slot in self._slots.items():
            assert self._owners[slot] == owner, f"slot {slot} has another owner"
        registered = len(self._slots) + len(self._free_slots)
        assert registered == len(self._owners), "slots leak"
        for slot in self._free_slots:
            for tier in range(4):
                assert not self.held(slot | tier << TIER_SHIFT), f"free slot {slot} has blocks"

    cdef int _expect(self, uint32_t slot) except -1:
        cdef size_t number = slot & ((1 << TIER_SHIFT) - 1)
        if number >= <size_t> len(self._owners) or self._owners[number] is None:
            raise ValueError(f"slot {slot} is not registered")
        if number != slot and not self._index.is_open(slot):
            raise ValueError(f"slot {slot} is not registered")
        return 0

    cdef int _open_column(
        self, object column, str name, Py_buffer *view, bint writable
    ) except -1:
        cdef Py_ssize_t capacity = len(self._owners)
        if open_u32(column, name, view, writable) < capacity:
            PyBuffer_Release(view)
            raise ValueError(f"{name} must have at least {capacity} places")
        return 0

    cdef object _open_tier(self, uint32_t number, uint32_t tier):
        if tier >= TIERS:
            raise ValueError(f"tier must be 0 to {TIERS - 1}, got {tier}")
        cdef uint32_t slot = tier << TIER_SHIFT | number
        self._index.open_slot(slot)
        return slot

    cdef list _dump(self, bint all_tiers):
        cdef Dump columns
        cdef Run run
        self._index.dump(&columns, all_tiers)
        return [
            (
                *self._owners[run.slot & ((1 << TIER_SHIFT) - 1)],
                run.parent_hash if run.has_parent else None,
                slice_of(columns.block_hashes, run.begin, run.end),
                slice_of(columns.tokens_hashes, run.begin, run.end),
                run.slot >> TIER_SHIFT,
            )
            for run in columns.runs
        ]

    cdef object _open(self, tuple owner):
        cdef uint32_t slot
        if self._free_slots:
            slot = heappop(self._free_slots)
            self._owners[slot] = owner
        else:
            slot = <uint32_t> len(self._owners)
            self._index.open_slot(slot)
            self._owners.append(owner)
        self._slots[owner] = slot
        return slot

    cdef object _store(
        self,
        uint32_t slot,
        cpp_bool has_parent,
        uint64_t parent,
        const uint8_t *block_hashes,
        const uint8_t *tokens_hashes,
        size_t count,
    ):
        cdef size_t added = 0
        cdef Stored outcome = self._index.store(
            slot, has_parent, parent, block_hashes, tokens_hashes, count, &added
        )
        if outcome == Stored.NO_PARENT:
            raise ParentNotFound("Failed to find parent block")
        if outcome == Stored.OWN_PARENT:
            raise InvalidSequence("Invalid block sequence")
        return added


cdef uint64_t unsigned(object value) except? 0:
    """Return the bits of a signed or unsigned 64-bit integer."""
    if -(1 << 63) <= value < 1 << 64:
        return value & 0xFFFF_FFFF_FFFF_FFFF
    raise ValueError(f"a block hash must have 64 bits, got {value}")


cdef array.array slice_of(const vector[uint64_t] &column, size_t begin, size_t end):
    cdef array.array part = array.clone(HASHES, <Py_ssize_t> (end - begin), False)
    if end > begin:
        memcpy(part.data.as_chars, column.data() + begin, (end - begin) * 8)
    return part
