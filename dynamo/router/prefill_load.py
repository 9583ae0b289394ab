"""The prompt tokens that running prefills have not computed yet, and the seconds that they wait.

Pure: time is handed in. A slot computes its prefills in order, so elapsed time is credited to the
oldest one, the anchor: of its tokens, ``elapsed / expected seconds`` count as done, at most all.
Without an expectation it counts in full. :mod:`prefill_model` has the expectation.
"""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

from dynamo._fast.prefill_progress import PrefillProgress
from dynamo._fast.seconds import SecondsCost
from dynamo.router.prefill_model import BusyInterval, PrefillFit, PrefillModel, PrefillSpeed

_INTERVAL_PREFILLS = 8


class PrefillLoad:
    """The active prefills by slot, oldest first. Every call is O(1) but :meth:`subtract_done`.

    Memory is bounded by the booked requests.
    """

    def __init__(self, model: PrefillModel, seconds: SecondsCost | None = None) -> None:
        self._model = model
        self._slots: dict[int, _SlotPrefills] = {}
        self._progress = PrefillProgress()
        self._seconds = seconds
        if seconds is not None and isinstance(model, PrefillFit):
            seconds.set_fit(*model.estimate)

    def begin(
        self, slot: int, request_id: str, tokens: int, cached_tokens: int, now_s: float
    ) -> None:
        """Add a booked prompt with ``tokens`` to compute; one without is no load."""
        if tokens <= 0:
            return
        expected_s = self._model.predict(tokens, cached_tokens)
        rate = tokens / expected_s if expected_s is not None and 0 < expected_s < math.inf else 0.0
        attention = tokens * (cached_tokens + tokens / 2)
        prefill = _Prefill(tokens, attention, rate if rate < math.inf else 0.0)
        active = self._slots.get(slot)
        if active is None:
            active = self._slots[slot] = _SlotPrefills(prefill, now_s)
            self._progress.set(slot, 0.0, prefill.rate, now_s, tokens)
        active.add(request_id, prefill)
        self._show(slot, active)

    def first_token(self, slot: int, request_id: str, now_s: float) -> None:
        """Remove a computed prompt. Ignores unknown requests."""
        active = self._slots.get(slot)
        prefill = active.pop(request_id) if active is not None else None
        if active is None or prefill is None:
            return
        active.count(prefill)
        self._learn(slot, active, prefill, now_s)
        oldest = active.oldest
        if prefill is oldest:
            self._advance_anchor(slot, active, now_s)
        elif oldest.rate and prefill.rate:
            # A younger prefill overtook the anchor and used part of the time credited to it. Take
            # its tokens back from the anchor: the sum over both, and so the reported load, does not
            # jump. Tokens are whole numbers, so the subtraction is exact in floating point.
            left = max(self._progress.value(slot, now_s) - prefill.tokens, 0.0)
            self._progress.set(slot, left, oldest.rate, now_s, oldest.tokens)
        self._show(slot, active)
        interval = active.take_interval(now_s, 1 if self._model.hurries else _INTERVAL_PREFILLS)
        if interval is not None:
            self._observe(slot, interval, now_s)

    def mark_waiting(self, slot: int) -> None:
        """Note that prompts of ``slot`` wait for memory: the interval measures no speed."""
        active = self._slots.get(slot)
        if active is not None:
            active.abandoned, active.began_s = True, None

    def abandon(self, slot: int, request_id: str, now_s: float) -> None:
        """Remove a request that ended before its first token: it was dropped, not computed."""
        active = self._slots.get(slot)
        prefill = active.pop(request_id) if active is not None else None
        if active is None or prefill is None:
            return
        # How much of it was computed is unknown: the interval measures nothing.
        active.abandoned, active.began_s = True, None
        if prefill is active.oldest:
            self._advance_anchor(slot, active, now_s)
        self._show(slot, active)

    def drop_slot(self, slot: int) -> None:
        """Remove all prefills of a worker that was removed."""
        if self._slots.pop(slot, None) is not None:
            self._progress.set(slot, 0.0, 0.0, 0.0, 0.0)
            if self._seconds is not None:
                self._seconds.set_queue(slot, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def speed(self) -> PrefillSpeed | None:
        """Return what the model expects, if it learns."""
        if not isinstance(self._model, PrefillFit):
            return None
        fixed_s, token_s, attention_s = self._model.estimate
        return PrefillSpeed(
            fixed_s=fixed_s,
            token_s=token_s,
            attention_s=attention_s,
            samples=len(self._model),
        )

    def predict(self, tokens: int, cached_tokens: int) -> float | None:
        """Return the seconds that a prompt takes on a worker of slowness 1; None: unknown."""
        return self._model.predict(tokens, cached_tokens)

    def restore(self, speed: PrefillSpeed) -> None:
        """Expect what an earlier router measured, until this one has measured."""
        if isinstance(self._model, PrefillFit):
            self._model.restore(speed)
            if self._seconds is not None:
                self._seconds.set_fit(*self._model.estimate)

    def done_tokens(self, slot: int, now_s: float) -> int:
        """Return the estimate of computed tokens on ``slot``."""
        return int(self._progress.value(slot, now_s))

    def subtract_done(self, prefill_tokens: array[int], now_s: float) -> None:
        """Subtract the estimates from a column (i64) by slot. O(slots), compiled."""
        self._progress.subtract_done(prefill_tokens, now_s)

    def _advance_anchor(self, slot: int, active: _SlotPrefills, now_s: float) -> None:
        """Make the oldest remaining prefill the anchor; its time starts now."""
        if not active.prefills:
            self.drop_slot(slot)
            return
        oldest = active.oldest = next(iter(active.prefills.values()))
        active.since_s = now_s
        self._progress.set(slot, 0.0, oldest.rate, now_s, oldest.tokens)

    def _show(self, slot: int, active: _SlotPrefills) -> None:
        """Say in seconds what waits on ``slot``, unless nothing does."""
        if self._seconds is not None and active.prefills:
            oldest, count = active.oldest, len(active.prefills)
            self._seconds.set_queue(
                slot,
                count,
                active.tokens,
                active.attention,
                oldest.tokens,
                oldest.attention,
                active.since_s,
            )

    def _learn(self, slot: int, active: _SlotPrefills, prefill: _Prefill, now_s: float) -> None:
        """Learn how slow a worker is from the time since its first token before this one."""
        began_s, active.began_s = active.began_s, now_s
        if began_s is not None and self._seconds is not None and not self._model.hurries:
            took_s = max(now_s - began_s, 0.0)
            self._seconds.measured(slot, prefill.tokens, prefill.attention, took_s)

    def _observe(self, slot: int, interval: BusyInterval, now_s: float) -> None:
        """Fit the model to an interval as a worker of the middle of the pool would take it."""
        seconds = self._seconds
        if seconds is not None:
            slower = seconds.slowness(slot) / seconds.middle_slowness()
            interval = interval._replace(seconds=interval.seconds / slower)
        self._model.observe(interval, now_s)
        if seconds is not None and isinstance(self._model, PrefillFit):
            seconds.set_fit(*self._model.estimate)


class _Prefill(NamedTuple):
    """``attention``: the tokens, times the tokens before each of them on average. ``rate`` in
    tokens a second; 0: unknown."""

    tokens: int
    attention: float
    rate: float


class _SlotPrefills:
    """The active prefills of one slot, and the totals of the current interval.

    ``tokens`` and ``attention`` are the sums of all active ones; the oldest began at ``since_s``.
    Nothing but the next one to end was computed since ``began_s``; None: not known.
    """

    __slots__ = (
        "_attention",
        "_count",
        "_since_s",
        "_tokens",
        "abandoned",
        "attention",
        "began_s",
        "oldest",
        "prefills",
        "since_s",
        "tokens",
    )

    def __init__(self, oldest: _Prefill, now_s: float) -> None:
        self.prefills: dict[str, _Prefill] = {}
        self.oldest = oldest
        self.since_s = now_s
        self.began_s: float | None = now_s
        self.tokens, self.attention = 0, 0.0
        self._restart(now_s)

    def add(self, request_id: str, prefill: _Prefill) -> None:
        """Add an active prefill."""
        self.prefills[request_id] = prefill
        self.tokens += prefill.tokens
        self.attention += prefill.attention

    def pop(self, request_id: str) -> _Prefill | None:
        """Remove an active prefill, if it is one."""
        prefill = self.prefills.pop(request_id, None)
        if prefill is not None:
            self.tokens -= prefill.tokens
            self.attention -= prefill.attention
        return prefill

    def count(self, prefill: _Prefill) -> None:
        """Add a computed prefill to the totals."""
        self._count += 1
        self._tokens += prefill.tokens
        self._attention += prefill.attention

    def take_interval(self, now_s: float, limit: int) -> BusyInterval | None:
        """End the interval and return it once the slot is idle or has computed ``limit`` prefills,
        else None.

        Times of single prefills that overlap cannot be told apart; their sum can be measured. The
        limit keeps a slot that is never idle from never being observed.
        """
        if not self.abandoned and self.prefills and self._count < limit:
            return None
        abandoned, seconds = self.abandoned, now_s - self._since_s
        found = BusyInterval(self._count, self._tokens, self._attention, seconds)
        self._restart(now_s)
        return None if abandoned or seconds <= 0 else found

    def _restart(self, now_s: float) -> None:
        self._since_s = now_s
        self._count = self._tokens = 0
        self._attention = 0.0
        self.abandoned = False
