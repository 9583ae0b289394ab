"""What threads do with KV events, done in one place in plain Python: decode, then the indexer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from dynamo._fast.radix import RadixTree
from dynamo.protocols import codec
from dynamo.protocols.kv import KvEventBatch
from dynamo.router.caches.indexer import EventMetrics, Indexer

__all__ = ["Alone", "Counts"]

_decode = codec.decoder(KvEventBatch).decode


class Counts(EventMetrics):
    """Counts in a Counter."""

    def __init__(self) -> None:
        self.seen: Counter[Any] = Counter()

    def applied(self, event_type: str, status: str, count: int = 1) -> None:
        self.seen[event_type, status] += count

    def warning(self, kind: str, count: int = 1) -> None:
        self.seen[kind] += count


class Alone:
    """An index that one thread keeps true to the events of workers that answer no question."""

    def __init__(self) -> None:
        self.tree = RadixTree()
        self.counts = Counts()
        self.indexer = self.make()

    def make(self) -> Indexer:
        return Indexer(self.tree, lambda _: None, self.counts)

    def deliver(self, payload: bytes) -> None:
        """One message."""
        try:
            self.indexer.apply(_decode(payload))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.counts.warning("malformed")

    def add(self, worker: int, rank: int) -> None:
        self.indexer.add(worker, rank, self.tree.slot(worker, rank), answers=False)

    def remove(self, worker: int) -> None:
        self.indexer.remove(worker)
        self.tree.remove_worker(worker)
