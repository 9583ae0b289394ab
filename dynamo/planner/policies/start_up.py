"""How long workers take to start, learned from those that did. Pure."""

from __future__ import annotations

from collections import deque

from dynamo.planner.observation import Pool

__all__ = ["StartUpTime"]

_FIRST_GUESS_S = 60.0
_RECENT = 5


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
