"""What a worker remembers of its KV events, so that a router that missed some can ask. Spec 2.6.

The newest events stay in a bounded ring; the blocks that they leave behind stay in an index. A
question is answered from the ring where it reaches back far enough, else with a dump.
"""

from __future__ import annotations

import logging
from collections import deque

from dynamo._fast.radix import InvalidSequence, ParentNotFound, RadixTree
from dynamo.protocols.kv import (
    STORAGE_TIERS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvQuery,
    KvQueryAnswer,
)

__all__ = ["RING_EVENTS", "EventLog"]

RING_EVENTS = 1024
log = logging.getLogger(__name__)


class EventLog:
    """Numbers the events of one (worker, dp_rank), without a hole, from 1."""

    def __init__(self, dp_rank: int = 0, ring_events: int = RING_EVENTS) -> None:
        self.dp_rank = dp_rank
        self.last_event_id = 0
        self.refused = 0
        self._ring: deque[KvEvent] = deque(maxlen=ring_events)
        self._tree = RadixTree()

    def record(
        self,
        data: BlocksStored | BlocksRemoved | BlocksCleared,
        storage_tier: str = STORAGE_TIERS[0],
    ) -> KvEvent | None:
        """The event of this change, remembered; None (counted, logged) if it makes no sense.

        ``storage_tier`` is one of ``STORAGE_TIERS``.
        """
        try:
            self._apply(data, STORAGE_TIERS.index(storage_tier))
        except (ParentNotFound, InvalidSequence, _UnknownBlocks) as error:
            self.refused += 1
            log.warning("KV event of dp_rank %d dropped: %s", self.dp_rank, error)
            return None
        self.last_event_id += 1
        event = KvEvent(self.last_event_id, data, self.dp_rank, storage_tier)
        self._ring.append(event)
        return event

    def answer(self, query: KvQuery) -> KvQueryAnswer:
        """Events start..end inclusive, or a dump where the ring does not reach. O(answer)."""
        start, end = query.start_event_id, query.end_event_id
        if start is None or not self._ring:
            return self.dump()
        if end is not None and end < start:
            return KvQueryAnswer("invalid_range", newest_available=self.last_event_id)
        if start > self.last_event_id:
            return KvQueryAnswer("too_new", newest_available=self.last_event_id)
        first = self._ring[0].event_id
        if start < first:
            return self.dump()
        last = self.last_event_id if end is None else min(end, self.last_event_id)
        events = [self._ring[i - first] for i in range(start, last + 1)]
        return KvQueryAnswer("events", events, last)

    def dump(self) -> KvQueryAnswer:
        """Stored events, parents first, that rebuild the index; ids count from 0. O(blocks)."""
        events = [
            KvEvent(
                number,
                BlocksStored(blocks.tobytes(), local.tobytes(), parent),
                rank,
                STORAGE_TIERS[tier],
            )
            for number, chain in enumerate(self._tree.dump_tiers())
            for _, rank, parent, blocks, local, tier in (chain,)
        ]
        return KvQueryAnswer("tree_dump", events, self.last_event_id)

    def blocks(self) -> int:
        """Blocks that the events leave behind, counted once per tier."""
        return self._tree.blocks()

    def _apply(self, data: BlocksStored | BlocksRemoved | BlocksCleared, tier: int) -> None:
        slot = self._tree.slot(0, self.dp_rank, tier)
        if isinstance(data, BlocksStored):
            self._store(slot, data, tier)
        elif isinstance(data, BlocksRemoved):
            self._tree.remove(slot, data.block_hashes)
        elif tier == 0:
            self._tree.clear_all(slot)
        else:
            self._tree.clear(slot)

    def _store(self, slot: int, data: BlocksStored, tier: int) -> None:
        if tier == 0 or data.tokens_hashes:
            self._tree.store(slot, data.parent_hash, data.block_hashes, data.tokens_hashes)
            return
        count = len(data.block_hashes) // 8
        if count and self._tree.adopt(slot, data.block_hashes) == count:
            raise _UnknownBlocks(f"none of {count} blocks is known on another tier")


class _UnknownBlocks(Exception):
    """Blocks without tokens that no other tier has, so that nobody can know what they hold."""
