"""Token ids to block hashes to sequence hashes: XXH3-64, the identity of a KV block."""

from array import array as new_array
from operator import index

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from dynamo._fast.columns cimport open_u32, open_u64

__all__ = ["BLOCK_SEED", "block_hashes", "seed_for", "sequence_hashes", "xxh3_64"]

BLOCK_SEED = 1337

cdef extern from "xxh3.hpp" namespace "dynamo::xxh3" nogil:
    uint64_t hash_bytes "dynamo::xxh3::hash"(const void *data, size_t size, uint64_t seed) noexcept
    void hash_windows(
        const uint8_t *data, size_t count, size_t size, size_t stride, uint64_t seed, uint64_t *out
    ) noexcept
    void hash_chain(const uint8_t *words, size_t count, uint64_t seed, uint64_t *out) noexcept

cdef extern from "integers.hpp" namespace "dynamo":
    Py_ssize_t small_u32_run(PyObject **items, Py_ssize_t count, uint32_t *out) noexcept

cdef extern from "Python.h":
    PyObject **PySequence_Fast_ITEMS(object sequence) noexcept

cdef array.array HASHES = new_array("Q")
cdef array.array TOKENS = new_array("I")


def xxh3_64(data, uint64_t seed=0):
    """XXH3 of the bytes of any buffer, 64-bit output. O(bytes)."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return hash_bytes(view.buf, <size_t> view.len, seed)
    finally:
        PyBuffer_Release(&view)


def seed_for(lora_name=None, cache_namespace=None):
    """Seed of the block hashes under an adapter and a cache namespace.

    ``BLOCK_SEED`` plus XXH3 of the adapter (seed 0) and of the namespace (seed 1), modulo 2**64.
    Empty and ``None`` mean the same; without both it is ``BLOCK_SEED``.
    """
    seed = BLOCK_SEED
    if lora_name:
        seed += xxh3_64(lora_name.encode(), 0)
    if cache_namespace:
        # Another seed: an adapter and a namespace of the same name must differ.
        seed += xxh3_64(cache_namespace.encode(), 1)
    return seed & 0xFFFF_FFFF_FFFF_FFFF


def block_hashes(
    tokens,
    Py_ssize_t block_size,
    *,
    uint64_t seed=1337,
    bint is_eagle=False,
    mm_hashes=None,
):
    """XXH3 of each complete block of ``tokens`` (u32, little-endian), as ``array('Q')``. O(tokens).

    ``tokens`` is a buffer of uint32 or a sequence of ints; an incomplete last block has no hash.
    ``is_eagle`` hashes windows of ``block_size + 1`` tokens, ``block_size`` apart. ``mm_hashes``
    gives, block by block, the 64-bit hashes of the multimodal objects in it (``None`` for none;
    it may be shorter than the blocks); their order does not matter.
    Raises ValueError for a block size below 1 or a value out of range, naming it.
    """
    if block_size <= 0:
        raise ValueError(f"kv_block_size cannot be {block_size}")
    cdef array.array packed
    cdef Py_buffer view
    if not PyObject_CheckBuffer(tokens):
        packed = pack_tokens(tokens)
        return hash_packed(
            <const uint8_t *> packed.data.as_uints,
            len(packed),
            block_size,
            seed,
            is_eagle,
            mm_hashes,
        )
    cdef Py_ssize_t count = open_u32(tokens, "tokens", &view, False)
    try:
        return hash_packed(
            <const uint8_t *> view.buf, count, block_size, seed, is_eagle, mm_hashes
        )
    finally:
        PyBuffer_Release(&view)


def sequence_hashes(block_hashes):
    """Chain block hashes into sequence hashes, as ``array('Q')``. O(blocks).

    ``block_hashes`` is a buffer of 64-bit integers, signed or not. The first one stays as it is,
    each later one is the hash of its predecessor's result and itself.
    """
    cdef Py_buffer view
    cdef Py_ssize_t count = open_u64(block_hashes, "block_hashes", &view)
    cdef array.array chained
    try:
        chained = array.clone(HASHES, count, False)
        hash_chain(
            <const uint8_t *> view.buf,
            <size_t> count,
            BLOCK_SEED,
            <uint64_t *> chained.data.as_ulonglongs,
        )
        return chained
    finally:
        PyBuffer_Release(&view)


cdef array.array hash_packed(
    const uint8_t *tokens,
    Py_ssize_t count,
    Py_ssize_t block_size,
    uint64_t seed,
    bint is_eagle,
    object mm_hashes,
):
    # Under Eagle a block is hashed with the token behind it: the last one needs that token, too.
    cdef Py_ssize_t extra = 1 if is_eagle else 0
    cdef Py_ssize_t blocks = (count - extra) // block_size if count > extra else 0
    cdef array.array hashes = array.clone(HASHES, blocks, False)
    cdef uint64_t *out = <uint64_t *> hashes.data.as_ulonglongs
    if blocks == 0:
        return hashes
    cdef size_t size = <size_t> (block_size + extra) * 4
    cdef size_t stride = <size_t> block_size * 4
    hash_windows(tokens, <size_t> blocks, size, stride, seed, out)
    if mm_hashes is not None:
        rehash_multimodal(tokens, size, stride, seed, mm_hashes, blocks, out)
    return hashes


cdef int rehash_multimodal(
    const uint8_t *tokens,
    size_t size,
    size_t stride,
    uint64_t seed,
    object mm_hashes,
    Py_ssize_t blocks,
    uint64_t *out,
) except -1:
    """Hash the blocks that hold multimodal objects again, with the objects' sorted hashes."""
    cdef array.array payload = new_array("B")
    cdef array.array suffix
    cdef Py_ssize_t block
    for block, hashes in zip(range(blocks), mm_hashes):
        if not hashes:
            continue
        try:
            suffix = new_array("Q", sorted(hashes))
        except OverflowError:
            raise ValueError(f"mm_hashes[{block}] must be in 0..2^64-1, got {hashes}") from None
        array.resize(payload, <Py_ssize_t> size)
        memcpy(payload.data.as_uchars, tokens + <size_t> block * stride, size)
        array.extend_buffer(payload, suffix.data.as_chars, len(suffix) * 8)
        out[block] = hash_bytes(payload.data.as_uchars, <size_t> len(payload), seed)
    return 0


cdef array.array pack_tokens(object tokens):
    """A sequence of ints as ``array('I')``."""
    cdef object items = tokens if isinstance(tokens, (list, tuple)) else list(tokens)
    cdef Py_ssize_t count = len(items)
    cdef array.array packed = array.clone(TOKENS, count, False)
    cdef uint32_t *out = packed.data.as_uints
    cdef PyObject **fast = PySequence_Fast_ITEMS(items)
    cdef Py_ssize_t done = small_u32_run(fast, count, out)
    if done < count:
        # A copy: __index__() of an item may run code that changes the sequence.
        pack_slowly(list(items), done, out)
    return packed


cdef int pack_slowly(list items, Py_ssize_t start, uint32_t *out) except -1:
    """Pack ``items[start:]``, any of which may be large, wrong or run Python code."""
    cdef Py_ssize_t at
    cdef object value
    for at in range(start, len(items)):
        value = index(items[at])
        if not 0 <= value <= 0xFFFF_FFFF:
            raise ValueError(f"token {at} must be in 0..4294967295, got {value}")
        out[at] = value
    return 0
