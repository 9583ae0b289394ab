"""When a dead process is started again, and when it is given up. Pure: times come in.

The first death in a while is answered at once; further ones wait 0.5, 1, 2, 4 … seconds. A burst
of deaths within the window, or a command that refuses its own flags, is given up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["USAGE_STATUS", "RestartPolicy", "Restarts"]

USAGE_STATUS = 2
"""Exit status of a program that does not understand its command line (argparse, getopt)."""

_USAGE_WITHIN_S = 30.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0


@dataclass(frozen=True)
class RestartPolicy:
    """``burst`` deaths within ``window_s`` seconds are too many."""

    burst: int = 5
    window_s: float = 60.0


class Restarts:
    """The deaths of one watcher's processes."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: deque[float] = deque(maxlen=policy.burst)

    def died(self, now_s: float, lived_s: float, status: int) -> float | str:
        """Note a death; the seconds to wait before the next start, or why there is none."""
        if status == USAGE_STATUS and lived_s < _USAGE_WITHIN_S:
            return "its command line was refused (exit status 2)"
        self._deaths.append(now_s)
        recent = sum(now_s - death <= self._policy.window_s for death in self._deaths)
        if recent >= self._policy.burst:
            return f"{recent} deaths within {self._policy.window_s:g} s"
        if recent == 1:
            return 0.0
        delay_s: float = _FIRST_DELAY_S * 2 ** (recent - 2)
        return min(delay_s, _MAX_DELAY_S)

    def forget(self) -> None:
        """Start afresh: somebody started the watcher by hand."""
        self._deaths.clear()
