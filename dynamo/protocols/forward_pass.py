"""What an engine reports after each forward pass, on the event plane; the names are Dynamo's."""

from __future__ import annotations

import msgspec

FORWARD_PASS = "forward-pass-metrics"
"""The topic, of an endpoint's component."""
VERSION = 1


class ScheduledRequests(msgspec.Struct, frozen=True):
    """The requests of the pass; ``kv_tokens`` are those whose KV was read, from cache or before."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueuedRequests(msgspec.Struct, frozen=True):
    """The requests that wait; a decode request has lost its blocks to others."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class ForwardPass(msgspec.Struct, frozen=True):
    """One pass of a rank, numbered by ``counter_id``. An idle rank sends one without a wall time.

    ``worker_id`` is the number of the worker's connection in decimal digits.
    """

    version: int = VERSION
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: ScheduledRequests = ScheduledRequests()
    queued_requests: QueuedRequests = QueuedRequests()

    @property
    def running(self) -> int:
        """Requests that were computed."""
        done = self.scheduled_requests
        return done.num_prefill_requests + done.num_decode_requests

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        queued = self.queued_requests
        return queued.num_prefill_requests + queued.num_decode_requests

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the requests of this pass hold after it."""
        done = self.scheduled_requests
        return done.sum_prefill_kv_tokens + done.sum_prefill_tokens + done.sum_decode_kv_tokens

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that were computed, or wait."""
        return self.scheduled_requests.sum_prefill_tokens + self.queued_requests.sum_prefill_tokens
