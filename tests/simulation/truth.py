"""What was so in a box, from its processes and files: for judges of what programs say of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from excuses import RESTART_S
from machine import START_S, Process
from presence import SERVED_BY, Span, gpus_of, model_of, service_of

if TYPE_CHECKING:
    from box import Box
    from history import Request

__all__ = ["SEVERAL", "Truth", "may_serve"]

SEVERAL = ("api",)
"""What :data:`presence.SERVED_BY` has for a worker of several models."""

_STARTS_S = 5.0
"""So long an arbiter may take from its start until its statefile says what runs."""
_SETTLED_S = 1.5
"""So long after a process has begun or ended all may know it."""
_WRITTEN_AGAIN_S = 1.5
"""So long after a full disk is free again the statefile may be old."""
_SEEN_S = 0.5
"""What a verb reads may be so old."""
_SERVED_S = 1.0
_FELT_S = 10.0
"""So long a process that was stopped may be taken for lost."""
_NEVER = float("inf")


def may_serve(process: Process, model: str) -> bool:
    """Whether a worker serves ``model``."""
    return model_of(process) in (model, *SEVERAL)


class Truth:
    """What was so in ``box`` from ``since_s`` to ``until_s``, seconds of the run."""

    def __init__(self, box: Box, since_s: float, until_s: float) -> None:
        self.box = box
        self.since_s, self.until_s = since_s, until_s
        self.span = Span(since_s - _SEEN_S, until_s)

    # -- processes

    def lived(self, process: Process) -> bool:
        """Whether it lived for a moment of this time."""
        return self._meets(process, self.since_s - _SEEN_S, self.until_s)

    def _meets(self, process: Process, since_s: float, until_s: float) -> bool:
        ended_s = float("inf") if process.alive else process.ended_s - START_S
        return process.started_s - START_S <= until_s and ended_s >= since_s

    def throughout(self, process: Process) -> bool:
        """Whether it lived all the time, and for a while before."""
        since_s = self.since_s - _SETTLED_S
        ended_s = float("inf") if process.alive else process.ended_s - START_S
        return process.started_s - START_S <= since_s and ended_s > self.until_s

    def process(self, pid: int) -> Process | None:
        """Return the process with this number, living or not."""
        return next((one for one in self.box.machine.lived if one.pid == pid), None)

    def arbiters(self) -> list[Process]:
        """Return those that lived for a moment of this time."""
        return [one for one in self.box.machine.lived if one.name == "serve" and self.lived(one)]

    def may_run(self) -> bool:
        """Whether a deployment ran for a moment."""
        return bool(self.arbiters())

    def may_not_run(self) -> bool:
        """Whether none may have run for a moment: none was there, or had said so."""
        return not any(
            one.started_s - START_S <= self.since_s - _STARTS_S
            and (one.alive or one.ended_s - START_S > self.until_s)
            for one in self.arbiters()
        ) or self.disturbed(self.box.causes.everywhere_spans())

    def stopped(self, process: Process, before_s: float = 0.0) -> bool:
        """Whether it was stopped for a moment, or ``before_s`` before."""
        spans = self.box.stops.get(process.pid, ())
        return any(one.meets(self.since_s - before_s, self.until_s) for one in spans)

    def asleep(self, process: Process) -> tuple[bool, bool]:
        """Return whether its engine was ever awake, and ever asleep, in this time."""
        changes = [
            (at_s - START_S, value)
            for at_s, one, value in self.box.machine.sleeps
            if one is process and at_s - START_S <= self.until_s
        ]
        state, seen = False, set()
        for at_s, value in changes:
            if at_s > self.since_s - _SEEN_S:
                seen.add(state)
            state = value
        seen.add(state)
        return False in seen, True in seen

    # -- workers

    def live(self, name: str) -> tuple[int, int]:
        """Return how many live workers a service or worker had, at least and at most."""
        count, seen = 0, []
        for at_s, now in self.box.presence.counts.get(name, ()):
            if at_s > self.until_s:
                break
            if at_s > self.span.since_s:
                seen.append(count)
            count = now
        seen.append(count)
        return min(seen), max(seen)

    def ready(self, model: str) -> tuple[int, int]:
        """Return how many live workers of a model there were, at least and at most."""
        counts = [self.live(name) for name, served in SERVED_BY.items() if served == model]
        return sum(least for least, _ in counts), sum(most for _, most in counts)

    def workers(self) -> list[Process]:
        """Return the workers that lived for a moment."""
        return [one for one in self.box.machine.lived if model_of(one) and self.lived(one)]

    def owner(self, lease: str) -> Process | None:
        """Return the process that had the lease with this hexadecimal name."""
        return self.box.presence.owners.get(lease)

    def may_hold(self, process: Process, gpus: list[str]) -> bool:
        """Whether these are the GPUs of a process, or the statefile could not be written."""
        full = self.box.was_full_at(self.since_s - _WRITTEN_AGAIN_S, self.until_s)
        return full or sorted(gpus) == sorted(gpus_of(process))

    # -- what was in the way

    def is_sleep_unwritten(self, process: Process) -> bool:
        """Whether its engine sleeps or slept, and what put it to sleep may have been killed.

        The next command or planner finishes it and writes it down.
        """
        ends = (
            one.ended_s - START_S
            for one in self.box.machine.lived
            if one.status & 0x7F and (one.program == "dynamo.planner" or "operator" in one.name)
        )
        spans = (Span(ended_s, ended_s + RESTART_S) for ended_s in ends)
        return self.asleep(process)[1] and self.disturbed(spans)

    def disturbed(self, spans: Iterator[Span]) -> bool:
        """Whether one of ``spans`` meets this time."""
        return any(one.meets(self.since_s - _SEEN_S, self.until_s) for one in spans)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has happened for a while that a program may still not know."""
        box = self.box
        since_s = self.since_s - _SETTLED_S
        spans = [Span(begun_s, ended_s) for begun_s, ended_s in box.acts]
        spans += [Span(begun_s, _NEVER) for begun_s in box.begun.values()]
        for one in box.done:
            if one.kind in ("fault", "clock"):
                at_s = box.ready_s + one.at_s
                spans.append(Span(at_s, at_s + one.details["seconds"] * (one.kind == "fault")))
        for process in box.machine.lived:
            if process.program or process.name == "serve":
                times = (process.started_s, *(() if process.alive else (process.ended_s,)))
                spans += [Span(at_s - START_S, at_s - START_S) for at_s in times]
        for stops in box.stops.values():
            spans += [Span(one.since_s, one.until_s + _FELT_S) for one in stops]
        spans += [one.span for one in box.causes.found if one.why == "the stop"]
        return not any(one.meets(since_s, self.until_s) for one in spans)

    @property
    def is_whole(self) -> bool:
        """Whether one arbiter has run from the begin, and could write all the time."""
        causes = self.box.causes.found
        return not any(
            not one.whom and not one.verb and one.since_s <= self.until_s for one in causes
        )

    def begun(self) -> list[Process]:
        """Return the workers that had begun by then."""
        until_s = self.since_s - _SEEN_S + START_S
        return [one for one in self.box.machine.lived if model_of(one) and one.started_s <= until_s]

    def interrupted(self) -> int:
        """Return how many operations were killed so far: what they left is shown until a repair."""
        return sum(results.count("killed") for results in self.box.results.values())

    @property
    def is_pristine(self) -> bool:
        """Whether nothing at all has happened to the box until then."""
        return self.is_quiet and all(one.since_s > self.until_s for one in self.box.causes.found)

    # -- requests

    def open_requests(self, model: str) -> int:
        """Return how many answers of a model were awaited for a moment, at most."""
        return sum(
            max(1, one.choices)
            for one in self._asked(model)
            if one.started_s <= self.until_s and one.ended_s >= self.since_s - _SERVED_S
        )

    def _asked(self, model: str) -> Iterator[Request]:
        for one in self.box.requests:
            if self.box.models[one.id] == model:
                yield one

    def service(self, process: Process) -> str:
        """Return its service."""
        return service_of(process)
