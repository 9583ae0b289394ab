"""What workers probably hold, told by the router's own decisions: kv mode without KV events.

Every decision stores the prompt's blocks under the chosen slot in the prefix index. What becomes of
them there nobody says, so they are forgotten by age (``ttl``), or when the worker's own capacity
is reached (``lru``). Pure: time is handed in. Spec 2.5.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from dynamo._fast.radix import RadixTree
from dynamo.observability.metrics import Counter
from dynamo.router.visits import Visit, VisitLine

__all__ = ["STEP_BLOCKS", "PredictedCache", "PredictionCounts"]

STEP_BLOCKS = 4096
"""About so many blocks are forgotten in one call (a millisecond), the rest in later ones."""

_BLOCK_BYTES = 140
"""Measured (100 to 140): an entry of ``_held`` with its integer and its share of the table."""

_NOTHING: Mapping[int, int] = {}


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
        self._aging = VisitLine()
        self._lines: dict[int, VisitLine] = {}
        self._capacities: dict[int, int] = {}
        self._running: dict[str, tuple[Visit, array[int]]] = {}
        self._number = 0
        self._blocks = 0
        self._pruning = False
        self.counts = PredictionCounts()

    def add_slot(self, slot: int, capacity_blocks: int | None) -> None:
        """A slot can be chosen; under ``lru`` one of unknown capacity falls back to ``ttl``."""
        self._held.setdefault(slot, {})
        if self._lru and capacity_blocks:
            self._capacities[slot] = capacity_blocks
            self._lines.setdefault(slot, VisitLine())
            self._shrink(slot, self._lines[slot])

    def drop_slot(self, slot: int) -> None:
        """The slot's worker is gone, and with it (from the index too) its blocks."""
        self._blocks -= len(self._held.pop(slot, ()))
        self._capacities.pop(slot, None)
        self._lines.pop(slot, None)
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
        line = self._lines.get(slot, self._aging)
        if line is self._aging or request_id is None:
            line.append(visit)
        else:
            self._running[request_id] = visit, hashes
        if line is not self._aging:
            self._shrink(slot, line)
        owned = self._blocks if line is self._aging else len(self._held[slot])
        if line.listed > 4 * owned:
            line.tidy(2 * len(chained), self._owned)
        self._pruning |= self._blocks > self._max_blocks
        if self._pruning:
            self._prune(STEP_BLOCKS + len(chained))

    def ended(self, request_id: str, now_s: float) -> None:
        """The request runs no more: under ``lru`` its blocks may go again, as the newest ones."""
        found = self._running.pop(request_id, None)
        if found is not None:
            visit, hashes = found
            self.routed(None, visit.slot, visit.blocks, hashes, now_s)

    def expire(self, now_s: float) -> int:
        """Forget what was last touched more than the TTL ago; how many blocks. O(1) if none.

        Once the answer reaches ``STEP_BLOCKS`` there may be more.
        """
        before_s = now_s - self._ttl_s
        dropped = 0
        front = self._aging.front()
        while front is not None and front.touched_s <= before_s and dropped < STEP_BLOCKS:
            dropped += self._forget_front(self._aging)
            front = self._aging.front()
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
        listed = sum(line.listed for line in self._all_lines())
        return _BLOCK_BYTES * self._blocks + 8 * listed + 16 * running

    def _own(self, slot: int, chained: array[int], now_s: float) -> Visit:
        self._number += 1
        number, held = self._number, self._held[slot]
        before = len(held)
        for block in chained:
            held[block] = number
        self._blocks += len(held) - before
        return Visit(number, slot, now_s, chained)

    def _owned(self, visit: Visit) -> array[int]:
        held, number = self._held.get(visit.slot, _NOTHING), visit.number
        return array("Q", [block for block in visit.blocks if held.get(block) == number])

    def _forget_front(self, line: VisitLine, most: int = STEP_BLOCKS) -> int:
        """Undo the oldest visit, or only ``most`` blocks of it, deepest first; how many."""
        visit = line.pop_front()
        owned = self._owned(visit)
        if most < len(owned):
            line.push_front(visit._replace(blocks=owned[: len(owned) - most]))
            owned = owned[len(owned) - most :]
        if len(owned):
            held = self._held[visit.slot]
            for block in owned:
                del held[block]
            self._blocks -= len(owned)
            self._index.remove(visit.slot, owned[::-1])
        return len(owned)

    def _shrink(self, slot: int, line: VisitLine) -> None:
        """Down to the slot's capacity, as far as running requests allow."""
        held = self._held[slot]
        excess = len(held) - self._capacities[slot]
        if excess <= 0 or line.front() is None:
            return
        self.counts.evictions.value += 1
        while excess > 0 and line.front() is not None:
            dropped = self._forget_front(line, excess)
            self.counts.evicted.value += dropped
            excess -= dropped

    def _prune(self, most: int) -> None:
        """Towards the target, by at most ``most`` blocks, the oldest first over all lines."""
        excess = self._blocks - self._target_blocks
        left = min(excess, most)
        while left > 0:
            fronts = [(line.front(), line) for line in self._all_lines()]
            waiting = [(visit.number, line) for visit, line in fronts if visit is not None]
            if not waiting:
                break  # all of it belongs to running requests
            dropped = self._forget_front(min(waiting, key=itemgetter(0))[1], left)
            self.counts.pruned.value += dropped
            left -= dropped
        self._pruning = self._blocks > self._target_blocks

    def _all_lines(self) -> Iterator[VisitLine]:
        yield self._aging
        yield from self._lines.values()

    def _check(self) -> None:
        assert self._blocks == sum(map(len, self._held.values())) == self._index.blocks()
        assert set(self._lines) == set(self._capacities)
        owned: set[tuple[int, int]] = set()
        for line in self._all_lines():
            assert line.listed == sum(len(visit.blocks) for visit in line)
            numbers = [visit.number for visit in line]
            assert numbers == sorted(numbers)
            for visit in line:
                held = self._held.get(visit.slot, {})
                owned |= {(visit.slot, b) for b in visit.blocks if held.get(b) == visit.number}
        for visit, _ in self._running.values():
            held = self._held[visit.slot]
            owned |= {(visit.slot, b) for b in visit.blocks if held.get(b) == visit.number}
        assert len(owned) == self._blocks, "a block without a visit never goes"
