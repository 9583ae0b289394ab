"""Metrics as plain numbers: an increment is an attribute addition, a scrape reads them.

A metric is declared once, beside the class that counts it::

    _STARTED = counter("dynamo_frontend_requests_started_total", "Requests accepted", "model kind")

    started = registry.child(_STARTED, "tiny", "stream")
    started.value += 1

``prometheus_client`` would spend 1-2 µs on an increment or observation; it renders here, from the
parts that :meth:`Registry.slices` builds at a scrape.

The text of a scrape: ``prometheus_client`` writes it, in the form that Dynamo's dashboards read.

Dynamo writes labels in declared order with ``le`` last, and integers without a fraction;
``prometheus_client`` sorts labels and writes every number as a float.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Generic, TypeVar, cast

from prometheus_client import CollectorRegistry, GCCollector, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.samples import Sample

from dynamo._fast.histogram import Histogram
from dynamo.prometheus_names import name_prefix

_PART = 500  # samples, in about 1 ms
# Buckets of the frontend that the router's histograms share.
ISL_BUCKETS = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
OSL_BUCKETS = (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
# fmt: off
TTFT_BUCKETS = (
    0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480
)
TEXT = "text/plain; version=0.0.4; charset=utf-8"
log = logging.getLogger(__name__)
_EOF = b"# EOF\n"
_ESCAPING = re.compile(r";\s*escaping=[^;,]*")
_FRACTION = re.compile(r"\.0$", re.MULTILINE)
_EXPONENT = re.compile(r" (-?\d\S*e[-+]\d+)$", re.MULTILINE)




class PageEncoder:
    """Writes a scrape with this ``Accept`` header part by part: OpenMetrics or plain text."""

    def __init__(self, accept: str = "") -> None:
        try:
            encoder, content_type = choose_encoder(_ESCAPING.sub("", accept))
        except TypeError:  # a version that is not made of numbers
            encoder, content_type = generate_latest, TEXT
        self.content_type: str = content_type
        self._encoder: Callable[..., bytes] = encoder
        self._is_text = content_type.startswith("text/plain")

    def parts(self, metrics: Iterable[Metric]) -> Iterator[bytes]:
        """The text of each of ``metrics``, which are parts of one metric: its head comes once."""
        head: bytes | None = None
        for number, part in enumerate(metrics):
            text = self._encode(_Parts(part)).removesuffix(_EOF)
            if number:
                if head is None:
                    empty = Metric(part.name, part.documentation, part.type)
                    head = self._encode(_Parts(empty)).removesuffix(_EOF)
                text = text.removeprefix(head)
            yield text

    def last(self, registry: CollectorRegistry) -> bytes:
        """The text of ``registry``, and of the end of the page."""
        return self._encode(registry)

    def _encode(self, registry: CollectorRegistry | _Parts) -> bytes:
        if self._is_text:
            return _dynamo_text(self._encoder(registry).decode()).encode()
        # Names of Dynamo need no escaping. UTF-8 is the cheapest scheme for OpenMetrics: the others
        # go through each name character by character, which doubles the time.
        return self._encoder(registry, escaping=ALLOWUTF8)


class _Parts:
    """A metric as a registry, for the encoders of ``prometheus_client``."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        """The metric."""
        yield self._metric


def _dynamo_text(text: str) -> str:
    """``text`` with plain numbers; counters whose names lack ``_total`` are counters again."""
    text = _EXPONENT.sub(lambda match: " " + plain_number(float(match[1])), text)
    return _FRACTION.sub("", text).replace(" untyped\n", " counter\n")


def plain_number(value: float) -> str:
    """The shortest decimal that reads back as ``value``, never in scientific notation."""
    if value in (float("inf"), float("-inf")) or value != value:
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else format(Decimal(repr(value)), "f")


class AppendedMetrics:
    """Metrics that an engine renders itself, such as ``vllm:…``; ``sources`` return their text."""

    def __init__(self) -> None:
        self.sources: list[Callable[[], str]] = []
        self._failed: set[int] = set()

    def after(self, body: bytes) -> bytes:
        """Return ``body`` with the text of every source. A failing source is logged once."""
        parts = [body.rstrip(b"\n")]
        for number, source in enumerate(self.sources):
            try:
                text = source()
                parts.append(text.strip("\n").encode())
            except Exception:  # the other metrics must stay visible
                if number not in self._failed:
                    self._failed.add(number)
                    log.exception("the metrics of a registered callback are missing from scrapes")
        return b"\n".join(part for part in parts if part) + b"\n"


class _Escaped(str):
    """Text that is escaped already: the escaping of ``prometheus_client`` leaves it as it is."""

    __slots__ = ()

    def replace(self, *_: object) -> _Escaped:
        """Return the text unchanged."""
        return self


class SampleLabels(dict[str, str]):
    """The labels of a sample, escaped and joined once instead of at each scrape.

    The encoders of ``prometheus_client`` sort and escape ``items()``. Here that is one pair: the
    first name, and the text of everything after it. All other methods are those of a dict.
    """

    __slots__ = ("_joined",)
    _joined: tuple[tuple[str, str], ...]

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        super().__init__(pairs)
        text = '",'.join(f'{name}="{_escaped(value)}' for name, value in super().items())
        first, _, rest = text.partition('="')
        self._joined = ((first, _Escaped(rest)),) if text else ()

    def items(self) -> Sequence[tuple[str, str]]:  # type: ignore[override]
        """One pair that an encoder writes as all labels."""
        return self._joined

    def with_bucket(self, limit: str) -> SampleLabels:
        """These labels and ``le``, which needs no escaping."""
        labels = SampleLabels.__new__(SampleLabels)
        labels.update(self)
        labels["le"] = limit
        first, rest = self._joined[0] if self else ("le", "")
        labels._joined = ((first, _Escaped(f'{rest}",le="{limit}' if self else limit)),)
        return labels


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


# fmt: on


class Counter:
    """A number that only rises; add to ``value``."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Add ``amount`` (>= 0); for use as a callback."""
        self.value += amount


