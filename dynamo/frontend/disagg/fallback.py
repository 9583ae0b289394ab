"""Serve a request without a prefill worker: by choice, because none can take it, or refuse it."""

from __future__ import annotations

import logging

from dynamo.config.router import RouterSettings
from dynamo.errors import DynamoError, Overloaded, Unavailable
from dynamo.frontend.disagg.metrics import PrefillMetrics
from dynamo.frontend.disagg.prefill_request import PrefillRequest
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing

log = logging.getLogger(__name__)


class Fallback:
    """Pass requests for ``model`` to ``dispatch`` without prefill, or refuse them."""

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
        self._uses_index = settings.uses_index

    def local_reason(self, tokens: Tokens, routing: Routing | None, queued: int) -> str:
        """Why a decode worker should compute this prompt while ``queued`` others wait; "" if a
        prefill worker should."""
        if self._conditions is None:
            return ""
        reason = self._conditions.local_reason(len(tokens), 0, queued)
        if not reason and self._uses_index:
            cached = self._cached_tokens(tokens, routing)
            reason = self._conditions.local_reason(len(tokens), cached, queued)
        return reason

    def no_worker(self, expected: bool) -> None:
        """Count a request for which no prefill worker is registered; ``expected``: one was before.

        Raises Unavailable if decode-only serving is forbidden.
        """
        if self._enforced:
            raise self._refusal("none is registered")
        if expected:
            self._metrics.fell_back("no_worker")

    def decode_only(
        self, prefill: PrefillRequest, reason: str, error: DynamoError | None = None
    ) -> None:
        """Have the decode worker compute the prompt, or refuse the request if that is forbidden.

        Does nothing for a request that has ended: the failure of another of its choices, which lost
        the same prefill worker, may have ended it just now.
        """
        if not prefill.engine_request.open or prefill.engine_request.request.closed:
            return
        if self._enforced:
            self.refuse(prefill, self._refusal(str(error or "the last one has left")))
            return
        if error is not None:
            log.warning("no prefill for %s (%s): %s", prefill.id, reason, error)
        self._metrics.fell_back(reason)
        prefill.engine_request.request.metrics.routed("aggregated")
        self._dispatch.decode_later(prefill.engine_request)

    def refuse(self, prefill: PrefillRequest, error: DynamoError, by_worker: bool = False) -> None:
        """End the request with ``error``."""
        if isinstance(error, Overloaded):
            self._metrics.refused("overloaded")
        prefill.engine_request.request.fail(error, by_worker)

    def _cached_tokens(self, tokens: Tokens, routing: Routing | None) -> int:
        """Prompt tokens that the best decode worker has cached; 0 if its cache is not indexed."""
        try:
            found = self._dispatch.picker.pick(None, tokens, routing=routing)
        except DynamoError:
            return 0  # the decode phase reports it
        return found.overlap_blocks * self._block_size

    def _refusal(self, why: str) -> Unavailable:
        self._metrics.refused("enforced")
        return Unavailable(
            f"No prefill worker can take a request for model `{self._model}` ({why}), and "
            "--enforce-disagg forbids serving it with decode workers alone. Please retry shortly."
        )
