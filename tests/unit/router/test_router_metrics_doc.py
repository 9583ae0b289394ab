"""docs/router-metrics.md names every family of the router, and nothing that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.observability.names import MetricSpec, Router
from dynamo.observability.names_router import EventSources, Hits, Replicas, RouterGate, RouterIndex

PAGE = Path(__file__).parents[3] / "docs/router-metrics.md"
ROOMS = (Router, RouterIndex, Hits, RouterGate, EventSources, Replicas)
SPECS = [spec for room in ROOMS for spec in vars(room).values() if isinstance(spec, MetricSpec)]
PREFIXES = ("dynamo_component_router", "dynamo_component", "dynamo_router_overhead")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_family_is_explained(spec: MetricSpec) -> None:
    present = PAGE.read_text().partition("## Dynamo's names that are not here")[0]
    tails = {spec.name.removeprefix(prefix) for prefix in PREFIXES}
    assert any(f"`{name}`" in present for name in (spec.name, *tails))
