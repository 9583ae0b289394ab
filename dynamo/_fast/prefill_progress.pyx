"""Per slot, an estimate that grows linearly with time up to a limit, subtracted from a column."""

cimport cython
from libc.math cimport floor
from libc.stdint cimport int64_t
from libcpp.vector cimport vector

__all__ = ["PrefillProgress"]

cdef struct Progress:
    double base
    double rate
    double since
    double limit


cdef inline double value_at(const Progress &progress, double now) noexcept nogil:
    # Clocks of two callers may differ a little: before `since` nothing has been added yet.
    cdef double elapsed = now - progress.since
    cdef double value = progress.base + progress.rate * (elapsed if elapsed > 0 else 0)
    return value if value < progress.limit else progress.limit


@cython.final
@cython.auto_pickle(False)
cdef class PrefillProgress:
    """``base + rate * (now - since)`` of each slot, at most ``limit``."""

    cdef vector[Progress] _slots

    def set(self, Py_ssize_t slot, double base, double rate, double since, double limit):
        """Replace a slot's progress; 65,536 slots at most."""
        cdef Progress none = Progress(0, 0, 0, 0)
        if not 0 <= slot < 65536:
            raise IndexError("slot is beyond 65535")
        if not (base >= 0 and rate >= 0 and limit >= 0):  # rejects NaN too
            raise ValueError(f"base, rate and limit must be >= 0, got {base}, {rate} and {limit}")
        if <size_t>slot >= self._slots.size():
            self._slots.resize(slot + 1, none)
        self._slots[slot] = Progress(base, rate, since, limit)

    def value(self, Py_ssize_t slot, double now):
        """Return the slot's progress at ``now``; 0 for a slot that was never set."""
        if slot < 0 or <size_t>slot >= self._slots.size():
            return 0.0
        return value_at(self._slots[slot], now)

    def subtract_done(self, int64_t[::1] column not None, double now):
        """Subtract the whole part of each slot's progress."""
        cdef size_t slot, width = <size_t>column.shape[0]
        if self._slots.size() < width:
            width = self._slots.size()
        for slot in range(width):
            # Most slots are idle: skip their floating point.
            if self._slots[slot].limit > 0:
                column[slot] -= <int64_t>floor(value_at(self._slots[slot], now))
