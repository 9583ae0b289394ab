"""Families, children and registry, and the numbers that a scrape reads."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.observability.metrics import Registry, counter, gauge, histogram

REQUESTS = counter("a_total", 'says "hi"\nback\\slash', "x y")
DEPTH = gauge("b", "b")
BY_WORKER = gauge("g", "g", "w")
SECONDS = histogram("c", "c", (0, 0.1, 5), "m")


def page(registry: Registry) -> str:
    """The text without what every process shows."""
    return registry.render().decode().partition("# HELP process_")[0]


def test_the_reference_parser_reads_the_values() -> None:
    registry = Registry()
    registry.child(REQUESTS, 'q"\n\\', "2").inc(3)
    registry.child(DEPTH).value = -1.5
    values = registry.child(SECONDS, "one")
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


def test_families_without_children_and_removed_children_are_not_rendered() -> None:
    registry = Registry()
    family = registry.family(BY_WORKER)
    assert page(registry) == ""
    family.labels("1").value = 1
    assert page(registry).endswith('g{w="1"} 1\n')
    family.remove("1")
    family.remove("never there")
    assert page(registry) == ""
    with pytest.raises(ValueError, match="needs labels"):
        family.labels("1", "2")


def test_a_child_is_made_once() -> None:
    registry = Registry()
    assert registry.child(BY_WORKER, "1") is registry.family(BY_WORKER)["1",]
    assert registry.family(BY_WORKER) is registry.family(BY_WORKER)


def test_a_child_with_labels_of_its_own() -> None:
    registry = Registry()
    family = registry.family(BY_WORKER)
    assert family.extended(("1",), ()) is family.labels("1")
    family.extended(("1",), (("zone", "a"), ("rack", "7"))).value = 2
    assert 'g{w="1",zone="a",rack="7"} 2\n' in page(registry)
    with pytest.raises(ValueError, match="needs labels"):
        family.extended((), ())


def test_a_gauge_may_be_read_at_a_scrape() -> None:
    registry = Registry()
    registry.child(DEPTH).function = lambda: 7
    assert "b 7\n" in page(registry)


def test_counts_kept_elsewhere_are_brought_up_to_date_first() -> None:
    registry = Registry()
    child = registry.child(DEPTH)
    registry.before_render.append(lambda: setattr(child, "value", 9))
    assert "b 9\n" in page(registry)


def test_the_prefix_of_the_frontend_can_be_changed() -> None:
    ours, other = counter("dynamo_frontend_x_total", "x"), counter("dynamo_router_x_total", "x")
    assert ours.named("acme") == "acme_x_total" and other.named("acme") == "dynamo_router_x_total"
    registry = Registry()
    FrontendMetrics(registry, "acme").model("tiny").active.value += 1
    assert 'acme_active_requests{model="tiny"} 1\n' in page(registry)
    assert "dynamo_frontend_" not in page(registry)


def test_the_process_and_its_garbage_collector_are_on_the_page() -> None:
    text = Registry().render().decode()
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert f"\n{name} " in text
    assert 'python_gc_collections_total{generation="2"} ' in text


def test_counters_of_what_is_gone_stay() -> None:
    """A rate over them would show a fall; gauges would show something that exists no more."""
    registry = Registry()
    served = counter("served_total", "s", "w")
    for worker in ("1", "2"):
        registry.child(BY_WORKER, worker).value = 1
        registry.child(served, worker).value = 5
    registry.forget("w", "1")
    text = page(registry)
    assert 'g{w="1"}' not in text and 'g{w="2"} 1' in text
    assert 'served_total{w="1"} 5' in text
