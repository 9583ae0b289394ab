"""Stop strings in a text that arrives in pieces of any size.

What might be the beginning of a stop string is held back; everything else passes at once. The
result does not depend on how the text was cut: the stop that is complete first wins, and among
those that end at the same character the one that began first.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """The state of one stream. ``hit`` is the stop string found, None before."""

    __slots__ = ("_held", "_include", "_lasts", "_longest", "_prefixes", "_stops", "hit")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``include`` leaves the stop string in the text. Stops are not empty."""
        self._stops = tuple(stops)
        self._include = include
        self._prefixes = {stop[:end] for stop in stops for end in range(1, len(stop))}
        self._lasts = {prefix[-1] for prefix in self._prefixes}
        self._longest = max(map(len, self._prefixes), default=0)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """What is certain to be shown now. After a hit, nothing. O(text · stops)."""
        if self.hit is not None or not text:
            return ""
        text = self._held + text
        found = self._find(text)
        if found is not None:
            start, self.hit = found
            self._held = ""
            return text[: start + len(self.hit)] if self._include else text[:start]
        keep = self._held_length(text)
        if not keep:
            self._held = ""
            return text
        self._held = text[-keep:]
        return text[:-keep]

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _held_length(self, text: str) -> int:
        if not text or text[-1] not in self._lasts:
            return 0
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0
