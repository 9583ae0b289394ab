"""The usual traffic of a model by the hour of the day and the day of the week, and its file.

A day has :data:`SLOTS` slots. Each slot of the day, and each of the week, has the mean rate of the
times that it was seen. Earlier times fade, so the means follow a change of habits within a week or
so. All of it has a fixed size. A file keeps it over restarts of planner and deployment.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynamo.runtime.discovery.layout import BadRecord, read_file
from dynamo.runtime.process.paths import private_dir, write_atomic

if TYPE_CHECKING:
    from dynamo.planner.capacity.observation import Traffic

SLOTS = 144
"""Slots of a day: ten minutes each."""
DAY_S = 86_400.0
USUAL_S = 3_600.0
"""How far ahead policies see what is usual."""
_DAYS = 7
_DAY_MEMORY, _WEEKDAY_MEMORY = 4.0, 3.0
"""Times of a slot after which an earlier one counts about a third: days, and weeks."""
_SAME_DAY = 3.0
"""A slot of the same day of the week counts as much as so many of other days."""
_COMPLETE = 0.5
"""Share of a slot that must have been observed; less says little of it."""
SEASONS_FILE = "logs/planner-traffic.json"
"""Name of the file in the run directory of a deployment; it stays when the deployment stops."""
_MODELS = 32
"""Models in the file, 40 KB each; the one that was seen the longest ago is dropped first."""
_DIGITS = 4
log = logging.getLogger(__name__)


class Usual(msgspec.Struct, frozen=True, kw_only=True):
    """The usual rates of the coming slots of ``slot_s`` seconds; NaN where none is known.

    The first slot is that of now, ``into_s`` seconds of it have passed.
    """

    slot_s: float
    into_s: float
    rates: tuple[float, ...]

    def at(self, ahead_s: float) -> float:
        """Return the usual rate in ``ahead_s`` seconds, NaN if it is not known."""
        slot = int((self.into_s + ahead_s) / self.slot_s)
        return self.rates[slot] if slot < len(self.rates) else math.nan


class SeasonRecord(msgspec.Struct, kw_only=True):
    """What :class:`Season` keeps: means and weights, by the slot of the day and of the week."""

    day: list[float]
    day_weight: list[float]
    week: list[float]
    week_weight: list[float]


def empty_record() -> SeasonRecord:
    """Return the record of a model that was never seen."""
    return SeasonRecord(
        day=[0.0] * SLOTS,
        day_weight=[0.0] * SLOTS,
        week=[0.0] * (_DAYS * SLOTS),
        week_weight=[0.0] * (_DAYS * SLOTS),
    )


def is_sound(record: SeasonRecord) -> bool:
    """Return whether a record that was read has the right size and finite figures."""
    sized = len(record.day) == len(record.day_weight) == SLOTS
    sized = sized and len(record.week) == len(record.week_weight) == _DAYS * SLOTS
    columns = (record.day, record.day_weight, record.week, record.week_weight)
    return sized and all(math.isfinite(x) and x >= 0 for column in columns for x in column)


class Season:
    """Counts arrivals by slot. Times are seconds since a midnight, local time; a day has ``day_s``.

    ``record`` is changed by :meth:`add` whenever a slot ends.
    """

    def __init__(self, record: SeasonRecord | None = None, day_s: float = DAY_S) -> None:
        self.record = record or empty_record()
        self._slot_s = day_s / SLOTS
        self._slot = -1
        self._arrived, self._observed_s = 0.0, 0.0

    def add(self, at_s: float, arrived: int, duration_s: float) -> bool:
        """Count ``arrived`` requests of ``duration_s`` until ``at_s``; return if a slot ended."""
        slot = int(at_s / self._slot_s)
        ended = slot != self._slot and self._observed_s >= _COMPLETE * self._slot_s
        if ended:
            self._fold(self._slot, self._arrived / self._observed_s)
        if slot != self._slot:
            self._slot, self._arrived, self._observed_s = slot, 0.0, 0.0
        self._arrived += arrived
        self._observed_s += duration_s
        return ended

    def usual(self, at_s: float, ahead_s: float) -> Usual | None:
        """Return the usual rates of the next ``ahead_s`` seconds; None if none is known."""
        first = int(at_s / self._slot_s)
        last = int((at_s + ahead_s) / self._slot_s)
        rates = tuple(self._rate(slot) for slot in range(first, last + 1))
        if all(map(math.isnan, rates)):
            return None
        return Usual(slot_s=self._slot_s, into_s=at_s - first * self._slot_s, rates=rates)

    def _fold(self, slot: int, rate: float) -> None:
        record = self.record
        for means, weights, memory in (
            (record.day, record.day_weight, _DAY_MEMORY),
            (record.week, record.week_weight, _WEEKDAY_MEMORY),
        ):
            index = slot % len(means)
            # A mean whose earlier times fade: their weight shrinks, and this time adds 1.
            before = weights[index] * math.exp(-1.0 / memory)
            means[index] = (means[index] * before + rate) / (before + 1.0)
            weights[index] = before + 1.0

    def _rate(self, slot: int) -> float:
        record = self.record
        day, week = slot % SLOTS, slot % (_DAYS * SLOTS)
        same = _SAME_DAY * record.week_weight[week]
        others = record.day_weight[day]
        if not others:
            return math.nan
        return (same * record.week[week] + others * record.day[day]) / (same + others)


def blended(path: Sequence[float], interval_s: float, usual: Usual, rate: float) -> list[float]:
    """Return the forecast ``path``, one value an interval, with what is usual at its times.

    A day that is busier than usual stays so for a while: the usual rates are scaled by the ``rate``
    of now over the usual one, within bounds.
    """
    now = usual.at(0.0)
    # Also false for NaN, where the usual rate of now is unknown.
    scale = rate / now if now > 0 else 1.0
    scale = min(max(scale, _SCALE[0]), _SCALE[1])
    rates = []
    for number, value in enumerate(path):
        expected = usual.at((number + 1) * interval_s) * scale
        has_usual = not math.isnan(expected)
        rates.append(_SHARE * expected + (1.0 - _SHARE) * value if has_usual else value)
    return rates


_SHARE = 0.5
"""How much what is usual counts where it is known; a trend is blind to a rise before it begins."""
_SCALE = (0.7, 1.4)


class SeasonStore:
    """Counts the traffic of models by local time; writes ``path`` whenever a slot has ended.

    Without ``writes`` it only reads: another planner may scale the deployment.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self._path = path
        self._writes = writes
        self._failed = False
        self._seasons = {name: Season(record) for name, record in self._read().items()}

    def add(self, model: str, traffic: Traffic, at_s: float | None = None) -> None:
        """Count the traffic of an interval that ends at ``at_s`` (Unix time), by default now."""
        if not traffic.known or traffic.duration_s <= 0:
            return
        season = self._seasons.setdefault(model, Season())
        if season.add(_local_s(at_s), traffic.arrived, traffic.duration_s):
            self._seasons[model] = self._seasons.pop(model)  # the newest is last
            while len(self._seasons) > _MODELS:
                del self._seasons[next(iter(self._seasons))]
            self._write()

    def usual(self, model: str, at_s: float | None = None) -> Usual | None:
        """Return what is usual for ``model`` in the time from ``at_s`` on, None if unknown."""
        season = self._seasons.get(model)
        return None if season is None else season.usual(_local_s(at_s), USUAL_S)

    def _read(self) -> dict[str, SeasonRecord]:
        try:
            data = read_file(self._path)
            records = msgspec.json.decode(data or b"{}", type=dict[str, SeasonRecord])
        except (BadRecord, OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("%s is not used: %s; the usual traffic is learned again", self._path, error)
            return {}
        return {name: record for name, record in records.items() if is_sound(record)}

    def _write(self) -> None:
        if not self._writes:
            return
        records = {name: _rounded(season.record) for name, season in self._seasons.items()}
        try:
            private_dir(self._path.parent)
            write_atomic(self._path, msgspec.json.encode(records))
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.error("cannot write %s: %s", self._path, error.strerror)
            self._failed = True


def _local_s(at_s: float | None) -> float:
    """Return the seconds of the local clock since 1970: a day begins at local midnight."""
    at_s = time.time() if at_s is None else at_s
    return at_s + time.localtime(at_s).tm_gmtoff


def _rounded(record: SeasonRecord) -> SeasonRecord:
    columns = {
        name: [round(value, _DIGITS) for value in getattr(record, name)]
        for name in record.__struct_fields__
    }
    return SeasonRecord(**columns)
