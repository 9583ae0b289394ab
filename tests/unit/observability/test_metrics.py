"""The exposition text, read back by the reference parser, and names kept to the letter."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo.observability.metrics import Registry
from dynamo.observability.names import (
    FrontendNames,
    MetricSpec,
    RequestPlane,
    Router,
    Worker,
    counter,
    histogram,
)

AREAS = (FrontendNames, RequestPlane, Router, Worker)


def specs() -> list[MetricSpec]:
    return [one for area in AREAS for one in vars(area).values() if isinstance(one, MetricSpec)]


def test_the_reference_parser_reads_what_was_counted() -> None:
    registry = Registry()
    registry.counter("a_total", 'says "hi"\nback\\slash', ("x", "y")).labels('q"\n\\', "2").inc(3)
    registry.gauge("b", "b").labels().set(-1.5)
    values = registry.histogram("c", "c", (0, 0.1, 5), ("m",)).labels("one")
    for value in (0, 0.1, 0.05, 6):
        values.observe(value)
    values.observe(2, times=2)
    families = {one.name: one for one in text_string_to_metric_families(registry.render().decode())}
    sample = families["a"].samples[0]
    assert (sample.labels, sample.value) == ({"x": 'q"\n\\', "y": "2"}, 3)
    assert families["b"].samples[0].value == -1.5
    rows = {(s.name, s.labels.get("le")): s.value for s in families["c"].samples}
    assert rows == {
        ("c_bucket", "0"): 1,
        ("c_bucket", "0.1"): 3,
        ("c_bucket", "5"): 5,
        ("c_bucket", "+Inf"): 6,
        ("c_count", None): 6,
        ("c_sum", None): pytest.approx(10.15),
    }


def test_names_without_total_and_numbers_keep_their_form() -> None:
    registry = Registry()
    counter(registry, FrontendNames.DETOKENIZE_TOKENS).labels().inc()
    histogram(registry, Router.HIT_RATE).labels("c", "n", "r", "w").observe(0.5)
    histogram(registry, Router.TOTAL_MS).labels("r").observe(0.5)
    registry.gauge("tiny", "t").labels().set(2.5e-6)
    text = registry.render().decode()
    assert "\ndynamo_frontend_detokenize_token_count 1\n" in "\n" + text
    assert 'le="0.15000000000000002"' in text and 'le="0.30000000000000004"' in text
    assert 'le="430467.2100000001"' in text and 'le="7.290000000000001"' in text
    assert "tiny 0.0000025\n" in text


def test_a_family_without_children_is_silent_and_removed_children_vanish() -> None:
    registry = Registry()
    family = registry.gauge("g", "g", ("w",))
    assert registry.render() == b""
    family.labels("1").set(1)
    family.remove("1")
    family.remove("never there")
    assert registry.render() == b""
    with pytest.raises(ValueError, match="needs labels"):
        family.labels("1", "2")


def test_a_gauge_may_be_read_at_scrape() -> None:
    registry = Registry()
    registry.gauge("g", "g").labels().function = lambda: 7
    assert b"g 7\n" in registry.render()


def test_every_name_is_said_once_and_well_formed() -> None:
    names = [spec.name for spec in specs()]
    assert len(names) == len(set(names)) > 60
    for spec in specs():
        assert spec.help
        assert (spec.kind == "histogram") == bool(spec.buckets)
        assert list(spec.buckets) == sorted(set(spec.buckets))


def test_the_prefix_of_the_frontend_can_be_changed() -> None:
    assert FrontendNames.TTFT.named("acme") == "acme_time_to_first_token_seconds"
    assert Router.TOTAL_MS.named("acme") == "dynamo_router_overhead_total_ms"
