"""The price of computing again what another worker has: it pushes something else out of a cache.

A block that is cached twice leaves room for one less, as long as it stays. The cost of spec 3.1
sees only what this prompt has to compute now.
"""

from __future__ import annotations

from array import array

from dynamo.router.cost import Terms
from dynamo.router.holdings import Holdings

__all__ = ["add_duplicates", "duplicate_blocks"]


def add_duplicates(
    terms: Terms,
    slots: array[int],
    held: Holdings,
    most: float,
    prompt_blocks: int,
    costs: array[float],
) -> None:
    """Raise ``costs[i]`` of ``slots[i]`` by what it lacks of the ``most`` that one of them holds.

    Each such block costs ``duplicate_cost`` blocks of prefill, times the share of the prompt that
    is cached there: a prompt that is mostly new goes where there is time. O(slots).
    """
    weights = terms.weights
    price = weights.prefill_scale * _price(terms, most, prompt_blocks)
    if price:
        for place, slot in enumerate(slots):
            costs[place] += price * (most - held.effective(weights, slot))


def duplicate_blocks(
    terms: Terms, slots: array[int], held: Holdings, prompt_blocks: int, slot: int
) -> float:
    """The same for one of ``slots``, as blocks of prefill. O(slots)."""
    most = held.most(terms.weights, slots)
    lacking = most - held.effective(terms.weights, slot)
    return max(_price(terms, most, prompt_blocks) * lacking, 0.0)


def _price(terms: Terms, most: float, prompt_blocks: int) -> float:
    return terms.duplicate_cost * most / max(prompt_blocks, 1)
