"""Traffic from the frontends' counters: deltas, several frontends, restarts, outages."""

from __future__ import annotations

import pytest

from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.observability.metrics import Registry
from dynamo.planner.live.traffic import FrontendPage, TrafficCounter, read_page

SINCE = 1000.0


def page(started_at: float, started: float, **values: float) -> FrontendPage:
    return FrontendPage(started_at, {"tiny": {"requests_started_total": started, **values}})


def test_a_page_has_the_counts_of_each_model() -> None:
    metrics = FrontendMetrics(Registry())
    model = metrics.model("tiny")
    model.started["chat_completions", "tiny", "stream"].value += 3
    model.started["completions", "tiny", "unary"].value += 2
    model.requests["completions", "", "tiny", "unary", "success"].value += 4
    model.ttft.observe(0.25)
    model.ttft.observe(0.75)
    model.active.value = 1
    metrics.model("other").queued.value = 7

    found = read_page(metrics.registry.render())

    assert found.started_at > SINCE
    tiny = found.models["tiny"]
    assert tiny["requests_started_total"] == 5
    assert tiny["requests_total"] == 4
    assert tiny["time_to_first_token_seconds_sum"] == 1
    assert tiny["time_to_first_token_seconds_count"] == 2
    assert tiny["active_requests"] == 1
    assert found.models["other"]["queued_requests"] == 7


def test_the_start_of_the_first_worker_is_no_latency_of_requests() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    counter.add({"a": page(1.0, 100)}, (), 0.0)
    counter.take("tiny", 0.0)
    waited = {
        "time_to_first_token_seconds_sum": 31.0,
        "time_to_first_token_seconds_count": 2,
        "time_to_first_token_worker_wait_seconds_total": 30.0,
        "request_duration_seconds_sum": 34.0,
        "request_duration_seconds_count": 2,
        "request_worker_wait_seconds_total": 30.0,
    }
    counter.add({"a": page(1.0, 102, **waited)}, (), 5.0)
    seen = counter.take("tiny", 5.0)
    assert (seen.ttft_ms, seen.request_s) == (500, 2)


def test_requests_that_wait_for_the_first_worker_are_queued() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    seen = []
    # They come and wait, a worker comes, and others come.
    for number, (started, held, active) in enumerate(
        [(100, 0, 0), (106, 6, 0), (109, 9, 0), (112, 0, 4), (113, 0, 0)]
    ):
        figures = {"cold_start_queue_requests": held, "active_requests": active}
        counter.add({"a": page(1.0, started, **figures)}, (), 5.0 * number)
        traffic = counter.take("tiny", 5.0 * number)
        seen.append((traffic.arrived, traffic.queued, traffic.inflight))
    assert seen[1:] == [(6, 6, 6), (3, 9, 9), (3, 0, 4), (1, 0, 0)]


def test_a_page_may_have_another_prefix() -> None:
    metrics = FrontendMetrics(Registry(), "my_frontend")
    metrics.model("tiny").active.value = 2
    text = metrics.registry.render()
    assert read_page(text, "my_frontend").models["tiny"]["active_requests"] == 2
    assert read_page(text).models == {}


def test_a_page_of_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match="process_start_time_seconds"):
        read_page(b"some_metric 1\n")


@pytest.mark.parametrize(
    "line",
    [
        b'dynamo_frontend_requests_started_total{model="a"} x',
        b'dynamo_frontend_requests_started_total{model="a',  # the page was cut
        b'dynamo_frontend_requests_started_total{model="\xff"} 3',
    ],
)
def test_a_page_with_a_damaged_counter_is_unknown(line: bytes) -> None:
    """Without the line, its requests would count as none. Other metrics may be damaged."""
    start = b"process_start_time_seconds 5\n"
    with pytest.raises(ValueError, match=r"could not convert|a damaged sample|codec can't decode"):
        read_page(start + line)
    other = b"dynamo_frontend_requests_started_total_created{ x\n"
    assert read_page(start + other).models == {}


def test_an_interval_has_what_the_counters_rose_by() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    counter.add({"a": page(1.0, 100, output_sequence_tokens_sum=900)}, (), 0.0)  # older than we are
    assert counter.take("tiny", 0.0).arrived == 0
    counter.add(
        {
            "a": page(
                *(1.0, 130),
                requests_total=20,
                output_sequence_tokens_sum=1100,
                output_sequence_tokens_count=4,
                time_to_first_token_seconds_sum=3,
                time_to_first_token_seconds_count=6,
                active_requests=9,
                queued_requests=2,
            )
        },
        (),
        10.0,
    )
    seen = counter.take("tiny", 10.0)
    assert (seen.duration_s, seen.arrived, seen.finished) == (10.0, 30, 20)
    assert (seen.osl, seen.ttft_ms, seen.isl) == (50, 500, None)
    assert (seen.inflight, seen.queued, seen.known) == (9, 2, True)
    assert counter.take("tiny", 11.0).arrived == 0


