"""The prompts that each slot computes in order, and how much of the oldest one is done."""

cimport cython
from cpython cimport array
from libc.math cimport NAN, floor, isfinite, isnan
from libc.stdint cimport int64_t
from libcpp.vector cimport vector

from dynamo._fast.seconds cimport SecondsCost

__all__ = ["PrefillQueues"]

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
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class _Prefill:
    """``attention``: the tokens, times the tokens before each of them on average. ``rate`` in
    tokens a second; 0: unknown."""

    cdef int64_t tokens
    cdef double attention
    cdef double rate


@cython.final
@cython.auto_pickle(False)
cdef class _Queue:
    """The prefills of one slot, oldest first, and the totals of the current interval.

    ``tokens`` and ``attention`` are the sums of all; the oldest began at ``since_s``. Nothing but
    the next one to end was computed since ``began_s``; NaN: not known.
    """

    cdef dict prefills
    cdef _Prefill oldest
    cdef int64_t tokens
    cdef double attention
    cdef double since_s
    cdef double began_s
    cdef bint abandoned
    cdef double interval_since_s
    cdef Py_ssize_t ended
    cdef int64_t ended_tokens
    cdef double ended_attention

    cdef void restart(self, double now_s) noexcept:
        self.interval_since_s = now_s
        self.ended = 0
        self.ended_tokens = 0
        self.ended_attention = 0.0
        self.abandoned = False


