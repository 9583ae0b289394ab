"""Load that workers report to routers, and routers to the planner."""

from __future__ import annotations

import msgspec

__all__ = [
    "KV_METRICS",
    "ON_DEMAND_STATE",
    "PREFILL_QUEUE",
    "KvMetrics",
    "OnDemandState",
    "PrefillQueueState",
]

KV_METRICS = "kv_metrics"
"""Topic of load reports; a message is a list of :class:`KvMetrics`."""

PREFILL_QUEUE = "prefill_queue"
"""Topic, of the prefill workers' component, on which each frontend publishes
:class:`PrefillQueueState`."""

ON_DEMAND_STATE = "on_demand_state"
"""Topic, of the component ``planner``, on which each frontend publishes :class:`OnDemandState`:
every second, and at once when the first request waits and when none waits any more."""


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


class OnDemandState(msgspec.Struct, omit_defaults=True):
    """The requests of one frontend for a ``model`` that is started on demand.

    ``waiting`` of them wait for its first worker, the oldest for ``oldest_s``. The frontend has had
    no request of the model for ``idle_s``.
    """

    model: str
    waiting: int = 0
    oldest_s: float = 0.0
    idle_s: float = 0.0
