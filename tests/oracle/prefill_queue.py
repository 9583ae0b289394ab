"""The prefills of each slot, in plain Python."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["PrefillQueues"]


@dataclass
class Prefill:
    """``rate`` in tokens a second; 0: unknown."""

    tokens: int
    attention: float
    rate: float


@dataclass
class Queue:
    """The oldest first. ``done`` tokens of it were computed at ``done_at_s``."""

    prefills: dict[str, Prefill] = field(default_factory=dict)
    oldest_since_s: float = 0.0
    done: float = 0.0
    done_at_s: float = 0.0
    began_s: float | None = None
    interval_since_s: float = 0.0
    ended: list[Prefill] = field(default_factory=list)
    disturbed: bool = False

    @property
    def oldest(self) -> Prefill:
        """The one that is computed."""
        return next(iter(self.prefills.values()))

    def done_at(self, now_s: float) -> float:
        """How much of it is probably done."""
        grown = self.done + self.oldest.rate * max(now_s - self.done_at_s, 0.0)
        return min(grown, float(self.oldest.tokens))

    def begin_oldest(self, now_s: float) -> None:
        """Its time starts now."""
        self.oldest_since_s = self.done_at_s = now_s
        self.done = 0.0


class PrefillQueues:
    """The reference implementation of :class:`dynamo._fast.prefill_queue.PrefillQueues`.

    ``measured`` has the calls that a cost in seconds with the coefficients ``fit`` gets;
    ``slowness`` is what it says of a slot.
    """

    def __init__(self, fit: tuple[float, float, float], slowness: Callable[[int], float]) -> None:
        self.queues: dict[int, Queue] = {}
        self.fit = fit
        self.slowness = slowness
        self.measured: list[tuple[int, int, float, float]] = []

    def begin(
        self,
        slot: int,
        request_id: str,
        tokens: int,
        cached_tokens: int,
        expected_s: float | None,
        now_s: float,
    ) -> None:
        """Add a prompt."""
        attention = tokens * (cached_tokens + tokens / 2)
        if expected_s is None:
            expected_s = self.fit[0] + tokens * self.fit[1] + attention * self.fit[2]
            expected_s *= self.slowness(slot)
        prefill = Prefill(tokens, attention, tokens / expected_s)
        queue = self.queues.setdefault(slot, Queue())
        if not queue.prefills:
            queue.began_s = queue.interval_since_s = now_s
            queue.prefills[request_id] = prefill
            queue.begin_oldest(now_s)
        queue.prefills[request_id] = prefill

    def first_token(
        self, slot: int, request_id: str, now_s: float, measures: bool, limit: int
    ) -> tuple[int, int, float, float] | None:
        """Remove a computed prompt."""
        queue = self.queues.get(slot)
        if queue is None or request_id not in queue.prefills:
            return None
        oldest, done = queue.oldest, queue.done_at(now_s)
        prefill = queue.prefills.pop(request_id)
        queue.ended.append(prefill)
        if measures and queue.began_s is not None:
            took_s = max(now_s - queue.began_s, 0.0)
            self.measured.append((slot, prefill.tokens, prefill.attention, took_s))
        queue.began_s = now_s
        if not queue.prefills:
            del self.queues[slot]
        elif prefill is oldest:
            queue.begin_oldest(now_s)
        elif oldest.rate and prefill.rate:
            queue.done, queue.done_at_s = max(done - prefill.tokens, 0.0), now_s
        if queue.prefills and len(queue.ended) < limit and not queue.disturbed:
            return None
        seconds = now_s - queue.interval_since_s
        found = len(queue.ended), sum(p.tokens for p in queue.ended), 0.0, seconds
        attention = sum(p.attention for p in queue.ended)
        disturbed = queue.disturbed or seconds <= 0
        queue.interval_since_s, queue.ended, queue.disturbed = now_s, [], False
        return None if disturbed else (found[0], found[1], attention, seconds)

    def abandon(self, slot: int, request_id: str, now_s: float) -> None:
        """Remove a dropped prompt."""
        queue = self.queues.get(slot)
        if queue is None or request_id not in queue.prefills:
            return
        prefill, oldest = queue.prefills[request_id], queue.oldest
        del queue.prefills[request_id]
        self._disturb(queue)
        if not queue.prefills:
            del self.queues[slot]
        elif prefill is oldest:
            queue.begin_oldest(now_s)

    def mark_waiting(self, slot: int) -> None:
        """Note that prompts wait for memory."""
        if slot in self.queues:
            self._disturb(self.queues[slot])

    def done_tokens(self, slot: int, now_s: float) -> int:
        """The estimate of computed tokens."""
        return int(self.queues[slot].done_at(now_s)) if slot in self.queues else 0

    def subtract_done(self, column: array[int], now_s: float) -> None:
        """Subtract it from a column."""
        for slot in range(len(column)):
            column[slot] -= self.done_tokens(slot, now_s)

    def wait_s(self, slot: int, now_s: float) -> float:
        """The seconds until a slot begins with a new prompt."""
        if slot not in self.queues:
            return 0.0
        queue = self.queues[slot]
        fixed_s, token_s, attention_s = (self.slowness(slot) * one for one in self.fit)
        prefills = queue.prefills.values()
        each = [fixed_s + one.tokens * token_s + one.attention * attention_s for one in prefills]
        return sum(each) - min(max(now_s - queue.oldest_since_s, 0.0), each[0])

    def _disturb(self, queue: Queue) -> None:
        queue.disturbed, queue.began_s = True, None
