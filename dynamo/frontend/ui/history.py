"""The figures of the last 24 hours: a ring of samples for each line of a chart.

A series has three rings, of seconds, of 10 seconds and of minutes; the coarser ones are made of the
seconds. Slots have absolute numbers (Unix time / step), so an unknown time is a gap, never data.
Pure: the caller reads the clock and the file.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.protocols.status import BoxStatus, GpuStatus, ModelStatus, WorkerStatus

VERSION = 1
SERIES = 500
"""More are not kept: each has 11 kB, all of them 5.5 MB."""
HELD_S = 15
"""A figure counts until the next sample, at most so long; after that there is a gap."""
_NAME_CHARACTERS = 256
_CHECKSUM_BYTES = 4
_PEAKS = frozenset({"ttft_p99_s", "kv_max"})
"""Of these a coarser slot has the maximum, of all others the mean."""


class Tier(NamedTuple):
    """A ring of ``slots`` that stand for ``step_s`` each."""

    step_s: int
    slots: int


TIERS = {"10m": Tier(1, 600), "2h": Tier(10, 720), "24h": Tier(60, 1440)}
_FINE, *_COARSER = TIERS.values()
SeriesKey = tuple[str, str]
"""A subject ("" for the deployment, ``model NAME``, ``gpu ID``) and the name of a figure."""


class HistorySlice(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /ui/history``: the value of each figure from ``start_s`` on (Unix time),
    one every ``step_s``, None where it is unknown."""

    start_s: int
    step_s: int
    series: dict[str, list[float | None]]


class _SavedSeries(msgspec.Struct, frozen=True, array_like=True):
    subject: str
    name: str
    rings: list[bytes]


class _HistoryFile(msgspec.Struct, frozen=True, array_like=True):
    version: int
    slot: int
    tiers: list[tuple[int, int]]
    series: list[_SavedSeries]


_decode = msgspec.msgpack.Decoder(_HistoryFile).decode


class _Series:
    def __init__(self) -> None:
        self.rings = [_unknown(tier.slots) for tier in TIERS.values()]
        self.known_slot = 0


