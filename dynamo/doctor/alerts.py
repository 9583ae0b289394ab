"""The alerts of a deployment: what a person should look at, and when each begins and ends. Pure.

For a box without Prometheus; ``deploy/grafana/alerts.yml`` is made with these names, durations and
shares. DynamoDiskFull is only here: no process exports it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo.doctor.deployment import MOST_ERROR
from dynamo.doctor.facts import FileSystemFacts
from dynamo.doctor.machine import GIB, size_text
from dynamo.protocols.status import BoxStatus, ModelStatus

FAILING_SHARE = 0.01
RATE_S = 300.0
CLEAR_S = 60.0
"""An alert ends when its condition has been false for this long."""
_ENOUGH_ESTIMATES = 10


class AlertRule(NamedTuple):
    """An alert begins when its condition has been true for ``for_s``."""

    name: str
    for_s: float


FRONTEND_DOWN = AlertRule("DynamoFrontendDown", 60)
MODEL_NOT_READY = AlertRule("DynamoModelNotReady", 300)
REQUESTS_FAIL = AlertRule("DynamoRequestsFail", 300)
REQUESTS_REJECTED = AlertRule("DynamoRequestsRejected", 600)
WORKERS_MISSING = AlertRule("DynamoWorkersMissing", 600)
OUT_OF_REACH = AlertRule("DynamoWorkerOutOfReach", 60)
EVENTS_MISSING = AlertRule("DynamoKvEventsMissing", 300)
ESTIMATES_OFF = AlertRule("DynamoEstimatesOff", 600)
DISK_FULL = AlertRule("DynamoDiskFull", 60)
RULES = (
    *(FRONTEND_DOWN, MODEL_NOT_READY, REQUESTS_FAIL, REQUESTS_REJECTED, WORKERS_MISSING),
    *(OUT_OF_REACH, EVENTS_MISSING, ESTIMATES_OFF, DISK_FULL),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendCounts:
    """What the metrics of a frontend have; counters begin at 0 with the process ``pid``.

    ``requests``, ``failed`` and ``rejected`` are by model, ``silent`` the workers of each model
    whose KV events are missing, ``unavailable`` those out of reach by endpoint.
    """

    pid: int
    requests: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, float] = field(default_factory=dict)
    rejected: Mapping[str, float] = field(default_factory=dict)
    silent: Mapping[str, int] = field(default_factory=dict)
    unavailable: Mapping[str, int] = field(default_factory=dict)
    estimates: float = 0.0
    estimate_error_s: float = 0.0
    first_tokens_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertFacts:
    """A deployment at ``now_s``, monotonic. A frontend that does not answer has no counts."""

    now_s: float
    box: BoxStatus
    frontends: Mapping[str, FrontendCounts | None] = field(default_factory=dict)
    disks: Sequence[FileSystemFacts] = ()


class AlertKey(NamedTuple):
    """One alert: the name of its rule, and what it is about."""

    alert: str
    subject: str


class Condition(NamedTuple):
    """A condition that is true now: why, in a sentence, and of which model, if of one."""

    text: str
    model: str = ""


class AlertChange(NamedTuple):
    """An alert begins, or ``ends``; then ``text`` has how long it took."""

    key: AlertKey
    ends: bool
    text: str
    model: str = ""


class AlertConditions:
    """Finds what is true now; keeps the counters of the last five minutes for rates."""

    def __init__(self) -> None:
        self._rates = _Rates()

    def find(self, facts: AlertFacts) -> dict[AlertKey, Condition]:
        """Return the conditions that are true, whatever their duration."""
        rates = self._rates
        rates.add(facts)
        conditions: dict[AlertKey, Condition] = {}
        for rule, subject, condition in (
            *_frontends(facts),
            *_models(facts.box),
            *_traffic(rates),
            *_routing(facts, rates),
            *_disks(facts.disks),
        ):
            # Several frontends may report the same: the first one counts.
            conditions.setdefault(AlertKey(rule.name, subject), condition)
        return conditions


_Finding = tuple[AlertRule, str, Condition]


def _frontends(facts: AlertFacts) -> Iterator[_Finding]:
    for name, counts in facts.frontends.items():
        if counts is None:
            yield FRONTEND_DOWN, name, Condition("the frontend does not answer; see: dynamo ps")


def _models(box: BoxStatus) -> Iterator[_Finding]:
    by_name = {worker.name: worker for worker in box.workers}
    planned = box.planner is not None and box.planner.state == "running"
    for model in box.models:
        restarts = any(by_name[name].restarts for name in model.workers if name in by_name)
        if not model.ready and (_is_awaited(model) or model.state == "failed" or restarts):
            cause = f" ({model.cause})" if model.cause else ""
            text = f"no worker serves {model.model}{cause}; see: dynamo ps"
            yield MODEL_NOT_READY, model.model, Condition(text, model.model)
        if planned and model.ready < model.wanted:
            text = (
                f"{model.model} has {model.ready} of the {model.wanted} workers that the planner "
                "wants; see: dynamo ps"
            )
            yield WORKERS_MISSING, model.model, Condition(text, model.model)


def _is_awaited(model: ModelStatus) -> bool:
    """Whether requests wait for it: one that an operator or a planner stopped is no alert."""
    return model.figures is not None and model.figures.queued > 0


def _traffic(rates: _Rates) -> Iterator[_Finding]:
    failed = rates.grown("failed")
    for model, number in rates.grown("requests").items():
        share = failed.get(model, 0.0) / number
        if share > FAILING_SHARE:
            text = f"{share:.0%} of the requests of {model} fail; see: dynamo logs"
            yield REQUESTS_FAIL, model, Condition(text, model)
    for model in rates.grown("rejected"):
        text = f"all workers of {model} are busy and requests are rejected; add one"
        yield REQUESTS_REJECTED, model, Condition(text, model)


def _routing(facts: AlertFacts, rates: _Rates) -> Iterator[_Finding]:
    for counts in facts.frontends.values():
        if counts is None:
            continue
        for endpoint, number in counts.unavailable.items():
            if number:
                text = f"a worker of {endpoint} does not answer the frontend; see: dynamo ps"
                yield OUT_OF_REACH, endpoint, Condition(text)
        for model, number in counts.silent.items():
            if number:
                text = f"KV events of workers of {model} are missing; see: dynamo doctor"
                yield EVENTS_MISSING, model, Condition(text, model)
    for name, error in rates.estimate_errors():
        if error > MOST_ERROR:
            text = (
                f"first tokens are off by {error:.0%} of the time that routing expects; see: "
                "dynamo explain --model-fit"
            )
            yield ESTIMATES_OFF, name, Condition(text)


def _disks(disks: Sequence[FileSystemFacts]) -> Iterator[_Finding]:
    for disk in disks:
        if disk.free_bytes < GIB or disk.free_files == 0:
            left = f"{size_text(disk.free_bytes)} free" if disk.free_files else "no inodes"
            text = f"{disk.path}: {left}; see: dynamo doctor"
            yield DISK_FULL, disk.path, Condition(text)


class _Totals(NamedTuple):
    """What all frontends have counted since the first facts, over restarts of their processes."""

    at_s: float
    counts: dict[tuple[str, str], float]


class _Rates:
    """What the counters of all frontends have grown by in the last ``RATE_S``."""

    def __init__(self) -> None:
        self._before: dict[str, FrontendCounts] = {}
        self._grown: dict[tuple[str, str], float] = {}
        self._kept: deque[_Totals] = deque()
        self._last: dict[tuple[str, str], float] = {}

    def add(self, facts: AlertFacts) -> None:
        for name, counts in facts.frontends.items():
            if counts is not None:
                self._grow(name, counts)
        self._kept.append(_Totals(facts.now_s, dict(self._grown)))
        # Keep one that is at least RATE_S old, so that rates are over the whole of it.
        while len(self._kept) > 1 and facts.now_s - self._kept[1].at_s >= RATE_S:
            self._kept.popleft()
        first = self._kept[0].counts
        self._last = {key: n - first.get(key, 0.0) for key, n in self._grown.items()}

    def _grow(self, name: str, counts: FrontendCounts) -> None:
        before = self._before.get(name)
        self._before[name] = counts
        if before is None:  # what it counted before the first look is of no known time
            return
        # Another process began at 0: all that it has counted is new.
        old = _counters(name, before) if before.pid == counts.pid else {}
        for key, number in _counters(name, counts).items():
            self._grown[key] = self._grown.get(key, 0.0) + number - old.get(key, 0.0)

    def grown(self, kind: str) -> dict[str, float]:
        """Return by model or frontend how much the counters of one kind grew, where they did."""
        return {key[1]: number for key, number in self._last.items() if key[0] == kind and number}

    def estimate_errors(self) -> Iterator[tuple[str, float]]:
        """Yield by frontend the error of expected first tokens, as a share of their time."""
        for name, number in self.grown("estimates").items():
            took_s = self._last["first_tokens_s", name]
            if number >= _ENOUGH_ESTIMATES and took_s > 0:
                yield name, self._last["estimate_error_s", name] / took_s


def _counters(name: str, counts: FrontendCounts) -> dict[tuple[str, str], float]:
    """Return all counters of the frontend ``name`` by their kind, and model or frontend."""
    counters = {
        (kind, model): number
        for kind in ("requests", "failed", "rejected")
        for model, number in getattr(counts, kind).items()
    }
    for kind in ("estimates", "estimate_error_s", "first_tokens_s"):
        counters[kind, name] = getattr(counts, kind)
    return counters


@dataclass(slots=True)
class _Alert:
    since_s: float
    true_s: float
    model: str = ""
    began: bool = False


class AlertBook:
    """Begins and ends alerts: each begins once, and ends once.

    ``began`` are alerts that an earlier process began and did not end, with their ages. Durations
    of the rules are multiplied by ``scale``.
    """

    def __init__(
        self,
        began: Mapping[AlertKey, tuple[float, str]] | None = None,
        now_s: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        self._scale = scale
        self._for_s = {rule.name: rule.for_s * scale for rule in RULES}
        self._alerts = {
            key: _Alert(now_s - age_s, now_s, model, True)
            for key, (age_s, model) in (began or {}).items()
        }

    def update(
        self, conditions: Mapping[AlertKey, Condition], now_s: float
    ) -> Iterator[AlertChange]:
        """Yield what begins and ends now."""
        for key, condition in conditions.items():
            alert = self._alerts.setdefault(key, _Alert(now_s, now_s, condition.model))
            alert.true_s = now_s
            if not alert.began and now_s - alert.since_s >= self._for_s[key.alert]:
                alert.began = True
                yield AlertChange(key, False, condition.text, condition.model)
        for key in [key for key in self._alerts if key not in conditions]:
            alert = self._alerts[key]
            # False before its time was over: it never was an alert.
            if not alert.began:
                del self._alerts[key]
            elif now_s - alert.true_s >= CLEAR_S * self._scale:
                del self._alerts[key]
                yield _end(key, alert, f"after {_span(alert.true_s - alert.since_s)}")

    def end(self, reason: str) -> Iterator[AlertChange]:
        """Yield the ends of all alerts."""
        for key, alert in self._alerts.items():
            if alert.began:
                yield _end(key, alert, reason)
        self._alerts.clear()


def _end(key: AlertKey, alert: _Alert, text: str) -> AlertChange:
    return AlertChange(key, True, text, alert.model)


def _span(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}".replace(".0 ", " ")
    return f"{seconds:.0f} s"
