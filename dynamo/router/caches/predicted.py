"""Cached blocks predicted from the router's own decisions. Pure: time is handed in.

Without KV events every decision stores the prompt's blocks under the chosen slot in the prefix
index. No event reports their eviction, so they are dropped by age (``ttl``), or when the worker's
capacity is reached (``lru``). With KV events short-lived predictions bridge the time until the
events arrive.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from dynamo._fast.radix import RadixTree
from dynamo._fast.recency import Recency
from dynamo.config.router import RouterSettings
from dynamo.observability.metrics import Counter, Registry, counter, gauge
from dynamo.router.caches.indexer import show_index
from dynamo.router.labels import COMPONENT, RouterLabels

STEP_BLOCKS = 4096
"""Blocks dropped in one call at most (half a millisecond); the rest follows in later calls."""

_LEASE_BYTES = 250
"""Estimated size of an entry in the table of leases."""

_EXPIRED = counter(
    "dynamo_component_router_predicted_blocks_expired_total",
    "Predicted blocks forgotten by age",
    COMPONENT,
)
_PRUNED = counter(
    "dynamo_component_router_predicted_blocks_pruned_total",
    "Predicted blocks forgotten because there were too many",
    COMPONENT,
)
_PREDICTED_MEMORY_BYTES = gauge(
    "dynamo_component_router_predicted_memory_bytes",
    "Memory of the predictions, beside the prefix index",
    COMPONENT,
)
_CONFIGURED_POLICY = gauge(
    "dynamo_component_router_approximate_cache_configured_policy",
    "1 for the policy that forgets predicted blocks",
    "dynamo_component dynamo_namespace policy worker_id",
)
_LRU_EVICTED = counter(
    "dynamo_component_router_approximate_lru_evicted_blocks_total",
    "Predicted blocks evicted because their worker is full",
    COMPONENT,
)
_LRU_EVICTIONS = counter(
    "dynamo_component_router_approximate_lru_eviction_batches_total",
    "Times that predicted blocks were evicted",
    COMPONENT,
)
_LRU_LEASES = gauge(
    "dynamo_component_router_approximate_lru_leases",
    "Running requests whose predicted blocks cannot be evicted",
    COMPONENT,
)
_LRU_FALLBACKS = gauge(
    "dynamo_component_router_approximate_lru_fallbacks",
    "Workers' ranks of unknown capacity, whose predicted blocks age instead",
    COMPONENT,
)


@dataclass
class PredictionCounts:
    """Dropped blocks by reason: age, the limit over all workers, a worker's capacity."""

    expired: Counter = field(default_factory=Counter)
    pruned: Counter = field(default_factory=Counter)
    evicted: Counter = field(default_factory=Counter)
    evictions: Counter = field(default_factory=Counter)


class PredictedCache:
    """Adds predicted blocks to ``index`` and drops them again.

    ``ttl_s`` is the same for all blocks, so they expire in the order of decisions: a list suffices,
    no heap. ``max_blocks`` limits (block, slot) pairs; beyond, the oldest are pruned until
    ``prune_ratio`` of it is left. Of one prompt the deepest block is dropped first: a block never
    before its extensions, without which they could not be found.

    Under ``lru`` a slot with a known capacity has its own list: its blocks do not age, and those of
    running requests stay. A decision costs O(blocks of the prompt).
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

    def export(self, registry: Registry, labels: RouterLabels, policy: str) -> None:
        """Export the predicted blocks, and count the dropped ones. ``policy`` forgets them."""
        show_index(registry, labels, self._index)
        here = labels.component, labels.namespace
        self.counts = PredictionCounts(
            *(
                registry.child(spec, *here, labels.router_id)
                for spec in (_EXPIRED, _PRUNED, _LRU_EVICTED, _LRU_EVICTIONS)
            )
        )
        registry.child(_CONFIGURED_POLICY, *here, policy, labels.router_id).value = 1
        for spec, read in (
            (_LRU_LEASES, self.leases),
            (_LRU_FALLBACKS, self.fallbacks),
            (_PREDICTED_MEMORY_BYTES, self.memory_bytes),
        ):
            registry.child(spec, *here, labels.router_id).function = read

    def add_slot(self, slot: int, capacity_blocks: int | None) -> None:
        """Add a slot; under ``lru`` one of unknown capacity falls back to ``ttl``."""
        bounded = self._lru and bool(capacity_blocks)
        self._slots.add(slot)
        self._recency.open(slot, bounded)
        if bounded and capacity_blocks is not None:
            self._capacities[slot] = capacity_blocks
            self._shrink(slot, STEP_BLOCKS)

    def drop_slot(self, slot: int) -> None:
        """Remove a slot, if it was added; the caller clears it in the index."""
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
        """Predict the blocks of a prompt sent to ``slot``, or renew their time."""
        if not len(chained) or slot not in self._slots:
            return
        self._index.store(slot, None, chained, hashes)
        if request_id is None or slot not in self._capacities:
            self._recency.touch(slot, chained, now_s)
        else:
            # An id that is routed again must not leave the blocks of its first worker pinned.
            self.ended(request_id, now_s)
            self._leases[request_id] = slot, self._recency.pin(slot, chained, now_s)
        if slot in self._capacities:
            self._shrink(slot, STEP_BLOCKS + len(chained))  # more than was added: it converges
        # Hysteresis: prune from the limit down to the target, a bounded step with each decision.
        self._pruning |= self._recency.blocks() > self._max_blocks
        if self._pruning:
            self._prune(STEP_BLOCKS + len(chained))

    def ended(self, request_id: str, now_s: float) -> None:
        """Release the blocks of an ended request (``lru``); they become its newest."""
        lease_entry = self._leases.pop(request_id, None)
        if lease_entry is not None:
            slot, lease = lease_entry
            self._recency.release(lease, now_s)
            self._shrink(slot, STEP_BLOCKS)

    def expire(self, now_s: float) -> int:
        """Drop blocks last used more than the TTL ago; return how many. O(1) if none.

        A result of ``STEP_BLOCKS`` means that there may be more.
        """
        dropped = self._drop(self._recency.age(now_s - self._ttl_s, STEP_BLOCKS))
        self.counts.expired.value += dropped
        return dropped

    def blocks(self) -> int:
        """Return the number of predicted (block, slot) pairs."""
        return self._recency.blocks()

    def leases(self) -> int:
        """Return the number of running requests that hold their blocks (``lru``)."""
        return self._recency.leases()

    def fallbacks(self) -> int:
        """Return the number of slots under ``lru`` without a known capacity."""
        return len(self._slots) - len(self._capacities) if self._lru else 0

    def memory_bytes(self) -> int:
        """Return the bytes held, without the index."""
        return self._recency.memory_bytes() + _LEASE_BYTES * len(self._leases)

    def _drop(self, chains: list[tuple[int, array[int]]]) -> int:
        for slot, blocks in chains:
            self._index.remove(slot, blocks)
        return sum(len(blocks) for _, blocks in chains)

    def _shrink(self, slot: int, most: int) -> None:
        """Evict down to the slot's capacity; blocks of running requests stay."""
        excess = self._recency.blocks_of(slot) - self._capacities[slot]
        if excess <= 0:
            return
        dropped = self._drop(self._recency.evict(slot, min(excess, most)))
        self.counts.evicted.value += dropped
        self.counts.evictions.value += dropped > 0

    def _prune(self, most: int) -> None:
        """Prune towards the target, the oldest blocks of all slots first; pinned blocks stay."""
        excess = self._recency.blocks() - self._target_blocks
        dropped = self._drop(self._recency.prune(min(excess, most)))
        self.counts.pruned.value += dropped
        self._pruning = dropped > 0 and self._recency.blocks() > self._target_blocks

    def _check(self) -> None:
        self._recency._check()
        blocks = sum(self._recency.blocks_of(slot) for slot in self._slots)
        assert self._recency.blocks() == blocks == self._index.blocks()
        assert self._recency.leases() == len(self._leases)
        assert all(self._recency.has_own_list(slot) for slot in self._capacities)


