"""The price of a duplicate: computing a prefix that another worker has cached evicts other blocks.

A block that is cached twice takes the space of another one for as long as it stays. Dynamo's
cost includes only the work of this prompt. The price grows with the prefix, and demand does not
lower it: alone, it would queue thousands of prompts of one hot document at a single worker. So
copies follow the ski-rental rule. Queueing is the rent, the copy is the purchase: once the prompts
of a prefix have paid enough rent, the next one makes a copy.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from math import inf
from typing import NamedTuple

from dynamo.router.caches.cached_blocks import CachedBlocks
from dynamo.router.kv_mode.cost import CostParams, duplicate_price
from dynamo.router.kv_mode.prompt import HashedPrompt

_LOSS_PER_PRICE = 0.25
"""Share of a copy's price that the prompts of a prefix must have lost before a copy is free.

Less than 1 because the queue keeps growing while the copy is computed. 0.1 to 0.5 behave alike
(docs/routing/measurements.md).
"""

_LOSS_HALF_LIFE_S = 10.0
"""A loss counts half after this time: a copy pays off only for a prefix that is in demand now."""

_MAX_PREFIXES = 4096
"""Prefixes with a recorded loss, about 250 bytes each. The least recently used one is dropped."""

_MAX_COPIES_IN_PROGRESS = 64
"""Bounds the search of each decision; no free copy is offered above it."""


class CopyOffer(NamedTuple):
    """The best place for another copy of a prompt's cached prefix of ``depth`` blocks.

    ``loss``: the cost of queueing instead of running on slot ``target`` as if it had the prefix,
    summed over this prompt and, decayed, those before it. ``free``: those before it have lost
    enough, so the copy has no price.
    """

    prefix: int
    depth: int
    target: int
    loss: float
    free: bool


class CopyPolicy:
    """Prices copies of cached prefixes, and waives the price for prefixes that are in demand.

    Deterministic; time is a parameter. Stores at most ``_MAX_PREFIXES`` losses.
    """

    def __init__(self) -> None:
        self._losses: OrderedDict[int, tuple[float, float]] = OrderedDict()
        self._in_progress: dict[str, tuple[int, int, int]] = {}

    def add_prices(
        self,
        params: CostParams,
        slots: array[int],
        cached: CachedBlocks,
        prompt: HashedPrompt,
        costs: array[float],
    ) -> CopyOffer | None:
        """Raise ``costs[i]`` by the blocks that ``slots[i]`` lacks of the prompt's best overlap.

        Each such block costs ``duplicate_cost`` blocks of prefill, times the share of the prompt
        that is cached at best: a prompt that is mostly new goes where the load is least. A free
        copy gives its target the cost that it would have with the prefix. Returns None where no
        other slot would be cheaper even with a copy. Records nothing. O(slots).
        """
        best_overlap, now_s = prompt.best_overlap, prompt.begun_s
        weights = params.weights
        price = weights.prefill_scale * duplicate_price(params, best_overlap, prompt.blocks)
        if not price:
            return None
        # ``least`` is the cost of the cheapest slot, ``unpriced`` the same without its price;
        # ``with_copy`` is the least cost that a slot without the prefix would have with it.
        least = unpriced = with_copy = inf
        target, lacking = -1, 0.0
        for place, slot in enumerate(slots):
            cost = priced = costs[place]
            missing = best_overlap - cached.effective(weights, slot)
            if missing > 0:
                priced = costs[place] = cost + price * missing
                if cost - weights.prefill_scale * missing < with_copy:
                    with_copy = cost - weights.prefill_scale * missing
                    target, lacking = place, missing
            if priced < least:
                least, unpriced = priced, cost
        if unpriced <= with_copy or not prompt.chained:
            return None
        depth = min(max(int(best_overlap), 1), len(prompt.chained))
        prefix = prompt.chained[depth - 1]
        lost, at_s = self._losses.get(prefix, (0.0, now_s))
        lost *= 0.5 ** ((now_s - at_s) / _LOSS_HALF_LIFE_S)
        free = lost >= _LOSS_PER_PRICE * price * lacking and self._has_room()
        if free:
            costs[target] = max(with_copy, 0.0)
        return CopyOffer(prefix, depth, slots[target], lost + unpriced - with_copy, free)

    def routed(self, request_id: str, slot: int, offer: CopyOffer, now_s: float) -> None:
        """Record the chosen slot of a prompt with an ``offer``. O(1)."""
        losses = self._losses
        if slot == offer.target:
            losses.pop(offer.prefix, None)
            if self._has_room():
                self._in_progress[request_id] = offer.prefix, offer.depth, slot
            return
        losses[offer.prefix] = offer.loss, now_s
        losses.move_to_end(offer.prefix)
        if len(losses) > _MAX_PREFIXES:
            losses.popitem(last=False)

    def in_progress(self, chained: array[int]) -> list[tuple[int, int]]:
        """Slot and blocks of each copy of a prefix of this prompt that is being computed.

        These slots count as having the prefix: the next prompts queue there, or make another copy.
        """
        if not self._in_progress:
            return []
        blocks = len(chained)
        return [
            (slot, depth)
            for prefix, depth, slot in self._in_progress.values()
            if depth <= blocks and chained[depth - 1] == prefix
        ]

    def ended(self, request_id: str) -> None:
        """Forget the copy of a request whose prefill, or which itself, has ended."""
        self._in_progress.pop(request_id, None)

    def drop_slot(self, slot: int) -> None:
        """Forget the copies on the slot of a removed worker."""
        copies = self._in_progress
        self._in_progress = {name: copy for name, copy in copies.items() if copy[2] != slot}

    def _has_room(self) -> bool:
        return len(self._in_progress) < _MAX_COPIES_IN_PROGRESS
