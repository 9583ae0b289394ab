"""Names, types, labels and buckets are those that dashboards for Dynamo read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.observability import names, names_prefill, names_queue, names_router, names_worker
from dynamo.observability.metrics import Registry
from dynamo.observability.names import MetricSpec

OURS = {
    "dynamo_frontend_http_connections",
    "dynamo_frontend_http_refused_total",
    "dynamo_frontend_model_cards_rejected_total",
    "dynamo_frontend_prefill_active_requests",
    "dynamo_frontend_prefill_fallbacks_total",
    "dynamo_frontend_prefill_local_total",
    "dynamo_frontend_prefill_queue_depth",
    "dynamo_frontend_prefill_queue_wait_seconds",
    "dynamo_frontend_prefill_refused_total",
    "dynamo_frontend_prefill_requests_total",
    "dynamo_frontend_prefill_requeues_total",
    "dynamo_frontend_prefill_seconds",
    "dynamo_frontend_prefill_workers",
    "dynamo_frontend_router_queue_left_total",
    "dynamo_frontend_router_queue_wait_seconds",
    "dynamo_component_router_approximate_lru_fallbacks",
    "dynamo_component_router_busy_workers",
    "dynamo_component_router_index_blocks",
    "dynamo_component_router_index_dropped_blocks",
    "dynamo_component_router_index_memory_bytes",
    "dynamo_component_router_predicted_blocks_expired_total",
    "dynamo_component_router_predicted_blocks_pruned_total",
    "dynamo_component_router_predicted_memory_bytes",
    "dynamo_component_router_replica_requests",
    "dynamo_component_router_replica_resyncs_total",
    "dynamo_component_router_replicas",
    "dynamo_component_router_session_requests_total",
    "dynamo_component_router_sessions",
    "dynamo_component_router_sessions_dropped_total",
}
"""What Dynamo does not have."""


def found(room: Any) -> Iterator[MetricSpec]:
    for value in vars(room).values():
        if isinstance(value, MetricSpec):
            yield value
        elif isinstance(value, type) and value.__module__.startswith("dynamo.observability.names"):
            yield from found(value)


ROOMS = (names, names_prefill, names_queue, names_router, names_worker)
SPECS = {spec.name: spec for room in ROOMS for spec in found(room)}
TABLE = [
    line.split("\t")
    for line in Path(__file__).with_name("dynamo_metrics.tsv").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_as_in_dynamo(row: list[str]) -> None:
    name, kind, labels, buckets = row + [""] * (4 - len(row))
    spec = SPECS[name]
    assert spec.kind == kind
    assert sorted(spec.labels) == sorted(filter(None, labels.split(",")))
    assert list(spec.buckets) == [float(bound) for bound in buckets.split()]


def test_whatever_else_there_is_is_known_to_be_ours() -> None:
    others = {name for name in SPECS if not name.startswith(("vllm:", "dynamo_"))}
    assert others == set()
    assert set(SPECS) - {row[0] for row in TABLE} == OURS


@pytest.mark.parametrize("row", [row for row in TABLE if len(row) > 3], ids=lambda row: row[0])
def test_bounds_are_written_as_in_dynamo(row: list[str]) -> None:
    registry = Registry()
    spec = SPECS[row[0]]
    names.histogram(registry, spec).labels(*("x" for _ in spec.labels))
    lines = registry.render().decode().splitlines()
    written = [line.split('le="')[1].split('"')[0] for line in lines if 'le="' in line]
    assert written == [*row[3].split(), "+Inf"]
