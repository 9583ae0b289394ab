"""The cost of all candidate slots in seconds: when each begins with a prompt, how long it computes,
and how much longer others wait for it."""

cimport cython
from cpython cimport array
from libc.math cimport exp, isfinite
from libc.stdint cimport UINT32_MAX, int64_t, uint32_t, uint64_t
from libcpp.algorithm cimport nth_element
from libcpp.vector cimport vector

from dynamo._fast.columns cimport check_items

__all__ = ["SecondsCost"]

# Constants of the compiler, which divides by powers of two without a division.
cdef enum:
    SAMPLED = 16
    REMEMBERED = 65536


@cython.final
@cython.auto_pickle(False)
cdef class SecondsCost:
    """What the cost in seconds knows of each slot, and the coefficients that all slots share.

    A prompt with ``t`` tokens to compute behind ``c`` cached ones takes ``fixed_s + t * token_s +
    t * (c + t / 2) * attention_s``, times the slot's slowness.
    """

    def __cinit__(self):
        self._sent.resize(REMEMBERED, Sent(0, UINT32_MAX))

    def set_fit(self, double fixed_s, double token_s, double attention_s):
        """Replace the coefficients of all slots."""
        for value in (fixed_s, token_s, attention_s):
            if not (isfinite(<double>value) and value >= 0):
                raise ValueError(f"coefficients must be finite and not negative, got {value}")
        self._fixed_s, self._token_s, self._attention_s = fixed_s, token_s, attention_s

    def add_slot(self, Py_ssize_t slot, double capacity):
        """Add an idle slot of slowness 1, or give one another ``capacity`` in KV blocks, 0 if
        unknown."""
        if not 0 <= slot < 65536:
            raise IndexError("slot is beyond 65535")
        if <size_t>slot >= self._slots.size():
            self._slots.resize(slot + 1, _idle(0))
        self._slots[slot].capacity = capacity

    def drop_slot(self, Py_ssize_t slot):
        """Forget what was learned of a slot whose worker is gone."""
        self._slot(slot)[0] = _idle(0)

    cpdef measured(self, Py_ssize_t slot, double tokens, double attention, double took_s):
        """Learn the slowness of ``slot`` from a prompt that took ``took_s`` there.

        It is the ratio of two sums: engines compute prompts together, so that one took all of the
        time and the next one none. The belief before the first prompt counts as much as two.
        """
        cdef Slot *state = self._slot(slot)
        cdef Work prompt = Work(1.0, tokens, attention)
        cdef double expected = self._work_s(&prompt)
        if not (isfinite(took_s) and took_s >= 0):
            raise ValueError(f"took_s must be finite and not negative, got {took_s}")
        if not expected > 0:
            return
        if state.expected_s == 0:
            state.took_s, state.expected_s = 2 * expected * state.slowness, 2 * expected
        # Something else has stopped a prompt that took much longer.
        took_s = min(took_s, MOST_LONGER * expected * state.slowness)
        state.took_s += took_s - LEARNED * state.took_s
        state.expected_s += expected - LEARNED * state.expected_s
        state.slowness = min(max(state.took_s / state.expected_s, 1 / SLOWEST), SLOWEST)

    def middle_slowness(self):
        """Return the median of the slots that were measured, of two the lower; 1 without one.
        O(slots)."""
        cdef vector[double] found
        cdef size_t i
        for i in range(self._slots.size()):
            if self._slots[i].expected_s > 0:
                found.push_back(self._slots[i].slowness)
        if found.empty():
            return 1.0
        i = (found.size() - 1) // 2
        nth_element(found.begin(), found.begin() + i, found.end())
        return found[i]

    cpdef set_queue(self, Py_ssize_t slot, double prefills, double tokens, double attention,
                    double running_tokens, double running_attention, double since_s):
        """Say what waits on ``slot``: the sums of all prefills, of which one has run since
        ``since_s``. ``attention`` sums, over them, tokens * (cached tokens + half of the tokens).
        """
        cdef Slot *state = self._slot(slot)
        state.queued = Work(prefills, tokens, attention)
        state.running = Work(min(prefills, 1.0), running_tokens, running_attention)
        state.since_s = since_s

    def add_decoding(self, Py_ssize_t slot, int64_t count):
        """Add to the requests of ``slot`` that generate tokens."""
        self._slot(slot).decoding += count

    def send(self, Py_ssize_t slot, array.array chained not None, Py_ssize_t held,
             Py_ssize_t cached, double work_s, double now_s):
        """Count a prompt that is sent to ``slot``, which has ``cached`` blocks of it and gets all,
        and the ``work_s`` that it takes there. ``held``: the most that a slot has. A block beyond,
        of a prompt that was sent before, was evicted too early: its last slot has too little room,
        and more work there costs more. O(blocks).
        """
        cdef Py_ssize_t count = len(chained)
        cdef Py_ssize_t i
        cdef Sent *last
        cdef Slot *state = self._slot(slot)
        check_items(chained, "chained", c"Q")
        cdef const uint64_t *blocks = <const uint64_t *>chained.data.as_ulonglongs
        for i in range(count):
            if blocks[i] % SAMPLED:
                continue
            last = &self._sent[blocks[i] // SAMPLED % REMEMBERED]
            if i >= held and last.block == blocks[i] and last.slot < self._slots.size():
                self._slots[last.slot].missed += SAMPLED
            last[0] = Sent(blocks[i], <uint32_t>slot)
        state.stored += max(count - cached, 0)
        # The share is that of about one change of the whole cache.
        cdef double turnover = state.capacity if state.capacity > 0 else DEFAULT_CAPACITY
        if state.stored > turnover:
            state.missed *= turnover / state.stored
            state.stored = turnover
        state.spent_s = _spent_s(state, now_s) + work_s
        state.spent_at_s = now_s
        return state.slowness

    def is_full(self, Py_ssize_t slot, double blocks):
        """Return whether ``blocks`` are more than ``slot`` has room for."""
        cdef double capacity = self._slot(slot).capacity
        return capacity > 0 and blocks > capacity

    def pressure(self, Py_ssize_t slot):
        """Return what a second of work on ``slot`` costs in blocks evicted too early."""
        return _pressure(self._slot(slot))

    def slowness(self, Py_ssize_t slot):
        """Return the slot's slowness."""
        return self._slot(slot).slowness

    def wait_s(self, Py_ssize_t slot, double now_s):
        """Return the seconds until ``slot`` begins with a new prompt, by its queue alone."""
        return self._wait_s(self._slot(slot), now_s)

    cdef double expected_s(self, Py_ssize_t slot, double tokens, double attention) except -1:
        # What a prompt takes on this slot, from its begin on.
        cdef Work work = Work(1.0, tokens, attention)
        return self._work_s(&work) * self._slot(slot).slowness

    cdef double _work_s(self, const Work *work) noexcept:
        return (work.prefills * self._fixed_s + work.tokens * self._token_s
                + work.attention * self._attention_s)

    cdef double _wait_s(self, const Slot *slot, double now_s) noexcept:
        # Clocks of two callers may differ a little: before `since_s` nothing has been computed.
        cdef double done = now_s - slot.since_s
        cdef double running
        if slot.queued.prefills <= 0:
            return 0.0
        running = self._work_s(&slot.running) * slot.slowness
        done = min(done, running) if done > 0 else 0.0
        return max(self._work_s(&slot.queued) * slot.slowness - done, 0.0)

    def costs(self, array.array candidates not None, double now_s, int64_t isl_tokens,
              int64_t block_size, tuple weights, double assumed, double rent, double held_s,
              double stall, array.array decode_blocks not None, array.array out not None,
              array.array terms not None, array.array device=None, array.array host=None,
              array.array disk=None, array.array shared=None):
        """Write the cost of ``candidates[i]`` to ``out[i]``, and its terms to ``terms`` from
        ``4 * i``: wait, work, others, running.

        ``weights`` are the shares of a block's work that host, disk and shared cache save. Work
        beyond the least of a candidate costs others the more, the busier the candidates are, less
        ``rent``; the least work costs more on a busier slot. ``assumed`` is added to the share of
        the time for which each was busy. A request holds its KV blocks for ``held_s``; ``stall`` is
        the share of a prefill that stops the requests that generate. Returns the most blocks that
        one candidate need not compute, the least wait, at slowness 1 the least work, and what a
        second of added work costs others. O(candidates).
        """
        cdef Py_ssize_t count = len(candidates)
        cdef Py_ssize_t width = min(<Py_ssize_t>self._slots.size(), len(decode_blocks))
        cdef Py_ssize_t i
        cdef uint32_t slot
        cdef double on_lower[3]
        cdef Work prompt
        cdef const Slot *state
        cdef double cached, tokens, work, wait, used, room, added, use, others
        cdef double use_sum = 0.0
        cdef double best = 0.0
        cdef double least_wait = 0.0
        cdef double least_work = 0.0
        on_lower[0], on_lower[1], on_lower[2] = weights
        check_items(candidates, "candidates", c"I")
        check_items(decode_blocks, "decode_blocks", c"q")
        check_items(out, "out", c"d")
        check_items(terms, "terms", c"d")
        cdef const uint32_t *slots = candidates.data.as_uints
        cdef const int64_t *decode = <const int64_t *>decode_blocks.data.as_longlongs
        cdef const uint32_t *on_device = _blocks(device, "device", &width)
        cdef const uint32_t *on_host = _blocks(host, "host", &width)
        cdef const uint32_t *on_disk = _blocks(disk, "disk", &width)
        cdef const uint32_t *in_shared = _blocks(shared, "shared", &width)
        cdef double *term = terms.data.as_doubles
        if len(out) < count or len(terms) < 4 * count:
            raise ValueError(f"the results hold fewer than {count} candidates")
        for i in range(count):
            slot = slots[i]
            if slot >= width:
                raise IndexError(f"slot {slot} is beyond the columns of {width}")
            cached = 0.0
            if on_device != NULL:
                cached = on_device[slot]
            if on_host != NULL:
                cached += on_lower[0] * on_host[slot]
            if on_disk != NULL:
                cached += on_lower[1] * on_disk[slot]
            best = max(best, cached)
            if in_shared != NULL:
                cached += on_lower[2] * in_shared[slot]
            # An engine computes at least the last token, whatever it has cached.
            tokens = max(<double>isl_tokens - cached * <double>block_size, 1.0)
            prompt = Work(1.0, tokens, tokens * (<double>isl_tokens - tokens / 2))
            work = self._work_s(&prompt)
            wait = self._wait_s(&self._slots[slot], now_s)
            room = 0.0
            if self._slots[slot].capacity > 0:
                used = <double>decode[slot] / self._slots[slot].capacity
                if used > 1.0:
                    # Blocks become free while prompts are computed: not the sum of both waits.
                    wait = max(wait, held_s * (1.0 - 1.0 / used))
                # The fuller a worker is, the likelier the next prompts have to wait for blocks.
                room = held_s * min(used * used * used * used, MOST_ROOM)
            use = assumed + _spent_s(&self._slots[slot], now_s) / DEMAND_S
            use_sum += use
            term[4 * i] = wait
            term[4 * i + 1] = work * self._slots[slot].slowness
            term[4 * i + 2] = room
            term[4 * i + 3] = _delay(use, MOST_USE)
            if i == 0 or wait < least_wait:
                least_wait = wait
            if i == 0 or work < least_work:
                least_work = work
        others = _delay(use_sum / max(count, 1), MOST_POOL_USE)
        for i in range(count):
            state = &self._slots[slots[i]]
            work = term[1]
            # What is cached elsewhere is added work; that this slot is slow is not.
            added = work - least_work * state.slowness
            term[2] += (term[3] * least_work + others * added
                        - min(rent, (1.0 + others) * added) + work * _pressure(state))
            term[3] = <double>state.decoding * (stall * work + TIE_S)
            out.data.as_doubles[i] = term[0] + work + term[2] + term[3]
            term += 4
        return best, least_wait, least_work, others

    cdef Slot *_slot(self, Py_ssize_t slot) except NULL:
        if slot < 0 or <size_t>slot >= self._slots.size():
            raise IndexError(f"slot {slot} was not added")
        return &self._slots[slot]


# At equal times, fewer running requests are better: a ten-thousandth of a second each.
cdef double TIE_S = 1e-4


cdef double DEFAULT_CAPACITY = 4096
cdef double SLOWEST = 16.0
cdef double MOST_LONGER = 8.0
# Each prompt counts a twentieth: 50 of them find a worker that has become twice as slow.
cdef double LEARNED = 0.05
# The load of a slot, and so of the pool, is that of about this time.
cdef double DEMAND_S = 15.0
cdef double MOST_POOL_USE = 30.0 / 31.0
# Beyond, the wait says how busy a slot is, and the use of a few seconds is chance.
cdef double MOST_USE = 0.8
cdef double MOST_ROOM = 4.0
cdef double MOST_MISSED = 0.95


cdef inline double _spent_s(const Slot *slot, double now_s) noexcept nogil:
    return slot.spent_s * exp(min(slot.spent_at_s - now_s, 0.0) / DEMAND_S)


cdef inline double _delay(double use, double most) noexcept nogil:
    # What a second of work costs those after it, by the share of the time in use.
    use = min(use, most)
    return use / (1.0 - use)


cdef inline double _pressure(const Slot *slot) noexcept nogil:
    # Of what is stored, a share evicts blocks that are wanted again; these evict others, and so on.
    cdef double turnover = slot.capacity if slot.capacity > 0 else DEFAULT_CAPACITY
    cdef double missed = min(slot.missed / max(slot.stored, turnover), MOST_MISSED)
    return missed / (1.0 - missed)


cdef inline Slot _idle(double capacity) noexcept nogil:
    return Slot(Work(0, 0, 0), Work(0, 0, 0), 0, 1, 0, 0, capacity, 0, 0, 0, 0, 0)


cdef const uint32_t *_blocks(array.array column, str name, Py_ssize_t *width) except? NULL:
    """The items of an optional column, NULL without one; ``width`` shrinks to its length."""
    if column is None:
        return NULL
    check_items(column, name, c"I")
    width[0] = min(width[0], len(column))
    return column.data.as_uints
