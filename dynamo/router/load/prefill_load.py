"""How much of the prompts booked on a slot is probably computed by now. Spec 3.6.

Pure: time is handed in. The oldest prefill of a slot, the anchor, stands for the time spent there:
it decays by elapsed over expected seconds. Without an expectation it keeps its full value.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

from dynamo._fast.prefill_progress import PrefillProgress

__all__ = ["BusyInterval", "Predictor", "PrefillLoad", "PrefillModel", "StaticModel"]

Predictor = Callable[[int, int], float | None]
"""(tokens to compute, tokens of the prefix that is cached) to seconds; None: it does not know."""

_STRETCH_PREFILLS = 8


class BusyInterval(NamedTuple):
    """A time in which a slot computed prompts without a pause.

    ``attention`` sums, over its ``prefills``, tokens × (cached tokens + half of the tokens).
    """

    prefills: int
    tokens: int
    attention: float
    seconds: float


class PrefillModel(Protocol):
    """Predicts durations, and may learn from those that were observed."""

    def predict(self, tokens: int, cached_tokens: int) -> float | None:
        """Seconds to the first token on an idle worker; None: it does not know."""

    def observe(self, stretch: BusyInterval, now_s: float) -> None:
        """What a worker took."""


class StaticModel:
    """A model that is a given ``predictor`` and learns nothing."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def predict(self, tokens: int, cached_tokens: int) -> float | None:
        """What the predictor says."""
        return self._predictor(tokens, cached_tokens)

    def observe(self, stretch: BusyInterval, now_s: float) -> None:
        """Nothing to learn."""


class PrefillLoad:
    """Active prefills by slot, in order of age. Every call is O(1) but :meth:`subtract_done`.

    Memory is bounded by what is booked. Of a slot's anchor ``base`` tokens count as done at
    ``since``; an overtaking moves them by whole tokens, which is exact in floating point, so that
    the load reported has no jump.
    """

    def __init__(self, model: PrefillModel) -> None:
        self._model = model
        self._lines: dict[int, _Line] = {}
        self._progress = PrefillProgress()

    def begin(
        self, slot: int, request_id: str, tokens: int, cached_tokens: int, now_s: float
    ) -> None:
        """A prompt with ``tokens`` to compute was booked; without any it is no load."""
        if tokens <= 0:
            return
        expected_s = self._model.predict(tokens, cached_tokens)
        rate = tokens / expected_s if expected_s is not None and 0 < expected_s < math.inf else 0.0
        prefill = _Prefill(tokens, cached_tokens, rate if rate < math.inf else 0.0)
        line = self._lines.get(slot)
        if line is None:
            line = self._lines[slot] = _Line(prefill, now_s)
            self._progress.set(slot, 0.0, prefill.rate, now_s, tokens)
        line.prefills[request_id] = prefill

    def first_token(self, slot: int, request_id: str, now_s: float) -> None:
        """The prompt is computed; one that is not known here is ignored."""
        line = self._lines.get(slot)
        prefill = line.prefills.pop(request_id, None) if line is not None else None
        if line is None or prefill is None:
            return
        line.count(prefill)
        oldest = line.oldest
        if prefill is oldest:
            self._next(slot, line, now_s)
        elif oldest.rate and prefill.rate:
            left = max(self._progress.value(slot, now_s) - prefill.tokens, 0.0)
            self._progress.set(slot, left, oldest.rate, now_s, oldest.tokens)
        stretch = line.stretch(now_s)
        if stretch is not None:
            self._model.observe(stretch, now_s)

    def abandon(self, slot: int, request_id: str, now_s: float) -> None:
        """The request ended before its first token: its backlog is gone, not done."""
        line = self._lines.get(slot)
        prefill = line.prefills.pop(request_id, None) if line is not None else None
        if line is None or prefill is None:
            return
        line.spoiled = True
        if prefill is line.oldest:
            self._next(slot, line, now_s)

    def drop_slot(self, slot: int) -> None:
        """The worker is gone."""
        if self._lines.pop(slot, None) is not None:
            self._progress.set(slot, 0.0, 0.0, 0.0, 0.0)

    def done_tokens(self, slot: int, now_s: float) -> int:
        """How many of the tokens booked on ``slot`` are computed, as far as is modelled."""
        return int(self._progress.value(slot, now_s))

    def subtract_done(self, prefill_tokens: array[int], now_s: float) -> None:
        """Take what is computed off a column (i64) by slot. O(slots), compiled."""
        self._progress.subtract_done(prefill_tokens, now_s)

    def _next(self, slot: int, line: _Line, now_s: float) -> None:
        """The oldest that is left stands for the time from now on."""
        if not line.prefills:
            self.drop_slot(slot)
            return
        oldest = line.oldest = next(iter(line.prefills.values()))
        self._progress.set(slot, 0.0, oldest.rate, now_s, oldest.tokens)


class _Prefill(NamedTuple):
    """``rate`` in tokens a second; 0: unmodelled."""

    tokens: int
    cached_tokens: int
    rate: float


class _Line:
    """The active prefills of one slot, and what it has computed since the last stretch."""

    __slots__ = ("_attention", "_count", "_since_s", "_tokens", "oldest", "prefills", "spoiled")

    def __init__(self, oldest: _Prefill, now_s: float) -> None:
        self.prefills: dict[str, _Prefill] = {}
        self.oldest = oldest
        self._restart(now_s)

    def count(self, prefill: _Prefill) -> None:
        """One more is computed."""
        self._count += 1
        self._tokens += prefill.tokens
        self._attention += prefill.tokens * (prefill.cached_tokens + prefill.tokens / 2)

    def stretch(self, now_s: float) -> BusyInterval | None:
        """What was computed since the last one, when that is worth a look."""
        if not self.spoiled and self.prefills and self._count < _STRETCH_PREFILLS:
            return None
        spoiled, seconds = self.spoiled, now_s - self._since_s
        found = BusyInterval(self._count, self._tokens, self._attention, seconds)
        self._restart(now_s)
        return None if spoiled or seconds <= 0 else found

    def _restart(self, now_s: float) -> None:
        self._since_s = now_s
        self._count = self._tokens = 0
        self._attention = 0.0
        self.spoiled = False
