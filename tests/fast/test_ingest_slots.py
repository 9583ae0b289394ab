"""A reused slot: pending events of its former owner must not change it."""

from __future__ import annotations

from array import array

import pytest
from oracle.ingest import Counts

from dynamo._fast.ingest import Ingest
from dynamo._fast.radix import RadixTree
from dynamo.protocols import codec
from dynamo.protocols.kv import BlocksStored, KvEvent, KvEventBatch, KvQueryAnswer
from dynamo.router.caches.event_threads import apply_handoff
from dynamo.router.caches.indexer import Indexer, Recovery

GONE, NEXT = 1, 2


class Box:
    """An index, one thread whose iterations the test runs, and the loop's indexer."""

    def __init__(self, answers: bool = False) -> None:
        self.tree = RadixTree()
        self.ingest = Ingest(self.tree, 1, "kv-events")
        self.counts = Counts()
        self.asked: list[Recovery] = []
        self.indexer = Indexer(self.tree, self.asked.append, self.counts, self.ingest)
        self.answers = answers

    def add(self, worker: int) -> int:
        slot = self.tree.slot(worker, 0)
        self.indexer.add(worker, 0, slot, self.answers)
        return slot

    def remove(self, worker: int) -> None:
        """Remove a worker in the order of the router."""
        self.indexer.remove(worker)
        self.tree.remove_worker(worker)

    def push(self, worker: int, event_id: int, tier: str = "device") -> None:
        blocks = array("Q", [event_id * 10, event_id * 10 + 1]).tobytes()
        event = KvEvent(event_id, BlocksStored(blocks, blocks), 0, tier)
        self.ingest.push(0, codec.encode(KvEventBatch(worker, [event])))

    def run(self) -> None:
        self.ingest.stop(0)
        self.ingest.run(0)

    def settle(self) -> None:
        while (handoff := self.ingest.next_handoff()) is not None:
            apply_handoff(handoff, self.indexer, self.counts)


def test_events_in_an_inbox_do_not_change_the_reused_slot() -> None:
    box = Box()
    slot = box.add(GONE)
    box.push(GONE, 1)
    box.run()
    assert box.tree.held(slot) == 2
    for tier in ("device", "host_pinned"):
        box.push(GONE, 2, tier)
    box.remove(GONE)
    assert box.add(NEXT) == slot
    box.push(NEXT, 7)
    box.run()
    box.settle()
    assert box.tree.match(array("Q", [20, 21])) == {}
    assert box.tree.match(array("Q", [70, 71])) == {(NEXT, 0): 2}
    assert box.tree.blocks() == 2
    assert box.ingest.warnings()["unknown_worker"] == 2
    box.tree._check()


def test_handed_off_events_do_not_change_the_reused_slot() -> None:
    box = Box()
    slot = box.add(GONE)
    for event_id in (1, 5):
        box.push(GONE, event_id)
    box.run()
    box.remove(GONE)
    assert box.add(NEXT) == slot
    box.settle()
    assert box.tree.blocks() == 0
    assert box.counts.seen["unknown_worker"] == 1


def test_an_answer_for_the_first_owner_does_not_reach_the_slots_heir() -> None:
    box = Box(answers=True)
    slot = box.add(GONE)
    box.push(GONE, 2)
    box.run()
    box.remove(GONE)
    assert box.add(NEXT) == slot
    blocks = array("Q", [10, 11]).tobytes()
    dump = [KvEvent(1, BlocksStored(blocks, blocks))]
    first, second = box.asked
    box.indexer.recovered(first, KvQueryAnswer("tree_dump", dump, 1))
    box.settle()
    assert box.tree.blocks() == 0 and box.indexer.is_pending(second)


def test_a_worker_that_returns_under_its_id_starts_empty() -> None:
    box = Box(answers=True)
    box.add(GONE)
    box.indexer.recovered(box.asked[-1], KvQueryAnswer("tree_dump", [], 0))
    for event_id in (1, 3):  # the second waits for the loop
        box.push(GONE, event_id)
    box.run()
    box.remove(GONE)
    box.add(GONE)
    box.push(GONE, 4)
    box.run()
    box.settle()
    assert box.tree.blocks() == 0, "all that comes is held until the worker's answer"
    blocks = array("Q", [30, 31]).tobytes()
    dump = [KvEvent(1, BlocksStored(blocks, blocks))]
    box.indexer.recovered(box.asked[-1], KvQueryAnswer("tree_dump", dump, 3))
    box.settle()
    box.push(GONE, 5)
    box.run()
    box.settle()
    assert box.tree.blocks() == 6, "3 from the dump, 4 held, 5 by the thread"
    assert box.ingest.applied() == {("stored", "ok"): 2}, "1 and 5"
    box.tree._check()


def test_blocks_of_a_freed_slot_are_a_fault_of_the_index() -> None:
    """A slot that is freed while a thread has its stream gets blocks of no worker."""
    box = Box()
    box.add(GONE)
    box.tree.remove_worker(GONE)
    box.tree._check()
    box.push(GONE, 1)
    box.run()
    with pytest.raises(AssertionError, match="free slot 0 has blocks"):
        box.tree._check()