class History:
    """Samples of all series. ``slot`` is the second of the last sample, 0 before the first one."""

    def __init__(self) -> None:
        self.slot = 0
        self._resumed = False
        self._series: dict[SeriesKey, _Series] = {}

    def __len__(self) -> int:
        return len(self._series)

    @property
    def size_bytes(self) -> int:
        """The memory of all rings."""
        rings = (ring for series in self._series.values() for ring in series.rings)
        return sum(len(ring) * ring.itemsize for ring in rings)

    def add(self, at_s: float, values: Mapping[SeriesKey, float | None]) -> None:
        """Add a sample. O(series); O(slots of a gap) after one.

        A clock that went back forgets what is now in the future.
        """
        slot = int(at_s)
        if slot < self.slot:
            self._forget_after(slot)
        elif self.slot:
            self._advance(slot)
        self.slot, self._resumed = slot, False
        for key, value in values.items():
            if value is None or not math.isfinite(value):
                continue
            series = self._series.get(key) or self._new(key)
            if series is not None:
                series.rings[0][slot % _FINE.slots] = value
                series.known_slot = slot

    def read(self, subject: str, period: str, after_s: int = 0) -> HistorySlice:
        """Return the figures of ``subject`` over ``period``, of slots that begin after ``after_s``.

        The last slot of a coarser ring is one that has ended. Raises InvalidArgument.
        """
        tier = TIERS.get(period)
        if tier is None:
            raise InvalidArgument(f"`range` must be one of {', '.join(TIERS)}")
        index = list(TIERS.values()).index(tier)
        end = self.slot // tier.step_s + (tier is _FINE)  # exclusive
        start = max(end - tier.slots, after_s // tier.step_s + 1)
        rings = {
            name: series.rings[index]
            for (owner, name), series in self._series.items()
            if owner == subject
        }
        slots = range(start, end)

        def is_known(slot: int) -> bool:
            return not all(math.isnan(ring[slot % tier.slots]) for ring in rings.values())

        # Nothing is sent of the time before the first sample.
        slots = range(next(filter(is_known, slots), end), end)
        return HistorySlice(
            start_s=slots.start * tier.step_s,
            step_s=tier.step_s,
            series={
                name: [_rounded(ring[slot % tier.slots]) for slot in slots]
                for name, ring in rings.items()
            },
        )

    def pack(self) -> bytes:
        """Return the content of the history's file."""
        saved = [
            _SavedSeries(subject, name, [ring.tobytes() for ring in series.rings])
            for (subject, name), series in self._series.items()
        ]
        body = msgspec.msgpack.encode(_HistoryFile(VERSION, self.slot, _shape(), saved))
        return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") + body

    @classmethod
    def unpack(cls, data: bytes) -> History:
        """Return the history of a file. Raises InvalidArgument if it is damaged or of another
        version."""
        body = data[_CHECKSUM_BYTES:]
        if zlib.crc32(body) != int.from_bytes(data[:_CHECKSUM_BYTES], "little") or not body:
            raise InvalidArgument("it is damaged")
        try:
            file = _decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"it is not understood: {error}") from error
        if file.version != VERSION or file.tiers != _shape():
            raise InvalidArgument(f"it has version {file.version}, not {VERSION}")
        history = cls()
        history.slot, history._resumed = file.slot, True  # a restart is a gap
        for saved in file.series[:SERIES]:
            series = _Series()
            # array() refuses bytes that are no whole floats; the lengths are compared below.
            rings = [array("f", ring) for ring in saved.rings if len(ring) % 4 == 0]
            if [len(ring) for ring in rings] != [tier.slots for tier in TIERS.values()]:
                raise InvalidArgument("a ring has another length")
            series.rings = rings
            history._series[saved.subject, saved.name] = series
        return history

    def _new(self, key: SeriesKey) -> _Series | None:
        """Return a series for ``key``, in the place of one that ended; None if all are in use."""
        if max(map(len, key)) > _NAME_CHARACTERS:
            return None
        if len(self._series) >= SERIES:
            oldest = min(self._series, key=lambda other: self._series[other].known_slot)
            if self._series[oldest].known_slot > self.slot - HELD_S:
                return None
            del self._series[oldest]
        return self._series.setdefault(key, _Series())

    def _advance(self, slot: int) -> None:
        """Fill the coarser slots that ended, and clear what was a whole ring ago."""
        before = self.slot
        continues = slot - before <= HELD_S and not self._resumed
        last = slot - 1 if continues else before
        for (_, name), series in self._series.items():
            fine = series.rings[0]
            for second in range(before + 1, last + 1):
                fine[second % _FINE.slots] = fine[before % _FINE.slots]
            for tier, ring in zip(_COARSER, series.rings[1:], strict=True):
                first, end = before // tier.step_s, slot // tier.step_s
                # After a gap only the slot of the last sample has figures.
                closed = range(first, end if continues else min(first + 1, end))
                for coarse in closed:
                    seconds = range(coarse * tier.step_s, (coarse + 1) * tier.step_s)
                    ring[coarse % tier.slots] = _summary(
                        [fine[second % _FINE.slots] for second in seconds if second <= last], name
                    )
                _clear(ring, closed.stop, end + 1)
            _clear(fine, last + 1, slot + 1)

    def _forget_after(self, slot: int) -> None:
        for series in self._series.values():
            series.known_slot = min(series.known_slot, slot)
            for tier, ring in zip(TIERS.values(), series.rings, strict=True):
                _clear(ring, slot // tier.step_s, self.slot // tier.step_s + 1)


def figures_of(status: BoxStatus) -> dict[SeriesKey, float | None]:
    """Return what a sample of a deployment adds to the history."""
    figures: dict[SeriesKey, float | None] = {}
    figures.update(_keyed("", _traffic(status.models, status.workers)))
    figures["", "ttft_p50_s"] = status.ttft_p50_s
    figures["", "ttft_p99_s"] = status.ttft_p99_s
    for model in status.models:
        workers = [worker for worker in status.workers if worker.model == model.model]
        subject = f"model {model.model}"
        figures.update(_keyed(subject, _traffic([model], workers)))
        if model.figures is not None:
            figures[subject, "ttft_p50_s"] = model.figures.ttft_p50_s
            figures[subject, "ttft_p99_s"] = model.figures.ttft_p99_s
    for gpu in status.gpus:
        figures.update(_keyed(f"gpu {gpu.gpu}", _gpu(gpu)))
    return figures


def _keyed(
    subject: str, figures: Iterator[tuple[str, float | None]]
) -> Iterator[tuple[SeriesKey, float | None]]:
    return (((subject, name), value) for name, value in figures)


def _traffic(
    models: tuple[ModelStatus, ...] | list[ModelStatus],
    workers: tuple[WorkerStatus, ...] | list[WorkerStatus],
) -> Iterator[tuple[str, float | None]]:
    figures = [model.figures for model in models if model.figures is not None]
    if figures:
        yield "output_tokens_per_s", sum(model.output_tokens_per_s for model in figures)
        yield "in_flight", sum(model.in_flight for model in figures)
        yield "queued", sum(model.queued for model in figures)
    used = [worker.kv_use for worker in workers if worker.kv_use is not None]
    if used:
        yield "kv_mean", sum(used) / len(used)
        yield "kv_max", max(used)


def _gpu(gpu: GpuStatus) -> Iterator[tuple[str, float | None]]:
    yield "used_bytes", gpu.used_bytes
    yield "utilization", gpu.utilization
    yield "watts", gpu.watts


def _unknown(slots: int) -> array[float]:
    return array("f", [math.nan]) * slots


def _clear(ring: array[float], start: int, end: int) -> None:
    """Make the slots from ``start`` to ``end`` (exclusive, absolute) unknown."""
    size = len(ring)
    count = min(end - start, size)
    if count <= 0:
        return
    # In two parts where the slots go over the end of the ring.
    first = start % size
    until = min(size, first + count)
    ring[first:until] = _unknown(until - first)
    wrapped = first + count - until
    ring[:wrapped] = _unknown(wrapped)


def _summary(values: list[float], name: str) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return math.nan
    return max(numbers) if name in _PEAKS else sum(numbers) / len(numbers)


def _rounded(value: float) -> float | None:
    """Return a value as it is sent: a 32-bit float has about seven digits, a chart shows four."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _shape() -> list[tuple[int, int]]:
    return [(tier.step_s, tier.slots) for tier in TIERS.values()]
