"""Metrics cheap enough for the token path: plain ints and floats, rendered only at scrape.

``prometheus_client`` spends 1-2 µs on an observation; a child here is one attribute addition, a
histogram one compiled call. The text is rendered here too, because that library renames counters
that do not end in ``_total`` and formats bucket bounds differently from what dashboards for this
system expect (spec 6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Generic, TypeVar

from dynamo._fast.histogram import Histogram

__all__ = ["CONTENT_TYPE", "Counter", "Family", "Gauge", "Histogram", "Registry"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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

    def extended(self, values: tuple[str, ...], extra: Sequence[tuple[str, str]]) -> C:
        """The child for these label values and for ``extra`` labels of its own (name, value)."""
        if not extra:
            return self.labels(*values)
        key = (*values, *(text for pair in extra for text in pair))
        if key not in self._children:
            self._children[key] = self._make()
        return self._children[key]

    def remove(self, *values: str) -> None:
        """Forget the child (a worker that is gone)."""
        self._children.pop(values, None)

    def items(self) -> Sequence[tuple[tuple[str, ...], C]]:
        """Every child with its label values."""
        return list(self._children.items())


class Registry:
    """The metrics of one process."""

    def __init__(self) -> None:
        self.before_render: list[Callable[[], None]] = []
        self._families: dict[str, Family[Counter] | Family[Gauge] | Family[Histogram]] = {}

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
        """Prometheus text exposition format, families without children left out. O(children).

        ``before_render`` holds what brings counts up to date that are kept elsewhere.
        """
        for bring_up_to_date in self.before_render:
            bring_up_to_date()
        out: list[str] = []
        for family in list(self._families.values()):
            _render(family, out)
        return "".join(out).encode()


def _render(family: Family[Counter] | Family[Gauge] | Family[Histogram], out: list[str]) -> None:
    children = family.items()
    if not children:
        return
    name = family.name
    out.append(f"# HELP {name} {_escape(family.help)}\n# TYPE {name} {family.kind}\n")
    count = len(family.labelnames)
    for values, child in children:
        extra = zip(values[count::2], values[count + 1 :: 2], strict=True)
        pairs = [*zip(family.labelnames, values, strict=False), *extra]
        inner = ",".join(f'{key}="{_escape(value, quote=True)}"' for key, value in pairs)
        if isinstance(child, Histogram):
            _render_histogram(name, inner, child, out)
            continue
        value = child.value if isinstance(child, Counter) else child.read()
        out.append(
            f"{name}{{{inner}}} {_number(value)}\n" if inner else f"{name} {_number(value)}\n"
        )


def _render_histogram(name: str, inner: str, child: Histogram, out: list[str]) -> None:
    running = 0
    lead = f"{name}_bucket{{{inner}," if inner else f"{name}_bucket{{"
    for bound, count in zip((*child.bounds, float("inf")), child.counts, strict=True):
        running += count
        out.append(f'{lead}le="{_number(bound)}"}} {running}\n')
    labels = f"{{{inner}}}" if inner else ""
    out.append(f"{name}_sum{labels} {_number(child.total)}\n{name}_count{labels} {running}\n")


def _number(value: float) -> str:
    """The shortest decimal that reads back as ``value``, never in scientific notation."""
    if value == float("inf"):
        return "+Inf"
    if value != value or value == float("-inf"):
        return "NaN" if value != value else "-Inf"
    if value == int(value):
        return str(int(value))
    text = repr(value)
    return format(Decimal(text), "f") if "e" in text else text


def _escape(text: str, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
