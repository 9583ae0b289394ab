"""The inputs and the outcome of one decision of the kv mode, for logs and tables."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from dynamo.errors import DynamoError
from dynamo.router.caches.cached_blocks import CachedBlocks
from dynamo.router.kv_mode.cost import CostBreakdown, CostParams, Load, breakdown
from dynamo.router.kv_mode.duplicates import duplicate_price
from dynamo.router.kv_mode.prompt import HashedPrompt


class DecisionSnapshot(NamedTuple):
    """Columns by slot; ``costs`` of the eligible ``slots`` only.

    ``chosen`` is None when ``error`` gives the reason why no slot was chosen. ``free_copy`` is the
    slot that may compute what others have cached without the price of a copy.
    """

    prompt: HashedPrompt
    params: CostParams
    slots: array[int]
    cached_blocks: CachedBlocks
    prefill: array[int]
    decode: array[int]
    costs: dict[int, float]
    chosen: int | None = None
    error: DynamoError | None = None
    free_copy: int | None = None

    def breakdown(self, slot: int, requests: int) -> CostBreakdown:
        """Return the terms of the cost of ``slot`` with ``requests`` running there. O(slots).

        Its prefill blocks include the price of duplicates.
        """
        tokens = self.prefill[slot]
        least = min((self.prefill[one] for one in self.slots), default=tokens)
        load = Load(tokens, max(tokens - least, 0), self.decode[slot], requests)
        cached = self.cached_blocks
        plain = breakdown(self.params, self.prompt.isl_tokens, cached.of(slot), load)
        if not self.params.duplicate_cost or not self.slots:
            return plain
        weights = self.params.weights
        best = cached.best_overlap(weights, self.slots)
        lacking = max(best - cached.effective(weights, slot), 0.0)
        # A free copy counts as if the slot had the prefix already.
        copies = (
            -lacking
            if slot == self.free_copy
            else lacking * duplicate_price(self.params, best, self.prompt.blocks)
        )
        return plain._replace(prefill_blocks=plain.prefill_blocks + copies)