class Gauge:
    """A number that rises and falls; with ``function`` it is read from there at a scrape."""

    __slots__ = ("function", "value")

    def __init__(self) -> None:
        self.value: float = 0
        self.function: Callable[[], float] | None = None


C = TypeVar("C", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class MetricSpec(Generic[C]):
    """The declaration of a metric; ``labels`` in the order in which children take their values."""

    kind: type[C]
    name: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()

    def make(self) -> C:
        """Return a child that belongs to no family, at 0."""
        if self.kind is Histogram:
            return Histogram(self.buckets)
        return self.kind()

    def named(self, prefix: str) -> str:
        """The full name where ``--metrics-prefix`` is ``prefix``."""
        if self.name.startswith(name_prefix.FRONTEND + "_"):
            return prefix + self.name[len(name_prefix.FRONTEND) :]
        return self.name


def counter(name: str, help: str, labels: str = "") -> MetricSpec[Counter]:
    """Declare a counter; ``labels`` are names with spaces between them."""
    return MetricSpec(Counter, name, help, tuple(labels.split()))


def gauge(name: str, help: str, labels: str = "") -> MetricSpec[Gauge]:
    """Declare a gauge; ``labels`` are names with spaces between them."""
    return MetricSpec(Gauge, name, help, tuple(labels.split()))


def histogram(
    name: str, help: str, buckets: Sequence[float], labels: str = ""
) -> MetricSpec[Histogram]:
    """Declare a histogram; ``buckets`` are its upper bounds, +Inf is implied."""
    return MetricSpec(Histogram, name, help, tuple(labels.split()), tuple(buckets))


class Family(dict[tuple[str, ...], C]):
    """The children of one metric by their label values; indexing makes a child on first use.

    On a hot path keep the child, or index with a tuple: a found child costs no Python call.
    """

    def __init__(self, spec: MetricSpec[C], name: str) -> None:
        super().__init__()
        self.spec: MetricSpec[C] = spec
        self.name = name
        # A counter whose name lacks _total exists for the text format only: there, `encode`
        # makes it a counter again; OpenMetrics has it as unknown.
        kind = spec.kind.__name__.lower()
        self._type = "unknown" if kind == "counter" and not name.endswith("_total") else kind
        self._limits = [plain_number(bound) for bound in (*spec.buckets, float("inf"))]
        self._labels: dict[tuple[str, ...], tuple[SampleLabels, ...]] = {}

    def __missing__(self, values: tuple[str, ...]) -> C:
        if len(values) != len(self.spec.labels):
            raise ValueError(f"{self.name} needs labels {self.spec.labels}, got {values}")
        child: C = self.spec.make()
        self[values] = child
        return child

    def labels(self, *values: str) -> C:
        """The child for these label values."""
        return self[values]

    def extended(self, values: tuple[str, ...], extra: Sequence[tuple[str, str]]) -> C:
        """The child for these label values and ``extra`` labels that others of the family lack."""
        key = (*values, *(text for pair in extra for text in pair))
        if extra and key not in self:
            self[key] = self.spec.make()
        return self[key]

    def remove(self, *values: str) -> None:
        """Remove the child, if there is one."""
        self.pop(values, None)
        self._labels.pop(values, None)

    def metrics(self) -> Iterator[Metric]:
        """The family as ``prometheus_client`` has it, in parts of some ``_PART`` samples.

        Children may come and go between two parts; the samples of one child are of one time.
        """
        part = self._empty()
        for values, child in list(self.items()):
            if len(part.samples) >= _PART:
                yield part
                part = self._empty()
            labels = self._labels.get(values)
            if labels is None:
                labels = self._sample_labels(values)
                if values in self:
                    self._labels[values] = labels
            if isinstance(child, Histogram):
                part.samples += _histogram_samples(self.name, labels, child)
            else:
                function = child.function if isinstance(child, Gauge) else None
                value = child.value if function is None else function()
                part.samples.append(Sample(self.name, labels[0], value))
        yield part

    def _empty(self) -> Metric:
        name = self.name.removesuffix("_total") if self._type == "counter" else self.name
        return Metric(name, self.spec.help, self._type)

    def _sample_labels(self, values: tuple[str, ...]) -> tuple[SampleLabels, ...]:
        """The labels of each sample of a child: of its buckets, then of its sum or value."""
        names: tuple[str, ...] = self.spec.labels
        extra: tuple[str, ...] = values[len(names) :]  # names and values alternate, see `extended`
        pairs = (*zip(names, values, strict=False), *zip(extra[::2], extra[1::2], strict=True))
        labels: SampleLabels = SampleLabels(pairs)
        if self.spec.kind is Histogram:
            return (*(labels.with_bucket(limit) for limit in self._limits), labels)
        return (labels,)


def _histogram_samples(
    name: str, labels: Sequence[SampleLabels], child: Histogram
) -> Iterator[Sample]:
    running = 0
    bucket = name + "_bucket"
    for count, bound in zip(child.counts, labels, strict=False):
        running += count
        yield Sample(bucket, bound, running)
    yield Sample(name + "_sum", labels[-1], child.total)
    yield Sample(name + "_count", labels[-1], running)


class Registry:
    """The metrics of one process, those of the process itself and of its garbage collector too.

    ``before_render`` holds the functions that bring counts up to date which are kept elsewhere,
    ``appended`` those that return the text of an engine's own metrics.
    """

    def __init__(self) -> None:
        self.before_render: list[Callable[[], None]] = []
        self.appended = AppendedMetrics()
        self._families: dict[str, Family[Counter] | Family[Gauge] | Family[Histogram]] = {}
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)

    def family(self, spec: MetricSpec[C], prefix: str = name_prefix.FRONTEND) -> Family[C]:
        """The family of ``spec``, made on first use."""
        name = spec.named(prefix)
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Family(spec, name)
        return cast(Family[C], family)

    def child(self, spec: MetricSpec[C], *values: str) -> C:
        """The child of ``spec`` for these label values."""
        return self.family(spec)[values]

    def forget(self, label: str, value: str, kinds: Collection[type] = (Gauge,)) -> None:
        """Remove what is of ``kinds`` and whose ``label`` has ``value``: that exists no more."""
        for family in self._families.values():
            if family.spec.kind in kinds and label in family.spec.labels:
                position = family.spec.labels.index(label)
                for values in [values for values in family if values[position] == value]:
                    family.remove(*values)

    def slices(self, accept: str) -> tuple[Iterator[bytes], str]:
        """The parts of a scrape with this ``Accept`` header, and its content type.

        Each part takes about 1 ms, so that an event loop can serve others between two. With metrics
        of an engine the text format answers every scrape: theirs is text.
        """
        encoder = PageEncoder("" if self.appended.sources else accept)
        return self._slices(encoder), encoder.content_type

    def _slices(self, encoder: PageEncoder) -> Iterator[bytes]:
        for bring_up_to_date in self.before_render:
            bring_up_to_date()
        for family in list(self._families.values()):
            if family:
                yield from encoder.parts(family.metrics())
        last = encoder.last(self._process)
        yield self.appended.after(last) if self.appended.sources else last

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Body and content type of a scrape with this ``Accept`` header. O(samples)."""
        slices, content_type = self.slices(accept)
        return b"".join(slices), content_type

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Append the text of ``callback()``, in Prometheus's format, to every scrape.

        It runs on the loop of the process and must not block. If it fails, the failure is logged
        and its metrics are absent from that scrape.
        """
        self.appended.sources.append(callback)

    def register_prometheus_typed_callback(self, callback: Callable[[], object]) -> None:
        """Accept a source of metrics for an OpenTelemetry export, which does not exist here.

        Workers register the same metrics as text, and the scrape shows those.
        """

    def render(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return self.exposition("")[0]
