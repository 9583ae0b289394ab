"""A limit on how often the workers change. Pure."""

from __future__ import annotations

__all__ = ["ActionLimit"]

_PER_HOUR = 24.0
_BURST = 5.0
"""Together at most 29 in any hour."""

_KEPT_FOR_UP = 2.0
"""Actions that only adding workers may use: too few workers are worse than too many."""


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

    def use(self) -> None:
        """Count one action."""
        self._tokens -= 1.0
