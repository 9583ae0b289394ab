"""Figures of one row: values per round of both systems, the ratio, the bar and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass
class Figure:
    """``ours`` and ``theirs`` hold one value for each round; ``theirs`` is empty for absolutes.

    ``limit`` applies to the median of the ratios, or of ``ours`` without a peer.
    """

    key: str
    title: str
    unit: str
    ours: list[float]
    theirs: list[float] = field(default_factory=list)
    limit: float | None = None
    notes: list[str] = field(default_factory=list)
    valid: bool = True
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, round by round."""
        pairs = zip(self.ours, self.theirs, strict=False)
        return [ours / theirs for ours, theirs in pairs if theirs]

    @property
    def judged(self) -> float | None:
        """Return the number that the bar applies to."""
        values = self.ratios if self.theirs else self.ours
        return median(values) if values else None

    @property
    def holds(self) -> bool | None:
        """Return whether the bar holds; None without a bar."""
        if self.limit is None:
            return None
        return self.valid and self.judged is not None and self.judged <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        return {
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "ours": self.ours,
            "theirs": self.theirs,
            "ratios": self.ratios,
            "ratio_median": median(self.ratios) if self.ratios else None,
            "limit": self.limit,
            "holds": self.holds,
            "notes": self.notes,
            "samples": self.samples,
        }
