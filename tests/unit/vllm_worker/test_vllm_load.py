"""The load of a rank, from the scheduler's statistics."""

from __future__ import annotations

from dynamo.protocols.kv import KvMetrics
from dynamo.vllm.worker import LoadReporter


def test_busy_ranks_report_now_and_then_and_idle_ones_at_once() -> None:
    found: list[KvMetrics] = []
    report = LoadReporter(1000, found.append)
    report(0, 3, 2, 0.25)
    report(0, 4, 0, 0.26)  # within the interval
    report(1, 1, 0, 0.5)  # another rank
    report(0, 0, 0, 0.0)
    assert [(each.dp_rank, each.num_requests_running) for each in found] == [(0, 3), (1, 1), (0, 0)]
    first = found[0]
    assert (first.kv_used_blocks, first.kv_total_blocks) == (250, 1000)
    assert first.active_decode_blocks == 250
    assert first.num_requests_waiting == 2
