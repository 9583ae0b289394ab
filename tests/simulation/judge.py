"""Judges the requests of a run: each has one end, and an error only where the page allows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attempts import MIGRATIONS
from call import FRONTEND, WORKER
from excuses import Cause
from history import Fault, Life, Request
from keys import LATE, NOT_GRANTED, demanded
from kinds import certain_of_kind, refusal_of_kind
from load_seen import Load, is_busy
from machine import START_S
from planned import no_planner
from presence import API, PREFILL, SERVED_BY, Span, decoders, gpus_of, model_of, share_of
from relay import RELAYED, is_disturbed
from validator import CLOSING_RACE_S, WORKERS_LOST, Spans, validate
from workers_seen import WorkersSeen

if TYPE_CHECKING:
    from box import Box

__all__ = ["EITHER", "Judge"]

EITHER = "either"
"""How the kinds begin of requests that might end in several ways."""

REJECTED = "rejected"
"""The kind of requests whose key does not allow them."""
_LONGEST_STOP_S = 30.0
NOTICE_S = 0.3
"""So long a frontend that runs may take to see that a model has a worker."""
SILENT_S = 6.0
"""So long it may take a worker that was stopped, and runs again, for silent."""
_ARRIVAL_S = 0.05
"""A signal, or the last bytes of a process that was killed, have arrived so soon."""
DRAIN_S = 20.0
"""A little less than a frontend waits for its requests after a stop signal."""
COLD_S = 100.0
"""--cold-start-timeout of each graph."""
_JUDGED = ("401:", "403:", "429:", "529:", "404: Model not found")
_NO_WORKER = (
    "is not ready to serve requests yet",
    "has no worker",
    "temporarily unavailable",
    "is not loaded, and this request does not start it",
)
_BY_COMMAND = "was stopped by a command"
_NOT_GRANTED = "is not granted to the API key"
_SERVER_LOST = ("The server of this model", "Service temporarily unavailable")
_TIMEOUT = "got no worker within"
_NEVER = float("inf")
_SHUTDOWN = "Service is shutting down"
_ENFORCED = "--enforce-disagg forbids serving it with decode workers alone"
_UNSERVED = "shutting down before model"
"""The error of a request that waits for the first worker of its model when its frontend ends."""


class Judge:
    """Judges the requests of ``box``.

    ``counts`` has how many were judged strictly, because their outcome was certain ("complete":
    it had to be complete; "refused": no live worker, so it had to be a 503; "cut": its frontend
    ended; "cancelled"), and how many might end in several ways ("either: …").
    """

    def __init__(self, box: Box) -> None:
        self._box = box
        self._lives = list(_lives(box))
        end_s = box.clock()
        self._gaps = {
            model: [
                gap
                for gap in box.presence.gaps(decoders(model), end_s)
                if gap.until_s > box.ready_s or model == API  # its models come when it is ready
            ]
            for model in (*box.profile.models, RELAYED, API)
        }
        self._gaps[PREFILL] = [
            one for one in box.presence.gaps((PREFILL,), end_s) if one.until_s > box.ready_s
        ]
        self._enforced = "enforce-disagg: true" in box.scenario.graph
        self._load = Load(box)
        self._workers = WorkersSeen(box)
        self.counts: Counter[str] = Counter()

    def failures(self) -> Iterator[str]:
        """Yield what broke a promise."""
        yield from self._validated()
        for request in self._box.requests:
            certain = self._certain(request)
            self.counts[certain] += 1
            reason = self._refusal(request, certain)
            if reason:
                error = _error(request)[:300]
                yield (
                    f"{request.id}: {reason}: {request.ending} {request.status} {error}"
                    f" (model {self._model(request)}, {request.started_s:.3f} to"
                    f" {request.ended_s:.3f} s, expected: {certain})"
                )
        yield from self._absences()
        yield from self._load.failures()

    def _validated(self) -> Iterator[str]:
        """Yield what the validator of the chaos says, for each model and frontend."""
        box = self._box
        for model in (*box.profile.models, RELAYED, API):
            served = _served_by(model)
            workers = [
                one for one in self._lives if one.role == "worker" and _served(one.name) in served
            ]
            losses = [
                Fault("requests cut", "", at_s)
                for lost, at_s in box.causes.losses
                if lost in served
            ]
            for port in sorted(set(box.ports.values())):
                requests = [
                    one
                    for one in box.requests
                    if box.ports[one.id] == port and box.models[one.id] == model
                ]
                lives = [*workers, *self._frontends(port)]
                for violation in validate([*requests, *losses], lives).violations:
                    if violation.rule == "status" and violation.detail.startswith(_JUDGED):
                        continue  # whether it is true is judged below
                    yield f"{violation.request}: {violation.rule}: {violation.detail}"

    def _frontends(self, port: int) -> list[Life]:
        """Return the lives of the frontend that listens on ``port``, one after the other."""
        ports = self._box.life_ports
        return [life for life in self._lives if life.role == "frontend" and ports[id(life)] == port]

    # -- what had to happen

    def _model(self, request: Request) -> str:
        return self._box.models[request.id]

    def _certain(self, request: Request) -> str:
        """Return what had to happen to ``request``; "either: …": uncertain, and why."""
        if request.cancel and request.ending == "cancelled":
            return "cancelled"
        frontend = self._frontend(request)
        needs = self._box.needs.get(request.id, WORKER)
        served = frontend in ("alive", "drains")
        if not served or needs == FRONTEND:
            return "complete" if served else frontend
        kind = self._by_key_or_relay(request)
        if kind:
            return kind
        since_s = request.started_s - NOTICE_S
        if self._was_absent(request, since_s, self._model(request)):
            return "refused" if needs == WORKER else f"{EITHER}: listed without a worker"
        away = self._enforced and self._without_prefill(request, since_s)
        if away:
            return away
        return self._by_losses(request, since_s, frontend == "drains")

    def _without_prefill(self, request: Request, since_s: float) -> str:
        """Return what had to happen where no decode worker may compute a prompt; '' if one may."""
        if self._was_absent(request, since_s, PREFILL):
            return "refused"
        return f"{EITHER}: no prefill worker" if self._prefill_away(request, since_s) else ""

    def _prefill_away(self, request: Request, since_s: float) -> bool:
        """Whether no prefill worker answered for a while: none was live, or the only one was lost
        for a moment and its frontend sends it nothing until it answers again.
        """
        if any(one.meets(since_s, request.ended_s) for one in self._gaps[PREFILL]):
            return True
        names = [one for one in self._box.presence.counts if one.startswith(f"box_{PREFILL}")]
        return any(
            request.started_s - SILENT_S <= at_s <= request.ended_s
            and not self._load.fewest([one for one in names if one != lost], at_s, request.ended_s)
            for lost, at_s in self._box.causes.prefill_losses
        )

    def _by_losses(self, request: Request, since_s: float, drains: bool) -> str:
        """Return what had to happen because of workers that it lost, of limits, or of gaps."""
        if self._may_lose(request):
            return f"{EITHER}: workers lost"
        if self._blind(request):
            return f"{EITHER}: stopped frontend"
        if self._load.may_refuse(request):
            return f"{EITHER}: limits"
        return self._by_gaps(request, since_s, drains)

    def _was_absent(self, request: Request, since_s: float, whom: str) -> bool:
        """Whether no worker of a model, or for prompts, could serve it at any time.

        A stopped frontend may send it to a worker that runs, but serves no longer. A worker whose
        socket was removed keeps its connections. A stopped worker gets requests until its lease
        goes, and answers them once it is continued.
        """
        model = self._model(request)
        if model in self._box.profile.on_demand or self._blind(request):
            return False
        if any(".sock" in one.why for one in self._causes(request)):
            return False
        stops = [
            span for one in self._workers.of[model] for span in self._box.stops.get(one.pid, ())
        ]
        if any(one.meets(request.started_s, request.started_s) for one in stops):
            return False
        return any(
            one.since_s <= since_s and request.ended_s <= one.until_s for one in self._gaps[whom]
        )

    def _by_gaps(self, request: Request, since_s: float, drains: bool) -> str:
        """Return what had to happen because of the times in which its model had no worker."""
        model = self._model(request)
        if not any(one.meets(since_s, request.ended_s) for one in self._gaps[model]):
            return "complete"
        if drains:
            return f"{EITHER}: frontend"  # it waits for no first worker
        if (
            model in self._box.profile.on_demand
            and self._box.needs.get(request.id, WORKER) == WORKER
        ):
            away = self._removed(request) or self._no_gpu(request)
            away = away or no_planner(self._box, request) or self._load.is_crowded(request)
            return f"{EITHER}: not started on demand" if away else "complete"
        return f"{EITHER}: no worker for a while"

    def _by_key_or_relay(self, request: Request) -> str:
        """Return what had to happen because of its key, its kind, or because it is relayed."""
        if self._model(request) == RELAYED:
            return f"{EITHER}: relayed" if is_disturbed(self._box, request) else "complete"
        kind = certain_of_kind(self._box, request)
        if kind:
            return kind
        demanded = self._demanded(request)
        return "" if not demanded else REJECTED if demanded > 0 else f"{EITHER}: key"

    def _demanded(self, request: Request) -> int:
        """Return the status that its key demands: see :func:`keys.demanded`."""
        if request.id not in self._box.asked:
            return 0
        name, fields = self._box.asked[request.id]
        stopped = self._is_stopped(request, request.started_s - _LONGEST_STOP_S)
        if name == LATE and stopped and self._box.key_changes:
            return -1  # it may not have read the file yet
        changes, ended_s = self._box.key_changes, request.ended_s
        return demanded(name, fields, changes, request.started_s, ended_s)

    def _removed(self, request: Request) -> bool:
        """Whether an operator has removed the workers of its model, or paused what starts them."""
        return any(one.removing for one in self._causes(request))

    def _no_gpu(self, request: Request) -> bool:
        """Whether stopped workers of other models keep the GPUs that its first worker needs.

        They keep them because `circusctl start` may start them again. A worker without GPUs that a
        reload has added counts as one in the planner's budget, which is as large as the box.
        """
        used: dict[str, float] = {}
        for cause in self._box.causes.found:
            kept = cause.verb in ("circus stop", "circus decr") and cause.removing
            last = self._workers.last.get(cause.whom)
            if kept and last and cause.span.meets(request.started_s, request.ended_s):
                for gpu in gpus_of(last):
                    used[gpu] = used.get(gpu, 0.0) + share_of(last)
        share = 0.5 if self._model(request) == "half" else 1.0
        taken = sum(one + share > 1 for one in used.values())
        taken += sum(
            one.started_s - START_S <= request.ended_s
            and (one.alive or one.ended_s - START_S >= request.started_s)
            for one in self._workers.of["extra"]
        )
        return bool(used) and taken >= self._box.profile.gpus

    def _frontend(self, request: Request) -> str:
        """Return "alive", "drains", "cut", "refused", or, if it began or ended at the same time,
        "either".
        """
        lives = self._frontends(self._box.ports[request.id])
        for life in lives:
            until_s = _until(life)
            closing_s = until_s if life.closing_s is None else life.closing_s
            if life.from_s <= request.started_s < closing_s - CLOSING_RACE_S:
                if request.ended_s <= closing_s:
                    return "alive"
                if life.pid not in self._box.machine.stop_signals_s:
                    arrived = request.ended_s < until_s + _ARRIVAL_S
                    late = arrived or request.id in self._box.slow_s
                    whole = request.ending == "complete"
                    return f"{EITHER}: frontend" if late and whole else "cut"
                return "drains" if self._is_drained(life, request) else f"{EITHER}: frontend"
            is_late = closing_s + _ARRIVAL_S < request.started_s and request.choices
            if is_late and self._is_drained(life, request):
                return "refused"
        since_s = request.started_s - CLOSING_RACE_S
        met = any(one.from_s <= request.ended_s and since_s <= _until(one) for one in lives)
        return f"{EITHER}: frontend" if met else "cut"

    def _is_drained(self, life: Life, request: Request) -> bool:
        """Whether ``life`` drained without a disturbance until ``request`` had ended."""
        assert life.closing_s is not None
        until_s = min(_until(life) - CLOSING_RACE_S, life.closing_s + DRAIN_S)
        since_s = life.closing_s - _LONGEST_STOP_S
        stops = self._box.stops.get(life.pid, ())
        return request.ended_s <= until_s and not any(one.meets(since_s, until_s) for one in stops)

    def _blind(self, request: Request) -> bool:
        """Whether its frontend was stopped, so it may not know the workers yet."""
        return self._is_stopped(request, request.ended_s - NOTICE_S)

    def _is_stopped(self, request: Request, since_s: float) -> bool:
        """Whether a frontend of its port was stopped at a time from ``since_s`` to its end."""
        return any(one.meets(since_s, request.ended_s) for one in self._stops(request))

    def _stops(self, request: Request) -> Iterator[Span]:
        """Yield when frontends of its port were stopped."""
        for frontend in self._frontends(self._box.ports[request.id]):
            yield from self._box.stops.get(frontend.pid, ())

    def _may_lose(self, request: Request) -> bool:
        """Whether it may have lost two workers before its first token, or more than may migrate."""
        firsts: dict[int, float] = {}  # of each choice, which is sent on by itself
        for event in request.events:
            if event.kind == "text":
                firsts.setdefault(event.index, event.at_s)
        all_began = len(firsts) >= max(request.choices, 1)
        first_s = max(firsts.values()) if all_began else request.ended_s
        # It may be sent to workers that have drained long ago.
        stopped = self._is_stopped(request, request.started_s - NOTICE_S)
        died = self._losses(request, first_s, drained=stopped)
        return died > 1 or self._losses(request, request.ended_s) > MIGRATIONS

    def _is_cut_short(self, request: Request) -> bool:
        """Whether its worker was lost and no other may go on: a grammar limits its output."""
        limited = request.id in self._box.constrained
        return limited and self._losses(request, request.ended_s) > 0

    def _losses(self, request: Request, until_s: float, drained: bool = True) -> int:
        """Return how many workers of its model were lost while it waited, up to ``until_s``.

        Those that ``drained`` returned their requests.
        """
        notice_s, silent_s = request.started_s - NOTICE_S, request.started_s - SILENT_S
        return sum(
            self._workers.ended(one, notice_s, until_s, drained)
            + self._workers.silent(one, silent_s, until_s)
            for one in _served_by(self._model(request))
        )

    def _lost_unseen(self, request: Request) -> int:
        """Return how many workers ended before it, while its frontend was stopped.

        A frontend that was stopped when the request came sends it to these, too.
        """
        at_s, until_s = request.started_s, request.started_s - NOTICE_S
        since_s = min((one.since_s for one in self._stops(request) if one.meets(at_s, at_s)),
                      default=at_s) - NOTICE_S  # fmt: skip
        return self._workers.ended(self._model(request), since_s, until_s, True)

    def _causes(self, request: Request) -> list[Cause]:
        return [
            one
            for one in self._box.causes.of(self._model(request))
            if one.span.meets(request.started_s, request.ended_s)
        ]

    # -- what is allowed

    def _refusal(self, request: Request, certain: str) -> str:
        """Return why the end of ``request`` is not allowed; '' if it is."""
        error = _error(request)
        if request.ending == "cancelled":
            return ""
        found = refusal_of_kind(self._box, request, error, certain)
        if found is not None:
            return found
        if certain == f"{EITHER}: relayed":
            return self._relay_refusal(request, error)
        if certain == REJECTED or request.status in (401, 403):
            return self._key_refusal(request)
        if certain == "cut" and request.ending == "complete":
            return "complete without its frontend"
        if not error and request.status == 200:
            generated = request.api != "refusal"  # a bad request may be seen without a worker
            served = request.ending == "complete" and certain == "refused" and generated
            return "complete without a live worker" if served else ""
        if certain == "complete":
            return "" if self._is_cut_short(request) else "had to be complete"
        if request.ending != "complete":
            return ""  # the validator has judged whether the frontend lived
        return self._error_refusal(request, error)

    def _relay_refusal(self, request: Request, error: str) -> str:
        """A relayed request fails as its server does, or because one of the two was lost."""
        if not error:
            return ""
        model = next((one for one in self._gaps if f"`{one}`" in error), "")
        if model and any(text in error for text in _NO_WORKER):
            since_s = request.started_s - NOTICE_S
            gaps = self._gaps[model]
            away = any(one.meets(since_s, request.ended_s + NOTICE_S) for one in gaps)
            return "" if away else f"{model} had a live worker"
        if any(text in error for text in _SERVER_LOST):
            since_s, ended_s = request.ended_s - NOTICE_S, request.ended_s + NOTICE_S
            away = any(one.meets(since_s, ended_s) for one in self._gaps["one"])
            return "" if away or self._relay_lost(request) else "its server lived"
        return self._error_refusal(request, error)

    def _relay_lost(self, request: Request) -> bool:
        """Whether a frontend or the worker that relays ended or was stopped in its time."""
        since_s, stops = request.started_s - _LONGEST_STOP_S, self._box.stops
        return any(
            since_s <= one.ended_s - START_S <= request.ended_s + NOTICE_S
            or any(stop.meets(since_s, request.ended_s) for stop in stops.get(one.pid, ()))
            for one in self._box.machine.lived
            if one.program in ("dynamo.frontend", "dynamo.attach")
        )

    def _key_refusal(self, request: Request) -> str:
        """A key is refused if it is unknown, or for what it does not allow; the page has both."""
        status = self._demanded(request)
        if request.ending != "complete" or request.status == status:
            return ""
        error = _error(request)
        if status < 0 and (request.status in (401, 403) or _NOT_GRANTED in error):
            return ""
        if status == NOT_GRANTED and _NOT_GRANTED in error:
            return ""  # an event, if its stream had begun while it waited for a worker
        if status == NOT_GRANTED and error and request.status != 401:
            return self._error_refusal(request, error)  # before the grants are read
        return f"its key demands {status or 'no refusal'}"

    def _error_refusal(self, request: Request, error: str) -> str:
        """Return why ``error`` is not true of ``request``; '' if it is."""
        if self._is_cut_short(request):
            return ""
        if error.startswith(WORKERS_LOST):
            lost = self._losses(request, request.ended_s) + self._lost_unseen(request)
            return "" if lost > 1 else "lost no two workers"
        if _ENFORCED in error:
            # A frontend that was stopped sees the end of one before the start of the next.
            away = self._prefill_away(request, request.ended_s - NOTICE_S) or self._blind(request)
            return "" if self._enforced and away else "a prefill worker lived"
        if is_busy(request):
            return self._load.refused(request)
        if _SHUTDOWN in error:
            return "" if self._drained(request) else "its frontend did not stop"
        if _TIMEOUT in error:
            return self._timeout(request)
        if _NOT_GRANTED in error:
            asked = self._demanded(request) in (-1, NOT_GRANTED)
            return "" if asked else "its key has the grant"
        if _BY_COMMAND in error:
            return "" if self._removed(request) else "no command stopped its model"
        if any(text in error for text in _NO_WORKER):
            away = self._without(request) or self._blind(request)
            away = away or bool(self._box.adapters.get(request.id))  # it may be the adapter
            return "" if away else "had a live worker"
        return "no such error is allowed"

    def _without(self, request: Request) -> bool:
        """Whether its model had no live worker when it ended, or just before.

        A slow reader sees the end when it reads on.
        """
        slow_s = self._box.slow_s.get(request.id, 0.0)
        return any(
            one.meets(request.ended_s - NOTICE_S - slow_s, request.ended_s)
            for one in self._gaps[self._model(request)]
        )

    def _drained(self, request: Request) -> bool:
        """Whether its frontend got a stop signal, before it or as long ago as a drain waits.

        A second one ends the drain.
        """
        second_signals_s = self._box.machine.second_signals_s
        for frontend in self._frontends(self._box.ports[request.id]):
            closing_s = frontend.closing_s
            if closing_s is None or not closing_s <= request.ended_s:
                continue
            stops = self._box.stops.get(frontend.pid, ())
            late = any(one.meets(request.started_s, closing_s) for one in stops)
            is_new = late or request.started_s > closing_s - NOTICE_S
            end_s = min(closing_s + DRAIN_S, second_signals_s.get(frontend.pid, _NEVER) - START_S)
            if request.started_s <= _until(frontend) and (
                is_new or _UNSERVED in _error(request) or request.ended_s > end_s
            ):
                return True
        return False

    def _timeout(self, request: Request) -> str:
        """A request waits for a first worker as long as the graph says, and only with a cause."""
        if request.ended_s - request.started_s < COLD_S - 1:
            return f"gave up after {request.ended_s - request.started_s:.1f} s"
        known = self._causes(request) or self._no_gpu(request)
        return "" if known else "got no worker without a cause"

    # -- workers that are away

    def _absences(self) -> Iterator[str]:
        """Yield the workers that were away for longer than something explains.

        Those that a planner starts and ends come when requests wait for them.
        """
        box = self._box
        if box.profile.planner:
            return
        names = (one for one in box.presence.counts if one.startswith("box_"))
        for name in sorted(one for one in names if one != "box_Relay"):  # its server may be away
            causes = [one for one in box.causes.found if one.names(name)]
            for gap in box.presence.gaps((name,), box.clock()):
                if gap.since_s < box.ready_s:
                    continue
                spans = [one.span for one in causes]
                spans += [
                    Span(one.since_s, gap.until_s)
                    for one in causes
                    if one.removing and one.span.meets(*gap)
                ]
                if not Spans(spans).covers(*gap):
                    yield (
                        f"{name} was away from {gap.since_s:.3f} to {gap.until_s:.3f} s without a "
                        "cause"
                    )


def _lives(box: Box) -> Iterator[Life]:
    for life in box.frontend_lives:
        since_s = box.machine.stop_signals_s.get(life.pid)
        if since_s is not None:  # it drains from then on, also while it is stopped
            life.closing_s = since_s - START_S
        yield life
    for process in box.machine.lived:
        if model_of(process):
            until_s = None if process.alive else process.ended_s - START_S
            started_s = process.started_s - START_S
            yield Life("worker", process.name, started_s, until_s, pid=process.pid)


def _served(name: str) -> str:
    return SERVED_BY.get(name.split("_")[1], "")


def _served_by(model: str) -> tuple[str, ...]:
    """Return the models whose workers requests for ``model`` may lose: its server's, too."""
    return (model, "one") if model == RELAYED else (model,)


def _until(life: Life) -> float:
    return float("inf") if life.until_s is None else life.until_s


def _error(request: Request) -> str:
    return next((event.text for event in request.events if event.kind == "error"), "")
