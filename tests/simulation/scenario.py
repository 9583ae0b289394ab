"""What happens in a run: the deployment, the requests, operators and faults of a seed. Pure.

A scenario is a list of steps with times, so a failing one can be shrunk by leaving steps out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import surface
from api_calls import with_api
from caches import cleared, filled
from calls import draw_calls, with_format
from keys import keyed
from pins import with_pins
from relay import attached
from shell import with_shells
from situations import dying, situated
from visit import visited

__all__ = ["POOL_SIZE", "PROFILES", "Profile", "Rates", "Scenario", "Step", "make_scenario"]

POOL_SIZE = 24
"""How many different requests there are."""

ENGINE = """
  run: dynamo.mocker
  model-path: {model_path}
  reply: sequence
  block-size: 16
  num-gpu-blocks-override: {blocks}
  max-num-seqs: {sequences}
  kv-bytes-per-token: 16384
  stream-interval: {tokens}
"""
FRONTEND = """
  run: dynamo.frontend
  router-event-threads: 1
  router-mode: {mode}
"""
PLANNER = """
Planner:
  run: dynamo.planner
  mode: load
  adjustment-interval: {interval}
  metric-pulling-interval: 1
  idle-timeout: {idle}
  min-residency: 2
  max-gpu-budget: {gpus}
"""
_SLEEPS = "  enable-sleep-mode: true\n  wake-time: 0.4\n"
CANCEL_STAGES = ("head", "queued", "first token", "mid-stream", "before done")


@dataclass(frozen=True)
class Profile:
    """A kind of deployment. ``models`` are those that requests name, ``services`` their workers."""

    graph: Callable[[random.Random], str]
    models: tuple[str, ...]
    services: tuple[str, ...]
    gpus: int = 0
    frontends: int = 1
    sleeps: bool = False
    planner: bool = False
    cold: tuple[str, ...] = ()
    """Models that have no worker until a person loads them."""
    on_demand: tuple[str, ...] = ()
    """Models whose workers the planner starts and ends: requests wait for a first one."""
    weight: int = 1
    """How often it is drawn."""


def _frontends(dice: random.Random, count: int) -> str:
    mode = dice.choice(("kv", "kv", "kv", "round-robin", "least-loaded"))
    other = random.Random()
    other.setstate(dice.getstate())  # a draw more would make every seed another box
    cost = other.choice(("blocks", "seconds"))
    text = ""
    for number in range(count):
        name = f"Frontend{number or ''}"
        text += f"{name}:{FRONTEND.format(mode=mode)}  http-port: {8000 + number}\n"
        text += "  cold-start-timeout: 100\n"
        if mode == "kv":
            text += f"  router-cost: {cost}\n"
        if count > 1 and mode == "kv":
            text += "  router-replica-sync: true\n"
    return text


def _engine(dice: random.Random) -> str:
    return ENGINE.format(
        model_path="{model_path}",
        blocks=dice.choice((96, 400, 4000)),
        sequences=dice.choice((2, 4, 32)),
        tokens=dice.choice((1, 1, 2, 7, 16)),
    )


def _agg(dice: random.Random) -> str:
    graph = _frontends(dice, 1) + f"Worker:{_engine(dice)}  model-name: one\n"
    return graph + f"  ServiceArgs: {{{{workers: {dice.choice((2, 3, 4))}}}}}\n"


def _replicas(dice: random.Random) -> str:
    graph = _frontends(dice, 2) + f"Worker:{_engine(dice)}  model-name: one\n"
    return graph + "  ServiceArgs: {{workers: 3}}\n"


def _disagg(dice: random.Random) -> str:
    return (
        _frontends(dice, 1)
        + f"Prefill:{_engine(dice)}  model-name: one\n  disaggregation-mode: prefill\n"
        + "  ServiceArgs: {{workers: 2}}\n"
        + f"Worker:{_engine(dice)}  model-name: one\n  disaggregation-mode: decode\n"
        + "  ServiceArgs: {{workers: 2}}\n"
    )


def _box(dice: random.Random) -> str:
    """Three models share two GPUs; the planner starts, wakes and ends their workers."""
    planner = PLANNER.format(interval=dice.choice((2, 5)), idle=dice.choice((3, 8)), gpus=2)
    engine = _engine(dice) + f"  startup-time: {dice.choice((0, 0.5, 2))}\n"
    return (
        _frontends(dice, 1)
        + planner
        + f"One:{engine}  model-name: one\n{_SLEEPS}"
        + "  ServiceArgs: {{workers: 1, min: 0, max: 2, resources: {{gpu: 1}}}}\n"
        + f"Two:{engine}  model-name: two\n{_SLEEPS if dice.random() < 0.6 else ''}"
        + "  ServiceArgs: {{workers: 0, min: 0, max: 1, resources: {{gpu: 1}}}}\n"
        + f"Half:{engine}  model-name: half\n"
        + "  ServiceArgs: {{workers: 0, min: 0, max: 2, resources: {{gpu: 0.5}}}}\n"
    )


def _manual(dice: random.Random) -> str:
    """Workers that sleep and wake by a person's verbs, without a planner."""
    return (
        _frontends(dice, 1)
        + f"One:{_engine(dice)}  model-name: one\n{_SLEEPS}"
        + f"  ServiceArgs: {{{{workers: {dice.choice((1, 2))}, resources: {{{{gpu: 1}}}}}}}}\n"
        + f"Two:{_engine(dice)}  model-name: two\n{_SLEEPS}"
        + "  ServiceArgs: {{workers: 0, resources: {{gpu: 1}}}}\n"
    )


