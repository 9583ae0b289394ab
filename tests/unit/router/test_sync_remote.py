"""Replica load over a channel that loses, doubles and reorders: it converges once it is quiet."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.config.router import RouterSettings
from dynamo.protocols.codec import encode
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.caches.prompt import HashedPrompt
from dynamo.router.connect.replicas import PickerLoadSink, decode_message
from dynamo.router.load import replica_loads as sync_local
from dynamo.router.load import replica_loads as sync_remote
from dynamo.router.load.active_load import Reservation
from dynamo.router.load.replica_loads import (
    AddRequest,
    LocalRequests,
    RemoteReplicas,
    SequenceBatch,
    SequenceEvent,
    SequenceMessage,
)
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.router.modes.kv import KvPicker

ROUTER, PUBLISHER, BLOCK = 0xA, 7, 4


class RecordingSink(PickerLoadSink):
    """Booked requests: key → (worker, prompt is computed)."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[int, bool]] = {}

    def book(self, key: str, event: SequenceEvent) -> None:
        assert isinstance(event.data, AddRequest)
        self.held.setdefault(key, (event.worker_id, event.data.prefill_completed))

    def prefill_completed(self, key: str) -> None:
        self.held[key] = (self.held[key][0], True)

    def free(self, key: str) -> None:
        del self.held[key]


class Pair:
    """A sending and a receiving router, with the wire format between them."""

    def __init__(self) -> None:
        self.local = LocalRequests(ROUTER, BLOCK, False, lambda: None)
        self.truth: dict[str, tuple[int, bool]] = {}
        self.sink = RecordingSink()
        self.queried: list[int] = []
        self.remote = RemoteReplicas(self.sink, self.queried.append)
        self.remote.add_publisher(PUBLISHER)

    def book(self, name: str, worker_id: int, blocks: int = 2) -> None:
        hashes = array("Q", range(blocks))
        prompt = HashedPrompt(blocks * BLOCK, blocks, hashes, hashes, hashes)
        self.local.booked(name, Reservation(0, worker_id, 0, blocks * BLOCK, 0, 0.0), prompt, 8)
        self.truth[name] = (worker_id, False)

    def complete(self, name: str) -> None:
        self.local.prefill_completed(name)
        if name in self.truth:
            self.truth[name] = (self.truth[name][0], True)

    def free(self, name: str) -> None:
        self.local.freed(name)
        self.truth.pop(name, None)

    def receive(self, *batches: SequenceBatch) -> None:
        for batch in batches:
            message: SequenceMessage = decode_message(encode(batch))
            assert isinstance(message, SequenceBatch)
            self.remote.receive(PUBLISHER, message)

    def settle(self) -> None:
        """Deliver everything: heartbeat, query and snapshot."""
        self.receive(*self.local.take_pending(), self.local.heartbeat())
        if self.queried:
            self.receive(*self.local.snapshot())

    def seen(self) -> dict[str, tuple[int, bool]]:
        return {key.partition("~")[2]: state for key, state in self.sink.held.items()}


NAMES = st.sampled_from("abcdef")
STEP = st.one_of(
    st.tuples(st.just("book"), NAMES),
    st.tuples(st.just("complete"), NAMES),
    st.tuples(st.just("free"), NAMES),
    st.tuples(st.just("send"), st.sampled_from(["well", "lost", "doubled", "late"])),
    st.tuples(st.just("snapshot"), st.sampled_from(["well", "lost", "doubled", "late"])),
)


@given(st.lists(STEP, min_size=20, max_size=60), st.randoms())
def test_whatever_the_channel_does_it_converges(
    steps: list[tuple[str, str]], random: Random
) -> None:
    pair = Pair()
    late: list[SequenceBatch] = []
    for verb, what in steps:
        if verb == "book" and what not in pair.truth:
            pair.book(what, random.randrange(3))
        elif verb == "complete":
            pair.complete(what)
        elif verb == "free":
            pair.free(what)
        elif verb in ("send", "snapshot"):
            batches = pair.local.take_pending() if verb == "send" else pair.local.snapshot()
            if what == "late":
                late += batches
            elif what != "lost":
                pair.receive(*batches, *(batches if what == "doubled" else ()))
            if late and random.random() < 0.3:
                random.shuffle(late)
                pair.receive(*late)
                late.clear()
    pair.settle()
    pair.receive(*late)
    assert pair.seen() == pair.truth
    assert pair.remote.is_in_sync() and pair.remote.requests() == len(pair.truth)
    pair.remote.remove_publisher(PUBLISHER)
    assert pair.seen() == {} and len(pair.remote) == 0


