"""What a compiled neighbour may call of the cost in seconds without a Python call."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp.vector cimport vector

cdef struct Work:
    double prefills
    double tokens
    double attention

cdef struct Sent:
    uint64_t block
    uint32_t slot

cdef struct Slot:
    Work queued
    Work running
    double since_s
    double slowness
    double took_s
    double expected_s
    double capacity
    int64_t decoding
    double stored
    double missed
    double spent_s
    double spent_at_s

cdef class SecondsCost:
    cdef vector[Slot] _slots
    cdef vector[Sent] _sent
    cdef double _fixed_s
    cdef double _token_s
    cdef double _attention_s

    cpdef measured(self, Py_ssize_t slot, double tokens, double attention, double took_s)
    cpdef set_queue(self, Py_ssize_t slot, double prefills, double tokens, double attention,
                    double running_tokens, double running_attention, double since_s)
    cdef double expected_s(self, Py_ssize_t slot, double tokens, double attention) except -1
    cdef double _work_s(self, const Work *work) noexcept
    cdef double _wait_s(self, const Slot *slot, double now_s) noexcept
    cdef Slot *_slot(self, Py_ssize_t slot) except NULL
