"""What a router counts of the caches it knows or believes in. Spec 6.3."""

from __future__ import annotations

from dynamo._fast.radix import RadixTree
from dynamo.observability.metrics import Counter, Gauge, Registry
from dynamo.observability.names import Router, counter, gauge
from dynamo.observability.names_router import EventSources, Predictions, RouterIndex
from dynamo.router.caches.optimistic import OptimisticCache
from dynamo.router.caches.predicted import PredictedCache, PredictionCounts
from dynamo.router.metrics import RouterLabels

__all__ = ["EventMetrics", "predictions", "show_optimistic_cache", "useless_sources"]


class EventMetrics:
    """KV events by type and outcome, oddities by kind, and the size of the index."""

    def __init__(self, registry: Registry, place: RouterLabels, index: RadixTree) -> None:
        self._place = place
        self._applied = counter(registry, Router.EVENTS_APPLIED)
        self._warnings = counter(registry, Router.EVENT_WARNINGS)
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
        """Count ``count`` oddities of one kind."""
        place = self._place
        labels = place.component, place.namespace, kind, place.router_id
        self._warnings.labels(*labels).value += count


def predictions(
    registry: Registry, place: RouterLabels, index: RadixTree, cache: PredictedCache, policy: str
) -> None:
    """Show what is predicted to be cached, and count what is forgotten."""
    _show_index(registry, place, index)
    here = place.component, place.namespace
    cache.counts = PredictionCounts(
        *(
            counter(registry, spec).labels(*here, place.router_id)
            for spec in (
                Predictions.EXPIRED,
                Predictions.PRUNED,
                Predictions.LRU_EVICTED,
                Predictions.LRU_EVICTIONS,
            )
        )
    )
    gauge(registry, Predictions.CONFIGURED_POLICY).labels(*here, policy, place.router_id).set(1)
    for spec, read in (
        (Predictions.LRU_LEASES, cache.leases),
        (Predictions.LRU_FALLBACKS, cache.fallbacks),
        (Predictions.MEMORY_BYTES, cache.memory_bytes),
    ):
        gauge(registry, spec).labels(*here, place.router_id).function = read


def show_optimistic_cache(
    registry: Registry, place: RouterLabels, optimistic: OptimisticCache
) -> None:
    """Show what is believed for a moment beside the events."""
    here = place.component, place.namespace, place.router_id
    gauge(registry, Predictions.MEMORY_BYTES).labels(*here).function = optimistic.memory_bytes


def useless_sources(registry: Registry, place: RouterLabels, endpoint: str) -> Gauge:
    """How many workers' KV events are missing or of no use."""
    return gauge(registry, EventSources.MISMATCHED_WORKERS).labels(
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
        (RouterIndex.BLOCKS, index.blocks),
        (RouterIndex.MEMORY_BYTES, index.memory_bytes),
        (RouterIndex.DROPPED_BLOCKS, index.dropped),
    ):
        gauge(registry, spec).labels(*place.router).function = read
