"""How often workers may change, and how long they take to start. Pure."""

from __future__ import annotations

from collections import deque

from dynamo.planner.observation import Pool

__all__ = ["ActionLimit", "StartUpTime"]

_PER_HOUR = 24.0
_BURST = 5.0
"""Together at most 29 in any hour."""

_KEPT_FOR_UP = 1.0
"""An action that only adding workers may use: too few workers are worse than too many."""

_FIRST_GUESS_S = 60.0
_RECENT = 5


class ActionLimit:
    """A token bucket; one action is one change of the pools."""

    def __init__(self) -> None:
        self._tokens = _BURST
        self._at_s: float | None = None

    def refill(self, now_s: float) -> None:
        """Add what the time since the last call allows."""
        if self._at_s is not None:
            self._tokens += (now_s - self._at_s) * _PER_HOUR / 3600.0
            self._tokens = min(self._tokens, _BURST)
        self._at_s = now_s

    def allows(self, up: bool) -> bool:
        """Return whether workers may be added (``up``) or removed now."""
        return self._tokens >= 1.0 + (0.0 if up else _KEPT_FOR_UP)

    @property
    def next_s(self) -> float:
        """The time from an action now until workers may be added again."""
        return max(2.0 - self._tokens, 0.0) * 3600.0 / _PER_HOUR

    def use(self) -> None:
        """Count one action."""
        self._tokens -= 1.0


class StartUpTime:
    """Follows the workers of one pool from the decision that adds them until they serve.

    :attr:`seconds` is the longest of the last few starts: a worker that comes late costs more than
    one that comes early. Before the first one it is a guess, or the time that the current start
    has already taken.
    """

    def __init__(self) -> None:
        self._begun: deque[float] = deque()
        self._taken: deque[float] = deque(maxlen=_RECENT)
        self._waiting_s = 0.0

    @property
    def seconds(self) -> float:
        """The expected start-up time."""
        known = max(self._taken) if self._taken else _FIRST_GUESS_S
        return max(known, self._waiting_s)

    def observe(self, pool: Pool, now_s: float) -> None:
        """Take the state of the pool; a worker that starts no more has become ready."""
        while len(self._begun) > pool.starting:
            self._taken.append(now_s - self._begun.popleft())
        self._waiting_s = now_s - self._begun[0] if self._begun else 0.0

    def changed(self, pool: Pool, wanted: int, now_s: float) -> None:
        """Note that the pool is to have ``wanted`` workers; the newest ones go first."""
        for _ in range(wanted - pool.workers):
            self._begun.append(now_s)
        for _ in range(min(pool.workers - wanted, pool.starting, len(self._begun))):
            self._begun.pop()

    def failed(self, now_s: float) -> None:
        """Forget the starts of the decision at ``now_s``."""
        while self._begun and self._begun[-1] == now_s:
            self._begun.pop()
