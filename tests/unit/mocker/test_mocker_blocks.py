"""The block pool: sharing, eviction order, events that match the cache exactly."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from occurred import StateMachine, occurring

from dynamo.mocker.blocks import DEVICE, HOST, BlockPool, CacheChange, SequenceBlocks
from dynamo.protocols.codec import tokens
from dynamo.protocols.kv import BlocksCleared, BlocksRemoved, BlocksStored

B = 4


def u64(raw: bytes) -> list[int]:
    return list(array("Q", raw))


def sequence_blocks(*ids: int) -> SequenceBlocks:
    return SequenceBlocks(tokens(ids), B)


def hold_all(pool: BlockPool, ids: list[int]) -> SequenceBlocks:
    held = sequence_blocks(*ids)
    found, _ = pool.cached_prefix(held)
    pool.reuse(held, found)
    assert pool.grow(held, len(ids))
    return held


@pytest.mark.parametrize(("length", "cached"), [(20, 16), (17, 16), (16, 12), (4, 0), (5, 4)])
def test_the_last_token_is_never_cached(length: int, cached: int) -> None:
    pool = BlockPool(100, B)
    prompt = list(range(1, length + 1))
    pool.release(hold_all(pool, prompt))
    assert pool.cached_prefix(sequence_blocks(*prompt)) == (cached // B, 0)


def test_two_sequences_share_their_common_prefix() -> None:
    pool = BlockPool(100, B)
    first = hold_all(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = hold_all(pool, [1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert pool.used == 2 + 1 + 1
    pool.release(first)
    assert (pool.used, pool.cached) == (3, 0)
    pool.release(second)
    assert (pool.used, pool.cached, pool.free) == (0, 2, 100)


def test_a_partial_block_becomes_shared_when_it_fills() -> None:
    pool = BlockPool(10, B)
    held = hold_all(pool, [1, 2, 3])
    assert pool.used == 1 and not pool.changes
    held.tokens.append(4)
    assert pool.grow(held, 4)
    assert pool.used == 1
    stored = pool.changes.pop().change
    assert isinstance(stored, BlocksStored) and stored.parent_hash is None
    held.tokens.extend([5, 6, 7, 8])
    assert pool.grow(held, 5) and pool.used == 2 and not pool.changes
    assert pool.grow(held, 8)
    second = pool.changes.pop().change
    assert isinstance(second, BlocksStored) and second.parent_hash == u64(stored.block_hashes)[0]
    whole = SequenceBlocks(tokens(range(1, 9)), B)
    assert list(held.sequence_hashes) == list(whole.sequence_hashes) and list(
        held.block_hashes
    ) == list(whole.block_hashes)


def test_the_tail_of_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = BlockPool(4, B)
    old = hold_all(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    pool.release(old)
    pool.release(hold_all(pool, [11, 12, 13, 14]))
    pool.changes.clear()
    hold_all(pool, [21, 22, 23, 24, 25])
    removed, stored = (each.change for each in pool.changes)
    assert isinstance(removed, BlocksRemoved) and isinstance(stored, BlocksStored)
    assert u64(removed.block_hashes) == [old.sequence_hashes[1]]


def test_growth_is_all_or_nothing() -> None:
    pool = BlockPool(2, B)
    held = hold_all(pool, [1, 2, 3, 4])
    other = sequence_blocks(*range(10, 20))
    pool.changes.clear()
    assert not pool.grow(other, 10)
    assert pool.used == 1 and not pool.changes and not other.full and not other.private
    assert pool.grow(other, 4)
    pool.release(held)
    assert pool.grow(other, 8)


def test_without_prefix_caching_nothing_is_shared_or_published() -> None:
    pool = BlockPool(4, B, prefix_caching=False)
    first = hold_all(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    second = hold_all(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.used == 4 and not pool.grow(sequence_blocks(1), 1)
    pool.release(first)
    pool.release(second)
    assert (pool.used, pool.cached, pool.changes) == (0, 0, [])


def test_blocks_differ_by_lora_and_namespace() -> None:
    ids = tokens(range(8))
    plain = SequenceBlocks(ids, B).sequence_hashes
    assert plain[0] != SequenceBlocks(ids, B, lora_name="a").sequence_hashes[0]
    assert plain[0] != SequenceBlocks(ids, B, cache_namespace="a").sequence_hashes[0]


class PoolMachine(StateMachine):
    """Random histories against plain sets: the events describe the cache, nothing leaks."""

    CAPACITY = 6
    HOST_CAPACITY = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.CAPACITY, B, host_capacity=self.HOST_CAPACITY)
        self.held: list[SequenceBlocks] = []
        self.published: set[int] = set()
        self.on_host: set[int] = set()

    def apply_events(self) -> None:
        for change, tier, _ in self.pool.changes:
            assert not isinstance(change, BlocksCleared)
            hashes = set(u64(change.block_hashes))
            self.seen[f"{tier} {type(change).__name__}"] += 1
            if tier == HOST and isinstance(change, BlocksStored):
                assert hashes <= self.published - self.on_host and not change.tokens_hashes
                self.on_host |= hashes
            elif tier == HOST:
                assert hashes <= self.on_host
                self.on_host -= hashes
            elif isinstance(change, BlocksStored):
                assert not hashes & self.published
                assert change.parent_hash is None or change.parent_hash in self.published
                self.published |= hashes
            else:
                assert hashes <= self.published
                self.published -= hashes
        self.pool.changes.clear()

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, ids: list[int]) -> None:
        held = sequence_blocks(*ids)
        found, active = self.pool.cached_prefix(held)
        if -(-len(ids) // B) - active <= self.pool.free:
            self.seen["reused"] += found > 0
            self.pool.reuse(held, found)
            assert self.pool.grow(held, len(ids))
            self.held.append(held)
        self.apply_events()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, data: st.DataObject, ids: list[int]) -> None:
        held = data.draw(st.sampled_from(self.held))
        held.tokens.extend(ids)
        if not self.pool.grow(held, len(held.tokens)):
            del held.tokens[-len(ids) :]
            self.seen["no room"] += 1
        self.apply_events()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.pool.release(held)
        self.apply_events()

    @invariant()
    def agrees(self) -> None:
        self.pool._check()
        full = {h for held in self.held for h in held.sequence_hashes[: len(held.tokens) // B]}
        partial = sum(1 for held in self.held if len(held.tokens) % B)
        assert self.pool.used == len(full) + partial
        assert self.pool.hashes() == self.published
        assert self.pool.host_hashes() == self.on_host
        assert full <= self.published


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
STATES = ("device BlocksStored", "device BlocksRemoved", "reused", "no room")
TestPoolMachine = occurring(PoolMachine, *STATES)


class HostPoolMachine(PoolMachine):
    """The same with host memory, which is smaller than the cache."""

    HOST_CAPACITY = 4


HostPoolMachine.TestCase.settings = PoolMachine.TestCase.settings
TestHostPoolMachine = occurring(
    HostPoolMachine, *STATES, "host_pinned BlocksStored", "host_pinned BlocksRemoved"
)


def test_an_evicted_block_returns_from_host_memory() -> None:
    pool = BlockPool(2, B, host_capacity=8)
    prompt = [1, 2, 3, 4, 5]
    pool.release(hold_all(pool, prompt))
    pool.release(hold_all(pool, list(range(10, 18))))
    assert pool.cached_prefix(sequence_blocks(*prompt)) == (1, 0)
    pool.changes.clear()
    held = hold_all(pool, prompt)
    assert held.full == 1
    tiers = [(each.storage_tier, type(each.change)) for each in pool.changes]
    # Both blocks of the other prompt make room: the first for the block, the second for token 5.
    offload = [(HOST, BlocksStored), (DEVICE, BlocksRemoved)]
    assert tiers == [*offload, (DEVICE, BlocksStored), *offload]


def test_the_cache_is_cleared_unless_sequences_use_it() -> None:
    pool = BlockPool(2, B, host_capacity=8)
    held = hold_all(pool, [1, 2, 3, 4, 5])
    assert not pool.clear()
    pool.release(held)
    pool.release(hold_all(pool, list(range(10, 18))))
    pool.changes.clear()
    assert pool.hashes() and pool.host_hashes()
    assert pool.clear()
    assert not pool.hashes() | pool.host_hashes()
    assert pool.changes == [CacheChange(BlocksCleared())]
