"""Restart policy: when to restart a dead process, and when to give up. Pure: times are arguments.

The first death in a window restarts at once; further ones wait 0.5, 1, 2, 4 … seconds. The policy
gives up after a burst of deaths within the window, after as many starts in a row that never served
a model (loading one may take longer than the window), or if a command rejects its own flags.

The exit status says why a process ended. With 75 (EX_TEMPFAIL) a later start may succeed, as when a
model cannot be downloaded now: the start is repeated for ever. Programs of this package exit with 2
only if a start with the same settings cannot succeed; from others it means that soon after their
start.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

USAGE_STATUS = 2
"""Exit status of a program that rejects its command line (argparse, getopt)."""

_USAGE_WITHIN_S = 30.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
_MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class RestartPolicy:
    """Give up after ``burst`` deaths within ``window_s`` seconds."""

    burst: int = 5
    window_s: float = 60.0


class Restarts:
    """The deaths of one watcher's processes."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: deque[float] = deque(maxlen=policy.burst)
        self._unserved = 0
        self._refused = 0

    @property
    def count(self) -> int:
        """The deaths that are remembered, at most a burst."""
        return len(self._deaths)

    def died(
        self,
        now_s: float,
        lived_s: float,
        status: int,
        *,
        served: bool = True,
        is_ours: bool = False,
    ) -> float | str:
        """Record a death; return the delay of the restart in seconds, or why to give up.

        ``served`` is False for a process that should have registered a model and never did.
        ``is_ours``: the program is one of this package.
        """
        if status == USAGE_STATUS and (is_ours or lived_s < _USAGE_WITHIN_S):
            what = "it refused to start" if is_ours else "its command line was rejected"
            return f"{what} (exit status {status})"
        if status == os.EX_TEMPFAIL:
            self._refused += 1
            return _delay_s(self._refused + 1)
        self._refused = 0
        self._deaths.append(now_s)
        self._unserved = 0 if served else self._unserved + 1
        recent = sum(now_s - death <= self._policy.window_s for death in self._deaths)
        if recent >= self._policy.burst:
            return f"{recent} deaths within {self._policy.window_s:g} s"
        if self._unserved >= self._policy.burst:
            return f"{self._unserved} starts in a row ended before the model was served"
        return _delay_s(max(recent, self._unserved))

    def forget(self) -> None:
        """Forget all deaths, after a manual start."""
        self._deaths.clear()
        self._unserved = self._refused = 0


def _delay_s(count: int) -> float:
    """Return the delay before the restart after the ``count``-th death."""
    if count == 1:
        return 0.0
    delay_s: float = _FIRST_DELAY_S * 2 ** min(count - 2, _MOST_DOUBLINGS)
    return min(delay_s, _MAX_DELAY_S)
