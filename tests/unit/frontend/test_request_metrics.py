"""The stage in which a request is counted, from its arrival to its first token."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.frontend.apis.operator import info
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.frontend.requests.recent import RequestInfo
from dynamo.frontend.requests.request_metrics import RequestMetrics, show_in_progress
from dynamo.http.routes import Routes
from dynamo.observability.metrics import Registry
from dynamo.router.picker import Decision
from dynamo.runtime.process.tasks import Tasks

DECISION = Decision(1, 0)


class Page:
    """A frontend's metrics and one request."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.shared = shared = FrontendMetrics(self.registry)
        self.metrics = RequestMetrics(
            RequestInfo("chat_completions", "1", None), "tiny", 0.0,
            shared=shared, of_model=shared.model("tiny"), kind="stream",
        )  # fmt: skip
        self.in_progress = [self.metrics]
        self.registry.before_render.append(lambda: show_in_progress(shared, self.in_progress))

    @property
    def stages(self) -> dict[str, float]:
        """The stages that are not empty."""
        rows = (line.rsplit(" ", 1) for line in self.registry.render().decode().splitlines())
        prefix = "dynamo_frontend_stage_requests{"
        found = {name: float(value) for name, value in rows if name.startswith(prefix)}
        assert len(found) == 8
        return {name.removeprefix(prefix)[:-1]: value for name, value in found.items() if value}


def at(stage: str, phase: str) -> dict[str, float]:
    return {f'phase="{phase}",stage="{stage}"': 1}


def test_a_request_of_one_worker() -> None:
    page = Page()
    assert page.stages == at("preprocess", "")
    page.metrics.routed("aggregated")
    assert page.stages == at("route", "aggregated")
    page.metrics.sent(DECISION, 0, 1.0, 0.0)
    page.metrics.dispatched(8)
    assert page.stages == at("dispatch", "aggregated")
    page.metrics.routed("aggregated")  # another choice of it waits for a worker
    assert page.stages == at("dispatch", "aggregated")
    page.metrics.first_token(2.0)
    assert page.stages == {}


def test_a_request_whose_prompt_is_computed_elsewhere() -> None:
    page = Page()
    page.metrics.routed("prefill")
    page.metrics.dispatched(8)
    assert page.stages == at("route", "prefill")
    page.metrics.prefilling()
    assert page.stages == at("dispatch", "prefill")
    page.metrics.routed("decode")
    assert page.stages == at("route", "decode")
    page.metrics.sent(DECISION, 0, 1.0, 0.0)
    assert page.stages == at("dispatch", "decode")
    page.metrics.first_token(2.0)
    assert page.stages == {}


def test_requests_in_progress_are_counted_when_they_are_shown() -> None:
    page = Page()
    model = page.metrics.of_model
    gauges = (model.inflight, model.queued, page.shared.plane_inflight)

    def shown() -> tuple[float, ...]:
        page.registry.render()
        return tuple(gauge.value for gauge in gauges)

    assert shown() == (0, 0, 0)
    page.metrics.sent(DECISION, 0, 1.0, 0.0)
    page.metrics.sent(DECISION, 0, 1.0, 0.0)
    page.metrics.dispatched(8)
    assert shown() == (1, 1, 2)
    page.metrics.first_token(2.0)
    assert shown() == (1, 0, 2)
    page.in_progress.clear()
    assert shown() == (0, 0, 0)


def test_choices_that_wait_for_a_worker_at_once_wait_once() -> None:
    page = Page()
    metrics = page.metrics
    metrics.sent(DECISION, 0, 1.0, 0.0)
    metrics.dispatched(8)
    for since_s, now_s in ((2.0, 5.0), (2.5, 5.5), (3.0, 5.5)):
        metrics.waited_for_worker(since_s, now_s)
    assert page.stages == at("dispatch", "aggregated")
    metrics.first_token(6.0)
    metrics.waited_for_worker(7.0, 9.0)
    assert (metrics.lost_prefill_s, metrics.lost_decode_s) == (3.5, 2.0)


async def test_the_loop_turns_while_the_metrics_of_many_models_are_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(info, "_SLICE_S", 0)
    registry, tasks, routes = Registry(), Tasks("test"), Routes()
    shared = FrontendMetrics(registry)
    for number in range(64):
        shared.model(f"m{number}")
    models: Any = SimpleNamespace(count=lambda: None, entries=list)
    info.InfoRoutes(models, None, registry, tasks).install(routes)  # type: ignore[arg-type]
    answers: list[tuple[int, bytes]] = []
    exchange: Any = SimpleNamespace(
        method="GET",
        path="/metrics",
        headers={},
        respond=lambda status, body, *_: answers.append((status, body)),
    )
    routes(exchange)
    turns = 0
    while not answers:
        turns += 1
        await asyncio.sleep(0)
    assert turns > 10
    [(status, body)] = answers
    assert status == 200
    assert (
        body.partition(b"# HELP process_")[0] == registry.render().partition(b"# HELP process_")[0]
    )
    await tasks.close()
