"""Metrics of busy workers and of sessions that are bound to a worker."""

from __future__ import annotations

from dynamo.observability.metrics import Registry, counter, gauge
from dynamo.router.eligibility.eligibility_filter import EligibilityFilter
from dynamo.router.metrics import COMPONENT, RouterLabels

__all__ = ["gates"]

_BUSY_WORKERS = gauge(
    "dynamo_component_router_busy_workers",
    "Workers over their busy thresholds, which get no requests",
    COMPONENT,
)
_SESSIONS = gauge("dynamo_component_router_sessions", "Sessions bound to a worker", COMPONENT)
_SESSION_REQUESTS = counter(
    "dynamo_component_router_session_requests_total",
    "Requests of known sessions that stayed with their worker, or moved",
    "dynamo_component dynamo_namespace outcome worker_id",
)
_SESSIONS_DROPPED = counter(
    "dynamo_component_router_sessions_dropped_total",
    "Sessions forgotten before their time because there were too many",
    COMPONENT,
)


def gates(registry: Registry, place: RouterLabels, eligibility: EligibilityFilter) -> None:
    """Show the busy workers and the sessions of ``eligibility``."""
    here = place.component, place.namespace
    busy = registry.child(_BUSY_WORKERS, *here, place.router_id)
    busy.function = lambda: len(eligibility.worker_pool.busy)
    sessions = eligibility.sessions
    if sessions is None:
        return
    registry.child(_SESSIONS, *here, place.router_id).function = sessions.__len__
    sessions.kept = registry.child(_SESSION_REQUESTS, *here, "kept", place.router_id)
    sessions.moved = registry.child(_SESSION_REQUESTS, *here, "moved", place.router_id)
    sessions.dropped = registry.child(_SESSIONS_DROPPED, *here, place.router_id)
