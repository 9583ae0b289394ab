"""The labels of a router's metrics. The metrics are declared with what counts them."""

from __future__ import annotations

from dataclasses import dataclass

COMPONENT = "dynamo_component dynamo_namespace worker_id"
"""Labels that a metric has where the router counts as one of the component's processes."""

ROUTED = "dynamo_component dynamo_namespace router_id worker_id"
"""Labels of the metrics by router. ``worker_id`` is the process that shows the metric."""


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
