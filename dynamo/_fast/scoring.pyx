"""Costs of all candidate slots in one call, and the choice among them. Spec 3.1-3.3."""

cimport cython
from libc.math cimport exp, isfinite
from libc.stdint cimport int64_t, uint32_t

__all__ = ["Weights", "choose", "costs"]


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


def costs(Weights weights not None, int64_t isl_tokens, const uint32_t[::1] candidates not None,
          const int64_t[::1] prefill_tokens not None, const int64_t[::1] decode_blocks not None,
          double[::1] out not None, const uint32_t[::1] device=None,
          const uint32_t[::1] host=None, const uint32_t[::1] disk=None,
          const uint32_t[::1] shared=None):
    """Write the cost of ``candidates[i]`` to ``out[i]``; columns are indexed by slot.

    Returns the most blocks that one of them need not compute.
    """
    cdef Py_ssize_t count = candidates.shape[0]
    cdef Py_ssize_t width = _width(prefill_tokens, decode_blocks, device, host, disk, shared)
    cdef Py_ssize_t i
    cdef uint32_t slot
    cdef int64_t least = 0
    cdef double decay = 1.0
    cdef double size = <double>weights.block_size
    cdef double request_blocks = <double>max(isl_tokens // weights.block_size, 1)
    cdef double prefill, overlap, held
    cdef double most = 0.0
    if out.shape[0] < count:
        raise ValueError(f"out holds {out.shape[0]} costs, {count} candidates given")
    for i in range(count):
        slot = candidates[i]
        if slot >= width:
            raise IndexError(f"slot {slot} is beyond the columns of {width}")
        if i == 0 or prefill_tokens[slot] < least:
            least = prefill_tokens[slot]
    for i in range(count):
        slot = candidates[i]
        overlap = held = 0.0
        if device is not None:
            if weights.decay > 0:
                decay = <double>(prefill_tokens[slot] - least) / size / request_blocks
                decay = 1.0 / (1.0 + weights.decay * decay)
            overlap = weights.credit * decay * device[slot]
            held = device[slot]
        if host is not None:
            overlap += weights.host * host[slot]
            held += weights.host * host[slot]
        if disk is not None:
            overlap += weights.disk * disk[slot]
            held += weights.disk * disk[slot]
        most = max(most, held)
        if shared is not None:
            overlap += weights.shared * shared[slot]
        prefill = <double>(prefill_tokens[slot] + isl_tokens) / size - overlap
        if prefill < 0:
            prefill = 0.0
        out[i] = weights.prefill_scale * prefill + <double>decode_blocks[slot]
    return most


def choose(const double[::1] costs not None, Py_ssize_t count, double temperature, double uniform):
    """The index of the chosen cost among the first ``count``; ``uniform`` is drawn from [0, 1)."""
    cdef double low, high
    cdef Py_ssize_t i
    if count < 1 or count > costs.shape[0]:
        raise ValueError(f"count must be between 1 and {costs.shape[0]}, got {count}")
    if not 0.0 <= uniform < 1.0:
        raise ValueError(f"uniform must be in [0, 1), got {uniform}")
    if not (isfinite(temperature) and temperature >= 0.0):
        raise ValueError(f"temperature must be finite and non-negative, got {temperature}")
    low = high = costs[0]
    for i in range(count):
        if not isfinite(costs[i]):
            raise ValueError(f"cost {i} is not finite: {costs[i]}")
        if costs[i] < low:
            low = costs[i]
        elif costs[i] > high:
            high = costs[i]
    if not (high - low) * temperature > 0.0:
        return _tied(&costs[0], count, low, uniform)
    return _softmax(&costs[0], count, low, (high - low) * temperature, uniform)


cdef Py_ssize_t _width(const int64_t[::1] prefill_tokens, const int64_t[::1] decode_blocks,
                       const uint32_t[::1] device, const uint32_t[::1] host,
                       const uint32_t[::1] disk, const uint32_t[::1] shared) noexcept:
    """Slots that every given column has."""
    cdef Py_ssize_t width = min(prefill_tokens.shape[0], decode_blocks.shape[0])
    if device is not None:
        width = min(width, device.shape[0])
    if host is not None:
        width = min(width, host.shape[0])
    if disk is not None:
        width = min(width, disk.shape[0])
    if shared is not None:
        width = min(width, shared.shape[0])
    return width


cdef Py_ssize_t _tied(const double* costs, Py_ssize_t count, double low,
                      double uniform) noexcept nogil:
    """A uniform choice among the costs that equal ``low``, the least."""
    cdef Py_ssize_t ties = 0
    cdef Py_ssize_t rank, i
    for i in range(count):
        ties += costs[i] == low
    rank = <Py_ssize_t>(uniform * <double>ties)
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
    return count - 1
