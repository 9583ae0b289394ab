"""Replicas' load through a channel that loses, doubles and swaps: it converges once it is quiet."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocols.codec import encode
from dynamo.protocols.sync import AddRequest, SequenceBatch, SequenceEvent, SequenceMessage
from dynamo.router.load.active import Reservation
from dynamo.router.prompt import HashedPrompt
from dynamo.router.sync import local as sync_own
from dynamo.router.sync import remote as sync_peers
from dynamo.router.sync.local import LocalRequests
from dynamo.router.sync.remote import RemoteReplicas
from dynamo.router.sync.replicas import decode_message

ROUTER, PUBLISHER, BLOCK = 0xA, 7, 4


class Board:
    """What is booked: key → (worker, prompt is computed)."""

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
    """A router that tells and one that hears, with the wire format between them."""

    def __init__(self) -> None:
        self.own = LocalRequests(ROUTER, BLOCK, False, lambda: None)
        self.truth: dict[str, tuple[int, bool]] = {}
        self.board = Board()
        self.asked: list[int] = []
        self.peers = RemoteReplicas(self.board, self.asked.append)
        self.peers.came(PUBLISHER)

    def book(self, name: str, worker_id: int, blocks: int = 2) -> None:
        hashes = array("Q", range(blocks))
        prompt = HashedPrompt(blocks * BLOCK, blocks, hashes, hashes, hashes)
        self.own.booked(name, Reservation(0, worker_id, 0, blocks * BLOCK, 0, 0.0), prompt, 8)
        self.truth[name] = (worker_id, False)

    def complete(self, name: str) -> None:
        self.own.prefill_completed(name)
        if name in self.truth:
            self.truth[name] = (self.truth[name][0], True)

    def free(self, name: str) -> None:
        self.own.freed(name)
        self.truth.pop(name, None)

    def hear(self, *batches: SequenceBatch) -> None:
        for batch in batches:
            message: SequenceMessage = decode_message(encode(batch))
            assert isinstance(message, SequenceBatch)
            self.peers.hear(PUBLISHER, message)

    def settle(self) -> None:
        """Everything arrives again: beats, questions and their answers."""
        self.hear(*self.own.news(), self.own.beat())
        if self.asked:
            self.hear(*self.own.account())

    def seen(self) -> dict[str, tuple[int, bool]]:
        return {key.partition("~")[2]: state for key, state in self.board.held.items()}


NAMES = st.sampled_from("abcdef")
STEP = st.one_of(
    st.tuples(st.just("book"), NAMES),
    st.tuples(st.just("complete"), NAMES),
    st.tuples(st.just("free"), NAMES),
    st.tuples(st.just("send"), st.sampled_from(["well", "lost", "doubled", "late"])),
    st.tuples(st.just("account"), st.sampled_from(["well", "lost", "doubled", "late"])),
)


@given(st.lists(STEP, min_size=20, max_size=60), st.randoms())
def test_whatever_the_channel_does_it_converges(steps, random) -> None:
    pair, late = Pair(), []
    for verb, what in steps:
        if verb == "book" and what not in pair.truth:
            pair.book(what, random.randrange(3))
        elif verb == "complete":
            pair.complete(what)
        elif verb == "free":
            pair.free(what)
        elif verb in ("send", "account"):
            batches = pair.own.news() if verb == "send" else pair.own.account()
            if what == "late":
                late += batches
            elif what != "lost":
                pair.hear(*batches, *(batches if what == "doubled" else ()))
            if late and random.random() < 0.3:
                random.shuffle(late)
                pair.hear(*late)
                late.clear()
    pair.settle()
    pair.hear(*late)
    assert pair.seen() == pair.truth
    assert pair.peers.is_whole() and pair.peers.requests() == len(pair.truth)
    pair.peers.gone(PUBLISHER)
    assert pair.seen() == {} and len(pair.peers) == 0


def test_the_next_request_of_an_id_whose_end_was_lost_has_its_prompt_to_compute() -> None:
    pair = Pair()
    pair.book("a", 1)
    pair.complete("a")
    pair.settle()
    pair.free("a")
    pair.own.news()  # lost
    pair.book("a", 1)
    pair.settle()
    assert pair.seen() == pair.truth == {"a": (1, False)}


def test_without_losses_nobody_is_asked() -> None:
    pair = Pair()
    pair.book("a", 1)
    pair.settle()
    pair.complete("a")
    pair.book("b", 2)
    pair.free("a")
    pair.settle()
    assert pair.seen() == {"b": (2, False)}
    assert pair.asked == [] and pair.peers.gaps == 0


def test_who_comes_late_asks_and_is_told_all() -> None:
    pair = Pair()
    pair.book("a", 1)
    pair.complete("a")
    pair.book("b", 1)
    pair.own.skip()  # nobody was there
    pair.hear(pair.own.beat())
    assert pair.seen() == {} and pair.asked == [ROUTER]
    pair.hear(*pair.own.account())
    assert pair.seen() == pair.truth == {"a": (1, True), "b": (1, False)}


def test_an_account_in_parts_of_which_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_own, "MAX_BATCH_BYTES", 150)
    pair = Pair()
    for name in "abcd":
        pair.book(name, 1)
    first, *rest = pair.own.news()
    assert len(rest) == 3
    pair.hear(first)
    parts = pair.own.account()
    assert [len(part.events) for part in parts] == [1] * 4
    assert (parts[0].opens, parts[-1].closes) == (True, True)
    pair.hear(parts[0], parts[2], parts[3])
    assert not pair.peers.is_whole() and pair.asked
    pair.settle()
    assert pair.seen() == pair.truth and pair.peers.is_whole()


def test_an_id_that_is_used_again_while_its_end_is_lost() -> None:
    pair = Pair()
    pair.book("a", 1)
    pair.settle()
    pair.free("a")
    pair.own.news()  # lost
    pair.book("a", 2)
    pair.settle()
    assert pair.seen() == {"a": (2, False)}


def test_load_of_an_unknown_worker_counts_once_it_is_known() -> None:
    pair = Pair()
    pair.book("a", 5)
    pair.settle()
    pair.board.held.clear()  # as a board that did not know worker 5
    pair.peers.worker_added(4)
    assert pair.seen() == {}
    pair.peers.worker_added(5)
    assert pair.seen() == {"a": (5, False)}


def test_who_is_not_there_is_not_heard() -> None:
    pair = Pair()
    pair.peers.gone(PUBLISHER)
    pair.book("a", 1)
    pair.settle()
    assert pair.seen() == {} and not pair.asked


def test_requests_of_one_replica_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_peers, "MAX_REQUESTS", 2)
    pair = Pair()
    for name in "abc":
        pair.book(name, 1)
    pair.settle()
    assert len(pair.seen()) == 2 and pair.peers.refused == 1
