"""Metrics of the router that are this project's own, beside ``names.Router``. Spec 6.3."""

from __future__ import annotations

from dynamo.observability.names import MetricSpec, Router

__all__ = ["EventSources", "Hits", "Predictions", "Replicas", "RouterGate", "RouterIndex"]

_ROUTED = ("dynamo_component", "dynamo_namespace", "router_id", "worker_id")
_MODELLED = ("dynamo_component", "dynamo_namespace", "model", "phase", "router_id", "worker_id")
_TYPED = (*_ROUTED, "worker_type")
_COMPONENT = ("dynamo_component", "dynamo_namespace", "worker_id")


class RouterIndex:
    """What the prefix index holds."""

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


class Hits:
    """What the prefix index gave, and what the choice left lying."""

    SELECTED_TOKENS = MetricSpec(
        "counter",
        "dynamo_component_router_kv_selected_cached_prefix_tokens_total",
        "Prompt tokens that the chosen workers held",
        _MODELLED,
    )
    BEST_TOKENS = MetricSpec(
        "counter",
        "dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total",
        "Prompt tokens that the eligible worker with most of them held",
        _MODELLED,
    )
    REUSED_TOKENS = MetricSpec(
        "counter",
        "dynamo_component_router_kv_worker_reused_tokens_total",
        "Prompt tokens that engines report as taken from their cache",
        _MODELLED,
    )
    NON_MAX = MetricSpec(
        "counter",
        "dynamo_component_router_non_max_overlap_selections_total",
        "Requests sent elsewhere than where most of their prompt is cached",
        _TYPED,
    )
    LOST_BLOCKS = MetricSpec(
        "histogram",
        "dynamo_component_router_overlap_blocks_lost",
        "Cached blocks that these requests did without",
        _TYPED,
        tuple(0.25 * 2**power for power in range(16)),
    )
    SHARED_BEYOND = MetricSpec(
        "histogram",
        "dynamo_component_router_shared_cache_beyond_blocks",
        "Blocks in the shared cache beyond those on the chosen device",
        _ROUTED,
        tuple(2.0**power for power in range(12)),
    )
    SHARED_HIT_RATE = MetricSpec(
        "histogram",
        "dynamo_component_router_shared_cache_hit_rate",
        "Share of the prompt that is in the shared cache",
        _ROUTED,
        Router.HIT_RATE.buckets,
    )


class Predictions:
    """The cache as own decisions predict it, where KV events are not followed. Spec 2.5."""

    EXPIRED = MetricSpec(
        "counter",
        "dynamo_component_router_predicted_blocks_expired_total",
        "Predicted blocks forgotten by age",
        _COMPONENT,
    )
    PRUNED = MetricSpec(
        "counter",
        "dynamo_component_router_predicted_blocks_pruned_total",
        "Predicted blocks forgotten because there were too many",
        _COMPONENT,
    )
    MEMORY_BYTES = MetricSpec(
        "gauge",
        "dynamo_component_router_predicted_memory_bytes",
        "Memory of the predictions, beside the prefix index",
        _COMPONENT,
    )
    CONFIGURED_POLICY = MetricSpec(
        "gauge",
        "dynamo_component_router_approximate_cache_configured_policy",
        "1 for the policy that forgets predicted blocks",
        ("dynamo_component", "dynamo_namespace", "policy", "worker_id"),
    )
    LRU_EVICTED = MetricSpec(
        "counter",
        "dynamo_component_router_approximate_lru_evicted_blocks_total",
        "Predicted blocks evicted because their worker is full",
        _COMPONENT,
    )
    LRU_EVICTIONS = MetricSpec(
        "counter",
        "dynamo_component_router_approximate_lru_eviction_batches_total",
        "Times that predicted blocks were evicted",
        _COMPONENT,
    )
    LRU_LEASES = MetricSpec(
        "gauge",
        "dynamo_component_router_approximate_lru_leases",
        "Running requests whose predicted blocks cannot be evicted",
        _COMPONENT,
    )
    LRU_FALLBACKS = MetricSpec(
        "gauge",
        "dynamo_component_router_approximate_lru_fallbacks",
        "Workers' ranks of unknown capacity, whose predicted blocks age instead",
        _COMPONENT,
    )


class EventSources:
    """Workers whose KV events are of no use to the router."""

    MISMATCHED_WORKERS = MetricSpec(
        "gauge",
        "dynamo_component_router_kv_event_source_mismatch_workers",
        "Workers that serve prompts without KV events, or whose blocks are of another size",
        (
            "dynamo_component",
            "dynamo_namespace",
            "model",
            "target_component",
            "target_endpoint",
            "target_namespace",
            "worker_id",
            "worker_type",
        ),
    )


class Replicas:
    """Other routers of the same workers, whose load is counted too. Spec 3.8."""

    KNOWN = MetricSpec(
        "gauge",
        "dynamo_component_router_replicas",
        "Other routers that tell of their load",
        _COMPONENT,
    )
    REQUESTS = MetricSpec(
        "gauge",
        "dynamo_component_router_replica_requests",
        "Running requests of other routers that are counted as load",
        _COMPONENT,
    )
    RESYNCS = MetricSpec(
        "counter",
        "dynamo_component_router_replica_resyncs_total",
        "Times that a router was asked for all its requests because something was missed",
        _COMPONENT,
    )


class RouterGate:
    """Who may take a request: busy workers, and sessions that stay with theirs."""

    BUSY_WORKERS = MetricSpec(
        "gauge",
        "dynamo_component_router_busy_workers",
        "Workers over their busy thresholds, which get no requests",
        _COMPONENT,
    )
    SESSIONS = MetricSpec(
        "gauge",
        "dynamo_component_router_sessions",
        "Sessions bound to a worker",
        _COMPONENT,
    )
    SESSION_REQUESTS = MetricSpec(
        "counter",
        "dynamo_component_router_session_requests_total",
        "Requests of known sessions that stayed with their worker, or moved",
        ("dynamo_component", "dynamo_namespace", "outcome", "worker_id"),
    )
    SESSIONS_DROPPED = MetricSpec(
        "counter",
        "dynamo_component_router_sessions_dropped_total",
        "Sessions forgotten before their time because there were too many",
        _COMPONENT,
    )
