"""The face of every router mode: pick a worker now, tell how the request went, free its load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.eligibility.eligibility_filter import EligibilityFilter
from dynamo.router.worker_pool import WorkerPool

__all__ = ["Decision", "Picker"]


class Decision(NamedTuple):
    """Where a request goes. ``overlap_blocks`` of its ``prompt_blocks`` full blocks are there."""

    worker_id: int
    dp_rank: int
    overlap_blocks: int = 0
    prompt_blocks: int = 0


class Picker(Protocol):
    """Synchronous and cheap; everything but ``pick`` may be repeated and ignores unknown ids."""

    worker_pool: WorkerPool
    eligibility: EligibilityFilter

    def pick(
        self,
        request_id: str | None,
        tokens: Tokens,
        *,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
    ) -> Decision:
        """Choose a worker and book its load under ``request_id`` (None: only ask).

        Raises NoInstances, Overloaded, or InvalidArgument for what the request itself got wrong.
        """
        ...

    def mark_prefill_complete(self, request_id: str) -> None:
        """The first token is here: the prompt is no load any more."""
        ...

    def add_output_tokens(self, request_id: str, count: int) -> None:
        """``count`` more tokens were generated."""
        ...

    def add_reused_tokens(self, tokens: int) -> None:
        """An engine said that it took ``tokens`` of some prompt from its cache."""
        ...

    def free(self, request_id: str) -> None:
        """The request has ended, however it did."""
        ...

    def add_worker(self, worker_id: int, config: RuntimeConfig, device_type: str = "cpu") -> None:
        """A worker appeared, or its configuration changed."""
        ...

    def remove_worker(self, worker_id: int) -> None:
        """A worker is gone: no request goes there from now on, its load is dropped."""
        ...
