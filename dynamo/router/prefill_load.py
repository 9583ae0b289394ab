"""How much of the prompts booked on a slot is probably computed by now. Spec 3.6.

Pure: time is handed in. The oldest prefill of a slot, the anchor, stands for the time spent there:
it decays by elapsed over expected seconds. Without an expectation it keeps its full value.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

__all__ = ["Predictor", "PrefillLoad", "PrefillModel", "Stretch", "Unfitted"]

Predictor = Callable[[int, int], float | None]
"""(tokens to compute, tokens of the prefix that is cached) to seconds; None: it does not know."""

_STRETCH_PREFILLS = 8


class Stretch(NamedTuple):
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

    def observe(self, stretch: Stretch, now_s: float) -> None:
        """What a worker took."""


class Unfitted:
    """A model that is a given ``predictor`` and learns nothing."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def predict(self, tokens: int, cached_tokens: int) -> float | None:
        """What the predictor says."""
        return self._predictor(tokens, cached_tokens)

    def observe(self, stretch: Stretch, now_s: float) -> None:
        """Nothing to learn."""


class PrefillLoad:
    """Active prefills by slot, in order of age. Every call is O(1) but :meth:`relieve`.

    A slot without active prefills costs nothing. Memory is bounded by what is booked.
    """

    def __init__(self, model: PrefillModel) -> None:
        self._model = model
        self._lines: dict[int, _Line] = {}

    def begin(
        self, slot: int, request_id: str, tokens: int, cached_tokens: int, now_s: float
    ) -> None:
        """A prompt with ``tokens`` to compute was booked; without any it is no load."""
        if tokens <= 0:
            return
        expected_s = self._model.predict(tokens, cached_tokens)
        if expected_s is not None and not 0 < expected_s < math.inf:
            expected_s = None
        line = self._lines.get(slot)
        if line is None:
            line = self._lines[slot] = _Line(now_s)
        line.prefills[request_id] = _Prefill(tokens, cached_tokens, expected_s)
        if len(line.prefills) == 1:
            line.anchor(now_s)

    def first_token(self, slot: int, request_id: str, now_s: float) -> None:
        """The prompt is computed; one that is not known here is ignored."""
        line = self._lines.get(slot)
        prefill = line.prefills.pop(request_id, None) if line is not None else None
        if line is None or prefill is None:
            return
        line.completed(prefill, now_s)
        stretch = line.stretch(now_s)
        if not line.prefills:
            del self._lines[slot]
        if stretch is not None:
            self._model.observe(stretch, now_s)

    def abandon(self, slot: int, request_id: str, now_s: float) -> None:
        """The request ended before its first token: its backlog is gone, not done."""
        line = self._lines.get(slot)
        prefill = line.prefills.pop(request_id, None) if line is not None else None
        if line is None or prefill is None:
            return
        line.spoiled = True
        if not line.prefills:
            del self._lines[slot]
        elif prefill is line.oldest:
            line.anchor(now_s)

    def drop_slot(self, slot: int) -> None:
        """The worker is gone."""
        self._lines.pop(slot, None)

    def done_tokens(self, slot: int, now_s: float) -> int:
        """How many of the tokens booked on ``slot`` are computed, as far as is modelled."""
        line = self._lines.get(slot)
        return 0 if line is None else int(line.done(now_s))

    def relieve(self, prefill_tokens: array[int], now_s: float) -> None:
        """Take what is computed off a column (i64) by slot. O(slots with active prefills)."""
        for slot, line in self._lines.items():
            if line.rate and slot < len(prefill_tokens):
                prefill_tokens[slot] -= int(line.done(now_s))


class _Prefill(NamedTuple):
    tokens: int
    cached_tokens: int
    expected_s: float | None


class _Line:
    """The active prefills of one slot. ``rate`` is the anchor's tokens a second, 0: unmodelled.

    ``base`` of the anchor's tokens count as done at ``since_s``. A completion moves them by whole
    tokens, which is exact in floating point, so that the load reported has no jump.
    """

    __slots__ = (
        "_attention",
        "_count",
        "_stretch_s",
        "_tokens",
        "base",
        "oldest",
        "prefills",
        "rate",
        "since_s",
        "spoiled",
    )

    def __init__(self, now_s: float) -> None:
        self.prefills: dict[str, _Prefill] = {}
        self.oldest = _Prefill(0, 0, None)
        self.base = self.rate = self.since_s = 0.0
        self.spoiled = False
        self._restart(now_s)

    def anchor(self, now_s: float) -> None:
        """The oldest that is left stands for the time from now on."""
        self.oldest = oldest = next(iter(self.prefills.values()))
        self.base = 0.0
        self.since_s = now_s
        self.rate = 0.0 if oldest.expected_s is None else oldest.tokens / oldest.expected_s

    def done(self, now_s: float) -> float:
        """Tokens of the anchor, at most all."""
        elapsed_s = max(now_s - self.since_s, 0.0)
        return min(self.base + self.rate * elapsed_s, float(self.oldest.tokens))

    def completed(self, prefill: _Prefill, now_s: float) -> None:
        """``prefill``, which has left the line, got its first token."""
        self._count += 1
        self._tokens += prefill.tokens
        self._attention += prefill.tokens * (prefill.cached_tokens + prefill.tokens / 2)
        if prefill is self.oldest:
            if self.prefills:
                self.anchor(now_s)
        elif self.rate and prefill.expected_s is not None:
            self.base = max(self.done(now_s) - prefill.tokens, 0.0)
            self.since_s = max(now_s, self.since_s)

    def stretch(self, now_s: float) -> Stretch | None:
        """What was computed since the last one, when that is worth a look."""
        if not self.spoiled and self.prefills and self._count < _STRETCH_PREFILLS:
            return None
        spoiled, seconds = self.spoiled, now_s - self._stretch_s
        found = Stretch(self._count, self._tokens, self._attention, seconds)
        self._restart(now_s)
        return None if spoiled or seconds <= 0 else found

    def _restart(self, now_s: float) -> None:
        self._stretch_s = now_s
        self._count = self._tokens = 0
        self._attention = 0.0
        self.spoiled = False
