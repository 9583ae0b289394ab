"""What is counted of a request: its stage until its first token, and its figures at its end."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.frontend.answer.generation import Usage
from dynamo.frontend.apis.operator import info
from dynamo.frontend.requests.errors import Labels
from dynamo.frontend.requests.metrics import WORKER_WAIT_STAGE, FrontendMetrics
from dynamo.frontend.requests.recent import RequestInfo
from dynamo.frontend.requests.request_metrics import RequestMetrics, show_in_progress
from dynamo.http import NEVER
from dynamo.http.routes import Routes
from dynamo.observability.metrics import Registry
from dynamo.router.decision.decision import Decision
from dynamo.runtime.process.tasks import Tasks

DECISION = Decision(1, 0)


class Page:
    """A frontend's metrics and one request."""

    def __init__(self, **given: Any) -> None:
        self.registry = Registry()
        self.shared = shared = FrontendMetrics(self.registry)
        self.metrics = RequestMetrics(
            RequestInfo("chat_completions", "1", None), "tiny", 0.0,
            shared=shared, of_model=shared.model("tiny"), kind="stream", **given,
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


def engine_request(*workers: int, **figures: Any) -> Any:
    """One choice of a request that went to worker 1, of a model with these workers."""
    pool = SimpleNamespace(members=dict.fromkeys(workers))
    picker = SimpleNamespace(worker_pool=pool, reused_tokens=SimpleNamespace(value=0))
    given = {"tokens": 11, "first_token_s": 6.0, "last_token_s": 8.5, "detokenize_s": 0.125}
    retries = SimpleNamespace(migrations=figures.pop("migrations", 2))
    return SimpleNamespace(
        decision=DECISION,
        picker=picker,
        retries=retries,
        inputs=None,
        prefill_inputs=None,
        **{**given, **figures},
    )


SECONDS = {
    "dynamo_frontend_stage_duration_seconds{worker_wait}": 4.0,
    "dynamo_frontend_stage_duration_seconds{preprocess}": 0.5,
    "dynamo_frontend_stage_duration_seconds{route}": 0.5,
    "dynamo_frontend_stage_duration_seconds{dispatch}": 0.25,
    "dynamo_frontend_stage_duration_seconds{transport_roundtrip}": 2.0,
    "dynamo_request_plane_queue_seconds": 4.0,
    "dynamo_request_plane_send_seconds": 0.25,
    "dynamo_request_plane_roundtrip_ttft_seconds": 2.0,
    "dynamo_frontend_request_duration_seconds{tiny}": 20.0,
    "dynamo_frontend_time_to_first_token_seconds{tiny}": 6.0,
    "dynamo_frontend_input_sequence_tokens{tiny}": 100.0,
    "dynamo_frontend_output_sequence_tokens{tiny}": 11.0,
    "dynamo_frontend_cached_tokens{tiny}": 32.0,
    "dynamo_frontend_tokenizer_latency_ms{detokenize}": 125.0,
}
"""What one observation of each histogram is, of a request that waited for a worker twice."""
VALUES = {
    "dynamo_frontend_time_to_first_token_worker_wait_seconds_total{tiny}": 3.0,
    "dynamo_frontend_request_worker_wait_seconds_total{tiny}": 4.0,
    "dynamo_frontend_output_tokens_total{tiny}": 11.0,
    "dynamo_frontend_detokenize_token_count": 11.0,
    "dynamo_frontend_detokenize_total_us": 125_000.0,
    "dynamo_frontend_worker_last_input_sequence_tokens{0,1,decode}": 100.0,
    "dynamo_frontend_worker_last_time_to_first_token_seconds{0,1,decode}": 6.0,
    "dynamo_frontend_worker_last_inter_token_latency_seconds{0,1,decode}": 0.25,
    "dynamo_frontend_requests_total{chat_completions,,tiny,stream,success}": 1.0,
}


def rows_of(page: Page) -> dict[str, float]:
    """The values of a page that are not 0, with the values of their labels."""
    found = {}
    for line in page.registry.render().decode().splitlines():
        if not line.startswith("#") and "_bucket{" not in line:
            name, value = line.rsplit(" ", 1)
            labels = ",".join(re.findall('="([^"]*)"', name))
            short = name.partition("{")[0]
            found[f"{short}{{{labels}}}" if "{" in name else short] = float(value)
    return {name: value for name, value in found.items() if value}


def test_each_figure_of_a_request_is_observed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 20.0, time=lambda: 1020.0)
    monkeypatch.setattr("dynamo.frontend.requests.request_metrics.time", clock)
    page = Page()
    metrics, choice = page.metrics, engine_request(1)
    metrics.resumed_s, metrics.prepared_s = 3.0, 3.5
    metrics.routed("aggregated")
    metrics.sent(Decision(1, 0, overlap_blocks=2, prompt_blocks=8), 4, 4.0, 0.25)
    metrics.dispatched(100)
    metrics.first_token(6.0)
    metrics.first_token(7.0)  # of another choice
    metrics.waited_for_worker(9.0, 10.0)
    assert metrics.timing() == {
        "request_received_ms": 1_000_000,
        "prefill_wait_time_ms": 4000.0,
        "prefill_time_ms": 2000.0,
        "ttft_ms": 6000.0,
        "total_time_ms": 20_000.0,
        "kv_hit_rate": 0.25,
        "router_queue_depth": 4,
    }
    assert metrics.of_model.active.value == 1
    metrics.count_output(Usage(100, 11, 32), [choice])
    metrics.ended(None, [choice])
    assert metrics.of_model.active.value == 0 and choice.picker.reused_tokens.value == 32
    rows = rows_of(page)
    for name, value in SECONDS.items():
        short, brace, labels = name.partition("{")
        assert rows[f"{short}_sum{brace}{labels}"] == value, name
        assert rows[f"{short}_count{brace}{labels}"] == 1, name
    assert {name: rows[name] for name in VALUES} == VALUES
    found = metrics.record()
    assert (found.ttft_s, found.worker_wait_s, found.prepare_s, found.queue_s) == (6, 4, 0.5, 0.5)
    assert (found.prefill_s, found.decode_s, found.migrations, found.outcome) == (2, 1.5, 2, "ok")
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (100, 11, 32)


