"""The price of computing again what another worker has: it pushes something else out of a cache.

A block that is cached twice leaves room for one less, as long as it stays. The cost of spec 3.1
sees only what this prompt has to compute now. The price grows with the prefix, demand does not
lower it: alone, it would queue thousands of prompts of one hot document at a single worker. So
copies follow the ski-rental rule: queueing is the rent, the copy is the purchase, and once enough
rent has been paid the next prompt makes a copy.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from math import inf
from typing import NamedTuple

from dynamo.router.caches.cached_blocks import CachedBlocks
from dynamo.router.cost import CostParams
from dynamo.router.prompt import HashedPrompt

__all__ = ["CopyOffer", "CopyPolicy", "duplicate_blocks"]

_LOSS_PER_PRICE = 0.25
"""Share of a copy's price that the prompts of a prefix must have lost before a copy is free.

Less than 1 because the queue keeps growing while the copy is computed. 0.1 to 0.5 behave alike
(docs/routing/measurements.md).
"""

_LOSS_HALF_LIFE_S = 10.0
"""A loss counts for half after this time: a copy pays only for a prefix that is in demand now."""

_MAX_PREFIXES = 4096
"""Prefixes with a recorded loss, about 250 bytes each; beyond, the least recently used is dropped.
"""

_MAX_COPIES_IN_PROGRESS = 64
"""Bounds what each decision has to look through; no free copy is offered beyond."""


class CopyOffer(NamedTuple):
    """The best place for another copy of a prompt's cached prefix of ``depth`` blocks.

    ``loss``: what this prompt and, fading, those before it lose by queueing instead of running on
    slot ``target`` as if it had the prefix, in units of cost. ``free``: those before it have lost
    enough, the copy has no price.
    """

    prefix: int
    depth: int
    target: int
    loss: float
    free: bool


class CopyPolicy:
    """Prices the copies of cached prefixes, and waives the price for prefixes that are in demand.

    Deterministic; time is handed in. Holds at most ``_MAX_PREFIXES`` losses.
    """

    def __init__(self) -> None:
        self._losses: OrderedDict[int, tuple[float, float]] = OrderedDict()
        self._in_progress: dict[str, tuple[int, int, int]] = {}

    def add_prices(
        self,
        params: CostParams,
        slots: array[int],
        held: CachedBlocks,
        best_overlap: float,
        prompt: HashedPrompt,
        costs: array[float],
        now_s: float,
    ) -> CopyOffer | None:
        """Raise ``costs[i]`` of ``slots[i]`` by what it lacks of ``best_overlap``.

        Each such block costs ``duplicate_cost`` blocks of prefill, times the share of the prompt
        that is cached there: a prompt that is mostly new goes where there is time. Where a copy is
        free, its target gets the cost that it would have with the prefix. Returns None where no
        other worker would be cheaper even with a copy. Records nothing. O(slots).
        """
        weights = params.weights
        price = weights.prefill_scale * _price(params, best_overlap, prompt.blocks)
        if not price:
            return None
        least = unpriced = with_copy = inf
        target, lacking = -1, 0.0
        for place, slot in enumerate(slots):
            cost = priced = costs[place]
            missing = best_overlap - held.effective(weights, slot)
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
        """Record where a prompt went that had an ``offer``. O(1)."""
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
        """Slot and blocks of each copy of this prompt's beginning that is being computed.

        Its worker counts as a holder: the next prompts queue there or make a copy elsewhere.
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
        """The prefill of the request has ended, or the request has; unknown ids are ignored."""
        self._in_progress.pop(request_id, None)

    def drop_slot(self, slot: int) -> None:
        """The slot's worker is gone."""
        copies = self._in_progress
        self._in_progress = {name: copy for name, copy in copies.items() if copy[2] != slot}

    def _has_room(self) -> bool:
        return len(self._in_progress) < _MAX_COPIES_IN_PROGRESS


def duplicate_blocks(
    params: CostParams,
    slots: array[int],
    held: CachedBlocks,
    prompt_blocks: int,
    slot: int,
    free: bool,
) -> float:
    """What :meth:`CopyPolicy.add_prices` adds for one of ``slots``, as blocks of prefill. O(slots).

    Negative where the copy is ``free``: the slot counts as if it had the prefix.
    """
    best_overlap = held.best_overlap(params.weights, slots)
    lacking = max(best_overlap - held.effective(params.weights, slot), 0.0)
    return -lacking if free else _price(params, best_overlap, prompt_blocks) * lacking


def _price(params: CostParams, best_overlap: float, prompt_blocks: int) -> float:
    return params.duplicate_cost * best_overlap / max(prompt_blocks, 1)
