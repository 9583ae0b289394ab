"""Load that workers report to routers. Topic ``kv_metrics``, spec 7.6."""

from __future__ import annotations

import msgspec

__all__ = ["KvMetrics"]


class KvMetrics(msgspec.Struct, omit_defaults=True):
    """State of one (worker, dp_rank) after a scheduler step; a missing value is unknown."""

    worker_id: int
    dp_rank: int = 0
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None
    kv_used_blocks: int | None = None
    kv_total_blocks: int | None = None
    num_requests_running: int | None = None
    num_requests_waiting: int | None = None
