"""Check that memory stays constant over millions of KV events, decoded and indexed.

    python benchmarks/event_soak.py [--events 2000000] [--threads 1] [--json OUT.json]

Eight workers of constant size store chains and remove them again, last block first; now and then
one clears its cache, or dies and is replaced. Prints resident memory and the size of the index over
time, and compares the last half with the second quarter: a ratio above ``--limit`` (default 1.02)
fails. With ``--threads`` above 1, event threads apply the events. Every phase ends with a check
that the index holds the blocks that were sent.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from random import Random
from statistics import mean

from dynamo._fast.ingest import Ingest
from dynamo._fast.radix import RadixTree
from dynamo.protocols import codec
from dynamo.protocols.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from dynamo.router.caches.event_threads import apply_handoff
from dynamo.router.caches.indexer import EventMetrics, Indexer

WORKERS = 8
LIVE_BLOCKS = 40_000
EVENTS_PER_BATCH = 16
STRETCHES = 400
_decode = codec.decoder(KvEventBatch).decode


class Counts(EventMetrics):
    """Counts of a run."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def applied(self, event_type: str, status: str, count: int = 1) -> None:
        """Events by outcome."""
        self.seen[status] += count

    def warning(self, kind: str, count: int = 1) -> None:
        """Warnings by kind."""
        self.seen[kind] += count


class Engine:
    """One worker's cache: chains of 1 to 40 blocks, the oldest is evicted first."""

    def __init__(self, worker: int, source: Random) -> None:
        self.worker = worker
        self.blocks = 0
        self._source = source
        self._chains: deque[bytes] = deque()
        self._event_id = 0

    def batch(self, clear: bool) -> bytes:
        """The next events, encoded."""
        events = []
        for _ in range(EVENTS_PER_BATCH):
            self._event_id += 1
            events.append(KvEvent(self._event_id, BlocksCleared() if clear else self._change()))
            if clear:
                self._chains.clear()
                self.blocks, clear = 0, False
        return codec.encode(KvEventBatch(self.worker, events))

    def _change(self) -> BlocksStored | BlocksRemoved:
        if self.blocks >= LIVE_BLOCKS:
            names = self._chains.popleft()
            self.blocks -= len(names) // 8
            return BlocksRemoved(
                b"".join(names[at : at + 8] for at in range(len(names) - 8, -1, -8))
            )
        count = self._source.randrange(1, 41)
        names = self._source.randbytes(8 * count)
        self._chains.append(names)
        self.blocks += count
        return BlocksStored(names, self._source.randbytes(8 * count))


class Soak:
    """Engines, and the index of their blocks."""

    def __init__(self, threads: int) -> None:
        self.tree, self.counts, self.source = RadixTree(), Counts(), Random(1)
        self.ingest = Ingest(self.tree, threads, "kv-events") if threads > 1 else None
        self.threads = threads
        self.indexer = Indexer(self.tree, lambda _: None, self.counts, self.ingest)
        self.born = 0
        self.engines = [self._start() for _ in range(WORKERS)]

    def stretch(self, events: int) -> None:
        """Send events and return when all are applied."""
        running = [
            threading.Thread(target=self.ingest.run, args=(number,))
            for number in range(self.threads)
            if self.ingest is not None
        ]
        for thread in running:
            thread.start()
        for _ in range(events // EVENTS_PER_BATCH):
            number = self.source.randrange(WORKERS)
            chance = self.source.random()
            if chance < 0.0005:
                self._die(number)
            self._deliver(number, self.engines[number].batch(clear=chance > 0.9995))
        for number, thread in enumerate(running):
            assert self.ingest is not None
            self.ingest.stop(number)
            thread.join()
        self._check()

    def _start(self) -> Engine:
        worker = self.born
        self.born += 1
        self.indexer.add(worker, 0, self.tree.slot(worker, 0), answers=False)
        return Engine(worker, self.source)

    def _die(self, number: int) -> None:
        worker = self.engines[number].worker
        self.indexer.remove(worker)
        self.tree.remove_worker(worker)
        self.engines[number] = self._start()

    def _deliver(self, number: int, payload: bytes) -> None:
        if self.ingest is None:
            self.indexer.apply(_decode(payload))
        else:
            self.ingest.push(number % self.threads, payload)

    def _check(self) -> None:
        while self.ingest is not None and (handoff := self.ingest.next_handoff()) is not None:
            apply_handoff(handoff, self.indexer, self.counts)
        held = sum(engine.blocks for engine in self.engines)
        assert self.tree.blocks() == held, (self.tree.blocks(), held)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Soak and print; exit 1 if memory grew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1.02)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    soak = Soak(args.threads)
    rows: list[dict[str, float]] = []
    begin = time.perf_counter()
    print(f"{'events':>10} {'seconds':>8} {'RSS MB':>8} {'index MB':>9} {'blocks':>9} {'born':>5}")
    for number in range(1, STRETCHES + 1):
        soak.stretch(args.events // STRETCHES)
        row = {
            "events": number * args.events // STRETCHES,
            "seconds": time.perf_counter() - begin,
            "rss_mb": resident_bytes() / 1e6,
            "index_mb": soak.tree.memory_bytes() / 1e6,
            "blocks": soak.tree.blocks(),
            "born": soak.born,
        }
        rows.append(row)
        if number % (STRETCHES // 10) == 0:
            print(
                "{events:10,} {seconds:8.1f} {rss_mb:8.1f} {index_mb:9.2f} ".format(**row), end=""
            )
            print("{blocks:9,} {born:5}".format(**row))
    soak.tree._check()
    second, last = rows[STRETCHES // 4 : STRETCHES // 2], rows[STRETCHES // 2 :]
    ratios = {
        name: mean(row[name] for row in last) / mean(row[name] for row in second)
        for name in ("rss_mb", "index_mb")
    }
    print(f"last half / second quarter: RSS {ratios['rss_mb']:.3f}, index {ratios['index_mb']:.3f}")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "ratios": ratios}, indent=1))
    sys.exit(ratios["rss_mb"] > args.limit)


if __name__ == "__main__":
    main()
