"""What a router counts of those who may not be chosen, or must be."""

from __future__ import annotations

from dynamo.observability.metrics import Registry
from dynamo.observability.names import counter, gauge
from dynamo.observability.names_router import RouterGate
from dynamo.router.eligibility.eligibility_filter import EligibilityFilter
from dynamo.router.metrics import RouterLabels

__all__ = ["gates"]


def gates(registry: Registry, place: RouterLabels, eligibility: EligibilityFilter) -> None:
    """Show busy workers and bound sessions."""
    here = place.component, place.namespace
    busy = gauge(registry, RouterGate.BUSY_WORKERS).labels(*here, place.router_id)
    busy.function = lambda: len(eligibility.worker_pool.busy)
    sessions = eligibility.sessions
    if sessions is None:
        return
    gauge(registry, RouterGate.SESSIONS).labels(*here, place.router_id).function = sessions.__len__
    requests = counter(registry, RouterGate.SESSION_REQUESTS)
    sessions.kept = requests.labels(*here, "kept", place.router_id)
    sessions.moved = requests.labels(*here, "moved", place.router_id)
    dropped = counter(registry, RouterGate.SESSIONS_DROPPED)
    sessions.dropped = dropped.labels(*here, place.router_id)