def _scaled(dice: random.Random) -> str:
    """A planner that follows the load of one model."""
    planner = PLANNER.format(interval=2, idle=60, gpus=3)
    return (
        _frontends(dice, 1)
        + planner
        + f"One:{_engine(dice)}  model-name: one\n  startup-time: 0.5\n"
        + "  ServiceArgs: {{workers: 1, min: 1, max: 3, resources: {{gpu: 1}}}}\n"
    )


PROFILES = {
    "agg": Profile(_agg, ("one",), ("Worker",)),
    "replicas": Profile(_replicas, ("one",), ("Worker",), frontends=2, weight=2),
    "disagg": Profile(_disagg, ("one",), ("Prefill", "Worker")),
    "box": Profile(
        _box,
        ("one", "two", "half"),
        ("One", "Two", "Half"),
        2,
        1,
        True,
        True,
        on_demand=("one", "two", "half"),
        weight=3,
    ),
    "manual": Profile(
        _manual, ("one", "two"), ("One", "Two"), 2, sleeps=True, cold=("two",), weight=3
    ),
    "scaled": Profile(_scaled, ("one",), ("One",), 3, 1, False, True),
}

FAULTS: dict[str, float] = {
    "kill worker": 4,
    "terminate worker": 3,
    "stop worker": 3,
    "kill at file": 3,
    "cut requests": 3,
    "cut events": 2,
    "kill frontend": 2,
    "terminate frontend": 1,
    "stop frontend": 2,
    "stop arbiter": 1,
    "kill arbiter": 1,
    "kill planner": 2,
    "stop planner": 1,
    "remove lease": 1,
    "remove socket": 1,
    "remove record": 1,
    "disk full": 2,
    "kill operator": 3,
    "power loss": 0.5,
}
"""The faults and how often they are drawn."""

OPERATIONS: dict[str, float] = {
    "restart": 4,
    "drain": 3,
    "load": 3,
    "unload": 2,
    "sleep": 4,
    "wake": 4,
    "reload": 4,
    "circus incr": 1,
    "circus decr": 1,
    "circus stop": 1,
    "circus start": 1,
    "circus rm": 0.5,
    "circus restart": 1,
    "pause planner": 1,
    "resume planner": 1.5,
    "repair": 1,
}
"""The operations and how often they are drawn."""
_AIMED_SHARE = 0.1
"""Of the runs of two models."""
_CALM_SHARE = 0.25
"""Of the runs of one model without a planner."""
_CALM_KINDS = ("kill worker", "terminate worker", "stop worker", "restart", "cut requests")
_RUNNING_S = 0.4
"""Most requests run for so long."""
_SILENT_S = 6.5
"""Less than a request waits for the only worker of its model."""
_BURST = 25
"""So many requests arrive at once, on average, in a run with a given rate."""
_RETURN_S = 10
_SHORT_SHARE = 0.97
"""Of the requests of a run with a given rate."""
_CHANGES = {"sleep", "wake", "load", "drain", "restart", "reload", "circus stop"}
_OFFSETS_S = (0.0, 0.02, 0.05, 0.1, 0.1, 0.2, 0.4, 1.0, 1.0, 3.0, 3.0)
"""Most verbs take some tenths of a second, their processes 2 to 50 ms to start."""
_CUT_SHARE = 0.1
"""Of the runs whose seed decides what happens."""
_OVERLAPS = (0.0, 0.0, 0.05, 0.3)
_CLOCK_SHARE = 0.2
"""Of all runs."""
_CLOCK_STEPS_S = (0.5, 5.0, 60.0, 3600.0, 86400.0 * 400)
_LENGTHS_S = (2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 8.0, 20.0)


