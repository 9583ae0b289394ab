"""The workers that lived in a run, and when they were lost: looked up by model for each request."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

from machine import START_S, Process
from presence import model_of

if TYPE_CHECKING:
    from box import Box

__all__ = ["WorkersSeen"]


class WorkersSeen:
    """The workers of a run that has ended.

    ``of`` has all that lived, by model, and ``last`` the last process with each name.
    """

    def __init__(self, box: Box) -> None:
        self.of: defaultdict[str, list[Process]] = defaultdict(list)
        self.last: dict[str, Process] = {}
        for process in box.machine.lived:
            self.last[process.name] = process
            if model_of(process):
                self.of[model_of(process)].append(process)
        self._ends = {
            (model, drained): sorted(
                one.ended_s - START_S
                for one in workers
                if not one.alive and (drained or one.status)
            )
            for model, workers in self.of.items()
            for drained in (False, True)
        }
        self._lost: defaultdict[str, list[float]] = defaultdict(list)
        for model, at_s in sorted(box.causes.losses):
            self._lost[model].append(at_s)

    def ended(self, model: str, since_s: float, until_s: float, drained: bool) -> int:
        """Return how many ended from ``since_s`` to ``until_s``, with those that ``drained``."""
        return _count(self._ends.get((model, drained), []), since_s, until_s)

    def silent(self, model: str, since_s: float, until_s: float) -> int:
        """Return how often one lost its requests in this time, and lived on."""
        return _count(self._lost[model], since_s, until_s)


def _count(times: list[float], since_s: float, until_s: float) -> int:
    return max(0, bisect_right(times, until_s) - bisect_left(times, since_s))