def test_a_request_that_never_waited_has_no_rows_of_waiting_and_a_removed_worker_none() -> None:
    page = Page()
    metrics, choice = page.metrics, engine_request()
    metrics.waited_for_worker(0.0, 0.5)  # before a worker had it: that is no loss
    metrics.prepared_s = 0.75
    metrics.sent(DECISION, 3, 1.0, 0.0)
    metrics.sent(DECISION, 2, 1.5, 0.0)  # another choice
    metrics.dispatched(8)
    metrics.first_token(2.0)
    second = engine_request(last_token_s=9.5, migrations=1)
    second.decision = None
    metrics.count_output(Usage(8, 11, None), [choice, second])
    metrics.ended(Labels("server", "timeout", "internal"), [choice, second])
    rows = rows_of(page)
    for part in ("worker_wait", "worker_last", "cached_tokens", "success"):
        assert not [name for name in rows if part in name], part
    failed = "dynamo_frontend_requests_total{chat_completions,server,tiny,stream,error}"
    assert rows[failed] == rows["dynamo_frontend_failures_total{timeout,internal}"] == 1
    assert rows["dynamo_frontend_stage_duration_seconds_sum{preprocess}"] == 0.75
    assert rows["dynamo_frontend_stage_duration_seconds_count{route}"] == 1
    assert choice.picker.reused_tokens.value == 0
    found = metrics.record()
    assert (found.outcome, found.migrations) == ("server", 3)
    assert (metrics.last_token_s, metrics.queue_depth) == (9.5, 3)
    assert [*page.shared.recent.records] == [metrics]


def test_a_wait_in_the_middle_counts_until_the_first_token_too() -> None:
    page = Page()
    metrics = page.metrics
    assert metrics.timing()["ttft_ms"] == pytest.approx(metrics.timing()["total_time_ms"], abs=1e3)
    metrics.rerouted_s, metrics.prepared_s = 2.0, 0.5
    metrics.sent(DECISION, 0, 3.0, 0.0)
    metrics.waits_for_worker()
    metrics.waited_for_worker(4.0, 5.0)
    assert page.stages == at("dispatch", "aggregated")
    metrics.first_token(6.0)
    rows = rows_of(page)
    name = "dynamo_frontend_time_to_first_token_worker_wait_seconds_total{tiny}"
    assert rows[name] == metrics.worker_wait_s() == 2.5
    assert rows["dynamo_frontend_stage_duration_seconds_sum{route}"] == 1.0


def test_a_request_whose_workers_left_before_it_was_sent_waits_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 20.0, time=lambda: 1020.0)
    monkeypatch.setattr("dynamo.frontend.requests.request_metrics.time", clock)
    metrics = Page().metrics
    metrics.waits_for_worker()
    assert metrics.rerouted_s == NEVER and metrics.stage == WORKER_WAIT_STAGE
    metrics.has_worker()
    assert metrics.rerouted_s == 20.0
    metrics.first_token(21.0)
    metrics.waits_for_worker()  # its stream goes on elsewhere: it is no request without a token
    assert metrics.stage is None


def test_images_and_embeddings_have_figures_of_their_own() -> None:
    images: Any = SimpleNamespace(hashes=["a", "b"], count_tokens=lambda: 0)
    page = Page(images=images)
    page.metrics.dispatched(8)
    page.metrics.count_output(Usage(8, 11, None), [])
    page.metrics.info = page.metrics.info._replace(endpoint="embeddings")
    page.metrics.ended(None, [])
    rows = rows_of(page)
    assert rows["dynamo_frontend_images_per_request_sum{tiny}"] == 2
    assert (
        rows["dynamo_frontend_image_tokens_per_request_count{tiny}"] == 1
    )  # an engine may report 0
    assert [name for name in rows if "embedding" in name and "_count" in name]


def test_a_request_that_was_counted_when_it_began_to_wait_is_not_counted_again() -> None:
    def started(**given: Any) -> dict[str, float]:
        page = Page(**given)
        return {name: row for name, row in rows_of(page).items() if "started" in name}

    assert [*started().values()] == [1.0] and started(resumed_s=1.0) == {}