def test_the_next_request_of_an_id_whose_end_was_lost_has_its_prompt_to_compute() -> None:
    pair = Pair()
    pair.book("a", 1)
    pair.complete("a")
    pair.settle()
    pair.free("a")
    pair.local.take_pending()  # lost
    pair.book("a", 1)
    pair.settle()
    assert pair.seen() == pair.truth == {"a": (1, False)}


def test_without_losses_no_snapshot_is_requested() -> None:
    pair = Pair()
    pair.book("a", 1)
    pair.settle()
    pair.complete("a")
    pair.book("b", 2)
    pair.free("a")
    pair.settle()
    assert pair.seen() == {"b": (2, False)}
    assert pair.queried == [] and pair.remote.gaps == 0


def test_a_late_replica_requests_a_snapshot() -> None:
    pair = Pair()
    pair.book("a", 1)
    pair.complete("a")
    pair.book("b", 1)
    pair.local.drop_pending()  # no subscribers
    pair.receive(pair.local.heartbeat())
    assert pair.seen() == {} and pair.queried == [ROUTER]
    pair.receive(*pair.local.snapshot())
    assert pair.seen() == pair.truth == {"a": (1, True), "b": (1, False)}


def test_a_snapshot_in_parts_of_which_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_local, "MAX_BATCH_BYTES", 150)
    pair = Pair()
    for name in "abcd":
        pair.book(name, 1)
    first, *rest = pair.local.take_pending()
    assert len(rest) == 3
    pair.receive(first)
    parts = pair.local.snapshot()
    assert [len(part.events) for part in parts] == [1] * 4
    assert (parts[0].opens, parts[-1].closes) == (True, True)
    pair.receive(parts[0], parts[2], parts[3])
    assert not pair.remote.is_in_sync() and pair.queried
    pair.settle()
    assert pair.seen() == pair.truth and pair.remote.is_in_sync()


def test_an_id_that_is_used_again_while_its_end_is_lost() -> None:
    pair = Pair()
    pair.book("a", 1)
    pair.settle()
    pair.free("a")
    pair.local.take_pending()  # lost
    pair.book("a", 2)
    pair.settle()
    assert pair.seen() == {"a": (2, False)}


def test_load_of_an_unknown_worker_counts_once_it_is_known() -> None:
    pair = Pair()
    pair.book("a", 5)
    pair.settle()
    pair.sink.held.clear()  # as a sink without worker 5
    pair.remote.worker_added(4)
    assert pair.seen() == {}
    pair.remote.worker_added(5)
    assert pair.seen() == {"a": (5, False)}


def test_messages_of_an_unknown_publisher_are_ignored() -> None:
    pair = Pair()
    pair.remote.remove_publisher(PUBLISHER)
    pair.book("a", 1)
    pair.settle()
    assert pair.seen() == {} and not pair.queried


def test_requests_of_one_replica_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_remote, "MAX_REQUESTS", 2)
    pair = Pair()
    for name in "abc":
        pair.book(name, 1)
    pair.settle()
    assert len(pair.seen()) == 2 and pair.remote.refused == 1


def test_the_load_of_a_router_that_sends_nothing_more_is_removed() -> None:
    """It takes this process for exited, and so never says that its requests have ended."""
    pair = Pair()
    pair.book("a", 1)
    pair.receive(*pair.local.take_pending())
    for _ in range(20):
        pair.remote.beat()
        pair.receive(pair.local.heartbeat())
    assert pair.seen() == pair.truth and not pair.queried
    for _ in range(sync_remote.MOST_SILENT - 1):
        pair.remote.beat()
    assert pair.seen() == pair.truth
    pair.remote.beat()
    assert pair.seen() == {} and pair.remote.requests() == 0
    pair.remote.beat()
    pair.book("b", 2)
    pair.settle()  # it sends again: its next message asks for all its requests
    assert set(pair.queried) == {ROUTER}
    assert pair.seen() == pair.truth and pair.remote.is_in_sync()


def picker_of_one_worker() -> KvPicker:
    settings = RouterSettings(mode="kv")
    picker = make_picker(settings, BLOCK, index=make_index(settings))
    assert isinstance(picker, KvPicker)
    picker.add_worker(1, RuntimeConfig())
    return picker


def test_what_another_replica_books_and_ends_is_a_change_for_the_queue() -> None:
    picker, changes = picker_of_one_worker(), []
    picker.eligibility.on_change = lambda: changes.append(len(picker.active))
    sink = PickerLoadSink(picker)
    hashes = array("Q", range(4)).tobytes()
    sink.book("key", SequenceEvent("r", 1, AddRequest(hashes, 16, 16)))
    sink.prefill_completed("key")
    sink.free("key")
    assert changes == [1, 1, 0]
