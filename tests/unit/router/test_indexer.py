"""Event ids: next, old, missing; recovery by range, by dump, and without an answer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo._fast.radix import RadixTree
from dynamo.errors import Disconnected
from dynamo.protocols.kv import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
    KvQueryAnswer,
)
from dynamo.router.caches import indexer as indexer_module
from dynamo.router.caches.indexer import EventMetrics, Indexer, Recovery
from dynamo.router.connect.event_feed import RecoveryClient


def column(*values: int) -> bytes:
    """Values as raw u64."""
    return array("Q", values).tobytes()


def stored(event_id: int, *blocks: int, parent: int | None = None) -> KvEvent:
    """Blocks whose token hash is their block hash plus 1000."""
    hashes = column(*blocks), column(*(block + 1000 for block in blocks))
    return KvEvent(event_id, BlocksStored(*hashes, parent))


def removed(event_id: int, *blocks: int) -> KvEvent:
    """Removed blocks."""
    return KvEvent(event_id, BlocksRemoved(column(*blocks)))


class Counts(EventMetrics):
    """Counts in a Counter."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def applied(self, event_type: str, status: str, count: int = 1) -> None:
        self.seen[f"{event_type} {status}"] += 1

    def warning(self, kind: str, count: int = 1) -> None:
        self.seen[kind] += count


class Bench:
    """An indexer over worker 7, rank 0, whose first dump is still open."""

    def __init__(self, answers: bool = True) -> None:
        self.index = RadixTree()
        self.counts = Counts()
        self.asked: list[Recovery] = []
        self._next_id = 0
        self.indexer = Indexer(self.index, self.asked.append, self.counts)
        self.slot = self.index.slot(7, 0)
        self.indexer.add(7, 0, self.slot, answers)

    def live(self, *events: KvEvent) -> None:
        self.indexer.apply(KvEventBatch(7, list(events)))

    def answer(self, answer: KvQueryAnswer) -> None:
        self.indexer.recovered(self.asked[-1], answer)

    def next_id(self, first: int) -> int:
        """Numbers from ``first`` on, one a call."""
        self._next_id = max(self._next_id + 1, first)
        return self._next_id

    def depth(self, *blocks: int) -> int:
        """Return how many leading blocks of the chain the worker holds."""
        depths = array("I", bytes(64))
        self.index.match_into(array("Q", [block + 1000 for block in blocks]), depths)
        return depths[self.slot]


@pytest.fixture
def bench() -> Bench:
    """A stream after the dump of an empty cache."""
    made = Bench()
    made.answer(KvQueryAnswer("tree_dump"))
    return made


def test_discovery_asks_for_a_dump_and_holds_live_events() -> None:
    bench = Bench()
    assert bench.asked == [Recovery(7, 0)]
    bench.live(stored(3, 3, parent=2), stored(4, 4, parent=3))
    assert bench.depth(1, 2, 3, 4) == 0
    bench.answer(KvQueryAnswer("tree_dump", [stored(0, 1, 2), stored(1, 3, parent=2)], 3))
    assert bench.depth(1, 2, 3, 4) == 4
    assert bench.indexer.recovering() == 0
    assert bench.counts.seen["duplicate"] == 1


def test_events_in_order(bench: Bench) -> None:
    bench.live(stored(1, 1, 2), stored(2, 3, parent=2))
    assert bench.depth(1, 2, 3) == 3
    bench.live(removed(3, 3))
    assert bench.depth(1, 2, 3) == 2
    bench.live(KvEvent(4, BlocksCleared()))
    assert bench.depth(1, 2, 3) == 0
    assert bench.counts.seen == {"stored ok": 2, "removed ok": 1, "cleared ok": 1}


def test_old_events_are_ignored(bench: Bench) -> None:
    bench.live(stored(1, 1), stored(2, 2, parent=1), removed(3, 2))
    bench.live(stored(2, 2, parent=1))
    assert bench.depth(1, 2) == 1
    assert bench.counts.seen["duplicate"] == 1


def test_a_gap_is_queried_and_live_events_are_held(bench: Bench) -> None:
    bench.live(stored(1, 1))
    bench.live(stored(4, 4, parent=3))
    bench.live(stored(5, 5, parent=4))
    assert bench.asked[-1] == Recovery(7, 0, 2, 3)
    assert bench.depth(1, 2, 3, 4, 5) == 1
    bench.answer(KvQueryAnswer("events", [stored(2, 2, parent=1), stored(3, 3, parent=2)], 3))
    assert bench.depth(1, 2, 3, 4, 5) == 5
    assert bench.counts.seen["gap"] == 2


