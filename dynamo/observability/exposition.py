"""The text of a scrape: ``prometheus_client`` writes it, in the form that Dynamo's dashboards read.

Dynamo writes labels in declared order with ``le`` last, and integers without a fraction;
``prometheus_client`` sorts labels and writes every number as a float.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8

__all__ = ["AppendedMetrics", "PageEncoder", "SampleLabels", "plain_number"]

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
        head = b""
        for part in metrics:
            yield self._encode(_Parts(part)).removesuffix(_EOF).removeprefix(head)
            if not head:
                head = self._encode(_Parts(Metric(part.name, part.documentation, part.type)))
                head = head.removesuffix(_EOF)

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
    text = _EXPONENT.sub(lambda found: " " + plain_number(float(found[1])), text)
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
        made = SampleLabels.__new__(SampleLabels)
        made.update(self)
        made["le"] = limit
        first, rest = self._joined[0] if self else ("le", "")
        made._joined = ((first, _Escaped(f'{rest}",le="{limit}' if self else limit)),)
        return made


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
