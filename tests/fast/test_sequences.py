"""The active-load tracker against its reference implementation, over random histories."""

from __future__ import annotations

import gc
import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from occurred import StateMachine, occurring
from oracle.sequences import ActiveSequences as Reference

from dynamo._fast.sequences import ActiveSequences

SLOTS = 3


def chain(path: tuple[int, ...]) -> array[int]:
    """Chained 64-bit identities of a path of small numbers: equal paths, equal hashes."""
    return array("Q", [hash(("block", path[: i + 1])) % 2**64 for i in range(len(path))])


def project(
    active: ActiveSequences, hashes: array[int] | None, unique: int = 0
) -> list[tuple[int, int]]:
    """Rows of (prefill tokens, blocks) by slot."""
    prefill, blocks = array("q", [9] * SLOTS), array("q", [9] * SLOTS)
    active.project_into(hashes, unique, prefill, blocks)
    again, depths = array("q", [9] * SLOTS), array("I", [2] * SLOTS)
    active.project_into(hashes, unique, prefill, again, depths)
    assert again == blocks
    # Whatever is there already counts in the blocks once.
    held = [unique + len(hashes or ()) + active.load(one)[1] - blocks[one] for one in range(SLOTS)]
    assert depths.tolist() == [max(2, one) for one in held]
    return list(zip(prefill, blocks, strict=True))