@cython.final
@cython.auto_pickle(False)
cdef class PrefillQueues:
    """The active prefills by slot, told to ``seconds`` where there is one."""

    cdef dict _queues
    cdef vector[Progress] _progress
    cdef SecondsCost _seconds

    def __init__(self, SecondsCost seconds=None):
        self._queues = {}
        self._seconds = seconds

    def begin(self, Py_ssize_t slot, str request_id not None, int64_t tokens,
              int64_t cached_tokens, object expected_s, double now_s):
        """Add a prompt behind those of ``slot``."""
        cdef double expected = NAN
        cdef _Queue queue
        cdef _Prefill prefill = _Prefill.__new__(_Prefill)
        if not 0 <= slot < 65536:
            raise IndexError("slot is beyond 65535")
        if not (tokens > 0 and cached_tokens >= 0):
            raise ValueError(f"a prefill has a token or more, got {tokens} after {cached_tokens}")
        if self._seconds is not None:
            self._seconds._slot(slot)  # raises before anything is changed
        prefill.tokens = tokens
        prefill.attention = <double>tokens * (<double>cached_tokens + <double>tokens / 2)
        if expected_s is not None:
            expected = expected_s
        elif self._seconds is not None:
            expected = self._seconds.expected_s(slot, <double>tokens, prefill.attention)
        prefill.rate = <double>tokens / expected if expected > 0 else 0.0
        if not isfinite(prefill.rate):
            prefill.rate = 0.0
        queue = <_Queue>self._queues.get(slot)
        if queue is None:
            queue = _Queue.__new__(_Queue)
            queue.prefills = {}
            queue.oldest = prefill
            queue.since_s = queue.began_s = now_s
            queue.restart(now_s)
            self._queues[slot] = queue
            self._set(slot, Progress(0.0, prefill.rate, now_s, <double>tokens))
        queue.prefills[request_id] = prefill
        queue.tokens += tokens
        queue.attention += prefill.attention
        self._show(slot, queue)

    def first_token(self, Py_ssize_t slot, str request_id not None, double now_s, bint measures,
                    Py_ssize_t limit):
        """Remove a computed prompt; return the interval that has ended with it."""
        cdef _Queue queue
        cdef _Prefill prefill
        cdef double took_s
        queue = <_Queue>self._queues.get(slot)
        prefill = None if queue is None else self._pop(queue, request_id)
        if prefill is None:
            return None
        queue.ended += 1
        queue.ended_tokens += prefill.tokens
        queue.ended_attention += prefill.attention
        took_s = now_s - queue.began_s
        if measures and self._seconds is not None and not isnan(took_s):
            self._seconds.measured(slot, <double>prefill.tokens, prefill.attention,
                                   max(took_s, 0.0))
        queue.began_s = now_s
        if prefill is queue.oldest:
            self._next(slot, queue, now_s)
        elif queue.oldest.rate > 0 and prefill.rate > 0:
            # A younger prefill overtook the oldest and used part of the time credited to it. Take
            # its tokens back from there: the sum over both, and so the reported load, does not
            # jump. Tokens are whole numbers, so the subtraction is exact in floating point.
            self._set(slot, Progress(
                max(value_at(self._progress[slot], now_s) - <double>prefill.tokens, 0.0),
                queue.oldest.rate, now_s, <double>queue.oldest.tokens))
        self._show(slot, queue)
        # Times of single prefills that overlap cannot be told apart; their sum can be measured. The
        # limit keeps a slot that is never idle from never being observed.
        if queue.prefills and queue.ended < limit and not queue.abandoned:
            return None
        found = None
        if not queue.abandoned and now_s > queue.interval_since_s:
            found = (queue.ended, queue.ended_tokens, queue.ended_attention,
                     now_s - queue.interval_since_s)
        queue.restart(now_s)
        return found

    def abandon(self, Py_ssize_t slot, str request_id not None, double now_s):
        """Remove a prompt that was dropped, not computed."""
        cdef _Queue queue
        cdef _Prefill prefill
        queue = <_Queue>self._queues.get(slot)
        prefill = None if queue is None else self._pop(queue, request_id)
        if prefill is None:
            return
        # How much of it was computed is unknown: the interval measures nothing.
        queue.abandoned = True
        queue.began_s = NAN
        if prefill is queue.oldest:
            self._next(slot, queue, now_s)
        self._show(slot, queue)

    def mark_waiting(self, Py_ssize_t slot):
        """Note that prompts of ``slot`` wait for memory: the interval measures no speed."""
        cdef _Queue queue = <_Queue>self._queues.get(slot)
        if queue is not None:
            queue.abandoned = True
            queue.began_s = NAN

    def done_tokens(self, Py_ssize_t slot, double now_s):
        """Return the whole tokens of ``slot`` that are probably computed by ``now_s``."""
        if slot < 0 or <size_t>slot >= self._progress.size():
            return 0
        return <int64_t>floor(value_at(self._progress[slot], now_s))

    def subtract_done(self, array.array column not None, double now_s):
        """Subtract the same from a column by slot, an ``array('q')``."""
        if column.ob_descr.typecode != c"q":
            raise ValueError(f"column must be array('q'), not array({column.typecode!r})")
        cdef int64_t* values = <int64_t*>column.data.as_longlongs
        cdef size_t slot, width = <size_t>len(column)
        if self._progress.size() < width:
            width = self._progress.size()
        for slot in range(width):
            # Most slots are idle: skip their floating point.
            if self._progress[slot].limit > 0:
                values[slot] -= <int64_t>floor(value_at(self._progress[slot], now_s))

    cdef _Prefill _pop(self, _Queue queue, str request_id):
        cdef _Prefill prefill = <_Prefill>queue.prefills.pop(request_id, None)
        if prefill is not None:
            queue.tokens -= prefill.tokens
            queue.attention -= prefill.attention
        return prefill

    cdef int _next(self, Py_ssize_t slot, _Queue queue, double now_s) except -1:
        # The time of the oldest that remains starts now.
        if not queue.prefills:
            del self._queues[slot]
            self._set(slot, Progress(0.0, 0.0, 0.0, 0.0))
            if self._seconds is not None:
                self._seconds.set_queue(slot, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
            return 0
        queue.oldest = <_Prefill>next(iter(queue.prefills.values()))
        queue.since_s = now_s
        self._set(slot, Progress(0.0, queue.oldest.rate, now_s, <double>queue.oldest.tokens))
        return 0

    cdef int _show(self, Py_ssize_t slot, _Queue queue) except -1:
        if self._seconds is not None and queue.prefills:
            self._seconds.set_queue(
                slot, <double>len(queue.prefills), <double>queue.tokens, queue.attention,
                <double>queue.oldest.tokens, queue.oldest.attention, queue.since_s)
        return 0

    cdef int _set(self, Py_ssize_t slot, Progress progress) except -1:
        if <size_t>slot >= self._progress.size():
            self._progress.resize(slot + 1, Progress(0.0, 0.0, 0.0, 0.0))
        self._progress[slot] = progress
        return 0
