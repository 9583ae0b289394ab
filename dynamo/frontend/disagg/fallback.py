"""Requests that go without a prefill worker: by choice, for want of one, or not at all."""

from __future__ import annotations

import logging

from dynamo.config.router import RouterSettings
from dynamo.errors import DynamoError, Overloaded, Unavailable
from dynamo.frontend.disagg.metrics import PrefillMetrics
from dynamo.frontend.disagg.prefill_request import PrefillRequest
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing

__all__ = ["Fallback"]

log = logging.getLogger(__name__)


class Fallback:
    """Hands requests of ``model`` to ``dispatch`` as they are, or refuses them."""

    def __init__(
        self,
        model: str,
        block_size: int,
        settings: RouterSettings,
        metrics: PrefillMetrics,
        dispatch: Dispatch,
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._metrics = metrics
        self._dispatch = dispatch
        self._enforced = settings.enforce_disagg
        self._conditions = settings.conditions
        self._looks_at_caches = settings.uses_index

    def prefers(self, tokens: Tokens, routing: Routing | None, waiting: int) -> str:
        """Why a decode worker had better do all of it, while ``waiting`` others queue; or ""."""
        if self._conditions is None:
            return ""
        reason = self._conditions.local_reason(len(tokens), 0, waiting)
        if not reason and self._looks_at_caches:
            cached = self._cached(tokens, routing)
            reason = self._conditions.local_reason(len(tokens), cached, waiting)
        return reason

    def absent(self, missed: bool) -> None:
        """There is no prefill worker; ``missed``: there was one. Raises Unavailable if there has
        to be one."""
        if self._enforced:
            raise self._refusal("none is registered")
        if missed:
            self._metrics.fell_back("no_worker")

    def take(self, ticket: PrefillRequest, reason: str, error: DynamoError | None = None) -> None:
        """The decode worker computes the prompt itself, if it may."""
        if self._enforced:
            self.refuse(ticket, self._refusal(str(error or "the last one has left")))
            return
        if error is not None:
            log.warning("no prefill for %s (%s): %s", ticket.reservation_id, reason, error)
        self._metrics.fell_back(reason)
        ticket.job.leg.call.metrics.routed("aggregated")
        self._dispatch.decode_later(ticket.job)

    def refuse(self, ticket: PrefillRequest, error: DynamoError, by_worker: bool = False) -> None:
        """The client hears ``error``."""
        if isinstance(error, Overloaded):
            self._metrics.refused("overloaded")
        ticket.job.leg.call.fail(error, by_worker)

    def _cached(self, tokens: Tokens, routing: Routing | None) -> int:
        """Prompt tokens that the decode worker would find, if it tells what it has cached."""
        try:
            found = self._dispatch.picker.pick(None, tokens, routing=routing)
        except DynamoError:
            return 0  # decoding will say why
        return found.overlap_blocks * self._block_size

    def _refusal(self, why: str) -> Unavailable:
        self._metrics.refused("enforced")
        return Unavailable(
            f"No prefill worker can take a request for model `{self._model}` ({why}), and "
            "--enforce-disagg forbids serving it with decode workers alone. Please retry shortly."
        )
