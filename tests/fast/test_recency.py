"""The eviction order against its reference implementation, over random histories."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from occurred import StateMachine, occurring
from oracle.recency import Recency as Reference

from dynamo._fast.recency import Recency

SLOTS = 3


def chain(path: list[int]) -> array[int]:
    """Chained identities of a path of small numbers: equal paths, equal blocks."""
    hashes = [hash(("block", *path[: depth + 1])) % 2**64 for depth in range(len(path))]
    return array("Q", hashes)


class History(StateMachine):
    """Touch, pin, release, drop and close in any order; both must drop the same, in order."""

    slots = st.integers(0, SLOTS - 1)
    paths = st.lists(st.integers(0, 1), max_size=8)
    most = st.integers(0, 6)
    pick = st.integers(0, 10_000)

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.reference, self.now_s = Recency(), Reference(), 0.0
        self.both = self.fast, self.reference
        self.leases: list[tuple[int, int]] = []
        self.open_slots: dict[int, bool] = {}

    @rule(slot=slots, own_list=st.booleans())
    def open(self, slot: int, own_list: bool) -> None:
        self.open_slots[slot] = self.open_slots.get(slot, False) or own_list
        for one in self.both:
            one.open(slot, own_list)

    @rule(slot=slots)
    def close(self, slot: int) -> None:
        self.open_slots.pop(slot, None)
        closed = self.fast.close(slot)
        assert closed == self.reference.close(slot)
        self.seen["closed with blocks"] += closed > 0

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(slot=slots, path=paths)
    def touch(self, slot: int, path: list[int]) -> None:
        if slot in self.open_slots:
            for one in self.both:
                one.touch(slot, chain(path), self.now_s)

    @rule(slot=slots, path=paths)
    def pin(self, slot: int, path: list[int]) -> None:
        if slot in self.open_slots:
            ours, theirs = (one.pin(slot, chain(path), self.now_s) for one in self.both)
            self.leases.append((ours, theirs))

    @rule(pick=pick)
    def release(self, pick: int) -> None:
        for ours, theirs in self.chosen(pick):
            released = self.fast.release(ours, self.now_s)
            assert released == self.reference.release(theirs, self.now_s)
            self.seen["released" if released else "released again"] += 1

    @rule(seconds=st.integers(0, 6), most=most)
    def age(self, seconds: int, most: int) -> None:
        before_s = self.now_s - seconds
        aged = self.fast.age(before_s, most)
        assert aged == self.reference.age(before_s, most)
        self.seen["aged"] += bool(aged)

    @rule(slot=slots, most=most)
    def evict(self, slot: int, most: int) -> None:
        if self.open_slots.get(slot):
            evicted = self.fast.evict(slot, most)
            assert evicted == self.reference.evict(slot, most)
            self.seen["evicted"] += bool(evicted)
            self.seen["pinned blocks stay"] += self.fast.blocks_of(slot) > 0 and bool(most)

    @rule(most=most)
    def prune(self, most: int) -> None:
        pruned = self.fast.prune(most)
        assert pruned == self.reference.prune(most)
        self.seen["pruned"] += bool(pruned)

    def chosen(self, pick: int) -> Iterator[tuple[int, int]]:
        """One pair of leases ever given out, ended or not; none at first."""
        if self.leases:
            yield self.leases[pick % len(self.leases)]

    @invariant()
    def agrees(self) -> None:
        self.fast._check()
        assert self.fast.blocks() == self.reference.blocks()
        assert self.fast.leases() == self.reference.leases()
        for slot in range(SLOTS):
            assert self.fast.blocks_of(slot) == self.reference.blocks_of(slot)
            assert self.fast.is_open(slot) == (slot in self.open_slots)
            assert self.fast.has_own_list(slot) == self.open_slots.get(slot, False)


History.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHistory = occurring(
    History,
    *("closed with blocks", "released", "released again", "aged", "evicted", "pruned"),
    "pinned blocks stay",
)


def test_leaves_are_dropped_before_parents_and_shared_prefixes_last() -> None:
    recency = Recency()
    recency.open(0, True)
    recency.touch(0, array("Q", [1, 2, 3]), 0.0)
    recency.touch(0, array("Q", [1, 4]), 1.0)
    assert recency.evict(0, 9) == [(0, array("Q", [3, 2, 4, 1]))]


def test_pinned_blocks_stay_until_their_last_lease_ends() -> None:
    recency = Recency()
    recency.open(0, True)
    first = recency.pin(0, array("Q", [1, 2]), 0.0)
    second = recency.pin(0, array("Q", [1, 3]), 0.0)
    assert recency.release(first, 1.0) and not recency.release(first, 1.0)
    assert recency.evict(0, 9) == [(0, array("Q", [2]))]
    assert recency.release(second, 2.0)
    assert recency.prune(9) == [(0, array("Q", [3, 1]))]


def test_a_lease_of_a_closed_slot_has_ended() -> None:
    recency = Recency()
    recency.open(0, True)
    lease = recency.pin(0, array("Q", [1, 2]), 0.0)
    assert (recency.close(0), recency.close(0), recency.leases()) == (2, 0, 0)
    recency.open(0, True)
    recency.pin(0, array("Q", [1]), 0.0)
    assert not recency.release(lease, 1.0)
    recency._check()


def test_bad_arguments_change_nothing() -> None:
    recency = Recency()
    blocks = array("Q", [1])
    with pytest.raises(ValueError, match="slot 0 is unknown"):
        recency.touch(0, blocks, 0.0)
    with pytest.raises(ValueError, match="slot 7 is unknown"):
        recency.pin(7, blocks, 0.0)
    with pytest.raises(IndexError, match="slot 65536 is beyond 65535"):
        recency.open(65536, False)
    recency.open(0, False)
    with pytest.raises(ValueError, match="no list of its own"):
        recency.evict(0, 1)
    with pytest.raises(TypeError, match="64-bit integers"):
        recency.touch(0, array("I", [1]), 0.0)
    assert recency.blocks() == 0


def test_memory_is_counted_and_freed() -> None:
    recency = Recency()
    recency.open(0, True)
    empty = recency.memory_bytes()
    recency.touch(0, array("Q", range(1, 200_001)), 0.0)
    assert 12 < (recency.memory_bytes() - empty) / 200_000 < 75
    recency.evict(0, 200_000)
    assert recency.memory_bytes() < empty + 300_000
