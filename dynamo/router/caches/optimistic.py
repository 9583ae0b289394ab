"""Prompts that were routed a moment ago, beside the KV events: what workers will soon tell of.

A worker tells of a block when it has computed it. Until then a burst of prompts with one beginning
looks new to every worker, and is spread. Pure: time is handed in. Spec 2.5.
"""

from __future__ import annotations

from array import array

from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.router.caches.predicted import PredictedCache

__all__ = ["OptimisticCache", "make_optimistic_cache"]


class OptimisticCache:
    """Blocks of decisions, believed on the chosen slot for ``ttl_s``; then only events count.

    At most ``max_blocks`` (block, slot) pairs, the oldest go first. Slots are those of the fleet.
    """

    def __init__(self, ttl_s: float, max_blocks: int, prune_ratio: float) -> None:
        self._index = RadixTree()
        self._believed = PredictedCache(self._index, ttl_s, max_blocks, prune_ratio)
        self._depths = array("I")

    def add_slot(self, slot: int) -> None:
        """A slot can be chosen."""
        for one in range(self._index.capacity(), slot + 1):
            self._index.slot(one, 0)  # the lowest free one: the same number
        self._depths = array("I", bytes(4 * self._index.capacity()))
        self._believed.add_slot(slot, None)

    def drop_slot(self, slot: int) -> None:
        """The slot's worker is gone. O(its blocks)."""
        self._believed.drop_slot(slot)
        if slot < self._index.capacity():
            self._index.clear(slot)

    def routed(self, slot: int, chained: array[int], hashes: array[int], now_s: float) -> None:
        """A prompt of these blocks goes to ``slot``. O(blocks)."""
        self._believed.routed(None, slot, chained, hashes, now_s)

    def raise_into(self, hashes: array[int], depths: array[int], now_s: float) -> None:
        """Raise ``depths[slot]`` to the leading blocks believed there. O(depth + slots)."""
        self._believed.expire(now_s)
        if not self._index.match_into(hashes, self._depths):
            return
        for slot, depth in enumerate(self._depths):
            if depth > depths[slot]:
                depths[slot] = depth

    def blocks(self) -> int:
        """(block, slot) pairs believed."""
        return self._believed.blocks()

    def memory_bytes(self) -> int:
        """Bytes held, index and all."""
        return self._believed.memory_bytes() + self._index.memory_bytes()

    def _check(self) -> None:
        self._believed._check()
        assert [slot for _, _, slot in self._index.slots()] == list(range(self._index.capacity()))


def make_optimistic_cache(settings: RouterSettings) -> OptimisticCache | None:
    """What the settings ask for: only where events are followed."""
    if settings.predicted_ttl_s is None or not settings.uses_index or settings.predicts:
        return None
    return OptimisticCache(
        settings.predicted_ttl_s, settings.max_tree_size, settings.prune_target_ratio
    )
