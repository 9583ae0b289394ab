"""The stage in which a request is counted, from its arrival to its first token or its end."""

from __future__ import annotations

import pytest

from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.frontend.requests.request_metrics import RequestMetrics
from dynamo.observability.metrics import Registry
from dynamo.router.picker import Decision

DECISION = Decision(1, 0)


class Page:
    """A frontend's metrics and one request."""

    def __init__(self) -> None:
        self.registry = Registry()
        metrics = FrontendMetrics(self.registry)
        self.meter = RequestMetrics(
            metrics, metrics.model("tiny"), "chat_completions", "stream", 0.0
        )

    @property
    def stages(self) -> dict[str, float]:
        """The stages that are not empty."""
        rows = (line.rsplit(" ", 1) for line in self.registry.render().decode().splitlines())
        prefix = "dynamo_frontend_stage_requests{"
        found = {name: float(value) for name, value in rows if name.startswith(prefix)}
        assert len(found) == 7
        return {name.removeprefix(prefix)[:-1]: value for name, value in found.items() if value}


def at(stage: str, phase: str) -> dict[str, float]:
    return {f'phase="{phase}",stage="{stage}"': 1}


def test_a_request_of_one_worker() -> None:
    page = Page()
    assert page.stages == at("preprocess", "")
    page.meter.prepared()
    page.meter.routed("aggregated")
    assert page.stages == at("route", "aggregated")
    page.meter.placed(1.0, DECISION, 0)
    page.meter.dispatched(8)
    assert page.stages == at("dispatch", "aggregated")
    page.meter.routed("aggregated")  # another choice of it waits for a worker
    assert page.stages == at("dispatch", "aggregated")
    page.meter.first_token(2.0)
    assert page.stages == {}
    page.meter.ended(None)
    assert page.stages == {}


def test_a_request_whose_prompt_is_computed_elsewhere() -> None:
    page = Page()
    page.meter.prepared()
    page.meter.routed("prefill")
    page.meter.dispatched(8)
    assert page.stages == at("route", "prefill")
    page.meter.prefilling()
    assert page.stages == at("dispatch", "prefill")
    page.meter.routed("decode")
    assert page.stages == at("route", "decode")
    page.meter.placed(1.0, DECISION, 0)
    assert page.stages == at("dispatch", "decode")
    page.meter.first_token(2.0)
    assert page.stages == {}


@pytest.mark.parametrize("steps", range(5))
def test_a_request_that_ends_early_is_in_no_stage(steps: int) -> None:
    page = Page()
    meter = page.meter
    for step in (
        meter.prepared,
        lambda: meter.routed("prefill"),
        meter.prefilling,
        lambda: meter.routed("decode"),
    )[:steps]:
        step()
    assert len(page.stages) == 1
    meter.ended(None)
    assert page.stages == {}