class History(StateMachine):
    """Reserve, grow, release and clear in any order; sums must equal the reference's."""

    def __init__(self) -> None:
        super().__init__()
        self.active, self.reference = ActiveSequences(), Reference()
        self.handles: list[tuple[int, int]] = []

    paths = st.lists(st.integers(0, 1), max_size=12).map(tuple)
    pick = st.integers(0, 10_000)

    @rule(
        slot=st.integers(0, SLOTS - 1),
        path=paths,
        unique=st.integers(0, 3),
        prefill=st.integers(0, 999),
    )
    def book(self, slot: int, path: tuple[int, ...], unique: int, prefill: int) -> None:
        hashes = chain(path)
        self.handles.append(
            (
                self.active.book(slot, hashes, unique, prefill),
                self.reference.book(slot, hashes, unique, prefill),
            )
        )

    @rule(pick=pick)
    def end_prefill(self, pick: int) -> None:
        for ours, theirs in self.chosen(pick):
            ended = self.active.end_prefill(ours)
            assert ended == self.reference.end_prefill(theirs)
            self.seen["prefill ended" if ended else "prefill of an ended one"] += 1

    @rule(pick=pick, blocks=st.integers(0, 4), faded=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    def grow(self, pick: int, blocks: int, faded: float) -> None:
        for ours, theirs in self.chosen(pick):
            grown = self.active.grow(ours, blocks, faded)
            assert grown == self.reference.grow(theirs, blocks, faded)
            self.seen["grown" if grown else "ended one grown"] += 1

    @rule(pick=pick)
    def release(self, pick: int) -> None:
        for ours, theirs in self.chosen(pick):
            released = self.active.release(ours)
            assert released == self.reference.release(theirs)
            self.seen["released" if released else "released again"] += 1

    @rule(slot=st.integers(0, SLOTS))
    def clear(self, slot: int) -> None:
        cleared = self.active.clear(slot)
        assert cleared == self.reference.clear(slot)
        self.seen["cleared requests"] += bool(cleared)

    def chosen(self, pick: int) -> list[tuple[int, int]]:
        """One handle pair ever given out, dead or alive; none at first."""
        return [self.handles[pick % len(self.handles)]] if self.handles else []

    @rule(path=paths, unique=st.integers(0, 2))
    def projection(self, path: tuple[int, ...], unique: int) -> None:
        rows = project(self.active, chain(path), unique)
        for got, expected in zip(
            rows, self.reference.project(chain(path), unique, SLOTS), strict=True
        ):
            assert got[0] == expected[0]
            assert abs(got[1] - expected[1]) <= 0.5

    @invariant()
    def sums_agree(self) -> None:
        self.active._check()
        for slot in range(SLOTS + 1):
            prefill, blocks, requests = self.active.load(slot)
            expected = self.reference.load(slot)
            assert (prefill, requests) == (expected[0], expected[2])
            assert abs(blocks - expected[1]) <= 0.5


History.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistory = occurring(
    History,
    *("prefill ended", "prefill of an ended one", "grown", "ended one grown", "released"),
    *("released again", "cleared requests"),
)


def test_observed_example() -> None:
    """As Dynamo: block size 4, 14 tokens with 2 blocks cached, then a cold query of 8 tokens."""
    active = ActiveSequences()
    handle = active.book(0, chain((1, 2, 3)), 0, 6)
    query = chain((7, 8))
    assert project(active, query)[0] == (6, 5)
    assert active.load(0)[2] == 1
    active.end_prefill(handle)
    assert project(active, query)[0] == (0, 5)
    active.release(handle)
    assert project(active, query)[0] == (0, 2)


def test_shared_blocks_count_once_per_slot() -> None:
    active = ActiveSequences()
    first = active.book(0, chain((1, 2, 3)), 0, 0)
    active.book(0, chain((1, 2, 4)), 0, 0)
    assert active.load(0)[1] == 4
    assert project(active, chain((1, 2, 3, 9))) == [(0, 5), (0, 4), (0, 4)]
    active.release(first)
    assert active.load(0)[1] == 3


def test_an_old_handle_never_ends_its_successor() -> None:
    active = ActiveSequences()
    old = active.book(0, None, 1, 10)
    assert active.release(old)
    new = active.book(0, None, 2, 20)
    assert not active.release(old)
    assert not active.end_prefill(old)
    assert not active.grow(old, 1)
    assert active.load(0) == (20, 2, 1)
    assert active.release(new)


def test_output_blocks_fade_with_expected_length() -> None:
    active = ActiveSequences()
    handle = active.book(0, chain((1, 2)), 0, 0)
    active.book(0, chain((1,)), 0, 0)
    active.grow(handle, 2, 0.5)  # block 1 is shared; block 2 and two output blocks fade by half
    assert active.load(0)[1] == 3  # 2.5, halves round up
    active.grow(handle, 0, 1.0)
    assert active.load(0)[1] == 1


@pytest.mark.slow
def test_many_requests_keep_the_invariants() -> None:
    source, active = random.Random(5), ActiveSequences()
    live: list[int] = []
    for step in range(3000):
        if len(live) > 200 or (live and source.random() < 0.4):
            assert active.release(live.pop(source.randrange(len(live))))
        else:
            path = tuple(source.randrange(3) for _ in range(source.randrange(60)))
            live.append(active.book(source.randrange(SLOTS), chain(path), 0, 5))
        if step % 100 == 0:
            active._check()
    for handle in live:
        assert active.release(handle)
    active._check()
    assert [active.load(slot) for slot in range(SLOTS)] == [(0, 0, 0)] * SLOTS


def test_bad_arguments_are_refused() -> None:
    active = ActiveSequences()
    with pytest.raises(IndexError):
        active.book(1 << 16, None, 0, 0)
    with pytest.raises(ValueError, match="negative"):
        active.book(0, None, -1, 0)
    with pytest.raises(ValueError, match="faded"):
        active.grow(0, 1, 1.5)
    with pytest.raises(ValueError, match="length"):
        active.project_into(None, 0, array("q", [0]), array("q"))
    with pytest.raises(ValueError, match="length"):
        active.project_into(None, 0, array("q", [0]), array("q", [0]), array("I"))
    with pytest.raises(TypeError, match="type code"):
        active.book(0, array("I", [1]), 0, 0)
    assert active.memory_bytes() >= 0


def test_memory_is_given_back() -> None:
    def resident_kb() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * 4

    hashes = array("Q", range(1, 20_001))
    for _ in range(20):
        active = ActiveSequences()
        active.book(0, hashes, 0, 1)
    gc.collect()
    before = resident_kb()
    for _ in range(200):
        active = ActiveSequences()
        active.release(active.book(0, hashes, 0, 1))
        active.book(1, hashes, 0, 1)
    assert resident_kb() - before < 20_000