def test_the_slots_in_doubt(bench: Bench) -> None:
    doubt = bench.indexer.recovering_slots
    assert Bench().indexer.recovering_slots == {bench.slot} and doubt == set()
    bench.live(stored(1, 1), stored(3, 3, parent=2))
    assert doubt == {bench.slot}
    bench.answer(KvQueryAnswer("events", [stored(2, 2, parent=1)], 2))
    assert doubt == set()
    bench.indexer.verify()  # a check: nothing is known to be missing
    assert bench.indexer.recovering() == 1 and doubt == set()
    bench.answer(KvQueryAnswer("too_new", newest_available=3))
    bench.live(stored(9, 9, parent=8))
    bench.indexer.recovered(bench.asked[-1], None)  # its blocks stay unknown until the next sweep
    assert bench.indexer.recovering() == 0 and doubt == {bench.slot}
    bench.indexer.remove(7)
    assert doubt == set()


def test_a_second_gap_behind_the_first(bench: Bench) -> None:
    bench.live(stored(2, 2, parent=1), stored(4, 4, parent=3))
    bench.answer(KvQueryAnswer("events", [stored(1, 1)], 1))
    assert bench.asked[-1] == Recovery(7, 0, 3, 3)
    bench.answer(KvQueryAnswer("events", [stored(3, 3, parent=2)], 3))
    assert bench.depth(1, 2, 3, 4) == 4


def test_only_events_of_an_answer_that_are_next_in_order_are_applied(bench: Bench) -> None:
    bench.live(stored(1, 1), stored(2, 2, parent=1), removed(3, 2))
    bench.live(stored(7, 7, parent=6))
    old, next_one, beyond = stored(2, 2, parent=1), stored(4, 4, parent=1), stored(6, 6, parent=4)
    bench.answer(KvQueryAnswer("events", [old, next_one, beyond], 6))
    assert (bench.depth(1, 2), bench.depth(1, 4, 6)) == (1, 2)
    assert bench.asked[-1] == Recovery(7, 0, 5, 6)


def test_a_dump_in_answer_to_a_range_replaces_everything(bench: Bench) -> None:
    bench.live(stored(1, 1, 2, 3))
    bench.live(stored(900, 8, parent=7))
    bench.answer(KvQueryAnswer("tree_dump", [stored(0, 6, 7)], 899))
    assert bench.depth(1, 2, 3) == 0
    assert bench.depth(6, 7, 8) == 3


@pytest.mark.parametrize("kind", ["too_new", "invalid_range", "events"])
def test_a_useless_answer_leads_to_a_dump_and_then_to_a_fresh_start(
    bench: Bench, kind: str
) -> None:
    bench.live(stored(1, 1))
    bench.live(stored(5, 5))
    bench.answer(KvQueryAnswer(kind, newest_available=0))
    assert bench.asked[-1] == Recovery(7, 0)
    bench.answer(KvQueryAnswer(kind))
    assert bench.depth(1) == 0
    assert bench.depth(5) == 1
    assert bench.counts.seen["recovery_failed"] == 1
    bench.live(stored(6, 6, parent=5))
    assert bench.depth(5, 6) == 2


def test_without_an_answer_the_blocks_are_forgotten(bench: Bench) -> None:
    bench.live(stored(1, 1, 2))
    bench.live(stored(5, 5))
    bench.live(stored(6, 3, parent=2))
    bench.indexer.recovered(bench.asked[-1], None)
    assert bench.depth(1, 2, 3) == 0
    assert bench.depth(5) == 1
    assert bench.counts.seen["stored parent_block_not_found"] == 1


def test_answers_to_old_queries_are_ignored(bench: Bench) -> None:
    bench.live(stored(3, 3))
    old = bench.asked[-1]
    bench.indexer.remove(7)
    bench.index.remove_worker(7)
    bench.indexer.add(7, 0, bench.index.slot(7, 0))
    bench.indexer.recovered(old, KvQueryAnswer("tree_dump", [stored(0, 1)], 2))
    bench.indexer.recovered(old, None)
    assert bench.depth(1) == 0
    assert bench.indexer.recovering() == 1


def test_a_worker_without_a_local_indexer_is_never_queried() -> None:
    bench = Bench(answers=False)
    assert bench.asked == []
    bench.live(stored(40, 1, 2))
    assert bench.depth(1, 2) == 2
    bench.live(stored(43, 9))
    assert bench.depth(1, 2) == 0
    assert bench.depth(9) == 1
    assert bench.asked == []


def test_events_of_unknown_workers_are_counted_and_dropped(bench: Bench) -> None:
    bench.indexer.apply(KvEventBatch(8, [stored(1, 1)]))
    assert bench.counts.seen == {"unknown_worker": 1}


