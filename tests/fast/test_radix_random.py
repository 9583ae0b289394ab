"""Random histories: the prefix index equals its reference implementation after every step."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
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


class Histories(RuleBasedStateMachine):
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
        assert self.store_fast(slot, parent, blocks, local) == self.store_reference(
            slot, parent, blocks, local
        )

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
        assert self.fast.remove(slot, column(blocks)) == self.reference.remove(slot, blocks)

    @rule(worker=workers, rank=ranks, whole_worker=st.booleans())
    def forget(self, worker: int, rank: int, whole_worker: bool) -> None:
        if whole_worker:
            assert self.fast.remove_worker(worker) == self.reference.remove_worker(worker)
        else:
            slot = self.slot(worker, rank)
            assert self.fast.clear(slot) == self.reference.clear(slot)

    @rule(query=queries, early_exit=st.booleans())
    def match(self, query: list[int], early_exit: bool) -> None:
        expected = self.reference.match(query, early_exit)
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
        assert self.fast.blocks() == self.reference.blocks()
        assert self.fast.nodes() == self.reference.nodes()
        assert self.fast.dropped() == self.reference.dropped()
        if self.cap:
            assert self.fast.blocks() <= self.cap and self.fast.nodes() <= self.cap


Histories.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


@pytest.mark.parametrize("seed", range(6))
def test_long_histories(seed: int) -> None:
    """Fuller trees than hypothesis builds: mostly stores, seldom a worker that leaves."""
    source = Random(seed)
    both = Histories()
    both.start(cap=[0, 0, 40][seed % 3], spread=[1, 40][seed % 2])

    def chain(longest: int) -> list[tuple[int, int]]:
        length = source.randrange(1, longest)
        return [(source.randrange(60), source.randrange(2)) for _ in range(length)]

    for step in range(600):
        owner = (source.randrange(3), source.randrange(2))
        match source.choices(range(6), [4, 8, 4, 8, 8, 0.1])[0]:
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
        both.agree()
        if step % 50 == 49:
            both.rebuild([[local for _, local in chain(10)] for _ in range(10)])