@dataclass(frozen=True)
class Step:
    """Something that happens ``at_s`` seconds after the deployment is ready."""

    number: int
    at_s: float
    kind: str
    what: str
    dice: int
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        details = " ".join(f"{key}={value}" for key, value in self.details.items())
        return f"{self.number:3d} {self.at_s:8.3f} s  {self.kind} {self.what} {details}"


@dataclass(frozen=True)
class Scenario:
    """A run: its graph, its steps in order of time, and when the last of them is begun.

    ``is_cut``: it ends with a stop while requests and operations go on. ``is_calm``: one of several
    workers dies or restarts, and nothing else happens: every request has to be complete.
    ``overlap`` is the share of file operations in the middle of which other processes run.
    ``format`` is what the workers write calls and reasoning in; '' if no request asks for them.
    """

    seed: int
    profile: str
    graph: str
    steps: tuple[Step, ...]
    seconds: float
    is_cut: bool = False
    is_calm: bool = False
    overlap: float = 0.0
    limits: surface.Limits = surface.NO_LIMITS
    restarts: tuple[int, float] = (100_000, 1.0)
    """After so many deaths within so many seconds the arbiter gives a worker up."""
    format: str = ""
    has_shells: bool = False
    """Whether operators read it with verbs, so that its arbiter has threads and logs."""


class Rates(NamedTuple):
    """What happens in each second of a run; 0: the seed decides."""

    requests: float = 0.0
    faults: float = 0.0


BY_SEED = Rates()


def make_scenario(
    seed: int, profile: str = "", seconds: float = 0.0, rates: Rates = BY_SEED
) -> Scenario:
    """Return the scenario of ``seed``: its profile, unless given, is drawn, too."""
    dice = random.Random(f"scenario {seed}")
    drawn = dice.choices(list(PROFILES), [one.weight for one in PROFILES.values()])[0]
    name = profile or drawn
    chosen = PROFILES[name]
    graph = chosen.graph(dice)
    length_s = seconds or dice.choice(_LENGTHS_S)
    happening = Happenings(dice, chosen)
    steps: list[Step] = []
    if rates.requests:
        for at_s in _times(dice, rates.requests / _BURST, length_s):
            burst = range(1 + int(dice.expovariate(1 / _BURST)))
            steps += [_request(dice, chosen, at_s, _SHORT_SHARE) for _ in burst]
    else:
        for at_s in _times(dice, dice.choice((0.5, 1.0, 2.0, 4.0)), length_s):
            steps.append(_request(dice, chosen, at_s))
    storm = rates.faults > 0 or dice.random() < 0.5
    for at_s in _times(dice, rates.faults or storm * dice.choice((0.0, 0.1, 0.5)), length_s):
        steps.append(happening.fault(at_s))
    for at_s in _times(dice, storm * dice.choice((0.0, 0.1, 0.5)), length_s):
        steps.append(happening.operation(at_s))
    first_s = round(dice.random(), 4)
    meetings = rates.faults / 2 or (0.8 if storm else 0.2)
    for at_s in (first_s, *_times(dice, meetings, length_s)):
        steps += happening.meeting(at_s, 0.45 if storm else 0.15)
    if rates.faults:  # what was unloaded, stopped or paused comes back
        for at_s in range(_RETURN_S, int(length_s), _RETURN_S):
            steps += [happening.operation(at_s, "load", model=one) for one in chosen.models]
            if chosen.planner:
                steps.append(happening.operation(at_s, "resume planner"))
    overlap = random.Random(f"overlap {seed}").choice(_OVERLAPS)
    steps = surface.with_fields(seed, steps)
    graph = surface.configured(seed, graph)
    numbered = surface.with_ranks(seed, graph, _numbered(steps))
    scenario = Scenario(seed, name, graph, numbered, length_s, overlap=overlap)
    scenario = _with_clock(
        scenario if rates.requests else _cut(dying(_aimed(_calm(scenario)), PROFILES, Step))
    )
    ask = partial(_request, profile=chosen)
    return scenario if rates.requests else _with_surface(scenario, ask)


def _with_surface(scenario: Scenario, ask: Callable[..., Step]) -> Scenario:
    old = _called(attached(keyed(surface.limited(scenario, ask), _key_change), ask))
    profile = PROFILES[old.profile]
    happening = Happenings(random.Random(f"situation faults {old.seed}"), profile)
    old = with_api(situated(old, profile, _request, happening.fault), Step)
    old = filled(cleared(old, Step), ask, Step)
    return visited(with_shells(with_pins(old, ask, Step), profile, _shell), profile, Step)


