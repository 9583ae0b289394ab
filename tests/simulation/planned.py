"""Whether what a planner decides about models on demand has the reason that it gives.

Its log names it: requests that wait, a time without requests, or an idle model whose GPU another
one needs. What clients asked for, and when workers were live, says whether that was so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from machine import START_S
from presence import decoders

if TYPE_CHECKING:
    from box import Box
    from history import Request
    from machine import Process

__all__ = ["check_decisions", "no_planner"]

_DECIDED = re.compile(
    r" *([\d.]+)  box_Planner .*: model (\w+), policy sharing: decode (\d+) -> (\d+): (.*); decided"
)
_IDLE = re.compile(r"no requests for ([\d.]+) s")
_NEEDED = re.compile(r"idle, and requests of (\w+) wait")
_WAITING = re.compile(r"\d+ requests? waits? for a worker")
_SLACK_S = 0.4
"""A frontend reports to planners five times a second, and bytes travel."""
_WAITED_S = 2.0
_FELT_S = 3.0
_BEGINS_S = 1.0
"""So long a planner that begins may take to say which models are started on demand."""
_TOUCH_S = 3.5
"""A lease is touched, and its keys are looked at, so often."""
_RETRY_S = 1.0
"""What a planner could not write it tries again so soon."""


def check_decisions(box: Box) -> Iterator[str]:
    """Yield the decisions whose reason is not so, unless something was disturbed at that time."""
    if box.has_asking_verbs:
        return
    for line in box.machine.history:
        found = _DECIDED.match(line) if "policy sharing" in line else None
        if found is not None:
            at_s = float(found[1])
            for problem in _wrong(box, at_s, found[2], found[5]):
                yield f"at {at_s:.3f} s the planner decided for {found[2]} ({found[5]}): {problem}"


def _wrong(box: Box, at_s: float, model: str, why: str) -> Iterator[str]:
    idle, needed = _IDLE.match(why), _NEEDED.match(why)
    if idle is not None and _is_calm(box, at_s - float(idle[1]) - _FELT_S, at_s):
        since_s = at_s - float(idle[1])
        if _served(box, model, since_s + _SLACK_S, at_s - _SLACK_S):
            yield "it served requests in that time"
        if (newest_s := _newest_s(box, model, at_s)) > since_s + _SLACK_S:
            yield f"its worker serves since {newest_s:.3f} s"
    elif needed is not None and _is_calm(box, at_s - _FELT_S, at_s):
        if _served(box, model, at_s - _SLACK_S, at_s + _SLACK_S, throughout=True):
            yield "it serves a request"
        if not _asked(box, needed[1], at_s):
            yield "no such request waits"
    elif (
        _WAITING.match(why) and _is_calm(box, at_s - _FELT_S, at_s) and not _asked(box, model, at_s)
    ):
        yield "none does"


def _is_calm(box: Box, since_s: float, until_s: float) -> bool:
    """Whether no process of the box was hit, stopped or new in that time."""
    faults = (
        step.at_s + box.ready_s
        for step in box.done
        if step.kind == "fault" or (step.kind == "operator" and step.what not in _BRINGING)
    )
    begun = (one.started_s - START_S for one in box.machine.lived if one.program in _REPORTING)
    times = [*faults, *begun]
    stops = (span for spans in box.stops.values() for span in spans)
    return not any(since_s <= one <= until_s for one in times) and not any(
        span.meets(since_s, until_s) for span in stops
    )


_BRINGING = ("load", "wake")
"""Operations after which a model is served, whether anyone asks for it or not."""
_REPORTING = ("dynamo.frontend", "dynamo.planner")


def _served(box: Box, model: str, since_s: float, until_s: float, throughout: bool = False) -> bool:
    """Whether a request of ``model`` was served in a part of that time, or in all of it."""
    for request in box.requests:
        texts = [one.at_s for one in request.events if one.kind == "text"]
        if box.models[request.id] != model or not texts or request.status != 200:
            continue
        begin_s, end_s = request.started_s, texts[-1]
        inside = begin_s <= since_s and end_s >= until_s
        if inside if throughout else begin_s <= until_s and end_s >= since_s:
            return True
    return False


def _asked(box: Box, model: str, at_s: float) -> bool:
    """Whether a request of ``model`` was open then, or a moment before."""
    return any(
        box.models[one.id] == model and one.started_s <= at_s and one.ended_s >= at_s - _WAITED_S
        for one in box.requests
    )


def _newest_s(box: Box, model: str, at_s: float) -> float:
    """Return when the newest worker of ``model`` began to serve."""
    newest_s = 0.0
    for service in decoders(model):
        before = 0
        for changed_s, count in box.presence.counts.get(service, ()):
            if changed_s > at_s:
                break
            if count > before:
                newest_s = max(newest_s, changed_s)
            before = count
    return newest_s


def no_planner(box: Box, request: Request) -> bool:
    """Whether no planner had said, all the time, which models are started on demand."""
    if _is_record_removed(box, request):
        return True
    since_s = request.started_s - _BEGINS_S
    planners = [one for one in box.machine.lived if one.program == "dynamo.planner"]
    runs = [
        one
        for one in planners
        if _begun_s(box, one) < since_s and (one.alive or one.ended_s - START_S > request.ended_s)
    ]
    stops = (span for one in runs for span in box.stops.get(one.pid, ()))
    return not runs or any(one.meets(since_s, request.ended_s) for one in stops)


def _is_record_removed(box: Box, request: Request) -> bool:
    """Whether a fault had removed the record of its model before a frontend began.

    The planner writes it again with the next touch of its lease. Older frontends keep it.
    """
    for model, at_s in box.removed_records:
        until_s = at_s + _TOUCH_S
        for full in box.full():
            if full.meets(until_s, until_s):
                until_s = full.until_s + _TOUCH_S
        new = any(
            at_s - _BEGINS_S <= one.started_s - START_S <= until_s
            for one in box.machine.lived
            if one.program == "dynamo.frontend"
        )
        meets = request.started_s <= until_s and at_s <= request.ended_s
        if new and meets and model == box.models[request.id]:
            return True
    return False


def _begun_s(box: Box, planner: Process) -> float:
    """Return when a planner began.

    Its start asks the arbiter, which may be stopped, and writes, which a full disk refuses.
    """
    begun_s = planner.started_s - START_S
    arbiters = (one for one in box.machine.lived if one.name == "serve")
    for span in (span for one in arbiters for span in box.stops.get(one.pid, ())):
        if begun_s <= span.until_s and span.since_s < begun_s + _BEGINS_S:
            begun_s = span.until_s
    for span in box.full():
        if begun_s <= span.until_s and span.since_s < begun_s + _BEGINS_S:
            begun_s = span.until_s + _RETRY_S
    return begun_s
