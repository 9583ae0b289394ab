"""The histogram under every latency: an observation is a search in an array of doubles.

Reference implementation: ``tests/oracle/histogram.py``.
"""

cimport cython
from libc.stdint cimport int64_t
from libcpp.algorithm cimport lower_bound
from libcpp.vector cimport vector

__all__ = ["Histogram"]


@cython.final
cdef class Histogram:
    """Counts per bucket: ``counts[i]`` values <= ``bounds[i]`` and above the bound before it, the
    last of ``counts`` those above all bounds. ``total`` is the sum of the values.

    ``bounds`` ascend. ``total`` can be NaN: an observation of NaN counts into the first bucket.
    """

    cdef readonly tuple bounds
    cdef readonly double total
    cdef vector[double] _bounds
    cdef vector[int64_t] _counts

    def __cinit__(self, bounds):
        self.bounds = tuple(bounds)
        for bound in self.bounds:
            self._bounds.push_back(bound)
        self._counts.resize(self._bounds.size() + 1, 0)

    @property
    def counts(self):
        """A copy of the counts. O(bounds)."""
        return list(self._counts)

    def observe(self, double value, int64_t times=1):
        """Count ``value`` ``times`` times. O(log bounds)."""
        # The first bound that is not below the value: a bucket counts what is at most its bound.
        cdef vector[double].iterator place = lower_bound(
            self._bounds.begin(), self._bounds.end(), value
        )
        self._counts[place - self._bounds.begin()] += times
        self.total += value * times
