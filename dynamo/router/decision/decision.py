"""A decision, and what one attempt to place a request asks of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from dynamo.protocols.engine import Routing
from dynamo.router.decision.receipt import DecisionInputs


class Decision(msgspec.Struct, gc=False, frozen=True):
    """The chosen rank. It has ``overlap_blocks`` of the ``prompt_blocks`` full blocks cached.

    ``inputs`` is what was weighed, for a receipt; None of a decision that books nothing.
    """

    worker_id: int
    dp_rank: int
    overlap_blocks: int = 0
    prompt_blocks: int = 0
    inputs: DecisionInputs | None = None


class Attempt(NamedTuple):
    """What one attempt to place a request adds to the constraints of its client.

    It may go only to the workers that ``among`` returns when it is placed, which may be long after
    it was queued (None: to any); others ``failed`` with it before. Its receipt is ``wanted``: of
    pools above 64 ranks it has the cheapest, not the chosen one alone.
    """

    among: Callable[[], Collection[int]] | None = None
    failed: Collection[int] = ()
    wanted: bool = False

    def limit(self, routing: Routing | None) -> Routing | None:
        """Return ``routing`` with ``among`` as its allow-list."""
        if self.among is None:
            return routing
        return msgspec.structs.replace(routing or Routing(), allowed_worker_ids=list(self.among()))
