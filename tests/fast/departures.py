"""Disconnect publishers of KV events while they publish: ``departures.py DIRECTORY COUNT``.

Print how many were disconnected and how many messages the threads received.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from pathlib import Path

import msgspec
import zmq

from dynamo._fast.radix import RadixTree
from dynamo.protocols import codec
from dynamo.protocols.kv import BlocksCleared, KvEvent, KvEventBatch
from dynamo.router.caches.event_threads import EventThreads
from dynamo.router.caches.indexer import EventMetrics, Indexer

TOPIC = "kv-events"
AT_ONCE = 4
BURST = 8


class Counts(EventMetrics):
    """Event counts, ignored."""

    def __init__(self) -> None:
        pass

    def applied(self, event_type: str, status: str, count: int = 1) -> None:
        """Ignore it."""

    def warning(self, kind: str, count: int = 1) -> None:
        """Ignore it."""


class Publisher:
    """Publishes on a thread of its own from its first subscription to :meth:`close`."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"ipc://{directory}/{number}.sock"
        self._socket.bind(self.address)
        self._stopping = False
        self.subscribed = threading.Event()
        self._thread = threading.Thread(target=self._publish)
        self._thread.start()

    def close(self) -> None:
        """Stop publishing."""
        self._stopping = True
        self._thread.join()
        self._socket.close()

    def _publish(self) -> None:
        batch = codec.encode(KvEventBatch(self.number, [KvEvent(1, BlocksCleared())]))
        body = msgspec.msgpack.encode({"publisher_id": self.number, "payload": batch})
        packed = b"\x01" + len(body).to_bytes(4, "big") + body
        head = TOPIC.encode(), self.number.to_bytes(8, "big")
        sequence = 0
        while not self._stopping:
            if not self.subscribed.is_set():
                if self._socket.poll(10):
                    self._socket.recv()
                    self.subscribed.set()
                continue
            for _ in range(BURST):
                sequence += 1
                self._socket.send_multipart((*head, sequence.to_bytes(8, "big"), packed))


async def main(directory: Path, departures: int) -> None:
    """Keep AT_ONCE publishers; disconnect the oldest once events of the newest have arrived."""
    tree = RadixTree()
    threads = EventThreads(tree, 2, TOPIC, Counts())
    indexer = Indexer(tree, lambda _: None, Counts(), threads.ingest)
    threads.start(indexer)
    publishers: deque[Publisher] = deque()
    for number in range(1, departures + AT_ONCE + 1):
        publisher = Publisher(directory, number)
        publishers.append(publisher)
        indexer.add(number, 0, tree.slot(number, 0), answers=False)
        threads.subscriber.connect(publisher.address, number)
        while not publisher.subscribed.is_set() or not threads.ingest.received_any(number, 0):  # noqa: ASYNC110
            await asyncio.sleep(0)
        if len(publishers) > AT_ONCE:
            leaving = publishers.popleft()
            threads.subscriber.disconnect(leaving.address)
            indexer.remove(leaving.number)
            tree.remove_worker(leaving.number)
            leaving.close()
    for publisher in publishers:
        publisher.close()
    threads.close()
    tree._check()
    print(f"departures {departures}, received {sum(threads.ingest.received())}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
