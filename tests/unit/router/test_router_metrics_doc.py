"""docs/router-metrics.md and, for its queue, docs/routing/queue.md explain the router's metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from metric_specs import AnySpec, declared_in

from dynamo.router.caches import indexer, predicted
from dynamo.router.connect import kv_router
from dynamo.router.connect import replicas as sync
from dynamo.router.eligibility import eligibility_filter as eligibility
from dynamo.router.load import active_load as active
from dynamo.router.modes import kv_metrics
from dynamo.router.queue import classes

DOCS = Path(__file__).parents[3] / "docs"
PAGE, QUEUE = DOCS / "router-metrics.md", DOCS / "routing/queue.md"
SPECS = declared_in(kv_metrics, classes, active, indexer, predicted, kv_router, eligibility, sync)
PREFIXES = (
    "dynamo_component_router",
    "dynamo_component",
    "dynamo_router_overhead",
    "dynamo_frontend_worker",
    "dynamo_frontend_router_queue",
    "dynamo_frontend_router_admission",
)
GROUPS = ("_predicted_", "_approximate_")
"""Families that the page explains together, as ``dynamo_component_router_predicted_…``."""


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_family_is_explained(spec: AnySpec) -> None:
    present = PAGE.read_text().partition("## Dynamo's names that are not here")[0]
    present += QUEUE.read_text()
    tails = {spec.name.removeprefix(prefix) for prefix in PREFIXES}
    if not any(f"`{name}`" in present for name in (spec.name, *tails)):
        assert any(group in spec.name and f"{group}…`" in present for group in GROUPS)
