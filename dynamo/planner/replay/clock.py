"""Virtual time: callbacks in the order of their due times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

__all__ = ["VirtualClock"]


class VirtualClock:
    """A queue of callbacks; those due at the same time run in the order of their registration."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, due_s: float, callback: Callable[..., None], *given: Any) -> None:
        """Call ``callback(*given)`` at ``due_s``, or now if that has passed."""
        heappush(self._queue, (max(due_s, self.now_s), next(self._order), callback, given))

    def run_next(self) -> bool:
        """Run the next callback; return False if there is none."""
        if not self._queue:
            return False
        self.now_s, _, callback, given = heappop(self._queue)
        callback(*given)
        return True
