"""Costs of all candidate slots in one call, and the choice among them."""

cimport cython
from cpython cimport array
from libc.math cimport exp, isfinite
from libc.stdint cimport int64_t, uint32_t

from dynamo._fast.columns cimport check_items

__all__ = ["Weights", "choose", "costs", "highest"]


@cython.final
@cython.auto_pickle(False)
cdef class Weights:
    """The coefficients of the cost; immutable, built once per router or per override."""

    cdef readonly int64_t block_size
    cdef readonly double prefill_scale
    cdef readonly double credit
    cdef readonly double decay
    cdef readonly double host
    cdef readonly double disk
    cdef readonly double shared

    def __init__(self, int64_t block_size, *, double prefill_scale=1.0, double credit=1.0,
                 double decay=0.0, double host=0.75, double disk=0.25, double shared=0.0):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        for name, value in (("prefill_scale", prefill_scale), ("credit", credit),
                            ("decay", decay), ("host", host), ("disk", disk),
                            ("shared", shared)):
            if not isfinite(<double>value):
                raise ValueError(f"{name} must be finite, got {value}")
        if decay < 0:
            raise ValueError(f"decay must not be negative, got {decay}")
        self.block_size = block_size
        self.prefill_scale = prefill_scale
        self.credit = credit
        self.decay = decay
        self.host = host
        self.disk = disk
        self.shared = shared


def costs(Weights weights not None, int64_t isl_tokens, array.array candidates not None,
          array.array prefill_tokens not None, array.array decode_blocks not None,
          array.array out not None, array.array device=None, array.array host=None,
          array.array disk=None, array.array shared=None):
    """Write the cost of ``candidates[i]`` to ``out[i]``; columns are indexed by slot.

    Returns the most blocks that one of them need not compute.
    """
    cdef Py_ssize_t count = len(candidates)
    cdef Py_ssize_t width = min(len(prefill_tokens), len(decode_blocks))
    cdef Py_ssize_t i
    cdef uint32_t slot
    cdef int64_t least = 0
    cdef double decay = 1.0
    cdef double size = <double>weights.block_size
    cdef double request_blocks = <double>max(isl_tokens // weights.block_size, 1)
    cdef double blocks, overlap, cached
    cdef double best = 0.0
    check_items(candidates, "candidates", c"I")
    check_items(prefill_tokens, "prefill_tokens", c"q")
    check_items(decode_blocks, "decode_blocks", c"q")
    check_items(out, "out", c"d")
    cdef const uint32_t *slots = candidates.data.as_uints
    cdef const int64_t *prefill = <const int64_t *>prefill_tokens.data.as_longlongs
    cdef const int64_t *decode = <const int64_t *>decode_blocks.data.as_longlongs
    cdef const uint32_t *on_device = _blocks(device, "device", &width)
    cdef const uint32_t *on_host = _blocks(host, "host", &width)
    cdef const uint32_t *on_disk = _blocks(disk, "disk", &width)
    cdef const uint32_t *in_shared = _blocks(shared, "shared", &width)
    if len(out) < count:
        raise ValueError(f"out holds {len(out)} costs, {count} candidates given")
    for i in range(count):
        slot = slots[i]
        if slot >= width:
            raise IndexError(f"slot {slot} is beyond the columns of {width}")
        if i == 0 or prefill[slot] < least:
            least = prefill[slot]
    for i in range(count):
        slot = slots[i]
        overlap = cached = 0.0
        if on_device != NULL:
            if weights.decay > 0:
                # The device credit fades with the tokens queued beyond the least loaded slot's,
                # measured in prompts of this length: a cached prefix is no use behind a queue.
                decay = <double>(prefill[slot] - least) / size / request_blocks
                decay = 1.0 / (1.0 + weights.decay * decay)
            overlap = weights.credit * decay * on_device[slot]
            cached = on_device[slot]
        if on_host != NULL:
            overlap += weights.host * on_host[slot]
            cached += weights.host * on_host[slot]
        if on_disk != NULL:
            overlap += weights.disk * on_disk[slot]
            cached += weights.disk * on_disk[slot]
        # Not the shared cache: all slots reach it alike, so no slot is better for it.
        best = max(best, cached)
        if in_shared != NULL:
            overlap += weights.shared * in_shared[slot]
        # A credit above 1 can exceed the work itself; a negative cost would break the softmax.
        blocks = max(<double>(prefill[slot] + isl_tokens) / size - overlap, 0.0)
        out.data.as_doubles[i] = weights.prefill_scale * blocks + <double>decode[slot]
    return best


def highest(array.array column not None):
    """The highest value of a column; 0 of an empty one."""
    cdef Py_ssize_t i
    cdef uint32_t found = 0
    check_items(column, "column", c"I")
    for i in range(len(column)):
        found = max(found, column.data.as_uints[i])
    return found


def choose(array.array costs not None, Py_ssize_t count, double temperature, double uniform):
    """The index of the chosen cost among the first ``count``; ``uniform`` is drawn from [0, 1)."""
    cdef double low, high
    cdef Py_ssize_t i
    check_items(costs, "costs", c"d")
    cdef const double *values = costs.data.as_doubles
    if count < 1 or count > len(costs):
        raise ValueError(f"count must be between 1 and {len(costs)}, got {count}")
    if not 0.0 <= uniform < 1.0:
        raise ValueError(f"uniform must be in [0, 1), got {uniform}")
    if not (isfinite(temperature) and temperature >= 0.0):
        raise ValueError(f"temperature must be finite and non-negative, got {temperature}")
    low = high = values[0]
    for i in range(count):
        if not isfinite(values[i]):
            raise ValueError(f"cost {i} is not finite: {values[i]}")
        if values[i] < low:
            low = values[i]
        elif values[i] > high:
            high = values[i]
    # Also false where the product underflows to 0: dividing by it would give NaN.
    if not (high - low) * temperature > 0.0:
        return _tied(values, count, low, uniform)
    return _softmax(values, count, low, (high - low) * temperature, uniform)


cdef const uint32_t *_blocks(array.array column, str name, Py_ssize_t *width) except? NULL:
    """The items of an optional column, NULL without one; ``width`` shrinks to its length."""
    if column is None:
        return NULL
    check_items(column, name, c"I")
    width[0] = min(width[0], len(column))
    return column.data.as_uints


cdef Py_ssize_t _tied(const double* costs, Py_ssize_t count, double low,
                      double uniform) noexcept nogil:
    """A uniform choice among the costs that equal ``low``, the least."""
    cdef Py_ssize_t ties = 0
    cdef Py_ssize_t rank, i
    for i in range(count):
        ties += costs[i] == low
    rank = <Py_ssize_t>(uniform * <double>ties)
    # ``uniform`` is below 1, but the product may be rounded up.
    if rank >= ties:
        rank = ties - 1
    for i in range(count):
        if costs[i] == low:
            if rank == 0:
                return i
            rank -= 1
    return count - 1


cdef Py_ssize_t _softmax(const double* costs, Py_ssize_t count, double low, double scale,
                         double uniform) noexcept nogil:
    """The first index whose cumulative share of exp(-(cost - low) / scale) exceeds uniform."""
    cdef double total = 0.0
    cdef double running = 0.0
    cdef Py_ssize_t i
    for i in range(count):
        total += exp((low - costs[i]) / scale)
    for i in range(count):
        running += exp((low - costs[i]) / scale)
        if running > uniform * total:
            return i
    # Rounding may leave the last sum below ``uniform * total``.
    return count - 1
