"""The exact text of a scrape, in both formats."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from dynamo.observability.metrics import (
    PageEncoder,
    Registry,
    SampleLabels,
    counter,
    gauge,
    histogram,
    plain_number,
)

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.1"
)


@pytest.fixture
def registry() -> Registry:
    """One metric of each form."""
    made = Registry()
    made.child(counter("tokens_count", "Counts \\ tokens\nof all")).value = 1_234_567
    made.child(counter("ended_total", "Ended", "model endpoint"), 'a"\\\n', "chat").value += 2
    made.child(gauge("share", "A share")).value = 2.5e-6
    made.child(gauge("none", "Not measured")).value = math.nan
    latency = made.child(
        histogram("wait_ms", "Waiting", (0.00005, 0.15000000000000002, 2, 1e7), "router_id a"),
        "r",
        "b",
    )
    for value in (0.1, 0.5, 1e7):
        latency.observe(value)
    return made


PAGE = r"""# HELP tokens_count Counts \\ tokens\nof all
# TYPE tokens_count counter
tokens_count 1234567
# HELP ended_total Ended
# TYPE ended_total counter
ended_total{model="a\"\\\n",endpoint="chat"} 2
# HELP share A share
# TYPE share gauge
share 0.0000025
# HELP none Not measured
# TYPE none gauge
none NaN
# HELP wait_ms Waiting
# TYPE wait_ms histogram
wait_ms_bucket{router_id="r",a="b",le="0.00005"} 0
wait_ms_bucket{router_id="r",a="b",le="0.15000000000000002"} 1
wait_ms_bucket{router_id="r",a="b",le="2"} 2
wait_ms_bucket{router_id="r",a="b",le="10000000"} 3
wait_ms_bucket{router_id="r",a="b",le="+Inf"} 3
wait_ms_sum{router_id="r",a="b"} 10000000.6
wait_ms_count{router_id="r",a="b"} 3
# HELP process_"""


def test_plain_text(registry: Registry) -> None:
    assert registry.render().decode().startswith(PAGE)
    assert registry.render().decode().startswith(PAGE)  # labels that were joined before


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/plain;version=0.0.4", TEXT),
        ("application/openmetrics-text;version=x", TEXT),
        ("text/plain;version=1.x", TEXT),
        ("text/plain;version=1.0.0;escaping=dots", TEXT.replace("0.0.4", "1.0.0")),
    ],
)
def test_other_accept_headers_get_plain_text(
    registry: Registry, accept: str, content_type: str
) -> None:
    body, found = registry.exposition(accept)
    assert found.removesuffix("; escaping=underscores") == content_type
    assert body.decode().startswith(PAGE)


@pytest.mark.parametrize("accept", [OPENMETRICS, PROMETHEUS])
def test_openmetrics(registry: Registry, accept: str) -> None:
    body, content_type = registry.exposition(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    text = body.decode()
    assert text.endswith("# EOF\n") and "# TYPE tokens_count unknown\n" in text
    families = {family.name: family for family in openmetrics(text)}  # type: ignore[no-untyped-call]
    assert families["ended"].type == "counter" and "process_cpu_seconds" in families
    [ended] = families["ended"].samples
    assert ended.labels == {"model": 'a"\\\n', "endpoint": "chat"} and ended.value == 2
    bounds = [s.labels["le"] for s in families["wait_ms"].samples if s.name == "wait_ms_bucket"]
    assert bounds == ["0.00005", "0.15000000000000002", "2", "10000000", "+Inf"]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_a_page_is_made_in_parts(registry: Registry, accept: str) -> None:
    """No part is long, and together they are what `prometheus_client` writes at once."""
    waits = histogram("long_ms", "Long\n", (1, 2, 5, 10), "model")
    done = counter("done_total", "Done", "model")
    for number in range(1200):
        registry.child(waits, f"m{number}").observe(number % 12)
        registry.child(done, f"m{number}").value = number
    slices, content_type = registry.slices(accept)
    parts = list(slices)
    assert max(part.count(b"\n") for part in parts) < 600
    assert len(parts) > 15

    class Whole:
        def collect(self) -> Iterator[Metric]:
            for family in registry._families.values():
                metric, *more = family.metrics()
                metric.samples += [sample for part in more for sample in part.samples]
                yield metric

    encoder = PageEncoder(accept)
    assert encoder.content_type == content_type
    whole = encoder._encode(Whole())  # type: ignore[arg-type]
    assert b"".join(parts[:-1]) == whole.removesuffix(b"# EOF\n")


def test_a_child_that_is_removed_between_parts_leaves_nothing() -> None:
    def labels() -> int:
        gc.collect()
        return sum(type(one) is SampleLabels for one in gc.get_objects())

    before = labels()
    registry = Registry()
    family = registry.family(gauge("g", "g", "model"))
    for number in range(2000):
        family[str(number),].value = number
    slices, _ = registry.slices("")
    parts = [next(slices)]
    for number in range(2000):
        family.remove(str(number))
    parts += slices
    assert b'g{model="1999"} 1999' in b"".join(parts)
    assert labels() == before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (-3.0, "-3"),
        (0.1, "0.1"),
        (1e-7, "0.0000001"),
        (-2.5e-7, "-0.00000025"),
        (1e22, "10000000000000000000000"),
        (430467.2100000001, "430467.2100000001"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert plain_number(value) == text
    registry = Registry()
    registry.child(gauge("g", "g")).value = value
    assert f"\ng {text}\n" in registry.render().decode()


def test_sample_labels_are_a_dict_that_an_encoder_reads_as_one_pair() -> None:
    labels = SampleLabels([("b", 'x"'), ("a", "y")])
    assert labels == {"b": 'x"', "a": "y"} and labels["a"] == "y" and list(labels) == ["b", "a"]
    assert labels.items() == (("b", 'x\\"",a="y'),)
    assert not SampleLabels([]) and list(SampleLabels([]).items()) == []
