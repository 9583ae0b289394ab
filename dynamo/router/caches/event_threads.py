"""KV events off the loop: threads that receive, decode and apply them without the GIL. Spec 2.4.

Every publisher belongs to one thread, so that its events keep their order. What a thread cannot go
on with (a gap, a worker whose caches are just being asked for, a strange message) it hands to the
loop, where :class:`Indexer` settles it. How that works is told in docs/radix.md.
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
from dynamo.router.caches.indexer import EventCounts, Indexer
from dynamo.runtime.events import EventSubscriber
from dynamo.runtime.events.zmq import subscribing_socket

__all__ = ["EventThreads", "Handed", "take_handed"]

COUNT_S = 1.0
"""How often the threads' counts are looked at, if nobody renders metrics."""

HANDED_PER_TURN = 64
"""Batches taken from the threads before the loop gets its turn."""

LOGGED = ("malformed", "overflow", "failed")
"""Oddities that nobody else explains."""

Handed = tuple[bytes | None, int | None, int, int]
"""What ``Ingest.handed`` gives."""

logger = logging.getLogger(__name__)
_decode_batch = codec.decoder(KvEventBatch).decode


class EventThreads:
    """``count`` threads that keep ``index`` true to the events of ``topic``.

    Give ``ingest`` to the :class:`Indexer` and ``subscriber`` to the subscription. Use from the
    loop's thread; end with :meth:`close`.
    """

    def __init__(self, index: RadixTree, count: int, topic: str, counts: EventCounts) -> None:
        self.ingest = Ingest(index, count, topic)
        self.subscriber: EventSubscriber = _Subscriber(topic, self)
        self._counts = counts
        self._counted: dict[object, int] = {}
        self._indexer: Indexer | None = None
        self._load = [0] * count
        self._of: dict[int, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        functions = _zmq_functions()
        self._sockets = [subscribing_socket(topic) for _ in range(count)]
        for number, socket in enumerate(self._sockets):
            self.ingest.use(number, int(socket.underlying), functions)
        self._threads = [
            threading.Thread(target=self._life, args=(number,), name=f"kv-events-{number}")
            for number in range(count)
        ]

    def start(self, indexer: Indexer) -> None:
        """Begin. ``indexer`` gets what the threads leave to the loop."""
        self._indexer = indexer
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.ingest.fileno(), self._take_handed)
        self._count()
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def close(self) -> None:
        """Stop and wait for the threads, which are never in the midst of much. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for number in range(len(self._threads)):
            self.ingest.stop(number)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for socket in self._sockets:
            socket.close(linger=0)
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self.ingest.fileno())
            self.flush()

    def push(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        """Events that came over another transport, where nobody tells when a publisher is gone."""
        number = self._of.get(publisher_id, publisher_id % len(self._threads))
        self.ingest.push(number, payload)

    def thread_of(self, publisher_id: int) -> int:
        """The thread of a publisher; a new one gets the thread with the fewest."""
        number = self._of.get(publisher_id)
        if number is None:
            number = self._of[publisher_id] = self._load.index(min(self._load))
            self._load[number] += 1
        return number

    def forget(self, publisher_id: int) -> None:
        """The publisher is gone."""
        number = self._of.pop(publisher_id, None)
        if number is not None:
            self._load[number] -= 1

    def _life(self, number: int) -> None:
        """A thread. It leaves the GIL at once and comes back at the end."""
        try:
            self.ingest.run(number)
        except Exception:
            logger.exception("thread %d for KV events failed", number)
        if not self._closed:
            logger.error("thread %d for KV events ended: its workers' caches go stale", number)

    def _take_handed(self) -> None:
        self.ingest.silence()
        for _ in range(HANDED_PER_TURN):
            handed = self.ingest.handed()
            if handed is None or self._indexer is None:
                break
            try:
                take_handed(handed, self._indexer, self._counts)
            except Exception:  # one batch must not end the others; its ids will be missed
                self._counts.warning("failed")
                logger.exception("KV events of worker %s failed", handed[1])
        else:
            if self._loop is not None and not self._closed:
                self._loop.call_soon(self._take_handed)

    def _count(self) -> None:
        self.flush()
        if self._loop is not None:
            self._timer = self._loop.call_later(COUNT_S, self._count)

    def flush(self) -> None:
        """Bring the metrics up to date."""
        for outcome, count in self.ingest.applied().items():
            self._counts.applied(*outcome, count - self._counted.get(outcome, 0))
            self._counted[outcome] = count
        oddities = self.ingest.oddities()
        self.subscriber.received = sum(self.ingest.received())
        self.subscriber.gaps = oddities["sequence_gap"]
        self.subscriber.malformed = oddities["malformed"]
        for kind, count in oddities.items():
            new = count - self._counted.get(kind, 0)
            self._counted[kind] = count
            if new:
                self._counts.warning(kind, new)
                if kind in LOGGED:
                    logger.warning("KV events: %d times %s", new, kind)


def take_handed(handed: Handed, indexer: Indexer, counts: EventCounts) -> None:
    """Let the indexer settle one thing that threads have left to the loop."""
    payload, worker, dp_rank, first = handed
    if payload is None:
        indexer.renew(worker or 0)
        return
    try:
        batch = _decode_batch(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        counts.warning("malformed")
        logger.warning("invalid KV events of worker %s: %s", worker, error)
        return
    if worker is not None:
        batch.events = [event for event in batch.events[first:] if event.dp_rank == dp_rank]
    indexer.apply(batch)


class _Subscriber:
    """The event plane's face of the threads' own sockets; counts are those of the last flush."""

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
            publisher = self._publishers[address] = publisher_id or 0
            self._threads.ingest.connect(self._threads.thread_of(publisher), address)

    def disconnect(self, address: str) -> None:
        """See EventSubscriber."""
        publisher = self._publishers.pop(address, None)
        if publisher is not None:
            number = self._threads.thread_of(publisher)
            self._threads.ingest.disconnect(number, address, publisher)
            self._threads.forget(publisher)

    def close(self) -> None:
        """See EventSubscriber. Waits for the threads."""
        self._threads.close()


def _zmq_functions() -> list[int]:
    """Where the library under pyzmq has the functions that the threads call."""
    try:
        library = ctypes.CDLL(import_module("zmq.backend.cython._zmq").__file__)
        functions = [library[name] for name in ZMQ_FUNCTIONS]
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(
            f"--router-event-threads needs pyzmq with its compiled backend: {error}"
        ) from error
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
