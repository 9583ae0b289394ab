"""Metrics of the other routers of the same workers, whose load is counted too. Spec 3.8."""

from __future__ import annotations

from dynamo.observability.metrics import Counter, Registry, counter, gauge
from dynamo.router.metrics import COMPONENT, RouterLabels
from dynamo.router.sync.remote import RemoteReplicas

__all__ = ["show_replicas"]

_KNOWN = gauge(
    "dynamo_component_router_replicas", "Other routers that tell of their load", COMPONENT
)
_REQUESTS = gauge(
    "dynamo_component_router_replica_requests",
    "Running requests of other routers that are counted as load",
    COMPONENT,
)
_RESYNCS = counter(
    "dynamo_component_router_replica_resyncs_total",
    "Times that a router was asked for all its requests because something was missed",
    COMPONENT,
)


def show_replicas(registry: Registry, place: RouterLabels, peers: RemoteReplicas) -> Counter:
    """Show the size of ``peers``; return the counter of snapshot requests."""
    here = place.component, place.namespace, place.router_id
    registry.child(_KNOWN, *here).function = peers.__len__
    registry.child(_REQUESTS, *here).function = peers.requests
    return registry.child(_RESYNCS, *here)
