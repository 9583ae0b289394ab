"""The labels of a router's metrics, and the metrics of its workers and of the queue before them.

Metrics of requests, caches, eligibility and replicas are declared with what counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo.errors import Overloaded, RouterQueueLimitExceeded
from dynamo.observability.metrics import (
    Registry,
    counter,
    gauge,
    histogram,
)
from dynamo.router.queue.waiting import POLICY_CLASS, WaitingQueue
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


_QUEUED = "model policy_class worker_type"
_REASONED = "model policy_class reason worker_type"
_REQUESTS = gauge(
    "dynamo_frontend_router_queue_pending_requests",
    "Requests waiting in the router's queue",
    _QUEUED,
)
_ISL_TOKENS = gauge(
    "dynamo_frontend_router_queue_pending_isl_tokens",
    "Prompt tokens of the requests waiting in the router's queue",
    _QUEUED,
)
_CACHED_TOKENS = gauge(
    "dynamo_frontend_router_queue_pending_cached_tokens",
    "Those of them that a worker holds",
    _QUEUED,
)
_BACKPRESSURE = counter(
    "dynamo_frontend_router_queue_backpressure_total",
    "Requests that had to wait: behind others, or for prefill load to fall",
    _REASONED,
)
_RECEIVED = counter(
    "dynamo_frontend_router_admission_received_total",
    "Requests that came to the router's queue, whether they had to wait or not",
    _QUEUED,
)
_REJECTED = counter(
    "dynamo_frontend_router_admission_rejected_total",
    "Requests turned away there: the queue was full, or all workers overloaded",
    _REASONED,
)
_LEFT = counter(
    "dynamo_frontend_router_queue_left_total",
    "Requests whose client left while they waited",
    _QUEUED,
)
_WAIT_SECONDS = histogram(
    "dynamo_frontend_router_queue_wait_seconds",
    "Time in the router's queue of the requests that had to wait and were served",
    (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
    _QUEUED,
)
_LIMIT, _OVERLOADED = "queue_limit", "overloaded"
_BACKLOG, _PREFILL = "backlog", "prefill_load"


class QueueMetrics:
    """The series of a class of ``model`` in ``registry``, or in a registry of their own."""

    def __init__(
        self,
        registry: Registry | None = None,
        model: str = "",
        worker_type: str = "decode",
        policy_class: str = POLICY_CLASS,
    ) -> None:
        self._registry = registry
        self._labels = (model, policy_class, worker_type)
        into = registry or Registry()
        self.received = into.child(_RECEIVED, *self._labels)
        self.left = into.child(_LEFT, *self._labels)
        self.waited = into.child(_WAIT_SECONDS, *self._labels)
        self._rejected, self._pressed = (
            {one: into.child(spec, model, policy_class, one, worker_type) for one in reasons}
            for spec, reasons in (
                (_REJECTED, (_LIMIT, _OVERLOADED)),
                (_BACKPRESSURE, (_BACKLOG, _PREFILL)),
            )
        )

    def show(self, queue: WaitingQueue[Any]) -> None:
        """Export the size of ``queue``."""
        if self._registry is None:
            return
        for spec, read in (
            (_REQUESTS, queue.__len__),
            (_ISL_TOKENS, lambda: queue.isl_tokens),
            (_CACHED_TOKENS, lambda: queue.cached_tokens),
        ):
            self._registry.child(spec, *self._labels).function = read

    def joined(self, before: int) -> None:
        """Count a queued request, with ``before`` others ahead."""
        self._pressed[_BACKLOG if before else _PREFILL].value += 1

    def refused(self, error: Overloaded) -> None:
        """Count a rejected request."""
        full = isinstance(error, RouterQueueLimitExceeded)
        self._rejected[_LIMIT if full else _OVERLOADED].value += 1
