"""The usual traffic of a model by the hour of the day and the day of the week. Pure.

A day has :data:`SLOTS` slots. Each slot of the day, and each of the week, has the mean rate of the
times that it was seen. Earlier times fade, so the means follow a change of habits within a week or
so. All of it has a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

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
            place = slot % len(means)
            before = weights[place] * math.exp(-1.0 / memory)
            means[place] = (means[place] * before + rate) / (before + 1.0)
            weights[place] = before + 1.0

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
    scale = rate / now if now > 0 else 1.0
    scale = min(max(scale, _SCALE[0]), _SCALE[1])
    found = []
    for number, value in enumerate(path):
        expected = usual.at((number + 1) * interval_s) * scale
        known = not math.isnan(expected)
        found.append(_SHARE * expected + (1.0 - _SHARE) * value if known else value)
    return found


_SHARE = 0.5
"""How much what is usual counts where it is known; a trend is blind to a rise before it begins."""
_SCALE = (0.7, 1.4)
