"""Which points a profile measures, and the thresholds that follow from them."""

from __future__ import annotations

import pytest

from dynamo.errors import ConfigError
from dynamo.serve.graph.graph import Graph, parse_graph
from dynamo_lab.profiler.measure import NAMESPACE, profiled_graph
from dynamo_lab.profiler.results import (
    FULL,
    QUICK,
    DecodeSample,
    EngineLimits,
    PrefillSample,
    decode_advice,
    decode_steps,
    prefill_advice,
    prefill_lengths,
)
from dynamo_lab.profiler.sweep import choose_services

LIMITS = EngineLimits(context_tokens=8192, kv_tokens=100_000, max_seqs=64, batched_tokens=2048)
DISAGG = """
Common: {model-path: model, disaggregation-mode: decode}
Frontend: {run: dynamo.frontend}
Prefill: {run: dynamo.mocker, disaggregation-mode: prefill, model-path: model}
Decode:
  run: dynamo.mocker
  common-configs: [model-path, disaggregation-mode]
  ServiceArgs: {workers: 3, resources: {gpu: 2}, envs: {TOKEN: secret}}
"""


def graph(text: str = DISAGG) -> Graph:
    return parse_graph(text, "graph.yaml")


def test_lengths_span_what_the_model_takes() -> None:
    lengths = prefill_lengths(LIMITS, QUICK, None)
    assert lengths[0] == 64 and lengths[-1] == 8191 and len(lengths) == QUICK.lengths
    assert list(lengths) == sorted(set(lengths))
    assert prefill_lengths(LIMITS, FULL, 1000)[-1] == 1000


def test_a_longest_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-isl 9000 does not fit.* at most 8191 tokens"):
        prefill_lengths(LIMITS, FULL, 9000)


def test_the_requests_of_every_step_fit_together_until_its_end() -> None:
    for each in (FULL, QUICK):
        steps = decode_steps(LIMITS, each, None, 512)
        assert len(steps) == len(set(steps)) and max(s.concurrency for s in steps) <= 64
        for step in steps:
            assert step.isl + step.osl <= LIMITS.context_tokens
            grown = step.isl + each.window + each.settle
            assert step.concurrency == 1 or step.concurrency * grown <= LIMITS.kv_tokens
        usages = {round(s.concurrency * s.isl / LIMITS.kv_tokens, 1) for s in steps}
        assert {0.9, 0.3} <= usages or each is FULL


def test_a_context_too_short_to_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="context of 100 tokens"):
        decode_steps(EngineLimits(context_tokens=100, kv_tokens=10_000), FULL, None, 8)


def test_each_half_of_a_disaggregated_graph_is_measured_on_its_own_service() -> None:
    prefill, decode = choose_services(graph(), None)
    assert (prefill.name, decode.name) == ("Prefill", "Decode")
    assert [one.name for one in choose_services(graph(), "Decode")] == ["Decode", "Decode"]
    with pytest.raises(ConfigError, match=r"--service Worker: no such worker.* Prefill, Decode"):
        choose_services(graph(), "Worker")


def test_two_models_need_a_choice() -> None:
    two = graph("A: {run: dynamo.mocker, model-path: a}\nB: {run: dynamo.mocker, model-path: b}\n")
    with pytest.raises(ConfigError, match=r"several \(workers: A, B\); choose one with --service"):
        choose_services(two, None)


def test_the_profiled_graph_is_one_aggregated_worker_with_its_resources() -> None:
    found = graph()
    document = profiled_graph(found, choose_services(found, None)[1], 8123)
    assert document["namespace"] == NAMESPACE and set(document) == {
        "namespace",
        "Common",
        "Frontend",
        "Decode",
    }
    assert document["Decode"]["disaggregation-mode"] == "agg"
    assert document["Decode"]["ServiceArgs"] == {
        "workers": 1,
        "resources": {"gpu": 2},
        "envs": {"TOKEN": "secret"},
    }
    assert document["Frontend"]["http-port"] == 8123


def prefill(isl: int, ttft_ms: float) -> PrefillSample:
    return PrefillSample(isl=isl, ttft_ms=ttft_ms, tokens_per_s_per_gpu=isl / ttft_ms * 1000)


def test_queue_thresholds_are_the_prompts_that_fit_into_the_target() -> None:
    """1.2 T/t - 1 and 0.8 T/t - 1, at least 0.1."""
    points = [prefill(1000, 100.0), prefill(3000, 300.0)]
    found = prefill_advice(points, 2000, 600.0)
    assert found is not None and (found.scale_up, found.scale_down) == (2.6, 1.4)
    slow = prefill_advice(points, 2000, 100.0)
    assert slow is not None and (slow.scale_up, slow.scale_down) == (0.1, 0.1)
    assert "no number of workers meets it" in slow.reason
    longer = prefill_advice(points, 6000, 1200.0)  # twice the longest measured
    assert longer is not None and longer.scale_up == pytest.approx(1.2 * 2 - 1)


def decode(kv_usage: float, itl_ms: float, rate: float, context: float = 3000) -> DecodeSample:
    return DecodeSample(
        concurrency=8,
        context_tokens=context,
        kv_usage=kv_usage,
        itl_ms=itl_ms,
        tokens_per_s_per_gpu=rate,
    )


def test_kv_thresholds_surround_the_fastest_point_within_the_target() -> None:
    points = [decode(0.1, 10, 100), decode(0.5, 30, 400), decode(0.9, 60, 600)]
    found = decode_advice([*points, decode(0.3, 5, 900, context=256)], 3075, 50.0)
    assert found is not None and (found.scale_up, found.scale_down) == (0.7, 0.3)
    high = decode_advice(points, 3075, 100.0)
    assert high is not None and (high.scale_up, high.scale_down) == (1.0, 0.7)
    none = decode_advice(points, 3075, 5.0)
    assert none is not None and (none.scale_up, none.scale_down) == (0.3, 0.1)
    assert "no point meets 5 ms; the fastest takes 10.0 ms" in none.reason
