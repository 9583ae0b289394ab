"""The cost of the kv mode in seconds: what it knows of the pool, and of prefixes in demand.

    wait + work + own * least + others * added - min(rent, (1 + others) * added)
        + full + lost + running

``wait`` is the time until the worker begins with the prompt, ``work`` the time to compute what it
has not cached: the ``least`` of all candidates, and what is ``added`` here. A busy pool makes the
added work of one prompt the wait of those after it: ``others`` is how much. The rest has to be done
somewhere; ``own`` is how much those wait that come to this worker. The last three are what it costs
those that will wait for blocks, those whose blocks it evicts, and those that generate.
``dynamo._fast.seconds`` adds the terms; this module has the time of the pool and what prefixes have
paid. docs/routing.md has a table of the terms. Pure.

A prefix earns a copy as one rents before one buys: queueing is the rent, the copy is the purchase.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict

from dynamo._fast.scoring import highest
from dynamo._fast.seconds import SecondsCost
from dynamo.router.caches.prompt import CachedBlocks, HashedPrompt

TERMS = 4
"""Of each candidate."""
_FIRST_USE = 0.8
"""Assumed at the start: a router that has just started must not fill all caches alike."""
_FIRST_S = 15.0
_RENT_HALF_LIFE_S = 10.0
"""A copy pays off only for a prefix that is in demand now."""
_MAX_PREFIXES = 4096
"""Prefixes with a recorded rent, about 250 bytes each. The least recently used one is dropped."""
_HELD_S = 5.0
"""How long a request holds its blocks, until some have ended."""
_HELD_SHARE = 0.05
_STALL = 0.1
"""Share of a prefill for which it stops each request that generates on the same worker."""


class Seconds:
    """Weighs prompts in seconds. Time is a parameter.

    ``weights`` are the shares of a block's work that host memory, disk and a shared cache save;
    ``terms`` are those of the last candidates, by index: wait, work, others and running.
    """

    def __init__(self, block_size: int, weights: tuple[float, float, float]) -> None:
        self.slots = SecondsCost()
        self._block_size = block_size
        self._weights = weights
        self._rents: OrderedDict[int, tuple[float, float]] = OrderedDict()
        self._began_s: float | None = None
        self._held_s = _HELD_S
        self._held = 0
        self._others = self._rent = self._least_wait_s = self._least_work_s = 0.0
        self.resize(16)

    def resize(self, width: int) -> None:
        """Make the terms long enough for ``width`` slots."""
        self.terms = array("d", bytes(8 * TERMS * width))

    def weigh(
        self,
        slots: array[int],
        cached: CachedBlocks,
        prompt: HashedPrompt,
        decode_blocks: array[int],
        costs: array[float],
    ) -> None:
        """Write the cost of each slot to ``costs``, by index, and set the prompt's best overlap."""
        now_s = prompt.matched_s
        self._rent = 0.0
        self._held = min(highest(cached.device), len(prompt.chained))
        if self._held and self._rents:
            paid = self._rents.get(prompt.chained[self._held - 1])
            if paid is not None:
                self._rent = paid[0] * 0.5 ** ((now_s - paid[1]) / _RENT_HALF_LIFE_S)
        totals = self.slots.costs(
            slots,
            now_s,
            prompt.isl_tokens,
            self._block_size,
            self._weights,
            self._assumed_use(now_s),
            self._rent,
            self._held_s,
            _STALL,
            decode_blocks,
            costs,
            self.terms,
            cached.device,
            cached.host,
            cached.disk,
            cached.shared,
        )
        prompt.best_overlap, self._least_wait_s, self._least_work_s, self._others = totals

    def routed(
        self, index: int, slots: array[int], cached: CachedBlocks, prompt: HashedPrompt
    ) -> float:
        """Count the work at the chosen index, and the rent that the prefix has paid.

        Returns the expected time to the first token.
        """
        now_s, slot = prompt.matched_s, slots[index]
        wait_s, work_s = self.terms[TERMS * index], self.terms[TERMS * index + 1]
        slowness = self.slots.send(
            slot, prompt.chained, self._held, cached.device[slot], work_s, now_s
        )
        if self._held:
            added_s = work_s - self._least_work_s * slowness
            # The rent: the wait beyond the shortest one, less what the added work costs all.
            paid = wait_s - self._least_wait_s - (1.0 + self._others) * added_s
            self._pay(prompt.chained[self._held - 1], paid, now_s)
        return wait_s + work_s

    def ended(self, held_s: float) -> None:
        """Count a request that held its blocks for ``held_s``."""
        # A moving average over about 20 requests, which is 1 / _HELD_SHARE.
        self._held_s += _HELD_SHARE * (held_s - self._held_s)

    def _pay(self, prefix: int, paid: float, now_s: float) -> None:
        rent = self._rent + paid
        if rent <= 0.0:
            # A rent at the time of the decision means an entry.
            if self._rent:
                del self._rents[prefix]
            return
        self._rents[prefix] = rent, now_s
        self._rents.move_to_end(prefix)
        if len(self._rents) > _MAX_PREFIXES:
            self._rents.popitem(last=False)

    def _assumed_use(self, now_s: float) -> float:
        """The share of the time that prompts took before the first one came."""
        if self._began_s is None:
            self._began_s = now_s
        return _FIRST_USE * math.exp(min(self._began_s - now_s, 0.0) / _FIRST_S)
