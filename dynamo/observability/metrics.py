"""Metrics cheap enough for the token path: plain ints and floats, rendered only at scrape.

``prometheus_client`` spends 1-2 µs on an observation; a child here is one attribute addition. One
custom collector hands all families to ``prometheus_client`` when /metrics is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

__all__ = ["Counter", "Family", "Gauge", "Histogram", "Registry"]

C = TypeVar("C", "Counter", "Gauge", "Histogram")


class Counter:
    """A number that only rises; add to ``value`` directly on hot paths."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Add ``amount`` (>= 0)."""
        self.value += amount


class Gauge:
    """A number that rises and falls, or is read from ``function`` at scrape."""

    __slots__ = ("function", "value")

    def __init__(self) -> None:
        self.value: float = 0
        self.function: Callable[[], float] | None = None

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``."""
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        """Subtract ``amount``."""
        self.value -= amount

    def read(self) -> float:
        """The value as a scrape sees it."""
        return self.value if self.function is None else self.function()


class Histogram:
    """Counts per bucket; ``observe`` is one bisect and three additions."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times; a bucket holds values <= its bound."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Family(Generic[C]):
    """All children of one metric name, keyed by their label values in ``labelnames`` order."""

    def __init__(
        self, kind: str, name: str, help: str, labelnames: Sequence[str], make: Callable[[], C]
    ) -> None:
        self.kind = kind
        self.name = name
        self.help = help
        self.labelnames = tuple(labelnames)
        self._make: Callable[[], C] = make
        self._children: dict[tuple[str, ...], C] = {}

    def labels(self, *values: str) -> C:
        """The child for these label values, made on first use. Keep it when on a hot path."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self.labelnames):
                raise ValueError(f"{self.name} needs labels {self.labelnames}, got {values}")
            child = self._children[values] = self._make()
        return child

    def remove(self, *values: str) -> None:
        """Forget the child (a worker that is gone)."""
        self._children.pop(values, None)

    def items(self) -> Iterable[tuple[tuple[str, ...], C]]:
        """Every child with its label values."""
        return list(self._children.items())


class Registry:
    """The metrics of one process."""

    def __init__(self) -> None:
        self._families: dict[str, Family[Counter] | Family[Gauge] | Family[Histogram]] = {}
        self._prometheus = CollectorRegistry()
        self._prometheus.register(self)

    def counter(self, name: str, help: str, labelnames: Sequence[str] = ()) -> Family[Counter]:
        """The counter family ``name``, made on first use."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Family("counter", name, help, labelnames, Counter)
        return family  # type: ignore[return-value]

    def gauge(self, name: str, help: str, labelnames: Sequence[str] = ()) -> Family[Gauge]:
        """The gauge family ``name``, made on first use."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Family("gauge", name, help, labelnames, Gauge)
        return family  # type: ignore[return-value]

    def histogram(
        self, name: str, help: str, buckets: Sequence[float], labelnames: Sequence[str] = ()
    ) -> Family[Histogram]:
        """The histogram family ``name`` with upper bounds ``buckets`` (+Inf is implied)."""
        family = self._families.get(name)
        if family is None:
            bounds = tuple(buckets)
            family = Family("histogram", name, help, labelnames, lambda: Histogram(bounds))
            self._families[name] = family
        return family  # type: ignore[return-value]

    def render(self) -> bytes:
        """Prometheus text exposition format."""
        return generate_latest(self._prometheus)

    def collect(self) -> Iterator[Metric]:
        """Called by ``prometheus_client`` at scrape."""
        for family in list(self._families.values()):
            yield _family_metric(family)


def _family_metric(family: Family[Counter] | Family[Gauge] | Family[Histogram]) -> Metric:
    if family.kind == "counter":
        counter = CounterMetricFamily(family.name, family.help, labels=family.labelnames)
        for labels, child in family.items():
            counter.add_metric(labels, child.value)  # type: ignore[union-attr]
        return counter
    if family.kind == "gauge":
        gauge = GaugeMetricFamily(family.name, family.help, labels=family.labelnames)
        for labels, child in family.items():
            gauge.add_metric(labels, child.read())  # type: ignore[union-attr]
        return gauge
    histogram = HistogramMetricFamily(family.name, family.help, labels=family.labelnames)
    for labels, child in family.items():
        histogram.add_metric(labels, _buckets(child), child.total)  # type: ignore[arg-type,union-attr]
    return histogram


def _buckets(child: Histogram) -> list[tuple[str, float]]:
    rows, running = [], 0
    for bound, count in zip((*child.bounds, float("inf")), child.counts, strict=True):
        running += count
        rows.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(running)))
    return rows
