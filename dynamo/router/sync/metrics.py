"""What a router counts of its replicas."""

from __future__ import annotations

from dynamo.observability.metrics import Counter, Registry
from dynamo.observability.names import counter, gauge
from dynamo.observability.names_router import Replicas
from dynamo.router.metrics import RouterLabels
from dynamo.router.sync.remote import RemoteReplicas

__all__ = ["show_replicas"]


def show_replicas(registry: Registry, place: RouterLabels, remote: RemoteReplicas) -> Counter:
    """Show ``remote``; the counter of questions for their accounts."""
    here = place.component, place.namespace, place.router_id
    gauge(registry, Replicas.KNOWN).labels(*here).function = remote.__len__
    gauge(registry, Replicas.REQUESTS).labels(*here).function = remote.requests
    return counter(registry, Replicas.RESYNCS).labels(*here)
