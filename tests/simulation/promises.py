"""Which rows of the tables of docs/guarantees.md a run met: a request to which it applied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from excuses import RESTART_S
from history import Request
from load_seen import error_of, is_busy
from machine import START_S
from presence import Span, model_of, service_of

if TYPE_CHECKING:
    from box import Box

__all__ = ["ROWS", "met"]

_KILLED = 9
_LASTS_S = 2.5


class _Facts:
    """What happened in a run, by the time at which requests may have met it."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self._ends = [
            (one.ended_s - START_S, one.status & 0x7F, service_of(one), model_of(one))
            for one in box.machine.lived
            if model_of(one) and not one.alive
        ]
        self._rejections = [at_s - START_S for at_s, _ in box.machine.rejections]
        self._times: dict[tuple[str, str], list[float]] = {}

    def times(self, request: Request, what: str) -> list[float]:
        """Return when ``what`` happened to workers of its model, or to the box; in order."""
        model = self.box.models[request.id]
        if (model, what) not in self._times:
            self._times[model, what] = sorted(self._found(model, what))
        return self._times[model, what]

    def _found(self, model: str, what: str) -> Iterable[float]:
        if what == "rejected":
            return self._rejections
        if what == "prefill died":
            return [
                at_s for at_s, status, service, _ in self._ends if service == "Prefill" and status
            ]
        if what in ("killed", "drained"):
            return [
                at_s
                for at_s, status, service, served in self._ends
                if served == model
                and service != "Prefill"
                and (status == _KILLED) == (what == "killed")
            ]
        if what == "replaced":
            begun = [*self.steps("restart"), *self.steps("reload"), *self.steps("circus restart")]
            return [
                at_s
                for at_s in self._found(model, "drained")
                if any(since_s <= at_s <= since_s + RESTART_S for since_s in begun)
            ]
        return self.steps(what)

    def steps(self, what: str) -> Iterable[float]:
        """Yield when steps of this kind were begun."""
        for step in self.box.done:
            if step.what == what:
                yield step.at_s + self.box.ready_s


def _first_s(request: Request) -> float:
    return next((one.at_s for one in request.events if one.kind == "text"), request.ended_s)


def _last_s(request: Request) -> float:
    finish = [one.at_s for one in request.events if one.kind == "finish"]
    return finish[-1] if finish else request.ended_s


def _whole(request: Request) -> bool:
    return request.ending == "complete" and request.status == 200 and not error_of(request)


Row = Callable[[_Facts, Request], bool]


def _survives(what: str, stage: str, early_s: float = 0.0) -> Row:
    """An answer is complete although ``what`` happened before its first token, or later."""

    def is_met(facts: _Facts, request: Request) -> bool:
        if not _whole(request):
            return False
        first_s, last_s = _first_s(request), _last_s(request)
        since_s, until_s = {
            "before": (request.started_s - early_s, first_s),
            "between": (first_s, last_s),
            "any": (request.started_s - early_s, request.ended_s),
        }[stage]
        if stage == "between" and first_s == last_s:
            return False
        times = facts.times(request, what)
        after = bisect_right(times, since_s)
        return after < len(times) and times[after] < until_s

    return is_met


def _fails(text: str, streamed: bool | None = None) -> Row:
    """A request ends with this error, as a status or as an event of a stream."""

    def is_met(facts: _Facts, request: Request) -> bool:
        in_stream = request.status == 200
        return text in error_of(request) and streamed in (None, in_stream)

    return is_met


def _leaves(stage: str) -> Row:
    return lambda facts, request: request.ending == "cancelled" and request.cancel == stage


def _busy(facts: _Facts, request: Request) -> bool:
    return is_busy(request) and "limit reached" not in error_of(request)


def _waits_for_room(facts: _Facts, request: Request) -> bool:
    """It lost its worker between two tokens, and the others were full."""
    died = [
        one for one in facts.times(request, "killed") if _first_s(request) < one < request.ended_s
    ]
    return _whole(request) and any(
        0 <= rejected - at_s < 1.0 for at_s in died for rejected in facts.times(request, "rejected")
    )


