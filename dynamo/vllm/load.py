"""The load of each rank, from the statistics of vLLM's scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable

from dynamo.protocols.load import KvMetrics

__all__ = ["LoadReporter"]

_INTERVAL_S = 0.05


class LoadReporter:
    """Calls ``report`` at most every 50 ms for each rank, and at once when a rank becomes idle.

    ``blocks`` are those of one rank.
    """

    def __init__(self, blocks: int, report: Callable[[KvMetrics], None]) -> None:
        self._blocks = blocks
        self._report = report
        self._last_s: dict[int, float] = {}

    def __call__(self, dp_rank: int, running: int, waiting: int, kv_usage: float) -> None:
        """Record the state of a rank after a step; see ``StepStats``."""
        now = time.monotonic()
        if (running or waiting) and now - self._last_s.get(dp_rank, 0.0) < _INTERVAL_S:
            return
        self._last_s[dp_rank] = now
        used = round(kv_usage * self._blocks)
        self._report(
            KvMetrics(
                worker_id=0,
                dp_rank=dp_rank,
                active_decode_blocks=used,
                kv_used_blocks=used,
                kv_total_blocks=self._blocks,
                num_requests_running=running,
                num_requests_waiting=waiting,
            )
        )
