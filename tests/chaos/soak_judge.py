"""The validator over a run of any length: a window of requests after the other."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import fields

from history import Fault, Life, Request
from validator import Verdict, validate

__all__ = ["Judge", "recent"]

SETTLED_S = 40.0
"""A request is judged this long after its end: the faults of its time are recorded by then."""

KEPT_S = 120.0
"""Lives and losses that ended so long ago met no request that is still to be judged."""

MOST_EXAMPLES = 1000


class Judge:
    """Takes requests and faults as they end; memory is that of about a minute's requests."""

    def __init__(self) -> None:
        self.verdict = Verdict()
        self.faults: Counter[str] = Counter()
        self._requests: deque[Request] = deque()
        self._losses: deque[Fault] = deque()

    def add(self, record: Request | Fault) -> None:
        """Take one record."""
        if isinstance(record, Request):
            self._requests.append(record)
        else:
            self.faults[record.kind] += 1
            self._losses.append(record)

    def __len__(self) -> int:
        return len(self._requests) + len(self._losses)

    def settle(self, now_s: float, lives: Iterable[Life]) -> list[Request]:
        """Judge the requests that ended long enough before ``now_s``.

        Return those that broke a promise, and those that failed and count.
        """
        ready = []
        while self._requests and self._requests[0].ended_s <= now_s - SETTLED_S:
            ready.append(self._requests.popleft())
        if not ready:
            return []
        since_s = min(one.started_s for one in ready) - KEPT_S
        while self._losses and self._losses[0].at_s < since_s:
            self._losses.popleft()
        found = validate([*self._losses, *ready], lives)
        found.faults.clear()
        _add(self.verdict, found)
        broken = {*found.failed, *(violation.request for violation in found.violations)}
        return [record for record in ready if record.id in broken]

    def finish(self, lives: Iterable[Life]) -> list[Request]:
        """Judge what is left, at the end of the run."""
        found = self.settle(float("inf"), lives)
        self.verdict.faults = self.faults
        return found


def recent(lives: Iterable[Life], now_s: float) -> list[Life]:
    """Return the lives that a request to be judged can have met."""
    since_s = now_s - KEPT_S - SETTLED_S
    return [one for one in lives if one.until_s is None or one.until_s >= since_s]


def _add(total: Verdict, found: Verdict) -> None:
    for one in fields(Verdict):
        mine, other = getattr(total, one.name), getattr(found, one.name)
        if isinstance(mine, list):
            mine += other[: MOST_EXAMPLES - len(mine)]
        elif isinstance(mine, Counter):
            mine.update(other)
        elif one.name.startswith("longest"):
            setattr(total, one.name, max(mine, other))
        else:
            setattr(total, one.name, mine + other)
