"""Stop signals: separate a second stop request from a copy of the first."""

from __future__ import annotations

import signal

__all__ = ["StopSignals"]

_REPEATABLE = (signal.SIGINT, signal.SIGQUIT)
_COPY_WITHIN_S = 0.5


class StopSignals:
    """Counts stop requests: the first one drains, a second one ends at once.

    One request often arrives as several signals: systemd signals every process of a unit and the
    supervisor then stops its children, coreutils ``timeout`` signals its child and the child's
    group. So SIGTERM and SIGHUP may be repeated without effect. Only SIGINT and SIGQUIT, which a
    person sends from a terminal, count again, and only 0.5 s after the last one that counted.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last_s = 0.0

    def received(self, number: int, now_s: float) -> int:
        """The number of this request, 1 for the first; 0 if the signal is a copy of an earlier one.

        ``now_s`` is the time of any monotonic clock.
        """
        is_copy = number not in _REPEATABLE or now_s - self._last_s < _COPY_WITHIN_S
        if self._count and is_copy:
            return 0
        self._count += 1
        self._last_s = now_s
        return self._count
