"""What workers and queues had to do at a time, and whether that allows a refusal.

Rejections and reports of workers are recorded when they happen. The requests, prompt tokens and
queued requests of a model are what its clients saw: an upper bound of what workers and routers may
count, so a refusal below it is wrong.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from history import Request
from machine import START_S
from presence import decoders, model_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from box import Box
    from machine import Process

__all__ = ["Load", "is_busy"]

_LINGER_S = 1.5
"""A worker that was busy counts as busy for a second, or to its next report."""
_TRAVEL_S = 0.3
"""So long a request may be on its way, and a cancelled one in its worker."""
_FELT_S = 6.0
"""So long after a fault a request may lose its worker by it."""
_WAITING = 1000
"""So many requests may wait for the first worker of a model."""
_BUSY = ("All workers are busy", "Service temporarily overloaded", "worker at capacity")
_QUEUE = re.compile(
    r'policy class "(\w+)" queue (\w+) limit reached \(current=(\d+), limit=(\d+)\)'
)


def is_busy(request: Request) -> bool:
    """Whether it was refused because of others."""
    error = error_of(request)
    return any(text in error for text in _BUSY) or bool(_QUEUE.search(error))


def error_of(request: Request) -> str:
    """Return the error that its client received; '' without one."""
    return next((event.text for event in request.events if event.kind == "error"), "")


class Load:
    """Judges refusals in ``box`` by the requests of all its clients."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._limits = box.scenario.limits
        self._requests: dict[str, tuple[list[Request], list[float]]] = {}
        """By model, as they began, and when the last of those up to each one ended."""
        for model in set(box.models.values()):
            own = sorted(
                (one for one in box.requests if box.models[one.id] == model), key=_started_s
            )
            self._requests[model] = own, list(accumulate((one.ended_s for one in own), max))

    def failures(self) -> Iterator[str]:
        """Yield the rejections of workers that had room."""
        room = self._limits.engine + self._limits.waiting
        for at_s, process in self._box.machine.rejections:
            seen = self._overlapping(model_of(process), at_s - START_S - _TRAVEL_S, at_s - START_S)
            count = sum(one.choices for one in seen)
            if count <= room:
                yield f"{process} rejected a request while its model had {count}, of {room}"

    def is_crowded(self, request: Request) -> bool:
        """Whether as many requests of its model wait as may wait for its first worker."""
        at_s = request.started_s
        return self._most(request, at_s, at_s + _TRAVEL_S, _TRAVEL_S) > _WAITING  # in any order

    def may_refuse(self, request: Request) -> bool:
        """Whether a limit may have been exceeded while ``request`` waited for a worker."""
        if not self._limits:
            return False
        first_s = next((one.at_s for one in request.events if one.kind == "text"), request.ended_s)
        causes = self._box.causes.of(self._box.models[request.id])
        if any(one.span.meets(request.started_s - _FELT_S, request.ended_s) for one in causes):
            first_s = request.ended_s  # it may have to find another worker
        if self._limits.queue or self._limits.classes or self._limits.prefill_queue:
            limit = self._limits.queue or self._limits.prefill_queue
            return self._may_queue(request, request.started_s, first_s, limit)
        return self._exceeds(request, request.started_s, first_s)

    def refused(self, request: Request) -> str:
        """Return why ``request`` was refused wrongly; '' if a limit may have been exceeded."""
        limits, at_s = self._limits, request.ended_s
        if not limits:
            return "there is no limit"
        if request.status not in (200, limits.status):
            return f"the status of refusals is {limits.status}"
        full = _QUEUE.search(error_of(request))
        if full:
            return self._queue(request, full)
        if limits.prefill_queue:
            queued = self._may_queue(request, at_s, at_s, limits.prefill_queue)
            return "" if queued else "too few requests waited"
        if limits.queue or limits.classes:  # 529 has no reason
            queued = self._may_queue(request, at_s, at_s, limits.queue)
            return "" if queued else "too few requests waited"
        return "" if self._exceeds(request, at_s, at_s) else "its workers had room"

    def _queue(self, request: Request, full: re.Match[str]) -> str:
        """A queue is full only of requests, behind at least one that is being computed."""
        name, kind, current, limit = full[1], full[2], int(full[3]), int(full[4])
        if kind != "requests" or current < limit:
            return "no such limit is set"
        if name == "default" and limit != self._limits.queue:
            return f"the limit is {self._limits.queue}"
        at_s = request.ended_s
        return "" if self._may_queue(request, at_s, at_s, limit) else "too few requests waited"

    def _may_queue(self, request: Request, since_s: float, until_s: float, limit: int) -> bool:
        """Whether more than ``limit`` requests may have waited, one of them at a worker."""
        return self._most(request, since_s, until_s, _TRAVEL_S) > max(1, limit)

    def _most(
        self, request: Request, since_s: float, until_s: float, late_s: float, tokens: bool = False
    ) -> int:
        """Return the most choices, or prompt ``tokens``, of its model that were open at once.

        Those that have ended count for ``late_s`` longer.
        """
        seen = list(self._overlapping(self._box.models[request.id], since_s - late_s, until_s))
        times = {max(since_s, one.started_s) for one in seen}
        return max(
            sum(
                one.choices * (one.expected.prompt_tokens if tokens else 1)
                for one in seen
                if one.started_s <= at_s <= one.ended_s + late_s
            )
            for at_s in times
        )

    def _exceeds(self, request: Request, since_s: float, until_s: float) -> bool:
        """Whether each worker may have been busy at some moment."""
        limits, model = self._limits, self._box.models[request.id]
        since_s -= _LINGER_S
        if limits.prefill_tokens:
            tokens = self._most(request, since_s, until_s, _LINGER_S, tokens=True)
            return tokens > limits.prefill_tokens * self.fewest(decoders(model), since_s, until_s)
        busy = (
            self._over_blocks(since_s, until_s) if limits.blocks else self._full(since_s, until_s)
        )
        busy = {one for one in busy if model_of(one) == model}
        return len(busy) >= self.fewest(decoders(model), since_s, until_s)

    def _full(self, since_s: float, until_s: float) -> set[Process]:
        """The workers that rejected a request in this time."""
        return {
            process
            for at_s, process in self._box.machine.rejections
            if since_s <= at_s - START_S <= until_s
        }

    def _over_blocks(self, since_s: float, until_s: float) -> set[Process]:
        """The workers that reported more blocks in use than the limit, in this time or last."""
        last: dict[Process, int] = {}
        over = set()
        for at_s, process, blocks in self._box.machine.reports:
            if at_s - START_S <= since_s:
                last[process] = blocks
            elif at_s - START_S <= until_s and blocks > self._limits.blocks:
                over.add(process)
        return over | {one for one, blocks in last.items() if blocks > self._limits.blocks}

    def fewest(self, services: Collection[str], since_s: float, until_s: float) -> int:
        """Return how many workers of ``services`` were live at least."""
        total = 0
        for service in services:
            changes = self._box.presence.counts.get(service, ())
            before = [count for at_s, count in changes if at_s < since_s]
            within = [count for at_s, count in changes if since_s <= at_s <= until_s]
            total += min([*before[-1:], *within], default=0)
        return total

    def _overlapping(self, model: str, since_s: float, until_s: float) -> Iterator[Request]:
        """Yield the requests of a model that were open at some moment of this time."""
        requests, ended_s = self._requests.get(model, ([], []))
        begun = bisect_right(requests, until_s, key=_started_s)
        for request in requests[bisect_left(ended_s, since_s) : begun]:
            if since_s <= request.ended_s:
                yield request


def _started_s(request: Request) -> float:
    return request.started_s