def test_an_unknown_tier_advances_the_id_and_is_counted(bench: Bench) -> None:
    event = stored(1, 1)
    event.storage_tier = "tape"
    bench.live(event)
    bench.live(stored(2, 2))
    assert bench.depth(1) == 0
    assert bench.depth(2) == 1
    assert bench.counts.seen["stored ignored_tier"] == 1


def test_lower_tiers_are_kept_apart_until_everything_is_cleared(bench: Bench) -> None:
    below, gone = stored(2, 2, 3, parent=1), KvEvent(3, BlocksCleared(), storage_tier="disk")
    below.storage_tier = "host_pinned"
    bench.live(stored(1, 1), below, gone)
    depths, further = array("I", [1]), array("I", [0])
    assert bench.depth(1, 2, 3) == 1
    assert bench.index.extend_into(array("Q", [1001, 1002, 1003]), depths, further, 1) == 1
    assert further[0] == 2
    bench.live(KvEvent(4, BlocksCleared()))
    assert bench.index.blocks() == 0


def test_unknown_blocks_and_parents_and_torn_columns_are_counted(bench: Bench) -> None:
    bench.live(removed(1, 5), stored(2, 2, parent=1), KvEvent(3, BlocksStored(column(1), b"")))
    bench.live(KvEvent(4, BlocksStored(b"1234567", b"1234567")), KvEvent(5, BlocksRemoved(b"123")))
    assert bench.counts.seen == {
        "removed block_not_found": 1,
        "stored parent_block_not_found": 1,
        "stored invalid_block": 2,
        "removed invalid_block": 1,
    }
    bench.live(stored(6, 5))
    assert bench.depth(5) == 1


def test_held_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_module, "MAX_HELD_EVENTS", 3)
    bench = Bench()
    for event_id in range(1, 6):
        bench.live(stored(event_id, event_id))
    bench.answer(KvQueryAnswer("tree_dump", [], 0))
    assert bench.asked == [Recovery(7, 0), Recovery(7, 0, 1, 3)]
    bench.answer(KvQueryAnswer("tree_dump", [stored(0, 1), stored(1, 2)], 5))
    assert bench.depth(2) == 1
    assert bench.counts.seen["held_overflow"] == 3
    assert bench.indexer.recovering() == 0


@pytest.mark.parametrize("answer", [None, KvQueryAnswer("too_new"), KvQueryAnswer("what?")])
def test_a_worker_without_a_dump_is_queried_again(answer: KvQueryAnswer | None) -> None:
    bench = Bench()
    while bench.indexer.recovering():
        bench.answer(answer)  # type: ignore[arg-type]
    bench.live(stored(41, 1), stored(42, 2, parent=1))
    for _ in range(3):
        bench.indexer.verify()
        assert bench.asked[-1] == Recovery(7, 0, retry=True)
        bench.live(stored(bench.next_id(43), 3, parent=2))
        bench.answer(answer)  # type: ignore[arg-type]
        assert bench.indexer.recovering() == 0
        assert bench.depth(1, 2, 3) == 3  # nothing was in doubt
    bench.indexer.verify()
    bench.live(stored(46, 6, parent=5))
    bench.answer(KvQueryAnswer("tree_dump", [stored(0, 1, 2, 3, 4, 5)], 45))
    assert bench.depth(1, 2, 3, 4, 5, 6) == 6
    bench.indexer.verify()
    assert bench.asked[-1] == Recovery(7, 0, 47)


def test_dumps_older_than_a_held_event_are_not_queried_forever() -> None:
    bench = Bench()
    old = KvQueryAnswer("tree_dump", [stored(0, 1, 2)], 5)
    bench.live(stored(9, 9))
    while bench.indexer.recovering():
        bench.answer(old)
        assert len(bench.asked) < 10
    assert (bench.depth(1), bench.depth(9)) == (0, 1)
    assert bench.counts.seen["recovery_failed"] == 1
    bench.indexer.verify()
    bench.answer(KvQueryAnswer("tree_dump", [stored(0, 1, 2), stored(1, 9)], 9))
    assert (bench.depth(1, 2), bench.depth(9)) == (2, 1)
    assert bench.indexer.recovering() == 0


def test_a_large_answer_is_applied_in_steps() -> None:
    bench = Bench()
    dump = [stored(0, 1), *(stored(block, block, parent=1) for block in range(2, 5000))]
    steps = bench.indexer.recovery_steps(bench.asked[-1], KvQueryAnswer("tree_dump", dump, 7))
    sizes = [bench.index.blocks()]
    for _ in steps:
        sizes.append(bench.index.blocks())
    sizes.append(bench.index.blocks())
    assert sizes[-1] == 4999
    assert max(after - before for before, after in pairwise(sizes)) < 500


