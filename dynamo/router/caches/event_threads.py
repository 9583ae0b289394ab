"""Threads that receive, decode and apply KV events without the GIL.

Every publisher belongs to one thread, so that its events keep their order. A thread hands off to
the loop, where :class:`Indexer` decides, whatever is not the next event of a stream: a gap, an
event during a recovery, a message that the compiled decoder rejects. Design: docs/radix.md.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from importlib import import_module

import msgspec

from dynamo._fast.ingest import ZMQ_FUNCTIONS, Ingest
from dynamo._fast.radix import RadixTree
from dynamo.errors import ConfigError
from dynamo.protocols import codec
from dynamo.protocols.kv import KvEventBatch
from dynamo.router.caches.indexer import EventMetrics, Indexer
from dynamo.runtime.events import EventSubscriber
from dynamo.runtime.events.plane import subscribing_socket

COUNT_S = 1.0
"""Interval of reading the threads' counters, without which warnings would not be logged."""

HANDOFFS_PER_ITERATION = 64
"""Handoffs applied before other callbacks of the loop run."""

LOGGED_WARNINGS = ("malformed", "overflow", "failed")
"""Warnings that no other log line explains."""

Handoff = tuple[bytes | None, int | None, int, int]
"""The result of ``Ingest.next_handoff``."""

log = logging.getLogger(__name__)
_decode_batch = codec.decoder(KvEventBatch).decode


class EventThreads:
    """``count`` threads that apply the events of ``topic`` to ``index``.

    Pass ``ingest`` to the :class:`Indexer` and ``subscriber`` to the subscription. All methods are
    for the loop's thread; end with :meth:`close`.
    """

    def __init__(self, index: RadixTree, count: int, topic: str, counts: EventMetrics) -> None:
        self.ingest = Ingest(index, count, topic)
        self.subscriber: EventSubscriber = _Subscriber(topic, self)
        self._counts = counts
        self._counted: dict[object, int] = {}
        self._indexer: Indexer | None = None
        self._publisher_counts = [0] * count
        self._thread_of: dict[int, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        functions = _zmq_functions()
        self._sockets = [subscribing_socket(topic) for _ in range(count)]
        for number, socket in enumerate(self._sockets):
            self.ingest.set_socket(number, int(socket.underlying), functions)
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"kv-events-{number}")
            for number in range(count)
        ]

    def start(self, indexer: Indexer) -> None:
        """Start the threads. ``indexer`` applies their handoffs."""
        self._indexer = indexer
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.ingest.fileno(), self._process_handoffs)
        self._update_counts()
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def close(self) -> None:
        """Stop the threads and wait for them: milliseconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # Stop all before the first join: they end side by side.
        for number in range(len(self._threads)):
            self.ingest.stop(number)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        # After the joins: a socket of libzmq must not be closed while another thread uses it.
        for socket in self._sockets:
            socket.close(linger=0)
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self.ingest.fileno())
            self.flush()

    def push(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        """Pass on events that the loop received over another transport.

        Such a publisher has no :meth:`forget`: its thread follows from its id instead.
        """
        # One thread for each publisher: two would apply its events out of order.
        number = self._thread_of.get(publisher_id, publisher_id % len(self._threads))
        self.ingest.push(number, payload)

    def thread_of(self, publisher_id: int) -> int:
        """Return the thread of a publisher; a new one gets the thread with the fewest."""
        number = self._thread_of.get(publisher_id)
        if number is None:
            number = self._thread_of[publisher_id] = self._publisher_counts.index(
                min(self._publisher_counts)
            )
            self._publisher_counts[number] += 1
        return number

    def forget(self, publisher_id: int) -> None:
        """Forget a publisher that disconnected."""
        number = self._thread_of.pop(publisher_id, None)
        if number is not None:
            self._publisher_counts[number] -= 1

    def _run(self, number: int) -> None:
        """Run in a thread; the GIL is only held at the start and the end."""
        try:
            self.ingest.run(number)
        except Exception:
            log.exception("thread %d for KV events failed", number)
        if not self._closed:
            log.error("thread %d for KV events ended: its workers' caches become stale", number)

    def _process_handoffs(self) -> None:
        # Clear before reading: a handoff that arrives afterwards wakes the loop again.
        self.ingest.clear_wakeup()
        for _ in range(HANDOFFS_PER_ITERATION):
            handoff = self.ingest.next_handoff()
            if handoff is None or self._indexer is None:
                break
            try:
                apply_handoff(handoff, self._indexer, self._counts)
            except Exception:  # the ids of a failed batch leave a gap, and so are recovered
                self._counts.warning("failed")
                log.exception("applying KV events of worker %x failed", handoff[1] or 0)
        else:  # the bound was reached: let other callbacks run before the rest
            if self._loop is not None and not self._closed:
                self._loop.call_soon(self._process_handoffs)

    def _update_counts(self) -> None:
        self.flush()
        if self._loop is not None:
            self._timer = self._loop.call_later(COUNT_S, self._update_counts)

    def flush(self) -> None:
        """Update the metrics from the threads' counters."""
        for outcome, count in self.ingest.applied().items():
            self._counts.applied(*outcome, count - self._counted.get(outcome, 0))
            self._counted[outcome] = count
        warnings = self.ingest.warnings()
        self.subscriber.received = sum(self.ingest.received())
        self.subscriber.gaps = warnings["sequence_gap"]
        self.subscriber.malformed = warnings["malformed"]
        for kind, count in warnings.items():
            # The threads count from their start; the metrics take the difference to the last flush.
            new = count - self._counted.get(kind, 0)
            self._counted[kind] = count
            if new:
                self._counts.warning(kind, new)
                if kind in LOGGED_WARNINGS:
                    log.warning("KV events: %d × %s", new, kind)


