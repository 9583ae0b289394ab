"""The interface of every router mode: pick a worker, report progress, free the load."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from typing import Any, NamedTuple, Protocol

import msgspec

from dynamo.observability.metrics import Counter
from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.eligibility.eligibility_filter import EligibilityFilter
from dynamo.router.explanation import Explanation
from dynamo.router.receipt import DecisionInputs
from dynamo.router.worker_pool import WorkerPool


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

    It may go ``among`` these workers only (None: any); others ``failed`` with it before. Its
    receipt is ``wanted``: of pools above 64 ranks it has the cheapest, not the chosen one alone.
    """

    among: Collection[int] | None = None
    failed: Collection[int] = ()
    wanted: bool = False

    def limit(self, routing: Routing | None) -> Routing | None:
        """Return ``routing`` with ``among`` as its allow-list."""
        if self.among is None:
            return routing
        return msgspec.structs.replace(routing or Routing(), allowed_worker_ids=list(self.among))


class Picker(Protocol):
    """Chooses workers and tracks their load. Synchronous and cheap.

    Everything but ``pick`` may be repeated and ignores unknown ids. ``weighs_overlap``: decisions
    depend on what workers have cached. ``tracks_output``: :meth:`add_output_tokens` changes the
    load. ``reused_tokens`` counts the prompt tokens that engines report as cached.
    """

    worker_pool: WorkerPool
    eligibility: EligibilityFilter
    reused_tokens: Counter
    weighs_overlap: bool
    tracks_output: bool

    def pick(
        self,
        request_id: str | None,
        tokens: Tokens,
        *,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        attempt: Attempt | None = None,
    ) -> Decision:
        """Choose a worker and book the load under ``request_id`` (None: book nothing).

        Raises NoInstances, Overloaded, or InvalidArgument for a mistake in the request.
        """
        ...

    def explain(
        self,
        tokens: Tokens,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        queued: Sized = (),
    ) -> Explanation:
        """Return what :meth:`pick` would weigh now, behind ``queued`` requests. Books nothing.

        Raises InvalidArgument for a bad ``override``, or in a mode that weighs nothing.
        """
        ...

    def mark_prefill_complete(self, request_id: str) -> None:
        """Drop the prompt from the load: its first token has arrived."""
        ...

    def add_output_tokens(self, request_id: str, count: int) -> None:
        """Count ``count`` more generated tokens."""
        ...

    def free(self, request_id: str, output_tokens: int = 0) -> None:
        """Drop the load of a request that has ended, in whatever way.

        ``output_tokens`` are those not reported by :meth:`add_output_tokens`.
        """
        ...

    def add_worker(self, worker_id: int, config: RuntimeConfig, device_type: str = "cpu") -> None:
        """Add a worker, or replace its configuration."""
        ...

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker and the load of its requests."""
        ...
