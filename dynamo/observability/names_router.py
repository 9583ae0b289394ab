"""Metrics of the router that are this project's own, beside ``names.Router``. Spec 6.3."""

from __future__ import annotations

from dynamo.observability.names import MetricSpec

__all__ = ["RouterIndex"]

_ROUTED = ("dynamo_component", "dynamo_namespace", "router_id", "worker_id")


class RouterIndex:
    """What the prefix index holds, and what it gave."""

    SELECTED_CACHED_TOKENS = MetricSpec(
        "counter",
        "dynamo_component_router_kv_selected_cached_prefix_tokens_total",
        "Prompt tokens that the chosen workers held",
        ("dynamo_component", "dynamo_namespace", "model", "phase", "router_id", "worker_id"),
    )
    BLOCKS = MetricSpec(
        "gauge",
        "dynamo_component_router_index_blocks",
        "Pairs of block and worker in the prefix index",
        _ROUTED,
    )
    MEMORY_BYTES = MetricSpec(
        "gauge",
        "dynamo_component_router_index_memory_bytes",
        "Memory of the prefix index",
        _ROUTED,
    )
    DROPPED_BLOCKS = MetricSpec(
        "gauge",
        "dynamo_component_router_index_dropped_blocks",
        "Blocks that the cap of the prefix index refused",
        _ROUTED,
    )