def _outlives_drain(facts: _Facts, request: Request) -> bool:
    return _whole(request) and any(
        life.closing_s is not None and request.started_s < life.closing_s < request.ended_s
        for life in facts.box.frontend_lives
        if facts.box.life_ports[id(life)] == facts.box.ports[request.id]
    )


def _is_cut(program: str) -> Row:
    """A request is cut by the death of its frontend, or of the arbiter and with it all."""

    def is_met(facts: _Facts, request: Request) -> bool:
        if request.ending != "closed":
            return False
        ends = [
            Span(one.ended_s - START_S - 0.1, one.ended_s - START_S + 0.5)
            for one in facts.box.machine.lived
            if not one.alive and one.status & 0x7F == _KILLED
            and (one.name == "serve" if program == "serve" else one.program == program)
        ]  # fmt: skip
        return any(span.meets(request.ended_s, request.ended_s) for span in ends)

    return is_met


def _stopped_box(facts: _Facts, request: Request) -> bool:
    ends = facts.box.causes.found
    stops = [one.since_s for one in ends if one.why == "the stop"]
    return _whole(request) and any(request.started_s < at_s < request.ended_s for at_s in stops)


ROWS: dict[str, Row] = {
    "worker killed, before a token": _survives("killed", "before"),
    "worker killed, between tokens": _survives("killed", "between"),
    "connection cut, before a token": _survives("cut requests", "before"),
    "connection cut, between tokens": _survives("cut requests", "between"),
    "worker replaced, before a token": _survives("replaced", "before"),
    "worker replaced, between tokens": _survives("replaced", "between"),
    "worker stopped, before a token": _survives("stop worker", "before", _LASTS_S),
    "worker stopped, between tokens": _survives("stop worker", "between"),
    "worker drained, before a token": _survives("drained", "before"),
    "worker drained, between tokens": _survives("drained", "between"),
    "worker at capacity, another takes it": _survives("rejected", "before"),
    "workers at capacity, 503": _busy,
    "workers at capacity, waits between tokens": _waits_for_room,
    "prefill worker dies": _survives("prefill died", "any"),
    "KV events cut": _survives("cut events", "any"),
    "disk full": _survives("disk full", "any"),
    "socket removed": _survives("remove socket", "any", _LASTS_S),
    "lease removed": _survives("remove lease", "any"),
    "record removed": _survives("remove record", "any"),
    "arbiter stopped": _survives("stop arbiter", "any"),
    "client leaves the queue": _leaves("queued"),
    "client leaves between tokens": _leaves("mid-stream"),
    "no worker, 503": _fails("is not ready to serve requests yet", streamed=False),
    "no worker, in a stream": lambda facts, request: request.status == 200
    and bool(error_of(request)) and not is_busy(request),
    "router's queue full": _fails("queue requests limit reached"),
    "migrations used up": _fails("Migration limit exhausted"),
    "two workers died, 500": _fails("Two workers died", streamed=False),
    "two workers died, in a stream": _fails("Two workers died", streamed=True),
    "frontend drains, its requests finish": _outlives_drain,
    "frontend drains, new ones get 503": _fails("Service is shutting down"),
    "frontend killed, cut": _is_cut("dynamo.frontend"),
    "arbiter killed, cut": _is_cut("serve"),
    "serve stopped, its requests finish": _stopped_box,
    "unknown key, 401": lambda facts, request: request.status == 401,
    "key without a grant, 403": lambda facts, request: request.status == 403,
}  # fmt: skip
"""What a row says of a request, by its name."""


def met(box: Box) -> list[str]:
    """Return the names of the rows that some request of the run met."""
    facts = _Facts(box)
    return [name for name, row in ROWS.items() if any(row(facts, one) for one in box.requests)]
