"""KV events on threads: the same result as in Python, for any input and any reader."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from occurred import assert_occurred
from oracle.ingest import Alone, Counts

from dynamo._fast import ingest
from dynamo._fast.ingest import Ingest
from dynamo._fast.radix import RadixTree
from dynamo.protocols import codec
from dynamo.protocols.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from dynamo.router.caches.event_threads import EventThreads, apply_handoff
from dynamo.router.caches.indexer import Indexer

TIERS = ["device", "device", "host_pinned", "host_pinned", "disk", "external", "tape"]
decode = codec.decoder(KvEventBatch).decode


def column(*values: int) -> bytes:
    return array("Q", values).tobytes()


class Helped(Alone):
    """The same with a thread, whose iterations the test runs."""

    def make(self) -> Indexer:
        self.ingest = Ingest(self.tree, 1, "kv-events")
        return Indexer(self.tree, lambda _: None, self.counts, self.ingest)

    def deliver(self, payload: bytes) -> None:
        self.ingest.push(0, payload)
        self.ingest.stop(0)
        self.ingest.run(0)
        self.apply_handoffs()

    def apply_handoffs(self) -> None:
        while (handoff := self.ingest.next_handoff()) is not None:
            apply_handoff(handoff, self.indexer, self.counts)

    def all_counts(self) -> Counter[Any]:
        return self.counts.seen + Counter(self.ingest.applied()) + Counter(self.ingest.warnings())


def test_is_compiled() -> None:
    assert ingest.__file__ is not None and ingest.__file__.endswith(".so")


def changes(source: Random, event_id: int) -> dict[str, Any]:
    """An event as a dict, with all that may be left out, added or unusual."""
    chain = [source.randrange(60) for _ in range(source.randrange(4))]
    blocks = column(*(block % 30 for block in chain)) + source.choice([b"", b"", b"", b"torn"])
    event: dict[str, Any] = {"event_id": event_id}
    tier = source.choice(TIERS) if source.random() < 0.6 else None
    match source.choices(range(4), [8, 6, 1, 2])[0]:
        case 0:
            event["data"] = {"kind": "stored", "block_hashes": blocks}
            tokens = source.choice([column(*chain), column(*chain), column(*chain), b""])
            event["data"]["tokens_hashes"] = tokens
            if source.random() < 0.7:
                event["data"]["parent_hash"] = source.choice([None, -1, source.randrange(30)])
            if source.random() < 0.2:
                event["data"]["start_position"] = source.choice([None, 7])
        case 1:
            event["data"] = {"kind": "removed", "block_hashes": blocks}
        case kind:
            event["data"] = {"kind": "cleared"}
            # Often not the device, which would clear all tiers.
            tier = tier if kind == 2 else source.choice(TIERS[3:5])
    if source.random() < 0.3:
        event["dp_rank"] = source.randrange(3)
    if tier is not None:
        event["storage_tier"] = tier
    if source.random() < 0.2:
        event["data"]["medium"] = {"any": [1, 2.5, None, "x" * 40, b"y"], "thing": -(2**40)}
    if source.random() < 0.2:
        event = dict(reversed(event.items()))
    return event


def payloads(source: Random, count: int) -> Iterator[bytes]:
    """Batches; some events are lost, repeated or come late, some bytes are broken."""
    ids: Counter[tuple[int, int]] = Counter()
    for _ in range(count):
        worker = source.randrange(3)
        events = []
        for _ in range(source.choice([1, 1, 1, 2, 5])):
            change = changes(source, 0)
            stream = worker, change.get("dp_rank", 0)
            ids[stream] += source.choices([1, 0, 2, -3], [120, 1, 1, 1])[0]
            events.append({**change, "event_id": max(ids[stream], 0)})
        batch: dict[str, Any] = {"worker_id": worker, "events": events}
        payload = msgspec.msgpack.encode(batch)
        match source.choices(range(4), [120, 1, 1, 1])[0]:  # each is a gap, too
            case 0:
                yield payload
            case 1:
                yield payload[: source.randrange(len(payload))]
            case 2:
                broken = bytearray(payload)
                broken[source.randrange(len(broken))] = source.randrange(256)
                yield bytes(broken)
            case 3:
                yield payload + source.randbytes(source.randrange(2))


@pytest.mark.parametrize("seed", range(8))
def test_any_input_gives_the_result_of_python(seed: int) -> None:  # noqa: C901 - event kinds
    source = Random(seed)
    alone, helped = Alone(), Helped()
    sides: list[Alone] = [alone, helped]
    for side in sides:
        for worker in range(2):  # a third one is not known
            for rank in range(2):
                side.add(worker, rank)
    states = Counter[str]()
    for number, payload in enumerate(payloads(source, 1500)):
        before = held(alone.tree)
        for side in sides:
            side.deliver(payload)
        states += changed(before, held(alone.tree))
        # Soon: the next clear or recovery hides a difference.
        if number % 5 == 4 or b"cleared" in payload:
            helped.tree._check()
            assert helped.tree.blocks() == alone.tree.blocks()
            assert contents(helped.tree) == contents(alone.tree)
        if number % 400 == 399:
            for side in sides:
                side.remove(1)
                side.add(1, 0)
                side.add(1, 1)
        if number % 150 == 149:
            for side in sides:
                side.indexer.verify()
    assert helped.all_counts() == +alone.counts.seen
    applied = helped.ingest.applied()
    kinds = ("stored", "ok"), ("removed", "ok"), ("cleared", "ok"), ("stored", "invalid_block")
    more = ("stored", "parent_block_not_found"), ("removed", "block_not_found")
    assert all(applied.get(each, 0) > 5 for each in (*kinds, *more)), applied
    warnings = ("duplicate", "malformed", "unknown_worker", "gap")
    assert all(alone.counts.seen[each] for each in warnings), alone.counts.seen
    assert states["one tier emptied"] > 2 and states["all tiers emptied"], states


def held(tree: RadixTree) -> list[list[int]]:
    """Return how many blocks each stream has on the device, the host and the disk."""
    return [
        [tree.held(tree.slot(worker, rank, tier)) for tier in range(3)]
        for worker in range(2)
        for rank in range(2)
    ]


def changed(before: list[list[int]], after: list[list[int]]) -> Counter[str]:
    """Count the tiers that had several blocks and have none."""
    seen = Counter[str]()
    for old, new in zip(before, after, strict=True):
        emptied = sum(was > 1 and not now for was, now in zip(old[1:], new[1:], strict=True))
        seen["one tier emptied"] += emptied if new[0] else 0
        seen["all tiers emptied"] += emptied and old[0] > 0 and not any(new)
    return seen


def contents(tree: RadixTree) -> list[Any]:
    """Return the blocks of a tree in a fixed order."""
    return sorted(
        (worker, rank, tier, -1 if parent is None else parent, block, local)
        for worker, rank, first, blocks, locals_, tier in tree.dump_tiers()
        for parent, block, local in zip([first, *blocks], blocks, locals_, strict=False)
    )


def event(
    event_id: int, data: BlocksStored | BlocksRemoved | BlocksCleared, worker: int = 7
) -> bytes:
    return codec.encode(KvEventBatch(worker, [KvEvent(event_id, data)]))


def test_a_gap_returns_the_stream_to_the_loop() -> None:
    asked: list[Any] = []
    tree, counts = RadixTree(), Counts()
    threads = Ingest(tree, 1, "kv-events")
    indexer = Indexer(tree, asked.append, counts, threads)
    indexer.add(7, 0, tree.slot(7, 0))
    threads.push(0, event(1, BlocksStored(column(1), column(11))))
    threads.push(0, event(2, BlocksStored(column(2), column(12), 1)))
    threads.stop(0)
    threads.run(0)
    assert threads.applied() == {}
    first, second = threads.next_handoff(), threads.next_handoff()
    assert first is not None and second is not None and threads.next_handoff() is None
    assert [decode(payload).events[0].event_id for payload in (first[0], second[0])] == [1, 2]  # type: ignore[arg-type]
    assert threads.reclaim(7, 0) == (None, True)
    assert threads.reclaim(8, 0) is None


def test_a_stream_is_delegated_only_without_pending_handoffs() -> None:
    tree = RadixTree()
    threads = Ingest(tree, 1, "kv-events")
    threads.add(7, 0, tree.slot(7, 0))
    assert not threads.delegate(9, 0, 3)
    assert threads.delegate(7, 0, 3)
    for event_id in (4, 6, 7):
        threads.push(0, event(event_id, BlocksStored(column(event_id), column(event_id))))
    threads.stop(0)
    threads.run(0)
    assert (tree.blocks(), threads.applied()) == (1, {("stored", "ok"): 1})
    assert not threads.delegate(7, 0, 6)
    assert threads.next_handoff() is not None
    assert not threads.delegate(7, 0, 6)
    assert threads.next_handoff() is not None
    assert threads.delegate(7, 0, 6)
    assert threads.received_any(7, 0)
    threads.remove(7, 0)
    assert not threads.received_any(7, 0)


def test_an_inbox_is_bounded() -> None:
    threads = Ingest(RadixTree(), 1, "kv-events")
    megabyte = bytes(1 << 20)
    assert sum(threads.push(0, megabyte) for _ in range(70)) == 64
    assert threads.warnings()["overflow"] == 6


class Storm:
    """Threads at work, their input as plain dicts, and a loop that reads the index."""

    WORKERS = 5

    def __init__(self, seed: int) -> None:
        self.source = Random(seed)
        self.tree, self.counts = RadixTree(), Counts()
        self.held: dict[int, dict[int, tuple[int, ...]]] = {}
        self.threads = Ingest(self.tree, 3, "kv-events")
        self.indexer = Indexer(self.tree, lambda _: None, self.counts, self.threads)
        self.ever: dict[int, set[tuple[int, ...]]] = {}
        self.next_id: Counter[int] = Counter()
        self.alive = [self.join(number) for number in range(self.WORKERS)]
        self.born = self.WORKERS
        self.depths = array("I", bytes(4 * 64))
        self.seen = Counter[str]()

    def join(self, worker: int) -> int:
        self.indexer.add(worker, 0, self.tree.slot(worker, 0), answers=False)
        self.ever[worker], self.held[worker] = set(), {}
        return worker

    def start(self) -> list[threading.Thread]:
        running = [threading.Thread(target=self.threads.run, args=(n,)) for n in range(3)]
        for thread in running:
            thread.start()
        return running

    def settle(self, running: list[threading.Thread]) -> None:
        """A barrier: all that was sent is applied."""
        for number in range(3):
            self.threads.stop(number)
        for thread in running:
            thread.join()
        assert self.threads.next_handoff() is None

    def send(self, worker: int, data: BlocksStored | BlocksRemoved | BlocksCleared) -> None:
        self.next_id[worker] += 1
        self.threads.push(worker % 3, event(self.next_id[worker], data, worker))

    def step(self) -> None:
        worker = self.source.choice(self.alive)
        held = self.held[worker]
        match self.source.choices(range(4), [10, 5, 0.2, 0.1])[0]:
            case 0:
                chain = self.source.choices(range(3), k=self.source.randrange(1, 100))
                paths = [tuple(chain[: end + 1]) for end in range(len(chain))]
                names = [hash((worker, path)) % 2**64 for path in paths]
                self.ever[worker] |= {path for path in paths if len(path) <= 6}
                held |= dict(zip(names, paths, strict=True))
                self.send(worker, BlocksStored(column(*names), column(*chain)))
            case 1:
                gone = self.source.sample(sorted(held), min(len(held), self.source.randrange(90)))
                self.seen["removed"] += len(gone)
                for name in gone:
                    del held[name]
                self.send(worker, BlocksRemoved(column(*gone)))
            case 2:
                self.seen["cleared"] += len(held)
                held.clear()
                self.send(worker, BlocksCleared())
            case 3:
                self.die(worker)
        self.look()

    def die(self, worker: int) -> None:
        """Replace a worker, possibly in its slot, while its last events are in flight."""
        self.indexer.remove(worker)
        self.tree.remove_worker(worker)
        self.alive.remove(worker)
        self.seen["died with blocks"] += len(self.held[worker])
        del self.ever[worker], self.held[worker]
        assert worker not in {owner[0] for owner in self.tree.match(array("Q", [0]))}
        self.alive.append(self.join(self.born))
        self.born += 1

    def look(self) -> None:
        """At any time no slot holds a block that it was not given."""
        query = [self.source.randrange(3) for _ in range(6)]
        for (worker, _), depth in self.tree.match(array("Q", query)).items():
            assert tuple(query[:depth]) in self.ever[worker]
            self.seen["found"] += 1

    def compare(self) -> None:
        """At rest the index holds exactly what was sent."""
        self.tree._check()
        assert self.tree.blocks() == sum(map(len, self.held.values()))
        paths = {worker: set(held.values()) for worker, held in self.held.items()}
        for number in range(3**4):
            query = [number // 3**place % 3 for place in range(4)]
            expected = {(worker, 0): depth(query, held) for worker, held in paths.items()}
            assert self.tree.match(array("Q", query)) == +Counter(expected)


def depth(query: list[int], held: set[tuple[int, ...]]) -> int:
    """How many leading blocks of the query are held."""
    ends = range(1, len(query) + 1)
    return next((end - 1 for end in ends if tuple(query[:end]) not in held), len(query))


@pytest.mark.parametrize("seed", range(4))
def test_threads_end_with_the_reference_result(seed: int) -> None:
    storm = Storm(seed)
    for _ in range(5):
        running = storm.start()
        try:
            for _ in range(300):
                storm.step()
        finally:
            storm.settle(running)
        storm.compare()
    assert storm.threads.warnings()["failed"] == 0
    assert_occurred(storm.seen, "removed", "cleared", "died with blocks", "found")


async def test_messages_over_zmq(tmp_path: Path) -> None:
    """A socket of the thread's own; foreign messages are counted and do no harm."""
    tree, counts = RadixTree(), Counts()
    threads = EventThreads(tree, 1, "kv-events", counts)
    indexer = Indexer(tree, lambda _: None, counts, threads.ingest)
    indexer.add(7, 0, tree.slot(7, 0), answers=False)
    threads.start(indexer)
    publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
    publisher.setsockopt(zmq.LINGER, 0)
    address = f"ipc://{tmp_path}/events.sock"
    publisher.bind(address)
    threads.subscriber.connect(address, 7)
    assert await asyncio.to_thread(publisher.recv) == b"\x01kv-events"
    topic, number = b"kv-events", (7).to_bytes(8, "big")

    def envelope(payload: bytes) -> bytes:
        body = msgspec.msgpack.encode({"publisher_id": 7, "payload": payload, "more": [1]})
        return b"\x01" + len(body).to_bytes(4, "big") + body

    good = event(1, BlocksStored(column(1), column(11)))
    for frames in (
        [topic],
        [topic, number, b"short", envelope(good)],
        [topic, number, bytes(8), b"\x02" + envelope(good)[1:]],
        [topic, number, bytes(8), envelope(good)[:-1]],
        [topic, number, bytes(8), b"\x01\x00\x00\x00\x01\xc1"],
        [topic, number, bytes(8), envelope(good), b"fifth"],
        [topic + b"-of-others", number, bytes(8), envelope(good)],
        [topic, number, bytes(8), envelope(good)],
    ):
        publisher.send_multipart(frames)
    async with asyncio.timeout(10):
        while tree.blocks() == 0:  # noqa: ASYNC110 - the index has no change event
            await asyncio.sleep(0.005)
    threads.close()
    publisher.close()
    assert counts.seen == {"malformed": 6, ("stored", "ok"): 1}
    assert threads.subscriber.received == 1


def test_publishers_disconnect_while_they_publish(tmp_path: Path) -> None:
    """Runs in a separate process: libzmq aborts if a connection closes inside a message."""
    script = Path(__file__).with_name("departures.py")
    command = [sys.executable, str(script), str(tmp_path), "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("departures 150, received ")
