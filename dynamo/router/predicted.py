"""What workers probably hold, told by the router's own decisions: kv mode without KV events.

Every decision stores the prompt's blocks under the chosen slot in the prefix index. What becomes of
them there nobody says, so they are forgotten by age (``ttl``), or when the worker's own capacity
is reached (``lru``). Pure: time is handed in. Spec 2.5.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo._fast.radix import RadixTree
from dynamo.observability.metrics import Counter

__all__ = ["PredictedCache", "PredictionCounts"]

_STALE_FACTOR = 4
_STALE_FLOOR = 65_536
"""Listed blocks are compacted beyond ``_STALE_FACTOR`` times the live ones and this floor."""

_BLOCK_BYTES = 140
"""Measured: an entry of ``_held`` with its integer and its share of the table."""


class _Visit(NamedTuple):
    """One decision. It owns those of its ``blocks`` that no later one has touched."""

    number: int
    slot: int
    touched_s: float
    blocks: array[int]


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
    the oldest visit stands in front of its line. ``max_blocks`` bounds (block, slot) pairs; beyond
    it the oldest go until ``prune_ratio`` of it is left. Requests of one instant go in order of
    arrival, each deepest block first. A block is never
    forgotten before what hangs under it: touching a block touches all before it.

    Under ``lru`` a slot with a known capacity has a line of its own: its visits do not age, and are
    held back while their request runs. Costs: O(blocks of the prompt) a decision, amortised.
    """

    def __init__(
        self, index: RadixTree, ttl_s: float, max_blocks: int, prune_ratio: float, lru: bool = False
    ) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._target_blocks = int(max_blocks * prune_ratio)
        self._lru = lru
        self._held: dict[int, dict[int, int]] = {}
        self._aging: deque[_Visit] = deque()
        self._lines: dict[int, deque[_Visit]] = {}
        self._capacities: dict[int, int] = {}
        self._running: dict[str, tuple[_Visit, array[int]]] = {}
        self._number = 0
        self._listed = 0
        self._blocks = 0
        self.counts = PredictionCounts()

    def add_slot(self, slot: int, capacity_blocks: int | None) -> None:
        """A slot can be chosen; under ``lru`` one of unknown capacity falls back to ``ttl``."""
        self._held.setdefault(slot, {})
        if self._lru and capacity_blocks:
            self._capacities[slot] = capacity_blocks
            self._lines.setdefault(slot, deque())
            self._shrink(slot)

    def drop_slot(self, slot: int) -> None:
        """The slot's worker is gone, and with it (from the index too) its blocks."""
        self._blocks -= len(self._held.pop(slot, ()))
        self._capacities.pop(slot, None)
        for visit in self._lines.pop(slot, ()):
            self._listed -= len(visit.blocks)
        gone = [key for key, (visit, _) in self._running.items() if visit.slot == slot]
        for key in gone:
            del self._running[key]

    def routed(
        self,
        request_id: str | None,
        slot: int,
        chained: array[int],
        hashes: array[int],
        now_s: float,
    ) -> None:
        """A prompt of these blocks goes to ``slot``: they will be there, for a fresh time."""
        if not len(chained) or slot not in self._held:
            return
        self._index.store(slot, None, chained, hashes)
        visit = self._own(slot, chained, now_s)
        if slot not in self._lines:
            self._line_up(self._aging, visit)
        elif request_id is None:
            self._line_up(self._lines[slot], visit)
        else:
            self._running[request_id] = visit, hashes
        if slot in self._lines:
            self._shrink(slot)
        if self._blocks > self._max_blocks:
            self._prune()
        if self._listed > _STALE_FACTOR * self._blocks + _STALE_FLOOR:
            self._compact()

    def ended(self, request_id: str, now_s: float) -> None:
        """The request runs no more: under ``lru`` its blocks may go again, as the newest ones."""
        found = self._running.pop(request_id, None)
        if found is not None:
            visit, hashes = found
            self.routed(None, visit.slot, visit.blocks, hashes, now_s)

    def expire(self, now_s: float) -> int:
        """Forget what was last touched more than the TTL ago; how many blocks. O(1) if none."""
        before_s = now_s - self._ttl_s
        dropped = 0
        while self._aging and self._aging[0].touched_s <= before_s:
            dropped += self._forget_front(self._aging)
        self.counts.expired.value += dropped
        return dropped

    def blocks(self) -> int:
        """How many (block, slot) pairs are believed to be cached."""
        return self._blocks

    def leases(self) -> int:
        """How many running requests hold their blocks (``lru``)."""
        return len(self._running)

    def fallbacks(self) -> int:
        """How many slots age although ``lru`` was asked for."""
        return len(self._held) - len(self._lines) if self._lru else 0

    def memory_bytes(self) -> int:
        """Bytes held beside the index, estimated."""
        running = sum(len(visit.blocks) for visit, _ in self._running.values())
        return _BLOCK_BYTES * self._blocks + 8 * self._listed + 16 * running

    def _own(self, slot: int, chained: array[int], now_s: float) -> _Visit:
        self._number += 1
        number, held = self._number, self._held[slot]
        before = len(held)
        for block in chained:
            held[block] = number
        self._blocks += len(held) - before
        return _Visit(number, slot, now_s, chained)

    def _line_up(self, line: deque[_Visit], visit: _Visit) -> None:
        line.append(visit)
        self._listed += len(visit.blocks)

    def _forget_front(self, line: deque[_Visit], most: int | None = None) -> int:
        """Undo the oldest visit, or only ``most`` blocks of it, deepest first; how many."""
        visit = line.popleft()
        self._listed -= len(visit.blocks)
        held = self._held.get(visit.slot)
        if held is None:
            return 0
        number = visit.number
        owned = array("Q", [block for block in visit.blocks if held.get(block) == number])
        if most is not None and most < len(owned):
            kept = owned[: len(owned) - most]
            owned = owned[len(owned) - most :]
            line.appendleft(visit._replace(blocks=kept))
            self._listed += len(kept)
        if len(owned):
            for block in owned:
                del held[block]
            self._blocks -= len(owned)
            self._index.remove(visit.slot, owned[::-1])
        return len(owned)

    def _shrink(self, slot: int) -> None:
        """Down to the slot's capacity, as far as running requests allow."""
        line, held = self._lines[slot], self._held[slot]
        excess = len(held) - self._capacities[slot]
        if excess <= 0 or not line:
            return
        self.counts.evictions.value += 1
        while excess > 0 and line:
            dropped = self._forget_front(line, excess)
            self.counts.evicted.value += dropped
            excess -= dropped

    def _prune(self) -> None:
        """Down to the target, the oldest first over all lines."""
        while self._blocks > self._target_blocks:
            lines = [line for line in self._all_lines() if line]
            if not lines:
                return  # all of it belongs to running requests
            oldest = min(lines, key=lambda line: line[0].number)
            excess = self._blocks - self._target_blocks
            self.counts.pruned.value += self._forget_front(oldest, excess)

    def _compact(self) -> None:
        """Drop from all lines what later visits have taken over."""
        self._listed = 0
        for line in self._all_lines():
            visits = [self._still_owned(visit) for visit in line]
            line.clear()
            for visit in visits:
                if len(visit.blocks):
                    self._line_up(line, visit)

    def _still_owned(self, visit: _Visit) -> _Visit:
        held = self._held.get(visit.slot, {})
        number = visit.number
        return visit._replace(
            blocks=array("Q", [block for block in visit.blocks if held.get(block) == number])
        )

    def _all_lines(self) -> Iterator[deque[_Visit]]:
        yield self._aging
        yield from self._lines.values()

    def _check(self) -> None:
        assert self._blocks == sum(map(len, self._held.values())) == self._index.blocks()
        assert self._listed == sum(len(v.blocks) for line in self._all_lines() for v in line)
        assert set(self._lines) == set(self._capacities)
        owned: set[tuple[int, int]] = set()
        for line in self._all_lines():
            numbers = [visit.number for visit in line]
            assert numbers == sorted(numbers)
            for visit in line:
                held = self._held.get(visit.slot, {})
                owned |= {(visit.slot, b) for b in visit.blocks if held.get(b) == visit.number}
        for visit, _ in self._running.values():
            held = self._held[visit.slot]
            owned |= {(visit.slot, b) for b in visit.blocks if held.get(b) == visit.number}
        assert len(owned) == self._blocks, "a block without a visit never goes"
