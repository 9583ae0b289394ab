"""KV events decoded and applied to the prefix index by threads that run without the GIL.

The threads, their locks and who owns a stream of events when: docs/radix.md. The twin of what they
do with a batch is ``dynamo.router.caches.indexer`` with ``dynamo.protocols.kv``.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cpp_bool
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

__all__ = ["ZMQ_FUNCTIONS", "Ingest"]

cdef extern from "radix_shared.hpp" namespace "dynamo::radix":
    cdef cppclass SharedIndex:
        pass

cdef extern from "ingest_thread.hpp" namespace "dynamo::ingest":
    cdef enum What:
        EVENTS
        ODD
        ANEW

    cdef cppclass Handed:
        What what
        uint32_t dp_rank
        uint64_t worker
        size_t first
        string payload

    cdef cppclass Streams:
        Streams(SharedIndex *index) except +
        int descriptor() noexcept
        void silence() noexcept
        uint64_t applied(size_t kind, size_t status) noexcept
        uint64_t odd(size_t oddity) noexcept
        void follow(uint64_t worker, uint32_t dp_rank, uint32_t slot) except + nogil
        cpp_bool give(
            uint64_t worker, uint32_t dp_rank, cpp_bool has_last, int64_t last
        ) except + nogil
        cpp_bool take(
            uint64_t worker, uint32_t dp_rank, cpp_bool *has_last, int64_t *last, cpp_bool *heard
        ) except + nogil
        cpp_bool heard(uint64_t worker, uint32_t dp_rank) except + nogil
        void forget(uint64_t worker, uint32_t dp_rank) except + nogil
        cpp_bool next_handed(Handed *handed) except + nogil

    cdef cppclass Thread:
        Thread(Streams *streams, string topic) except +
        void use(void *socket, const uintptr_t *zmq) noexcept
        void connect(string address) except +
        void disconnect(string address, uint64_t publisher) except +
        void stop() except +
        cpp_bool push(const char *data, size_t size) except +
        uint64_t received() noexcept
        void run() except + nogil

ZMQ_FUNCTIONS = (
    "zmq_poll",
    "zmq_connect",
    "zmq_disconnect",
    "zmq_msg_init",
    "zmq_msg_recv",
    "zmq_msg_data",
    "zmq_msg_size",
    "zmq_msg_more",
    "zmq_msg_close",
    "zmq_errno",
    "zmq_setsockopt",
)
KINDS = ("stored", "removed", "cleared")
STATUSES = ("ok", "parent_block_not_found", "block_not_found", "invalid_block", "ignored_tier")
ODDITIES = ("duplicate", "unknown_worker", "overflow", "malformed", "sequence_gap", "failed")


@cython.final
cdef class Ingest:
    """Streams of KV events and the ``threads`` that apply them to ``tree``.

    A stream belongs to the loop until it is given away; from then on threads apply its events as
    long as each is the next in order. The first that is not makes the stream the loop's again, and
    like all that follow it waits in ``handed()``; ``fileno()`` is readable while something waits.
    """

    cdef object _tree
    cdef unique_ptr[Streams] _streams
    cdef vector[Thread *] _threads

    def __cinit__(self, tree, size_t threads, topic):
        self._tree = tree
        cdef SharedIndex *index = <SharedIndex *> PyCapsule_GetPointer(
            tree._share(), "dynamo.radix.SharedIndex"
        )
        self._streams.reset(new Streams(index))
        cdef bytes name = topic.encode()
        for _ in range(threads):
            self._threads.push_back(new Thread(self._streams.get(), name))

    def __dealloc__(self):
        for thread in self._threads:
            del thread

    def fileno(self):
        """A descriptor that is readable while something is handed over."""
        return self._streams.get().descriptor()

    def silence(self):
        """Make ``fileno()`` unreadable until something more is handed over."""
        self._streams.get().silence()

    def follow(self, uint64_t worker, uint32_t dp_rank, uint32_t slot):
        """Know a stream; its blocks go to ``slot`` and it is the loop's. O(1)."""
        with nogil:
            self._streams.get().follow(worker, dp_rank, slot)

    def give(self, uint64_t worker, uint32_t dp_rank, last):
        """Let threads apply what comes after ``last`` (None: whatever comes next).

        False if the stream is not known or events of it still wait in ``handed()``.
        """
        cdef cpp_bool has_last = last is not None
        cdef int64_t number = last if has_last else 0
        cdef cpp_bool given
        with nogil:
            given = self._streams.get().give(worker, dp_rank, has_last, number)
        return given

    def take(self, uint64_t worker, uint32_t dp_rank):
        """Take the stream back: (last id applied or None, whether it was ever heard of).

        None if it is not known. When this returns no thread changes its slot.
        """
        cdef cpp_bool has_last = False, heard = False, known
        cdef int64_t last = 0
        with nogil:
            known = self._streams.get().take(worker, dp_rank, &has_last, &last, &heard)
        return (last if has_last else None, heard) if known else None

    def heard(self, uint64_t worker, uint32_t dp_rank):
        """Whether any event of the stream ever came."""
        cdef cpp_bool heard
        with nogil:
            heard = self._streams.get().heard(worker, dp_rank)
        return heard

    def forget(self, uint64_t worker, uint32_t dp_rank):
        """Know the stream no more. When this returns no thread changes its slot."""
        with nogil:
            self._streams.get().forget(worker, dp_rank)

    def handed(self):
        """The oldest thing that the threads left to the loop, or None.

        (payload, worker, dp_rank, first): the batch's events from ``first`` on of that rank;
        (payload, None, 0, 0): a payload that only the Python decoder can judge;
        (None, worker, 0, 0): the worker's publisher began to count anew.
        """
        cdef Handed found
        cdef cpp_bool any_
        with nogil:
            any_ = self._streams.get().next_handed(&found)
        if not any_:
            return None
        if found.what == ANEW:
            return None, found.worker, 0, 0
        payload = PyBytes_FromStringAndSize(found.payload.data(), <Py_ssize_t> found.payload.size())
        if found.what == ODD:
            return payload, None, 0, 0
        return payload, found.worker, found.dp_rank, found.first

    def applied(self):
        """Events applied so far, by (type, status); those that never occurred are left out."""
        cdef size_t kind, status
        counts = {}
        for kind in range(3):
            for status in range(5):
                count = self._streams.get().applied(kind, status)
                if count:
                    counts[KINDS[kind], STATUSES[status]] = count
        return counts

    def oddities(self):
        """Warnings so far, by kind."""
        cdef size_t oddity
        return {ODDITIES[oddity]: self._streams.get().odd(oddity) for oddity in range(6)}

    def received(self):
        """Messages that each thread's socket received."""
        return [thread.received() for thread in self._threads]

    def use(self, size_t thread, uintptr_t socket, functions):
        """Give a thread a SUB socket, before it runs: its address and those of ZMQ_FUNCTIONS."""
        cdef vector[uintptr_t] addresses = functions
        if addresses.size() != <size_t> len(ZMQ_FUNCTIONS):
            raise ValueError(f"{len(ZMQ_FUNCTIONS)} functions are needed")
        self._at(thread).use(<void *> socket, addresses.data())

    def connect(self, size_t thread, str address):
        """Let a thread's socket connect, soon."""
        self._at(thread).connect(address.encode())

    def disconnect(self, size_t thread, str address, uint64_t publisher):
        """Let a thread's socket disconnect, soon, and forget the publisher's numbers."""
        self._at(thread).disconnect(address.encode(), publisher)

    def push(self, size_t thread, bytes payload):
        """Give a thread a payload that came another way; False (counted) if its inbox is full."""
        return self._at(thread).push(PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload))

    def stop(self, size_t thread):
        """Let ``run`` return, soon."""
        self._at(thread).stop()

    def run(self, size_t thread):
        """A thread's life, without the GIL; returns after ``stop`` and what was pushed before."""
        cdef Thread *self_ = self._at(thread)
        with nogil:
            self_.run()

    cdef Thread *_at(self, size_t thread) except NULL:
        if thread >= self._threads.size():
            raise IndexError(f"there are {self._threads.size()} threads")
        return self._threads[thread]
