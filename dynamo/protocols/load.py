"""Load that workers report to routers, and routers to the planner. Spec 7.6."""

from __future__ import annotations

import msgspec

__all__ = [
    "COLD_START_QUEUE",
    "KV_METRICS",
    "PREFILL_QUEUE",
    "ColdStartQueueState",
    "KvMetrics",
    "PrefillQueueState",
]

COLD_START_QUEUE = "cold_start_queue"
"""Topic, of the component ``planner``, on which each frontend publishes
:class:`ColdStartQueueState`: at once when the first request waits and when none waits any more,
every second in between."""

KV_METRICS = "kv_metrics"
"""Topic of load reports; a message is a list of :class:`KvMetrics`."""

PREFILL_QUEUE = "prefill_queue"
"""Topic, of the prefill workers' component, on which each frontend publishes
:class:`PrefillQueueState`."""


class KvMetrics(msgspec.Struct, omit_defaults=True):
    """The load of one (worker, dp_rank) after a scheduler step. A missing value is unknown."""

    worker_id: int
    dp_rank: int = 0
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None
    kv_used_blocks: int | None = None
    kv_total_blocks: int | None = None
    num_requests_running: int | None = None
    num_requests_waiting: int | None = None


class PrefillQueueState(msgspec.Struct, omit_defaults=True):
    """The prefill queue of one frontend.

    ``size`` requests of ``model`` are queued (a planner scales on it), ``active`` are sent to
    one of ``workers`` prefill workers.
    """

    model: str
    size: int = 0
    active: int = 0
    workers: int = 0


class ColdStartQueueState(msgspec.Struct, omit_defaults=True):
    """The requests of one frontend that wait for the first worker of ``model``.

    The oldest has waited ``oldest_s``.
    """

    model: str
    size: int = 0
    oldest_s: float = 0.0
