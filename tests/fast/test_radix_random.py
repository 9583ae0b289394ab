"""Random histories: the prefix index equals its reference implementation after every step."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from occurred import StateMachine, assert_occurred, occurring
from oracle import radix as oracle

from dynamo._fast import radix

# Few ids, so that chains meet, move, share nodes under several names and close and open holes.
ids = st.integers(0, 15)
locals_ = st.integers(0, 1)
workers = st.integers(0, 2)
ranks = st.sampled_from([0, 0, 0, 1])
chains = st.lists(st.tuples(ids, locals_), max_size=6)
long_chains = st.lists(st.tuples(ids, locals_), min_size=2, max_size=6)
queries = st.lists(locals_, max_size=7)


def column(values: list[int]) -> array[int]:
    return array("Q", values)


class Histories(StateMachine):
    """Both sides live through the same history."""

    @initialize(cap=st.sampled_from([0, 0, 0, 5, 12]), spread=st.sampled_from([1, 1, 40, 300]))
    def start(self, cap: int, spread: int) -> None:
        self.cap = cap
        self.fast = radix.RadixTree(cap)
        self.reference = oracle.RadixTree(cap)
        # Other owners take the slots in between, so that holders need more than one word.
        self.spread = spread
        for other in range(spread * 3):
            if other % spread == 0:
                self.slot(other // spread, 0)
            else:
                self.slot(1000 + other, 0)

    def slot(self, worker: int, rank: int) -> int:
        slot = self.fast.slot(worker, rank)
        assert slot == self.reference.slot(worker, rank)
        return slot

    def store(self, slot: int, parent: int | None, blocks: list[int], local: list[int]) -> None:
        stored = self.store_fast(slot, parent, blocks, local)
        assert stored == self.store_reference(slot, parent, blocks, local)
        self.seen[stored if isinstance(stored, str) else "stored"] += 1
        self.seen["refused by the cap"] += self.fast.dropped() > 0

    def store_fast(
        self, slot: int, parent: int | None, blocks: list[int], local: list[int]
    ) -> int | str:
        try:
            return self.fast.store(slot, parent, column(blocks), column(local))
        except radix.ParentNotFound:
            return "no parent"
        except radix.InvalidSequence:
            return "own parent"

    def store_reference(
        self, slot: int, parent: int | None, blocks: list[int], local: list[int]
    ) -> int | str:
        try:
            return self.reference.store(slot, parent, blocks, local)
        except oracle.ParentNotFound:
            return "no parent"
        except oracle.InvalidSequence:
            return "own parent"

    @rule(worker=workers, rank=ranks, parent=st.none() | ids, chain=chains)
    def store_anything(
        self, worker: int, rank: int, parent: int | None, chain: list[tuple[int, int]]
    ) -> None:
        slot = self.slot(worker, rank)
        self.store(slot, parent, [b for b, _ in chain], [t for _, t in chain])

    @rule(worker=workers, rank=ranks, chain=long_chains)
    def store_from_the_root(self, worker: int, rank: int, chain: list[tuple[int, int]]) -> None:
        self.store_anything(worker, rank, None, chain)

    @rule(worker=workers, rank=ranks, which=ids, names=st.lists(ids, min_size=6, max_size=6))
    def store_again_under_other_names(
        self, worker: int, rank: int, which: int, names: list[int]
    ) -> None:
        slot = self.slot(worker, rank)
        paths = sorted(self.reference.paths(slot))
        if paths:
            path = paths[which % len(paths)][:6]
            self.store(slot, None, names[: len(path)], list(path))

    @rule(worker=workers, rank=ranks, which=ids, chain=chains)
    def store_below(self, worker: int, rank: int, which: int, chain: list[tuple[int, int]]) -> None:
        held = sorted(self.reference.ids(self.slot(worker, rank)))
        if held:
            self.store_anything(worker, rank, held[which % len(held)], chain)

    @rule(worker=workers, rank=ranks, blocks=st.lists(ids, max_size=5))
    def remove(self, worker: int, rank: int, blocks: list[int]) -> None:
        slot = self.slot(worker, rank)
        unknown = self.fast.remove(slot, column(blocks))
        assert unknown == self.reference.remove(slot, blocks)
        self.seen["removed unknown"] += unknown > 0
        self.seen["removed"] += unknown < len(blocks)

    @rule(worker=workers, rank=ranks, which=ids, blocks=st.lists(ids, max_size=2))
    def remove_held(self, worker: int, rank: int, which: int, blocks: list[int]) -> None:
        held = sorted(self.reference.ids(self.slot(worker, rank)))
        if held:
            self.remove(worker, rank, [held[which % len(held)], *blocks])

    @rule(worker=workers, rank=ranks, whole_worker=st.booleans())
    def forget(self, worker: int, rank: int, whole_worker: bool) -> None:
        self.seen["forgot blocks"] += self.fast.blocks() > 0
        if whole_worker:
            assert self.fast.remove_worker(worker) == self.reference.remove_worker(worker)
        else:
            slot = self.slot(worker, rank)
            assert self.fast.clear(slot) == self.reference.clear(slot)

    @rule(query=queries, early_exit=st.booleans())
    def match(self, query: list[int], early_exit: bool) -> None:
        expected = self.reference.match(query, early_exit)
        self.seen["several match"] += len(expected) > 1
        assert self.fast.match(column(query), early_exit) == expected

    @rule(queries=st.lists(queries, max_size=4))
    def rebuild(self, queries: list[list[int]]) -> None:
        replayed = oracle.RadixTree()
        again = radix.RadixTree()
        for worker, rank, parent, blocks, local in self.fast.dump():
            slot = replayed.slot(worker, rank)
            assert slot == again.slot(worker, rank)
            replayed.store(slot, parent, blocks.tolist(), local.tolist())
            again.store(slot, parent, blocks, local)
        again._check()
        self.seen["rebuilt without what is behind a hole"] += again.blocks() < self.fast.blocks()
        expected = oracle.RadixTree()
        for worker, rank, parent, names, hashes in self.reference.dump():
            expected.store(expected.slot(worker, rank), parent, names, hashes)
        assert replayed.copies() == expected.copies()
        assert again.blocks() == expected.blocks()
        for query in queries:
            assert again.match(column(query)) == self.fast.match(column(query))

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "fast"):
            return
        self.fast._check()
        self.seen["two names of a block"] += max(self.reference.copies().values(), default=0) > 1
        assert self.fast.blocks() == self.reference.blocks()
        assert self.fast.nodes() == self.reference.nodes()
        assert self.fast.dropped() == self.reference.dropped()
        if self.cap:
            assert self.fast.blocks() <= self.cap and self.fast.nodes() <= self.cap


STATES = (
    *("stored", "no parent", "own parent", "removed", "removed unknown", "forgot blocks"),
    *("several match", "two names of a block", "rebuilt without what is behind a hole"),
)

Histories.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHistories = occurring(Histories, *STATES, "refused by the cap")


@pytest.mark.parametrize("seed", range(6))
def test_long_histories(seed: int) -> None:  # noqa: C901 - event kinds
    """Fuller trees than hypothesis builds: mostly stores, seldom a worker that leaves."""
    source = Random(seed)
    both = Histories()
    both.seen = Counter()
    both.start(cap=[0, 0, 40][seed % 3], spread=[1, 40][seed % 2])

    def chain(longest: int) -> list[tuple[int, int]]:
        length = source.randrange(1, longest)
        return [(source.randrange(60), source.randrange(2)) for _ in range(length)]

    def step() -> None:
        owner = (source.randrange(3), source.randrange(2))
        match source.choices(range(7), [4, 8, 4, 8, 8, 0.1, 0.3])[0]:
            case 0:
                both.store_from_the_root(*owner, chain(8))
            case 1:
                both.store_below(*owner, source.randrange(60), chain(5))
            case 2:
                names = [source.randrange(60) for _ in range(6)]
                both.store_again_under_other_names(*owner, source.randrange(60), names)
            case 3:
                both.remove(*owner, [block for block, _ in chain(5)])
            case 4:
                both.match([local for _, local in chain(10)], source.random() < 0.5)
            case 5:
                both.forget(*owner, source.random() < 0.5)
            case 6:  # the parent is often unknown
                both.store_anything(*owner, source.randrange(60, 90), chain(3))

    for number in range(600):
        step()
        both.agree()
        if number % 50 == 49:
            both.rebuild([[local for _, local in chain(10)] for _ in range(10)])
    both.forget(0, 0, True)
    assert_occurred(both.seen, *STATES, *(["refused by the cap"] if both.cap else []))