def _shell(number: int, at_s: float, words: tuple[str, ...]) -> Step:
    return Step(number, at_s, "shell", words[0], 0, {"words": words})


def _key_change(number: int, at_s: float, what: str) -> Step:
    return Step(number, at_s, "keys", what, 0)


def _numbered(steps: list[Step]) -> tuple[Step, ...]:
    ordered = sorted(steps, key=lambda step: step.at_s)
    return tuple(replace(step, number=number) for number, step in enumerate(ordered))


class Happenings:
    """Draws the operations and faults of a run.

    Each run leaves many kinds out, others each time: those that are left meet more often. Most
    operations of a run are on one worker.
    """

    def __init__(self, dice: random.Random, profile: Profile) -> None:
        self._dice = dice
        self._profile = profile
        self._faults = _some(dice, FAULTS, 0.4)
        self._operations = _some(dice, _able(profile), 0.3)
        self._target = {
            "service": dice.choice((profile.services[0], *profile.services)),
            "worker": dice.choice((-1, 0, 0, 1)),
        }

    def fault(self, at_s: float, what: str = "") -> Step:
        """Return a fault, of the kind ``what`` if it is given."""
        what = what or _draw(self._dice, self._faults)
        details = {"seconds": self._dice.choice((0.05, 0.5, 1.5, 4.0, 12.0))}
        return Step(0, at_s, "fault", what, self._dice.getrandbits(32), details)

    def operation(self, at_s: float, what: str = "", certain: float = 0.6, model: str = "") -> Step:
        """Return an operation, on the target of the run with the probability ``certain``."""
        dice, profile = self._dice, self._profile
        what = what or _draw(dice, self._operations)
        details = {"service": dice.choice(profile.services), "worker": dice.choice((-1, 0, 1))}
        if dice.random() < certain:
            details = dict(self._target)
        if what in ("load", "unload"):
            details = {"model": model or dice.choice(profile.models)}
        elif what == "reload":
            change = dice.choice(("workers", "flag", "env", "other"))
            value = dice.choice((0, 1, 2, 3))
            if change == "other":  # a draw more would make every seed another box
                change = ("same", "frontend", "extra", "extra")[value]
            details |= {"change": change, "value": value}
            del details["worker"]
        elif "planner" in what or what == "repair":
            details = {}
        return Step(0, at_s, "operator", what, dice.getrandbits(32), details)

    def meeting(self, at_s: float, faulty: float) -> list[Step]:
        """Return an operation that changes a worker, and what happens to it then or after.

        ``faulty`` is the share of faults in that.
        """
        dice = self._dice
        able = sorted(_CHANGES & _able(self._profile).keys())
        steps = [self.operation(at_s, dice.choice(able), 0.9)]
        if "sleep" in able and dice.random() < 0.4:
            steps = [self.operation(at_s, "sleep", 1.0)]
        for _ in range(dice.choice((1, 1, 2, 3))):
            at_s = round(at_s + dice.choice(_OFFSETS_S), 4)
            if dice.random() >= faulty:
                steps.append(self.operation(at_s, dice.choice(sorted(self._operations)), 0.9))
            elif dice.random() < 0.5:
                steps.append(self.fault(at_s, dice.choice(("kill operator", "kill at file"))))
            else:
                steps.append(self.fault(at_s))
        return steps


def _calm(scenario: Scenario) -> Scenario:
    """Leave a model with several workers of one event in some scenarios: one dies, or restarts."""
    dice, profile = random.Random(f"calm {scenario.seed}"), PROFILES[scenario.profile]
    if profile.models != ("one",) or profile.planner or dice.random() >= _CALM_SHARE:
        return scenario
    happening = Happenings(dice, profile)
    at_s = round(1 + dice.random() * 2, 4)
    kind = dice.choice(_CALM_KINDS)
    event = happening.operation(at_s, kind) if kind == "restart" else happening.fault(at_s, kind)
    if kind == "stop worker":
        event = replace(event, details={"seconds": dice.choice((0.5, 1.5, 4.0, 4.0))})
    times = [dice.random() * 8 for _ in range(20)]
    times += [at_s - dice.random() * _RUNNING_S for _ in range(20)]  # which lose their worker
    asked = [_request(dice, profile, round(one, 4)) for one in times]
    return replace(scenario, steps=_numbered([event, *asked]), is_calm=True)


