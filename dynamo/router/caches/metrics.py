"""Metrics of the prefix index, KV events and predictions."""

from __future__ import annotations

from dynamo._fast.radix import RadixTree
from dynamo.observability.metrics import Counter, Gauge, Registry, counter, gauge
from dynamo.router.caches.predicted import OptimisticCache, PredictedCache, PredictionCounts
from dynamo.router.metrics import COMPONENT, ROUTED, RouterLabels

_EVENTS_APPLIED = counter(
    "dynamo_component_kv_cache_events_applied",
    "KV events by type and outcome",
    "dynamo_component dynamo_namespace event_type status worker_id",
)
_EVENT_WARNINGS = counter(
    "dynamo_component_kv_cache_event_warnings",
    "KV events that were odd but tolerable",
    "dynamo_component dynamo_namespace warning_kind worker_id",
)
_MISMATCHED_WORKERS = gauge(
    "dynamo_component_router_kv_event_source_mismatch_workers",
    "Workers that serve prompts without KV events, or whose blocks are of another size",
    "dynamo_component dynamo_namespace model"
    " target_component target_endpoint target_namespace worker_id worker_type",
)

# The prefix index.
_BLOCKS = gauge(
    "dynamo_component_router_index_blocks", "Pairs of block and worker in the prefix index", ROUTED
)
_MEMORY_BYTES = gauge(
    "dynamo_component_router_index_memory_bytes", "Memory of the prefix index", ROUTED
)
_DROPPED_BLOCKS = gauge(
    "dynamo_component_router_index_dropped_blocks",
    "Blocks that the cap of the prefix index refused",
    ROUTED,
)

# Predicted caches, where KV events are not followed.
_EXPIRED = counter(
    "dynamo_component_router_predicted_blocks_expired_total",
    "Predicted blocks forgotten by age",
    COMPONENT,
)
_PRUNED = counter(
    "dynamo_component_router_predicted_blocks_pruned_total",
    "Predicted blocks forgotten because there were too many",
    COMPONENT,
)
_PREDICTED_MEMORY_BYTES = gauge(
    "dynamo_component_router_predicted_memory_bytes",
    "Memory of the predictions, beside the prefix index",
    COMPONENT,
)
_CONFIGURED_POLICY = gauge(
    "dynamo_component_router_approximate_cache_configured_policy",
    "1 for the policy that forgets predicted blocks",
    "dynamo_component dynamo_namespace policy worker_id",
)
_LRU_EVICTED = counter(
    "dynamo_component_router_approximate_lru_evicted_blocks_total",
    "Predicted blocks evicted because their worker is full",
    COMPONENT,
)
_LRU_EVICTIONS = counter(
    "dynamo_component_router_approximate_lru_eviction_batches_total",
    "Times that predicted blocks were evicted",
    COMPONENT,
)
_LRU_LEASES = gauge(
    "dynamo_component_router_approximate_lru_leases",
    "Running requests whose predicted blocks cannot be evicted",
    COMPONENT,
)
_LRU_FALLBACKS = gauge(
    "dynamo_component_router_approximate_lru_fallbacks",
    "Workers' ranks of unknown capacity, whose predicted blocks age instead",
    COMPONENT,
)


class EventMetrics:
    """KV events by type and outcome, warnings by kind, and the size of the index."""

    def __init__(self, registry: Registry, place: RouterLabels, index: RadixTree) -> None:
        self._place = place
        self._applied = registry.family(_EVENTS_APPLIED)
        self._warnings = registry.family(_EVENT_WARNINGS)
        self._by_outcome: dict[tuple[str, str], Counter] = {}
        _show_index(registry, place, index)

    def applied(self, event_type: str, status: str, count: int = 1) -> None:
        """Count events."""
        child = self._by_outcome.get((event_type, status))
        if child is None:
            place = self._place
            child = self._by_outcome[event_type, status] = self._applied.labels(
                place.component, place.namespace, event_type, status, place.router_id
            )
        child.value += count

    def warning(self, kind: str, count: int = 1) -> None:
        """Count warnings of one kind."""
        place = self._place
        labels = place.component, place.namespace, kind, place.router_id
        self._warnings.labels(*labels).value += count


def predictions(
    registry: Registry, place: RouterLabels, index: RadixTree, cache: PredictedCache, policy: str
) -> None:
    """Export the predicted blocks, and count the dropped ones."""
    _show_index(registry, place, index)
    here = place.component, place.namespace
    cache.counts = PredictionCounts(
        *(
            registry.child(spec, *here, place.router_id)
            for spec in (_EXPIRED, _PRUNED, _LRU_EVICTED, _LRU_EVICTIONS)
        )
    )
    registry.child(_CONFIGURED_POLICY, *here, policy, place.router_id).value = 1
    for spec, read in (
        (_LRU_LEASES, cache.leases),
        (_LRU_FALLBACKS, cache.fallbacks),
        (_PREDICTED_MEMORY_BYTES, cache.memory_bytes),
    ):
        registry.child(spec, *here, place.router_id).function = read


def show_optimistic_cache(
    registry: Registry, place: RouterLabels, optimistic: OptimisticCache
) -> None:
    """Export the size of the optimistic cache."""
    here = place.component, place.namespace, place.router_id
    registry.child(_PREDICTED_MEMORY_BYTES, *here).function = optimistic.memory_bytes


def useless_sources(registry: Registry, place: RouterLabels, endpoint: str) -> Gauge:
    """Return the gauge of workers whose KV events are missing or unusable."""
    return registry.child(
        _MISMATCHED_WORKERS,
        place.component,
        place.namespace,
        place.model,
        place.component,
        endpoint,
        place.namespace,
        place.router_id,
        place.worker_type,
    )


def _show_index(registry: Registry, place: RouterLabels, index: RadixTree) -> None:
    for spec, read in (
        (_BLOCKS, index.blocks),
        (_MEMORY_BYTES, index.memory_bytes),
        (_DROPPED_BLOCKS, index.dropped),
    ):
        registry.child(spec, *place.router).function = read
