"""One number per slot that grows with time up to a limit, and leaves a column by it."""

cimport cython
from libc.math cimport floor
from libc.stdint cimport int64_t
from libcpp.vector cimport vector

__all__ = ["Anchors"]

cdef struct Anchor:
    double base
    double rate
    double since
    double limit


cdef inline double grown(const Anchor &anchor, double now) noexcept nogil:
    cdef double elapsed = now - anchor.since
    cdef double value = anchor.base + anchor.rate * (elapsed if elapsed > 0 else 0)
    return value if value < anchor.limit else anchor.limit


@cython.final
@cython.auto_pickle(False)
cdef class Anchors:
    """``base + rate * (now - since)`` of each slot, at most ``limit``."""

    cdef vector[Anchor] _anchors

    def set(self, Py_ssize_t slot, double base, double rate, double since, double limit):
        """From now on; 65,536 slots at most."""
        cdef Anchor none = Anchor(0, 0, 0, 0)
        if not 0 <= slot < 65536:
            raise IndexError("slot is beyond 65535")
        if not (base >= 0 and rate >= 0 and limit >= 0):
            raise ValueError(f"base, rate and limit must be >= 0, got {base}, {rate} and {limit}")
        if <size_t>slot >= self._anchors.size():
            self._anchors.resize(slot + 1, none)
        self._anchors[slot] = Anchor(base, rate, since, limit)

    def value(self, Py_ssize_t slot, double now):
        """What it is at ``now``; 0 for a slot that was never set."""
        if slot < 0 or <size_t>slot >= self._anchors.size():
            return 0.0
        return grown(self._anchors[slot], now)

    def relieve(self, int64_t[::1] column not None, double now):
        """Subtract the whole part of each slot's value."""
        cdef size_t slot, width = <size_t>column.shape[0]
        if self._anchors.size() < width:
            width = self._anchors.size()
        for slot in range(width):
            if self._anchors[slot].limit > 0:
                column[slot] -= <int64_t>floor(grown(self._anchors[slot], now))