def _aimed(scenario: Scenario) -> Scenario:
    """Return a meeting that chance rarely makes instead of some scenarios with two models.

    The only worker of a model is silent, while that of another model answers.
    """
    dice, profile = random.Random(f"aimed {scenario.seed}"), PROFILES[scenario.profile]
    if not profile.cold or dice.random() >= _AIMED_SHARE:
        return scenario
    happening = Happenings(dice, profile)
    load = happening.operation(0.0, "load", model=profile.cold[0])
    stop_s = round(0.5 + dice.random(), 4)
    stop = happening.fault(stop_s, "stop worker")
    times = [round(dice.random() * 6, 4) for _ in range(16)]
    asked = [_request(dice, profile, at_s) for at_s in (*times, stop_s + _SILENT_S)]
    steps = [load, replace(stop, details={"seconds": _SILENT_S}), *asked]
    graph = scenario.graph.replace("workers: 2", "workers: 1")
    return replace(scenario, graph=graph, steps=_numbered(steps))


def _cut(scenario: Scenario) -> Scenario:
    """End some scenarios with a stop in the middle, a moment after one of the steps."""
    dice = random.Random(f"stop {scenario.seed}")
    operations = [step for step in scenario.steps if step.kind != "request"]
    if dice.random() >= _CUT_SHARE or not operations or scenario.is_calm:
        return scenario
    until_s = dice.choice(operations).at_s + dice.choice(_OFFSETS_S)
    steps = tuple(step for step in scenario.steps if step.at_s <= until_s)
    return replace(scenario, steps=steps, seconds=until_s, is_cut=True)


def _called(scenario: Scenario) -> Scenario:
    """Let clients of other APIs come in some scenarios. The other steps keep their numbers.

    Limits, keys and relayed models have boxes of their own.
    """
    others = "{keys}" in scenario.graph or "dynamo.attach" in scenario.graph
    if scenario.limits != surface.NO_LIMITS or others:
        return scenario
    profile = PROFILES[scenario.profile]
    length_s = max((step.at_s for step in scenario.steps), default=scenario.seconds)
    name, rows = draw_calls(scenario.seed, profile.models, profile.frontends, length_s)
    if not name:
        return scenario
    asked = (
        Step(number, at_s, "request", model, 0, details)
        for number, (at_s, model, details) in enumerate(rows, len(scenario.steps))
    )
    steps = tuple(sorted((*scenario.steps, *asked), key=lambda step: step.at_s))
    graph = with_format(scenario.graph, name)
    return replace(scenario, steps=steps, graph=graph, format=name)


def _with_clock(scenario: Scenario) -> Scenario:
    """Let someone set the clock in some scenarios. The other steps keep their numbers."""
    dice = random.Random(f"date {scenario.seed}")
    if dice.random() >= _CLOCK_SHARE:
        return scenario
    steps = list(scenario.steps)
    for number in range(len(steps), len(steps) + dice.choice((1, 1, 2))):
        at_s = round(dice.random() * scenario.seconds, 4)
        seconds = {"seconds": dice.choice(_CLOCK_STEPS_S)}
        steps.append(Step(number, at_s, "clock", dice.choice(("forward", "back")), 0, seconds))
    return replace(scenario, steps=tuple(sorted(steps, key=lambda step: step.at_s)))


def _some(dice: random.Random, weights: dict[str, float], kept: float) -> dict[str, float]:
    return {kind: weight for kind, weight in weights.items() if dice.random() < kept} or weights


def _times(dice: random.Random, rate: float, until_s: float) -> list[float]:
    if not rate:
        return []
    times, at_s = [], dice.expovariate(rate)
    while at_s < until_s:
        times.append(round(at_s, 4))
        at_s += dice.expovariate(rate)
    return times


def _request(dice: random.Random, profile: Profile, at_s: float, short_share: float = 0.0) -> Step:
    short = dice.random() < short_share
    cancel = dice.choice(CANCEL_STAGES) if dice.random() < (0.02 if short else 0.2) else ""
    details: dict[str, Any] = {
        "entry": dice.randrange(POOL_SIZE),
        "stream": dice.random() < (0.1 if short else 0.7) or cancel in CANCEL_STAGES[2:],
    }
    if short:
        details["short"] = True
    if profile.frontends > 1:
        details["frontend"] = dice.randrange(profile.frontends)
    if cancel:
        details |= {"cancel": cancel, "after": dice.randrange(1, 20)}
    if dice.random() < 0.1 and not short:
        details["n"] = 2
    return Step(0, at_s, "request", dice.choice(profile.models), dice.getrandbits(32), details)


def _able(profile: Profile) -> dict[str, float]:
    return {
        name: weight
        for name, weight in OPERATIONS.items()
        if (profile.planner or "planner" not in name)
        and (profile.sleeps or name not in ("sleep", "wake"))
    }


def _draw(dice: random.Random, weights: dict[str, float]) -> str:
    return dice.choices(list(weights), list(weights.values()))[0]
