"""Checks the promise of docs/guarantees.md against the history of a chaos run. Pure: no I/O."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from history import Event, Life, Record, Request

__all__ = ["ALLOWED_STATUSES", "Spans", "Verdict", "Violation", "check_request", "validate"]

ALLOWED_STATUSES = (200, 503)
"""Every request of a run is valid, so other statuses are the deployment's fault."""

TWO_LOST = "Two workers died"
"""How the error of a request begins that two workers did not survive before its first token."""

WORKERS_LOST = (TWO_LOST, "Migration limit exhausted")
"""How the errors begin of requests that lost more workers than is promised, at least two."""

SILENCE_S = 5.0
"""A request may be sent to a worker that fell silent this long ago, and lose it."""

WORKER_LOSSES = ("requests cut", "worker stopped")
"""Faults after which a frontend may take a worker for lost whose life goes on."""

CLOSING_RACE_S = 0.1
"""A request that starts this shortly before a frontend drains may find its connection closed."""

NEVER = float("inf")


class Violation(NamedTuple):
    """A broken promise: the request, the rule, and what was received."""

    request: str
    rule: str
    detail: str


class Spans:
    """The union of some spans of time."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self._spans: list[tuple[float, float]] = []
        for start, end in sorted(spans):
            if self._spans and start <= self._spans[-1][1]:
                self._spans[-1] = self._spans[-1][0], max(end, self._spans[-1][1])
            else:
                self._spans.append((start, end))
        self._starts = [start for start, _ in self._spans]

    def covers(self, from_s: float, until_s: float) -> bool:
        """Return whether every moment of the span is in the union."""
        at = bisect_right(self._starts, from_s) - 1
        return at >= 0 and until_s <= self._spans[at][1]

    def meet(self, from_s: float, until_s: float) -> bool:
        """Return whether some moment of the span is in the union."""
        at = bisect_right(self._starts, until_s) - 1
        return at >= 0 and from_s <= self._spans[at][1]


@dataclass
class Verdict:
    """The counts of a run.

    ``requests`` reached a frontend, ``refused`` ones found none.
    ``counted`` requests were not cancelled, met no death of a frontend, and had a live worker at
    every moment; ``succeeded`` of them got their complete answer. ``workers_lost`` are not
    counted either: they met more losses of workers than is promised. ``longest_gap_s`` is the
    longest time in which a stream of these received nothing.
    """

    requests: int = 0
    refused: int = 0
    counted: int = 0
    succeeded: int = 0
    complete: int = 0
    cancelled: int = 0
    frontend_lost: int = 0
    no_worker: int = 0
    workers_lost: int = 0
    tokens: int = 0
    longest_gap_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def success_rate(self) -> float:
        """The share of the counted requests that succeeded; 1 without any."""
        return self.succeeded / self.counted if self.counted else 1.0


def validate(records: Iterable[Record], lives: Iterable[Life]) -> Verdict:
    """Check every request of ``records`` with ``lives``, which may be among them, too."""
    lives = list(lives)
    frontends = [one for one in lives if one.role == "frontend"]
    workers = Spans(
        (one.from_s, NEVER if one.until_s is None else one.until_s)
        for one in lives
        if one.role == "worker"
    )
    verdict = Verdict()
    seen: set[str] = set()
    losses = [one.until_s for one in lives if one.role == "worker" and one.until_s is not None]
    lost: list[Request] = []
    for record in records:
        if isinstance(record, Request):
            if record.id in seen:
                verdict.violations.append(Violation(record.id, "ended twice", "two histories"))
            seen.add(record.id)
            alive = any(_outlives(one, record) for one in frontends)
            served = workers.covers(record.started_s, record.ended_s)
            _count(verdict, record, alive, served)
            if _error(record).startswith(WORKERS_LOST):
                lost.append(record)
        elif not isinstance(record, Life):
            verdict.faults[record.kind] += 1
            if record.kind in WORKER_LOSSES:
                losses.append(record.at_s)
    # Faults are recorded when they end, so a request may come before its own.
    verdict.violations += _check_losses(lost, sorted(losses))
    return verdict


def _check_losses(lost: Iterable[Request], losses: Sequence[float]) -> Iterator[Violation]:
    """Yield the requests that say that they lost their workers, when fewer than two were lost."""
    for request in lost:
        first = bisect_left(losses, request.started_s - SILENCE_S)
        found = bisect_right(losses, request.ended_s) - first
        if found < 2:
            yield Violation(request.id, "no loss", f"{found} workers lost while it waited")


def _outlives(frontend: Life, request: Request) -> bool:
    """Whether one frontend lived throughout ``request``, and accepted it."""
    until_s = NEVER if frontend.until_s is None else frontend.until_s
    closing_s = until_s if frontend.closing_s is None else frontend.closing_s - CLOSING_RACE_S
    accepted = frontend.from_s <= request.started_s < closing_s
    return accepted and request.ended_s <= until_s


def _count(verdict: Verdict, request: Request, alive: bool, served: bool) -> None:
    found = list(check_request(request, alive))
    verdict.violations += found
    if request.ending == "refused":
        verdict.refused += 1
        return
    verdict.requests += 1
    complete = not found and _is_complete(request)
    verdict.complete += complete
    if complete:
        verdict.tokens += request.expected.completion_tokens * request.choices
    if request.ending == "cancelled":
        verdict.cancelled += 1
        return
    if not complete:
        verdict.failures[_failure(request)] += 1
    if not alive:
        verdict.frontend_lost += 1
    elif not served:
        verdict.no_worker += 1
    elif _error(request).startswith(WORKERS_LOST):
        verdict.workers_lost += 1
    else:
        verdict.counted += 1
        verdict.succeeded += complete
        if complete and request.stream:
            verdict.longest_gap_s = max(verdict.longest_gap_s, _longest_gap(request))
        if not complete:
            verdict.failed.append(request.id)


def check_request(request: Request, frontend_alive: bool = True) -> Iterator[Violation]:
    """Yield every rule that ``request`` breaks.

    ``frontend_alive``: one frontend lived from its start to its end.
    """
    for rule, detail in (
        *_check_text(request),
        *_check_order(request),
        *_check_ending(request, frontend_alive),
        *(_check_complete(request) if _claims_success(request) else ()),
    ):
        yield Violation(request.id, rule, detail)


def _longest_gap(request: Request) -> float:
    times = [request.started_s, *(event.at_s for event in request.events)]
    return max(later - earlier for earlier, later in pairwise(times))


def _is_complete(request: Request) -> bool:
    """Whether a request without violations received its whole answer.

    A client that left between the last token and [DONE] has not.
    """
    return request.ending == "complete" and _claims_success(request)


def _claims_success(request: Request) -> bool:
    failed = any(event.kind == "error" for event in request.events)
    return request.ending == "complete" and request.status == 200 and not failed


def _failure(request: Request) -> str:
    if request.ending != "complete":
        return request.ending
    return "error event" if request.status == 200 else f"status {request.status}"


def _check_text(request: Request) -> Iterator[tuple[str, str]]:
    """The text of every choice is the expected one, as far as it got."""
    expected = request.expected.text
    texts = _texts(request.events)
    for index, text in sorted(texts.items()):
        if not 0 <= index < request.choices:
            yield "foreign choice", f"choice {index} of {request.choices}"
        if not expected.startswith(text):
            same = next(
                (i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b),
                min(len(text), len(expected)),
            )
            around = f"{text[same : same + 40]!r} instead of {expected[same : same + 40]!r}"
            yield "wrong text", f"choice {index} at character {same}: {around}"


def _check_order(request: Request) -> Iterator[tuple[str, str]]:
    """Each end comes once, and nothing of its kind after it."""
    finished: set[int] = set()
    ended = ""
    for event in request.events:
        if ended == "done" or (ended and event.kind != "done"):
            yield "after the end", f"{event.kind} after {ended}"
        if event.kind == "finish" and event.index in finished:
            yield "ended twice", f"choice {event.index} has two finish reasons"
        if event.kind == "text" and event.index in finished and event.text:
            yield "after the end", f"text of choice {event.index} after its finish reason"
        if event.kind == "finish":
            finished.add(event.index)
        if event.kind in ("done", "error"):
            ended = event.kind
    if sum(event.kind == "usage" for event in request.events) > 1:
        yield "ended twice", "two usages"
    if any(later.at_s < earlier.at_s for earlier, later in pairwise(request.events)):
        yield "history", "its times go backwards"


def _check_ending(request: Request, frontend_alive: bool) -> Iterator[tuple[str, str]]:
    """A failure is visible: a status with a text, or an error event."""
    if request.ending == "timeout":
        yield "no end", f"no end after {request.ended_s - request.started_s:.0f} s"
    elif request.ending == "closed" and frontend_alive:
        yield "cut", f"closed after {len(request.events)} events, without an error"
    elif request.ending == "refused" and frontend_alive:
        yield "refused", "no connection, although the frontend lived"
    elif request.ending == "complete" and not _is_allowed(request):
        yield "status", f"{request.status}: {_error(request)}"
    elif request.ending == "complete" and request.status != 200 and not _error(request):
        yield "status", f"{request.status} without a text"
    streamed = request.stream and request.status == 200 and request.ending == "complete"
    if streamed and (not request.events or request.events[-1].kind != "done"):
        yield "no end", "a stream without [DONE]"


def _check_complete(request: Request) -> Iterator[tuple[str, str]]:
    """A success has every token, finish reason and the usage."""
    expected = request.expected
    texts = _texts(request.events)
    reasons = {event.index: event.text for event in request.events if event.kind == "finish"}
    for index in range(request.choices):
        got = texts.get(index, "")
        if got != expected.text and expected.text.startswith(got):
            missing = f"{len(expected.text) - len(got)} of {len(expected.text)} characters"
            yield "lost text", f"choice {index} lacks {missing}"
        if reasons.get(index) != expected.finish_reason:
            yield "finish reason", f"{reasons.get(index)!r} instead of {expected.finish_reason!r}"
    wanted = expected.prompt_tokens, expected.completion_tokens * request.choices
    found = [event.usage for event in request.events if event.kind == "usage"]
    if found[:1] != [wanted]:
        yield "usage", f"{found[0] if found else None} instead of {wanted}"


def _is_allowed(request: Request) -> bool:
    """503, or the 500 of a request that lost two workers before its first token."""
    return request.status in ALLOWED_STATUSES or (
        request.status == 500 and _error(request).startswith(TWO_LOST)
    )


def _texts(events: Iterable[Event]) -> dict[int, str]:
    parts: dict[int, list[str]] = {}
    for event in events:
        if event.kind == "text":
            parts.setdefault(event.index, []).append(event.text)
    return {index: "".join(found) for index, found in parts.items()}


def _error(request: Request) -> str:
    return next((event.text for event in request.events if event.kind == "error"), "")