def apply_handoff(handoff: Handoff, indexer: Indexer, counts: EventMetrics) -> None:
    """Apply one handoff of the threads."""
    payload, worker, dp_rank, first = handoff
    if payload is None and first:  # messages were lost
        indexer.verify(worker)
        return
    if payload is None:
        indexer.publisher_restarted(worker or 0)
        return
    try:
        batch = _decode_batch(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        counts.warning("malformed")
        log.warning("invalid KV events: %s", error)
        return
    if worker is not None:
        # The thread applied the events before ``first``, and hands off each other rank on its own.
        batch.events = [event for event in batch.events[first:] if event.dp_rank == dp_rank]
    indexer.apply(batch)


class _Subscriber:
    """The EventSubscriber of the threads' sockets; its counts are those of the last flush."""

    def __init__(self, topic: str, threads: EventThreads) -> None:
        self.topic = topic
        self.received = 0
        self.gaps = 0
        self.malformed = 0
        self._threads = threads
        self._publishers: dict[str, int] = {}

    def connect(self, address: str, publisher_id: int | None = None) -> None:
        """See EventSubscriber."""
        if address not in self._publishers:
            publisher = self._publishers[address] = 0 if publisher_id is None else publisher_id
            self._threads.ingest.connect(self._threads.thread_of(publisher), address)

    def disconnect(self, address: str) -> None:
        """See EventSubscriber."""
        publisher = self._publishers.pop(address, None)
        if publisher is not None:
            number = self._threads.thread_of(publisher)
            self._threads.ingest.disconnect(number, address, publisher)
            # Last: it drops the number of the thread that has the socket.
            self._threads.forget(publisher)

    def close(self) -> None:
        """See EventSubscriber. Waits for the threads."""
        self._threads.close()


def _zmq_functions() -> list[int]:
    """Return the addresses of the functions that the threads call, in pyzmq's own libzmq."""
    try:
        library = ctypes.CDLL(import_module("zmq.backend.cython._zmq").__file__)
        functions = [library[name] for name in ZMQ_FUNCTIONS]
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(
            f"--router-event-threads needs pyzmq with its compiled backend: {error}"
        ) from error
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