def test_an_answer_with_an_invalid_event_is_no_answer() -> None:
    def events() -> Iterator[KvEvent]:
        yield stored(0, 1)
        raise ValueError("torn")

    bench = Bench()
    dump = KvQueryAnswer("tree_dump", last_event_id=3)
    with pytest.raises(ValueError, match="torn"):
        list(bench.indexer.recovery_steps(bench.asked[-1], dump, events()))
    bench.live(stored(4, 4, parent=3))
    assert bench.indexer.is_pending(bench.asked[-1])
    bench.answer(KvQueryAnswer("tree_dump", [stored(0, 2, 3)], 3))
    assert (bench.depth(1), bench.depth(2, 3, 4)) == (0, 3)


def test_events_of_a_publisher_that_restarted_are_not_applied_after_its_dump(bench: Bench) -> None:
    bench.live(stored(1, 1), stored(5, 9, parent=1))
    bench.indexer.publisher_restarted(7)
    bench.answer(KvQueryAnswer("tree_dump", [stored(0, 1, 2)], 4))
    assert bench.depth(1, 2) == 2 and bench.depth(1, 9) == 1, "the event 5 was one of before"
    bench.live(stored(5, 3, parent=2))
    assert bench.depth(1, 2, 3) == 3 and bench.indexer.recovering() == 0


def test_steps_of_an_answer_end_with_its_query() -> None:
    bench = Bench()
    dump = [stored(block, block) for block in range(1, 2000)]
    for leave in (bench.indexer.publisher_restarted, bench.indexer.remove):
        steps = bench.indexer.recovery_steps(bench.asked[-1], KvQueryAnswer("tree_dump", dump, 7))
        next(steps)
        leave(7)
        held = bench.index.blocks()
        assert list(steps) == []
        assert bench.index.blocks() == held < 1999


def test_silent_workers(bench: Bench) -> None:
    assert bench.indexer.silent(7)
    assert not bench.indexer.silent(8)
    bench.live(stored(1, 1))
    assert not bench.indexer.silent(7)


@pytest.fixture(scope="module")
def small_steps() -> Iterator[None]:
    """Steps of one event."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer_module, "STEP_BLOCKS", 1)
        yield


@pytest.mark.usefixtures("small_steps")
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=15, max_size=40),
    st.data(),
)
def test_lost_and_repeated_events_end_in_the_workers_own_state(
    changes: list[tuple[bool, int]], data: st.DataObject
) -> None:
    """Whatever is lost or repeated, after the last event the index holds what the worker holds.

    Answers are taken in steps of one event, some of them between live events.
    """
    bench = Bench()
    steps: Iterator[None] = iter(())
    asked: Recovery | None = None
    bench.answer(KvQueryAnswer("tree_dump"))
    history: list[KvEvent] = []
    held: set[int] = set()
    for event_id, (add, block) in enumerate(changes, 1):
        history.append((stored if add else removed)(event_id, block))
        held = held | {block} if add else held - {block}
        if data.draw(st.booleans()) and event_id < len(changes):
            continue  # lost on the way
        bench.live(history[-1])
        if data.draw(st.booleans()):
            bench.live(history[-1])
        while bench.indexer.recovering():
            if asked is bench.asked[-1]:
                next(steps, None)
                if event_id < len(changes) and data.draw(st.booleans()):
                    break
                continue
            asked = bench.asked[-1]
            start, end = bench.asked[-1][2:4]
            if data.draw(st.booleans()) or start is None or end is None:
                present = [stored(0, block) for block in sorted(held)]
                answer = KvQueryAnswer("tree_dump", present, event_id)
            else:
                answer = KvQueryAnswer("events", history[start - 1 : end], end)
            steps = bench.indexer.recovery_steps(asked, answer)
    bench.index._check()
    assert {block for block in range(10) if bench.depth(block)} == held
    assert "recovery_failed" not in bench.counts.seen


async def test_a_query_of_a_lost_worker_is_freed_without_a_collection() -> None:
    """Its error has the frame that waits for the answer; the frame must not have the error."""
    sinks: list[weakref.ref[Any]] = []
    removed_worker = asyncio.Event()

    class LostWorker:
        def open(self, worker_id: int, payload: bytes, sink: Any) -> Any:
            sinks.append(weakref.ref(sink))
            asyncio.get_running_loop().call_soon(sink.on_error, Disconnected("the worker died"))
            return object()

    class Removed:
        def is_pending(self, recovery: Recovery) -> bool:
            removed_worker.set()
            return False

    recoveries = RecoveryClient(
        cast(Any, LostWorker()), cast(Any, Removed()), 16, lambda *foreign: None
    )
    gc.disable()
    try:
        recoveries.send(Recovery(1, 0))
        await removed_worker.wait()
        async with asyncio.timeout(30):
            while sinks[0]() is not None:  # noqa: ASYNC110 - the loop drops the task
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
