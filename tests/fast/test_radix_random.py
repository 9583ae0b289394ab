"""Random histories: the prefix index and its readable twin must agree after every step."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracle import radix as oracle

from dynamo._fast import radix

# Few ids, so that chains meet, move, share nodes under several names and close and open holes.
ids = st.integers(0, 9)
locals_ = st.integers(0, 2)
workers = st.integers(0, 3)
ranks = st.integers(0, 1)
chains = st.lists(st.tuples(ids, locals_), max_size=6)
queries = st.lists(locals_, max_size=7)


def column(values: list[int]) -> array[int]:
    return array("Q", values)


class Histories(RuleBasedStateMachine):
    """Both sides live through the same history."""

    @initialize(cap=st.sampled_from([0, 0, 5, 12]), spread=st.sampled_from([1, 1, 40, 300]))
    def start(self, cap: int, spread: int) -> None:
        self.cap = cap
        self.fast = radix.RadixTree(cap)
        self.twin = oracle.RadixTree(cap)
        # Other owners take the slots in between, so that holders need more than one word.
        self.spread = spread
        for other in range(spread * 4):
            if other % spread == 0:
                self.slot(other // spread, 0)
            else:
                self.slot(1000 + other, 0)

    def slot(self, worker: int, rank: int) -> int:
        slot = self.fast.slot(worker, rank)
        assert slot == self.twin.slot(worker, rank)
        return slot

    @rule(worker=workers, rank=ranks, parent=st.none() | ids, chain=chains)
    def store(
        self, worker: int, rank: int, parent: int | None, chain: list[tuple[int, int]]
    ) -> None:
        slot = self.slot(worker, rank)
        blocks, local = [b for b, _ in chain], [t for _, t in chain]
        outcomes: list[object] = []
        for side, as_column in ((self.twin, list), (self.fast, column)):
            try:
                outcomes.append(side.store(slot, parent, as_column(blocks), as_column(local)))
            except (radix.ParentNotFound, oracle.ParentNotFound):
                outcomes.append("no parent")
            except (radix.InvalidSequence, oracle.InvalidSequence):
                outcomes.append("own parent")
        assert outcomes[0] == outcomes[1]

    @rule(worker=workers, rank=ranks, blocks=st.lists(ids, max_size=5))
    def remove(self, worker: int, rank: int, blocks: list[int]) -> None:
        slot = self.slot(worker, rank)
        assert self.fast.remove(slot, column(blocks)) == self.twin.remove(slot, blocks)

    @rule(worker=workers, rank=ranks)
    def clear(self, worker: int, rank: int) -> None:
        slot = self.slot(worker, rank)
        assert self.fast.clear(slot) == self.twin.clear(slot)

    @rule(worker=workers)
    def remove_worker(self, worker: int) -> None:
        assert self.fast.remove_worker(worker) == self.twin.remove_worker(worker)

    @rule(query=queries, early_exit=st.booleans())
    def match(self, query: list[int], early_exit: bool) -> None:
        expected = self.twin.match(query, early_exit)
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
        for worker, rank, parent, blocks, local in self.twin.dump():
            expected.store(expected.slot(worker, rank), parent, blocks, local)
        assert replayed.copies() == expected.copies()
        assert again.blocks() == expected.blocks()
        for query in queries:
            assert again.match(column(query)) == self.fast.match(column(query))

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "fast"):
            return
        self.fast._check()
        assert self.fast.blocks() == self.twin.blocks()
        assert self.fast.nodes() == self.twin.nodes()
        assert self.fast.dropped() == self.twin.dropped()
        if self.cap:
            assert self.fast.blocks() <= self.cap and self.fast.nodes() <= self.cap


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
