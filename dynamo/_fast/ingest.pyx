"""KV events decoded and applied to the prefix index by threads that run without the GIL.

Threads, locks and the ownership of streams: docs/radix.md. The reference implementation of applying
a batch is ``dynamo.router.caches.indexer`` with ``dynamo.protocols.kv``.
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
    cdef enum HandoffKind:
        EVENTS
        UNDECODED
        RESTARTED
        LOST

    cdef cppclass Handoff:
        HandoffKind kind
        uint32_t dp_rank
        uint64_t worker
        size_t first
        string payload

    cdef cppclass Streams:
        Streams(SharedIndex *index) except +
        int descriptor() noexcept
        void clear_wakeup() noexcept
        uint64_t applied(size_t kind, size_t status) noexcept
        uint64_t warned(size_t warning) noexcept
        void add(uint64_t worker, uint32_t dp_rank, uint32_t slot) except + nogil
        cpp_bool delegate(
            uint64_t worker, uint32_t dp_rank, cpp_bool has_last, int64_t last
        ) except + nogil
        cpp_bool reclaim(
            uint64_t worker,
            uint32_t dp_rank,
            cpp_bool *has_last,
            int64_t *last,
            cpp_bool *received_any,
        ) except + nogil
        cpp_bool received_any(uint64_t worker, uint32_t dp_rank) except + nogil
        void remove(uint64_t worker, uint32_t dp_rank) except + nogil
        cpp_bool next_handoff(Handoff *handoff) except + nogil

    cdef cppclass Thread:
        Thread(Streams *streams, string topic) except +
        void set_socket(void *socket, const uintptr_t *zmq) noexcept
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
WARNINGS = ("duplicate", "unknown_worker", "overflow", "malformed", "sequence_gap", "failed")


@cython.final
cdef class Ingest:
    """Streams of KV events and the ``threads`` that apply them to ``tree``.

    The loop owns a stream until it delegates it: then threads apply its events as long as each is
    the next in order. The first that is not returns the stream to the loop; that event and all
    later ones are handed off (:meth:`next_handoff`). ``fileno()`` is readable while one is pending.
    """

    cdef object _tree
    cdef unique_ptr[Streams] _streams
    cdef vector[Thread *] _threads

    def __cinit__(self, tree, size_t threads, topic):
        # The capsule does not own the index: this reference keeps it alive.
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
        """Return a descriptor that is readable while handoffs are pending."""
        return self._streams.get().descriptor()

    def clear_wakeup(self):
        """Make ``fileno()`` unreadable until the next handoff."""
        self._streams.get().clear_wakeup()

    def add(self, uint64_t worker, uint32_t dp_rank, uint32_t slot):
        """Register a stream, owned by the loop; its blocks go to ``slot``. O(1)."""
        with nogil:
            self._streams.get().add(worker, dp_rank, slot)

    def delegate(self, uint64_t worker, uint32_t dp_rank, last):
        """Let threads apply the events after ``last`` (None: from any id on).

        Return False if the stream is unknown or handoffs of it are pending.
        """
        cdef cpp_bool has_last = last is not None
        cdef int64_t number = last if has_last else 0
        cdef cpp_bool delegated
        with nogil:
            delegated = self._streams.get().delegate(worker, dp_rank, has_last, number)
        return delegated

    def reclaim(self, uint64_t worker, uint32_t dp_rank):
        """Return the stream to the loop: (last applied id or None, whether it received any event).

        None if it is unknown. No thread changes its slot after the return.
        """
        cdef cpp_bool has_last = False, received_any = False, known
        cdef int64_t last = 0
        with nogil:
            known = self._streams.get().reclaim(worker, dp_rank, &has_last, &last, &received_any)
        return (last if has_last else None, received_any) if known else None

    def received_any(self, uint64_t worker, uint32_t dp_rank):
        """Return whether any event of the stream was received."""
        cdef cpp_bool received_any
        with nogil:
            received_any = self._streams.get().received_any(worker, dp_rank)
        return received_any

    def remove(self, uint64_t worker, uint32_t dp_rank):
        """Forget the stream. No thread changes its slot after the return."""
        with nogil:
            self._streams.get().remove(worker, dp_rank)

    def next_handoff(self):
        """Take the oldest handoff of the threads to the loop, or None.

        (payload, worker, dp_rank, first): the batch's events of that rank from index ``first`` on;
        (payload, None, 0, 0): a payload that the compiled decoder rejects;
        (None, worker, 0, 0): the worker's publisher restarted its sequence numbers;
        (None, worker, 0, 1): messages of it were lost, of whatever rank.
        """
        cdef Handoff found
        cdef cpp_bool any_
        with nogil:
            any_ = self._streams.get().next_handoff(&found)
        if not any_:
            return None
        if found.kind in (RESTARTED, LOST):
            return None, found.worker, 0, int(found.kind == LOST)
        payload = PyBytes_FromStringAndSize(found.payload.data(), <Py_ssize_t> found.payload.size())
        if found.kind == UNDECODED:
            return payload, None, 0, 0
        return payload, found.worker, found.dp_rank, found.first

    def applied(self):
        """Return the number of events applied, by (type, status), without zeros."""
        cdef size_t kind, status
        counts = {}
        for kind in range(3):
            for status in range(5):
                count = self._streams.get().applied(kind, status)
                if count:
                    counts[KINDS[kind], STATUSES[status]] = count
        return counts

    def warnings(self):
        """Return the number of warnings, by kind."""
        cdef size_t warning
        return {WARNINGS[warning]: self._streams.get().warned(warning) for warning in range(6)}

    def received(self):
        """Return the number of messages that each thread's socket received."""
        return [thread.received() for thread in self._threads]

    def set_socket(self, size_t thread, uintptr_t socket, functions):
        """Set a thread's SUB socket before it runs: its address and those of ZMQ_FUNCTIONS."""
        cdef vector[uintptr_t] addresses = functions
        if addresses.size() != <size_t> len(ZMQ_FUNCTIONS):
            raise ValueError(f"{len(ZMQ_FUNCTIONS)} functions are needed")
        self._at(thread).set_socket(<void *> socket, addresses.data())

    def connect(self, size_t thread, str address):
        """Make a thread's socket connect, asynchronously."""
        self._at(thread).connect(address.encode())

    def disconnect(self, size_t thread, str address, uint64_t publisher):
        """Make a thread's socket disconnect, asynchronously, and forget the publisher's numbers."""
        self._at(thread).disconnect(address.encode(), publisher)

    def push(self, size_t thread, bytes payload):
        """Add a payload from another transport; return False (counted) if the inbox is full."""
        return self._at(thread).push(PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload))

    def stop(self, size_t thread):
        """Make ``run`` return, asynchronously."""
        self._at(thread).stop()

    def run(self, size_t thread):
        """Run a thread without the GIL until ``stop``; all that was pushed before is applied."""
        cdef Thread *self_ = self._at(thread)
        with nogil:
            self_.run()

    cdef Thread *_at(self, size_t thread) except NULL:
        if thread >= self._threads.size():
            raise IndexError(f"there are {self._threads.size()} threads")
        return self._threads[thread]
