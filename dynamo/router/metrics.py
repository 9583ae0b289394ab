"""The labels of a router's metrics, and the metrics of its workers.

Metrics of requests, caches, eligibility, the queue and replicas are declared with what counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo.observability.metrics import (
    Registry,
    gauge,
)
from dynamo.router.worker_pool import Member

if TYPE_CHECKING:
    from dynamo.router.active_load import ActiveLoad

COMPONENT = "dynamo_component dynamo_namespace worker_id"
"""Labels that a metric has where the router counts as one of the component's processes."""

ROUTED = "dynamo_component dynamo_namespace router_id worker_id"
"""Labels of the metrics by router. ``worker_id`` is the process that shows the metric."""

_WORKER = "dp_rank worker_id worker_type"

# The workers.
_WORKER_REGISTERED = gauge(
    "dynamo_component_router_worker_registered",
    "1 for each worker of the router",
    "dp_rank dynamo_component dynamo_namespace router_worker_id worker_id worker_type",
)
_DECODE_BLOCKS = gauge(
    "dynamo_frontend_worker_active_decode_blocks", "Blocks of running requests", _WORKER
)
_PREFILL_TOKENS = gauge(
    "dynamo_frontend_worker_active_prefill_tokens", "Prompt tokens still to be computed", _WORKER
)


@dataclass(frozen=True)
class RouterLabels:
    """The label values of a router: the component routed to, and the process that routes.

    ``phase`` is the work of the routed requests there (aggregated, prefill, decode),
    ``worker_type`` the kind of worker (prefill, decode).
    """

    namespace: str
    component: str
    model: str = ""
    router_id: str = "0"
    phase: str = "aggregated"
    worker_type: str = "decode"

    @property
    def router(self) -> tuple[str, ...]:
        """Label values of the per-router families."""
        return self.component, self.namespace, self.router_id, self.router_id

    @property
    def typed(self) -> tuple[str, ...]:
        """Label values of the families that distinguish prefill workers from others."""
        return (*self.router, self.worker_type)

    @property
    def modelled(self) -> tuple[str, ...]:
        """Label values of the per-model families."""
        return (
            self.component,
            self.namespace,
            self.model,
            self.phase,
            self.router_id,
            self.router_id,
        )


class WorkerMetrics:
    """One series per (worker, dp_rank) that can be chosen, removed with the worker."""

    def __init__(self, registry: Registry, place: RouterLabels) -> None:
        self._place = place
        self._registered = registry.family(_WORKER_REGISTERED)
        self._loads = (registry.family(_PREFILL_TOKENS), registry.family(_DECODE_BLOCKS))

    def added(self, member: Member, active: ActiveLoad) -> None:
        """Export the worker and its load."""
        for rank, slot in member.slots.items():
            self._registered.labels(*self._registration(member, rank)).value = 1
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


def _reader(active: ActiveLoad, slot: int, part: int) -> Callable[[], float]:
    return lambda: active.load(slot)[part]
