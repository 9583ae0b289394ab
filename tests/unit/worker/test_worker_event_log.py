"""The event log answers every range query; its answers rebuild the worker's blocks."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_events import held_after

from dynamo.protocols import codec
from dynamo.protocols.kv import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
    KvQuery,
)
from dynamo.worker import publish
from dynamo.worker.publish import EventLog


def u64(*values: int) -> bytes:
    return array("Q", values).tobytes()


def stored(*hashes: int, parent: int | None = None) -> BlocksStored:
    return BlocksStored(u64(*hashes), u64(*(h + 1000 for h in hashes)), parent)


def test_ids_rise_by_one_from_one() -> None:
    event_log = EventLog()
    events = [event_log.record(stored(n, parent=n - 1 or None)) for n in (1, 2, 3)]
    assert [event.event_id for event in events if event] == [1, 2, 3]


def test_an_inconsistent_event_is_dropped_and_gets_no_id() -> None:
    event_log = EventLog()
    assert event_log.record(stored(2, parent=1)) is None
    assert event_log.record(stored(1)).event_id == 1  # type: ignore[union-attr]
    assert (event_log.rejected, event_log.last_event_id) == (1, 1)


def test_answers_by_range() -> None:
    event_log = EventLog(ring_events=4)
    empty = event_log.answer(KvQuery(start_event_id=1))
    assert (empty.kind, empty.last_event_id, empty.events) == ("tree_dump", 0, [])
    for n in range(1, 11):
        event_log.record(stored(n, parent=n - 1 or None))
    dump = event_log.answer(KvQuery())
    assert (dump.kind, dump.last_event_id) == ("tree_dump", 10)
    assert sorted(held_after(dump.events)) == list(range(1, 11))
    assert event_log.answer(KvQuery(start_event_id=8, end_event_id=7)).kind == "invalid_range"
    new = event_log.answer(KvQuery(start_event_id=11, end_event_id=12))
    assert (new.kind, new.newest_available) == ("too_new", 10)
    assert event_log.answer(KvQuery(start_event_id=6)).kind == "tree_dump"
    some = event_log.answer(KvQuery(start_event_id=8, end_event_id=9))
    assert (some.kind, [e.event_id for e in some.events]) == ("events", [8, 9])
    rest = event_log.answer(KvQuery(start_event_id=7, end_event_id=99))
    assert [e.event_id for e in rest.events] == [7, 8, 9, 10]


def test_a_clear_removes_all_blocks() -> None:
    event_log = EventLog(dp_rank=3)
    event_log.record(stored(1, 2))
    event = event_log.record(BlocksCleared())
    assert event is not None and event.dp_rank == 3
    assert event_log.blocks() == 0 and event_log.dump().events == []


def test_every_tier_is_logged() -> None:
    event_log = EventLog(ring_events=2)
    event_log.record(stored(1, 2, 3))
    event_log.record(stored(3, 4, parent=2), "host_pinned")
    event_log.record(BlocksStored(u64(1, 4), b""), "disk")
    event_log.record(BlocksRemoved(u64(2)), "host_pinned")
    held = {
        tier: sorted(
            block
            for event in event_log.dump().events
            if event.storage_tier == tier and isinstance(event.data, BlocksStored)
            for block in array("Q", event.data.block_hashes)
        )
        for tier in ("device", "host_pinned", "disk")
    }
    assert held == {"device": [1, 2, 3], "host_pinned": [3, 4], "disk": [1, 4]}
    assert event_log.blocks() == 7
    rest = event_log.answer(KvQuery(start_event_id=3))
    assert [(event.event_id, event.storage_tier) for event in rest.events] == [
        (3, "disk"),
        (4, "host_pinned"),
    ]
    again = EventLog()
    for event in event_log.dump().events:
        assert again.record(event.data, event.storage_tier) is not None
    assert again.dump().events == event_log.dump().events


def test_ids_that_no_other_tier_has_are_rejected() -> None:
    event_log = EventLog()
    assert event_log.record(BlocksStored(u64(7), b""), "host_pinned") is None
    event_log.record(stored(7))
    assert event_log.record(BlocksStored(u64(7, 8), b""), "host_pinned") is not None
    assert (event_log.rejected, event_log.blocks()) == (1, 2)


def test_clearing_the_device_clears_every_tier() -> None:
    event_log = EventLog()
    for tier in ("device", "host_pinned", "disk"):
        event_log.record(stored(1), tier)
    event_log.record(BlocksCleared(), "host_pinned")
    assert event_log.blocks() == 2
    event_log.record(BlocksCleared())
    assert event_log.blocks() == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 12)), min_size=20, max_size=60
    )
)
def test_a_dump_rebuilds_the_same_blocks_as_the_events(steps: list[tuple[bool, int, int]]) -> None:
    event_log = EventLog(ring_events=8)
    published: list[KvEvent] = []
    held: dict[int, int] = {}
    for store, block, parent in steps:
        if store and block not in held and (parent == 0 or parent in held):
            event = event_log.record(stored(block, parent=parent or None))
            held[block] = parent
        elif not store and block in held and block not in held.values():
            event = event_log.record(BlocksRemoved(u64(block)))
            del held[block]
        else:
            continue
        assert event is not None
        published.append(event)
    assert held_after(event_log.dump().events) == held_after(published)


def test_the_log_keeps_a_bounded_number_of_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "RING_BYTES", 1600)
    sender = publish.KvEventSender(7)
    sent: list[bytes] = []
    kept = []
    for count in (20, 80):
        for number in range(count):
            first = sender.event_log(0).last_event_id * 1000
            sender.record(0, [stored(*range(first + 1, first + 1 + (number % 2) * 9 + 1))])
        kept.append(len(sender.event_log(0)._ring))
    assert max(kept) <= 20 and sum(event_log_bytes(sender)) <= 1600
    sender.open(sent.append)
    assert [len(codec.decoder(KvEventBatch).decode(one).events) for one in sent] == [kept[-1]]
    large = stored(*range(10**7, 10**7 + 500))
    sender.event_log(0).record(large)
    assert [event.data for event in sender.event_log(0)._ring] == [large], "one may be larger"
    sender.close()


def event_log_bytes(sender: publish.KvEventSender) -> list[int]:
    data = [event.data for event in sender.event_log(0)._ring]
    return [2 * len(one.block_hashes) for one in data if isinstance(one, BlocksStored)]


def test_a_loss_that_rejects_many_events_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    event_log = EventLog()
    for number in range(1, 1001):
        assert event_log.record(stored(number, parent=10**6)) is None
    assert (event_log.rejected, caplog.text.count("dropped a KV event")) == (1000, 10)