def test_frontends_are_summed() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    pages = {"a": page(2000.0, 3, active_requests=1), "b": page(2001.0, 4, active_requests=2)}
    counter.add(pages, (), 0.0)
    seen = counter.take("tiny", 1.0)
    assert (seen.arrived, seen.inflight) == (7, 3)


def test_a_restarted_frontend_counts_from_zero() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    counter.add({"a": page(2000.0, 50)}, (), 0.0)
    counter.take("tiny", 1.0)
    counter.add({"a": page(3000.0, 4)}, (), 0.0)
    assert counter.take("tiny", 2.0).arrived == 4


def test_two_processes_may_share_an_address() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    for started_at, started in ((2000.0, 50), (3000.0, 1), (2000.0, 52), (3000.0, 4)):
        counter.add({"a": page(started_at, started)}, (), 0.0)
    assert counter.take("tiny", 1.0).arrived == 56


def test_traffic_is_unknown_while_a_frontend_is_missing() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    counter.add({"a": page(1.0, 1)}, (), 0.0)
    assert not counter.take("tiny", 1.0).known  # it ran before, and nothing was read then
    counter.add({"a": page(1.0, 2)}, (), 0.0)
    assert counter.take("tiny", 2.0).known
    counter.add({}, ("a",), 0.0)
    assert not counter.take("tiny", 3.0).known
    counter.add({"a": page(1.0, 9)}, (), 0.0)  # requests of this interval and the one before
    assert not counter.take("tiny", 4.0).known
    counter.add({"a": page(1.0, 10)}, (), 0.0)
    seen = counter.take("tiny", 5.0)
    assert seen.known
    assert seen.arrived == 1


def test_a_frontend_that_hangs_for_long_is_ignored_until_it_answers() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    both = {"a": page(2000.0, 1), "b": page(2000.0, 1)}
    counter.add(both, (), 10.0)
    assert counter.take("tiny", 10.0).arrived == 2
    for now_s, known in ((40.0, False), (70.0, False), (100.0, True), (130.0, True)):
        counter.add({"a": page(2000.0, now_s)}, ("b",), now_s)
        assert counter.take("tiny", now_s).known is known
    assert counter.ignored == {"b"}
    counter.add({"a": page(2000.0, 131.0), "b": page(2000.0, 500)}, (), 160.0)
    seen = counter.take("tiny", 160.0)
    assert (seen.known, seen.arrived, counter.ignored) == (False, 1, frozenset())
    counter.add({"a": page(2000.0, 131.0), "b": page(2000.0, 503)}, (), 190.0)
    seen = counter.take("tiny", 190.0)
    assert (seen.known, seen.arrived) == (True, 3)


def test_the_only_frontend_is_waited_for() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    for now_s in (0.0, 100.0, 200.0):
        counter.add({}, ("a",), now_s)
        assert not counter.take("tiny", now_s).known


def test_without_frontends_traffic_is_unknown() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    for _ in range(2):
        counter.add({}, (), 0.0)
        seen = counter.take("tiny", 1.0)
    assert not seen.known


def test_a_look_does_not_end_the_interval() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)
    counter.add({"a": page(2000.0, 5)}, (), 0.0)
    assert counter.peek("tiny", 1.0).arrived == 5
    assert counter.take("tiny", 2.0).arrived == 5


def test_requests_for_an_adapter_are_traffic_of_its_model() -> None:
    counter = TrafficCounter(SINCE, 0.0, 60.0)

    def read(tiny: int, sql: int) -> dict[str, FrontendPage]:
        ttft = {"time_to_first_token_seconds_count": sql, "time_to_first_token_seconds_sum": sql}
        counts = {"requests_started_total": float(sql), "active_requests": 2.0, **ttft}
        models = {"tiny": {"requests_started_total": float(tiny), "queued_requests": 1.0}}
        return {"a": FrontendPage(2000.0, {**models, "sql": counts})}

    counter.add(read(5, 100), (), 0.0)
    assert counter.take("tiny", 1.0).arrived == 5  # no worker serves the adapter yet
    counter.add(read(7, 104), (), 1.0, {"sql": "tiny"})
    seen = counter.take("tiny", 2.0)
    assert (seen.arrived, seen.ttft_ms) == (6, 1000)
    assert (seen.queued, seen.inflight) == (1, 2)
    assert counter.take("sql", 2.0).inflight == 0
