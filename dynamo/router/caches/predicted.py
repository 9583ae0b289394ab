"""What workers probably hold, told by the router's own decisions: kv mode without KV events.

Every decision stores the prompt's blocks under the chosen slot in the prefix index. What becomes of
them there nobody says, so they are forgotten by age (``ttl``), or when the worker's own capacity
is reached (``lru``). Pure: time is handed in. Spec 2.5.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from dynamo._fast.radix import RadixTree
from dynamo._fast.recency import Recency
from dynamo.observability.metrics import Counter

__all__ = ["STEP_BLOCKS", "PredictedCache", "PredictionCounts"]

STEP_BLOCKS = 4096
"""So many blocks are forgotten in one call (half a millisecond), the rest in later ones."""

_LEASE_BYTES = 250
"""A running request in the table of leases: its key, its entry, its numbers."""


@dataclass
class PredictionCounts:
    """Blocks forgotten, by reason: age, the cap on all, a worker's capacity (in ``evictions``)."""

    expired: Counter = field(default_factory=Counter)
    pruned: Counter = field(default_factory=Counter)
    evicted: Counter = field(default_factory=Counter)
    evictions: Counter = field(default_factory=Counter)


class PredictedCache:
    """Keeps ``index`` within what is believed to be cached.

    ``ttl_s`` is one for all, so the order of decisions is the order of expiry: no heap is needed,
    the oldest block stands in front of its line. ``max_blocks`` bounds (block, slot) pairs; beyond
    it the oldest go until ``prune_ratio`` of it is left. Of one prompt the deepest block goes
    first: a block is never forgotten before what hangs under it.

    Under ``lru`` a slot with a known capacity has a line of its own: its blocks do not age, and
    those of running requests stay. Costs: O(blocks of the prompt) a decision.
    """

    def __init__(
        self, index: RadixTree, ttl_s: float, max_blocks: int, prune_ratio: float, lru: bool = False
    ) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._target_blocks = int(max_blocks * prune_ratio)
        self._lru = lru
        self._recency = Recency()
        self._slots: set[int] = set()
        self._capacities: dict[int, int] = {}
        self._leases: dict[str, tuple[int, int]] = {}
        self._pruning = False
        self.counts = PredictionCounts()

    def add_slot(self, slot: int, capacity_blocks: int | None) -> None:
        """A slot can be chosen; under ``lru`` one of unknown capacity falls back to ``ttl``."""
        bounded = self._lru and bool(capacity_blocks)
        self._slots.add(slot)
        self._recency.open(slot, bounded)
        if bounded and capacity_blocks is not None:
            self._capacities[slot] = capacity_blocks
            self._shrink(slot, STEP_BLOCKS)

    def drop_slot(self, slot: int) -> None:
        """The slot's worker is gone, and with it (from the index too) its blocks."""
        self._slots.discard(slot)
        self._capacities.pop(slot, None)
        self._recency.close(slot)
        for request_id in [key for key, (where, _) in self._leases.items() if where == slot]:
            del self._leases[request_id]

    def routed(
        self,
        request_id: str | None,
        slot: int,
        chained: array[int],
        hashes: array[int],
        now_s: float,
    ) -> None:
        """A prompt of these blocks goes to ``slot``: they will be there, for a fresh time."""
        if not len(chained) or slot not in self._slots:
            return
        self._index.store(slot, None, chained, hashes)
        if request_id is None or slot not in self._capacities:
            self._recency.touch(slot, chained, now_s)
        else:
            self.ended(request_id, now_s)
            self._leases[request_id] = slot, self._recency.pin(slot, chained, now_s)
        if slot in self._capacities:
            self._shrink(slot, STEP_BLOCKS + len(chained))
        self._pruning |= self._recency.blocks() > self._max_blocks
        if self._pruning:
            self._prune(STEP_BLOCKS + len(chained))

    def ended(self, request_id: str, now_s: float) -> None:
        """The request runs no more: under ``lru`` its blocks may go again, as the newest ones."""
        found = self._leases.pop(request_id, None)
        if found is not None:
            slot, lease = found
            self._recency.release(lease, now_s)
            self._shrink(slot, STEP_BLOCKS)

    def expire(self, now_s: float) -> int:
        """Forget what was last touched more than the TTL ago; how many blocks. O(1) if none.

        When the answer is ``STEP_BLOCKS`` there may be more.
        """
        dropped = self._forget(self._recency.age(now_s - self._ttl_s, STEP_BLOCKS))
        self.counts.expired.value += dropped
        return dropped

    def blocks(self) -> int:
        """How many (block, slot) pairs are believed to be cached."""
        return self._recency.blocks()

    def leases(self) -> int:
        """How many running requests hold their blocks (``lru``)."""
        return self._recency.leases()

    def fallbacks(self) -> int:
        """How many slots age although ``lru`` was asked for."""
        return len(self._slots) - len(self._capacities) if self._lru else 0

    def memory_bytes(self) -> int:
        """Bytes held beside the index."""
        return self._recency.memory_bytes() + _LEASE_BYTES * len(self._leases)

    def _forget(self, chains: list[tuple[int, array[int]]]) -> int:
        for slot, blocks in chains:
            self._index.remove(slot, blocks)
        return sum(len(blocks) for _, blocks in chains)

    def _shrink(self, slot: int, most: int) -> None:
        """Towards the slot's capacity, as far as running requests allow."""
        excess = self._recency.blocks_of(slot) - self._capacities[slot]
        if excess <= 0:
            return
        dropped = self._forget(self._recency.evict(slot, min(excess, most)))
        self.counts.evicted.value += dropped
        self.counts.evictions.value += dropped > 0

    def _prune(self, most: int) -> None:
        """Towards the target, the oldest first over all lines; pinned blocks stay."""
        excess = self._recency.blocks() - self._target_blocks
        dropped = self._forget(self._recency.prune(min(excess, most)))
        self.counts.pruned.value += dropped
        self._pruning = dropped > 0 and self._recency.blocks() > self._target_blocks

    def _check(self) -> None:
        self._recency._check()
        held = sum(self._recency.blocks_of(slot) for slot in self._slots)
        assert self._recency.blocks() == held == self._index.blocks()
        assert self._recency.leases() == len(self._leases)
        assert all(self._recency.has_own_line(slot) for slot in self._capacities)
