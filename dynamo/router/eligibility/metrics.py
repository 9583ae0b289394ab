"""Metrics of workers: registered, loaded and busy ones, and the sessions bound to them."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.observability.metrics import Registry, counter, gauge
from dynamo.router.eligibility.eligibility_filter import EligibilityFilter
from dynamo.router.load.active import ActiveLoad
from dynamo.router.metrics import COMPONENT, RouterLabels
from dynamo.router.worker_pool import Member

__all__ = ["WorkerMetrics", "show_eligibility"]

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

_WORKER = "dp_rank worker_id worker_type"
_WORKER_REGISTERED = gauge(
    "dynamo_component_router_worker_registered",
    "1 for each worker the router knows",
    "dp_rank dynamo_component dynamo_namespace router_worker_id worker_id worker_type",
)
_DECODE_BLOCKS = gauge(
    "dynamo_frontend_worker_active_decode_blocks", "Blocks of running requests", _WORKER
)
_PREFILL_TOKENS = gauge(
    "dynamo_frontend_worker_active_prefill_tokens", "Prompt tokens still to be computed", _WORKER
)


class WorkerMetrics:
    """The series of each (worker, dp_rank) that can be chosen, removed with the worker."""

    def __init__(self, registry: Registry, place: RouterLabels) -> None:
        self._place = place
        self._registered = registry.family(_WORKER_REGISTERED)
        self._loads = (registry.family(_PREFILL_TOKENS), registry.family(_DECODE_BLOCKS))

    def added(self, member: Member, active: ActiveLoad | None) -> None:
        """Show the worker and, where load is tracked, its load."""
        for rank, slot in member.slots.items():
            self._registered.labels(*self._registration(member, rank)).value = 1
            if active is None:
                continue
            for part, family in enumerate(self._loads):
                child = family.labels(str(rank), str(member.worker_id), self._place.worker_type)
                child.function = _reader(active, slot, part)

    def removed(self, member: Member) -> None:
        """Remove the worker's series."""
        for rank in member.slots:
            for family in self._loads:
                family.remove(str(rank), str(member.worker_id), self._place.worker_type)
            self._registered.remove(*self._registration(member, rank))

    def _registration(self, member: Member, rank: int) -> tuple[str, ...]:
        place = self._place
        return (
            str(rank),
            place.component,
            place.namespace,
            str(member.worker_id),
            place.router_id,
            place.worker_type,
        )


def show_eligibility(
    registry: Registry, place: RouterLabels, eligibility: EligibilityFilter
) -> None:
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


def _reader(active: ActiveLoad, slot: int, part: int) -> Callable[[], float]:
    return lambda: active.load(slot)[part]