class OptimisticCache:
    """Predictions beside KV events: blocks of decisions count as cached for ``ttl_s``.

    A worker reports a block once it is computed. Until then a burst of prompts with one prefix
    looks new to every worker, and would be spread over all. The predictions have an index of their
    own, so that an event never removes them nor they a reported block. At most ``max_blocks``
    (block, slot) pairs, the oldest are dropped first. Slots are those of the worker pool.
    """

    def __init__(self, ttl_s: float, max_blocks: int, prune_ratio: float) -> None:
        self._index = RadixTree()
        self._predicted = PredictedCache(self._index, ttl_s, max_blocks, prune_ratio)
        self._depths = array("I")

    def export(self, registry: Registry, labels: RouterLabels) -> None:
        """Export the size."""
        here = labels.component, labels.namespace, labels.router_id
        registry.child(_PREDICTED_MEMORY_BYTES, *here).function = self.memory_bytes

    def add_slot(self, slot: int) -> None:
        """Add a slot."""
        for number in range(self._index.capacity(), slot + 1):
            self._index.slot(number, 0)  # the lowest free slot: the same number as in the pool
        self._depths = array("I", bytes(4 * self._index.capacity()))
        self._predicted.add_slot(slot, None)

    def drop_slot(self, slot: int) -> None:
        """Remove a slot with its blocks. O(its blocks)."""
        self._predicted.drop_slot(slot)
        if slot < self._index.capacity():
            self._index.clear(slot)

    def routed(self, slot: int, chained: array[int], hashes: array[int], now_s: float) -> None:
        """Predict the blocks of a prompt sent to ``slot``. O(blocks)."""
        self._predicted.routed(None, slot, chained, hashes, now_s)

    def raise_into(self, hashes: array[int], depths: array[int], now_s: float) -> None:
        """Raise ``depths[slot]`` to the leading blocks predicted there. O(depth + slots)."""
        self._predicted.expire(now_s)
        if not self._index.match_into(hashes, self._depths):
            return
        for slot, depth in enumerate(self._depths):
            if depth > depths[slot]:
                depths[slot] = depth

    def blocks(self) -> int:
        """Return the number of predicted (block, slot) pairs."""
        return self._predicted.blocks()

    def memory_bytes(self) -> int:
        """Return the bytes held, with the index."""
        return self._predicted.memory_bytes() + self._index.memory_bytes()

    def _check(self) -> None:
        self._predicted._check()
        assert [slot for _, _, slot in self._index.slots()] == list(range(self._index.capacity()))


def make_predicted_cache(settings: RouterSettings, index: RadixTree) -> PredictedCache:
    """Return a prediction of the caches of workers without KV events, as the settings bound it."""
    lru = settings.approximate_cache_policy == "lru"
    limit = settings.max_index_blocks if lru else settings.max_tree_size
    return PredictedCache(index, settings.ttl_s, limit, settings.prune_target_ratio, lru)


def make_optimistic_cache(settings: RouterSettings) -> OptimisticCache | None:
    """Return the optimistic cache of the settings; None without one or without KV events."""
    if settings.predicted_ttl_s is None or not settings.uses_index or settings.predicts:
        return None
    return OptimisticCache(
        settings.predicted_ttl_s, settings.max_tree_size, settings.prune_target_ratio
    )
