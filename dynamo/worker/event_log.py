"""The log of a worker's KV events, from which routers fetch events that they missed.

A bounded ring holds the newest events, an index the blocks that result from all of them. A query is
answered from the ring if it reaches back far enough, otherwise with a dump of the index.
"""

from __future__ import annotations

import logging
from collections import deque

from dynamo._fast.radix import InvalidSequence, ParentNotFound, RadixTree
from dynamo.protocols.kv import (
    STORAGE_TIERS,
    TIER_NUMBERS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvQuery,
    KvQueryAnswer,
)

__all__ = ["RING_EVENTS", "EventLog"]

RING_EVENTS = 1024
"""Events that the log keeps, and that one message holds at most."""

log = logging.getLogger(__name__)


class EventLog:
    """The events of one (worker, dp_rank), numbered from 1 without a gap."""

    def __init__(self, dp_rank: int = 0, ring_events: int = RING_EVENTS) -> None:
        self.dp_rank = dp_rank
        self.last_event_id = 0
        self.rejected = 0
        self._ring: deque[KvEvent] = deque(maxlen=ring_events)
        self._tree = RadixTree()

    def record(
        self,
        data: BlocksStored | BlocksRemoved | BlocksCleared,
        storage_tier: str = STORAGE_TIERS[0],
    ) -> KvEvent | None:
        """Store a change and return its event; None if the index rejects it (counted and logged).

        ``storage_tier`` is one of ``STORAGE_TIERS``.
        """
        # The index comes first: a change that it rejects gets no id, because routers would reject
        # it as well, and an id without an event would look like a lost one.
        try:
            self._apply(data, TIER_NUMBERS[storage_tier])
        except (ParentNotFound, InvalidSequence, _UnknownBlocks) as error:
            self.rejected += 1
            log.warning("dropped a KV event of dp_rank %d: %s", self.dp_rank, error)
            return None
        self.last_event_id += 1
        event = KvEvent(self.last_event_id, data, self.dp_rank, storage_tier)
        self._ring.append(event)
        return event

    def answer(self, query: KvQuery) -> KvQueryAnswer:
        """Return events start..end inclusive, or a dump if the ring is too short. O(answer)."""
        start, end = query.start_event_id, query.end_event_id
        if start is None or not self._ring:
            return self.dump()
        if end is not None and end < start:
            return KvQueryAnswer("invalid_range", newest_available=self.last_event_id)
        if start > self.last_event_id:
            return KvQueryAnswer("too_new", newest_available=self.last_event_id)
        first = self._ring[0].event_id  # ids have no gaps: event i is at position i - first
        if start < first:
            return self.dump()
        last = self.last_event_id if end is None else min(end, self.last_event_id)
        events = [self._ring[i - first] for i in range(start, last + 1)]
        return KvQueryAnswer("events", events, last)

    def dump(self) -> KvQueryAnswer:
        """Return events that rebuild the index, parents first; ids count from 0. O(blocks)."""
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
        """Count the blocks in the index, once per tier."""
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
        # Ids alone: the position in the tree comes from another tier. adopt() returns how many
        # have none; an event of which no block was adopted is useless to routers too.
        count = len(data.block_hashes) // 8
        if count and self._tree.adopt(slot, data.block_hashes) == count:
            raise _UnknownBlocks(f"no other tier has any of its {count} blocks")


class _UnknownBlocks(Exception):
    """Blocks without tokens that no other tier has: their content is undefined."""
