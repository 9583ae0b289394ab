"""Declared metrics have the names, types, labels and buckets that dashboards for Dynamo read."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from metric_specs import AnySpec, declarations, kind_of

from dynamo.observability.metrics import Registry

OWN = {
    "dynamo_component_gpu_cache_usage_percent",  # Dynamo has both, with unknown labels
    "dynamo_component_total_blocks",
    "dynamo_component_model_load_time_seconds",  # and this one with unknown labels
    "dynamo_frontend_api_key_requests_total",
    "dynamo_frontend_cold_start_queue_requests",
    "dynamo_frontend_embedding_latency_seconds",  # Dynamo has these three, with unknown buckets
    "dynamo_frontend_image_tokens_per_request",
    "dynamo_frontend_images_per_request",
    "dynamo_frontend_http_connections",
    "dynamo_frontend_http_refused_total",
    "dynamo_frontend_model_cards_rejected_total",
    "dynamo_frontend_model_used_kv_blocks",
    "dynamo_frontend_models_dropped_total",
    "dynamo_frontend_model_migration_duration_seconds",  # Dynamo has it, with unknown buckets
    "dynamo_frontend_prefill_active_requests",
    "dynamo_frontend_prefill_fallbacks_total",
    "dynamo_frontend_prefill_local_total",
    "dynamo_frontend_prefill_queue_depth",
    "dynamo_frontend_request_worker_wait_seconds_total",
    "dynamo_frontend_router_policy_active",
    "dynamo_frontend_router_policy_failures_total",
    "dynamo_frontend_router_policy_seconds",
    "dynamo_frontend_prefill_queue_wait_seconds",
    "dynamo_frontend_prefill_refused_total",
    "dynamo_frontend_prefill_requests_total",
    "dynamo_frontend_prefill_requeues_total",
    "dynamo_frontend_prefill_seconds",
    "dynamo_frontend_prefill_workers",
    "dynamo_frontend_router_queue_left_total",
    "dynamo_frontend_router_queue_wait_seconds",
    "dynamo_frontend_stored_response_bytes",
    "dynamo_frontend_stored_responses",
    "dynamo_frontend_time_to_first_token_worker_wait_seconds_total",
    "dynamo_log_lines_dropped_total",
    "dynamo_planner_load_scaling_decision",  # enumerations, which Dynamo has, too
    "dynamo_planner_throughput_scaling_decision",
    "dynamo_request_plane_unavailable_workers",
    "dynamo_request_plane_worker_outages_total",
    "dynamo_component_health_checks_total",
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
    "dynamo_router_ttft_error_seconds",
}
"""Metrics that Dynamo does not have."""


TABLE = [
    line.split("\t")
    for line in Path(__file__).with_name("dynamo_metrics.tsv").read_text().splitlines()
    if not line.startswith("#")
]


@functools.cache
def specs() -> dict[str, AnySpec]:
    return {spec.name: spec for spec in declarations()}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_as_in_dynamo(row: list[str]) -> None:
    name, kind, labels, buckets = row + [""] * (4 - len(row))
    spec = specs()[name]
    assert kind_of(spec) == kind
    assert sorted(spec.labels) == sorted(filter(None, labels.split(",")))
    assert list(spec.buckets) == [float(bound) for bound in buckets.split()]


def test_each_metric_is_declared_once_and_well_formed() -> None:
    assert len(specs()) == len(declarations()) > 130
    for spec in declarations():
        assert spec.name.startswith(("vllm:", "dynamo_")) and spec.help
        assert len(set(spec.labels)) == len(spec.labels)
        assert (kind_of(spec) == "histogram") == bool(spec.buckets)
        assert list(spec.buckets) == sorted(set(spec.buckets))


def test_metrics_that_dynamo_lacks_are_listed() -> None:
    assert set(specs()) - {row[0] for row in TABLE} == OWN


@pytest.mark.parametrize("row", [row for row in TABLE if len(row) > 3], ids=lambda row: row[0])
def test_bounds_are_written_as_in_dynamo(row: list[str]) -> None:
    registry = Registry()
    spec = specs()[row[0]]
    registry.child(spec, *("x" for _ in spec.labels))
    lines = registry.render().decode().splitlines()
    written = [line.split('le="')[1].split('"')[0] for line in lines if 'le="' in line]
    assert written == [*row[3].split(), "+Inf"]
