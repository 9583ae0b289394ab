"""What one decision of the kv mode weighs, kept for those who explain it."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from dynamo.errors import DynamoError
from dynamo.router.caches.cached_blocks import CachedBlocks
from dynamo.router.cost import CostBreakdown, CostParams, Load, parts
from dynamo.router.duplicates import duplicate_blocks
from dynamo.router.prompt import HashedPrompt

__all__ = ["DecisionSnapshot"]


class DecisionSnapshot(NamedTuple):
    """Columns by slot; ``costs`` of the eligible ``slots`` only.

    ``chosen`` is None when ``error`` says why there is none. ``free_copy`` is the slot that may
    compute what others hold without the price of a copy.
    """

    prompt: HashedPrompt
    params: CostParams
    slots: array[int]
    held: CachedBlocks
    prefill: array[int]
    decode: array[int]
    costs: dict[int, float]
    chosen: int | None = None
    error: DynamoError | None = None
    free_copy: int | None = None

    @property
    def overlaps(self) -> array[int]:
        """Leading blocks on the device."""
        return self.held.device

    def parts(self, slot: int, requests: int) -> CostBreakdown:
        """What the cost of ``slot`` consists of, ``requests`` running there. O(slots).

        Its prefill blocks have the price of duplicates in them.
        """
        tokens = self.prefill[slot]
        least = min((self.prefill[one] for one in self.slots), default=tokens)
        load = Load(tokens, max(tokens - least, 0), self.decode[slot], requests)
        found = parts(self.params, self.prompt.isl_tokens, self.held.of(slot), load)
        if not self.params.duplicate_cost or not self.slots:
            return found
        copies = duplicate_blocks(
            self.params, self.slots, self.held, self.prompt.blocks, slot, slot == self.free_copy
        )
        return found._replace(prefill_blocks=found.prefill_blocks + copies)
