"""Situations that chance rarely makes: what meets in them happens within a second, on purpose.

Each has dice of its own. It adds its steps to those of a run, which keep their numbers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from scenario import Profile, Scenario, Step

__all__ = ["dying", "situated"]

_SHARE = 0.4
_DYING_SHARE = 0.06
_DEATHS_SHARE = 0.15
"""Of the situations."""
_DYING_BURST, _DYING_WINDOW_S = 3, 3.0
_DEATHS_S = (0.5, 1.7, 5.0, 6.2, 9.5, 10.7, 14.0)
_LONG = (5, 6, 12, 13, 19, 20)
"""Entries of the pool with answers of many tokens."""
_KV = "  router-mode: kv\n"
_MODES = ("hard", "soft")


class _Table(NamedTuple):
    """What a situation is made of. ``ask`` and ``fault`` make a step of a time."""

    dice: random.Random
    profile: Profile
    ask: Callable[..., Step]
    fault: Callable[..., Step]

    def request(self, at_s: float, **details: Any) -> Step:
        """Return a request, mostly for a long stream that its client reads to the end."""
        step = self.ask(self.dice, profile=self.profile, at_s=round(at_s, 4))
        kept = {key: value for key, value in step.details.items() if key not in ("cancel", "after")}
        if self.dice.random() < 0.8:
            kept |= {"entry": self.dice.choice(_LONG), "stream": True}
        return replace(step, details={**kept, **details})

    def requests(self, count: int, at_s: float, within_s: float, **details: Any) -> Iterator[Step]:
        """Yield ``count`` requests that arrive within a time."""
        for _ in range(count):
            yield self.request(at_s + self.dice.random() * within_s, **details)

    def event(self, at_s: float, what: str, seconds: float = 0.05, draw: int = 0) -> Step:
        """Return a fault; two with the same ``draw`` hit the same process."""
        step: Step = self.fault(round(at_s, 4), what)
        return replace(step, dice=draw or step.dice, details={"seconds": seconds})

    def operation(self, at_s: float, what: str, **details: Any) -> Step:
        """Return an operation, on the first service and its worker ``worker``."""
        target = {"service": self.profile.services[0], **details}
        step: Step = self.fault(round(at_s, 4), "kill operator")
        return replace(step, kind="operator", what=what, details=target)


def _chain(table: _Table, at_s: float) -> Iterator[Step]:
    """One worker after the other dies while the same requests run."""
    dice = table.dice
    yield from table.requests(6, at_s, 0.05, fields={"min_tokens": dice.choice((1, 20, 60))})
    for _ in range(dice.choice((2, 5, 6))):
        at_s += dice.choice((0.1, 0.1, 0.2))
        yield table.event(
            at_s, dice.choice(("kill busy worker", "kill busy worker", "kill worker"))
        )


def _silent_death(table: _Table, at_s: float) -> Iterator[Step]:
    """A worker is stopped for so long that it counts as silent, and some are then killed."""
    dice = table.dice
    draw = dice.getrandbits(32) or 1
    yield from table.requests(6, at_s, 0.3)
    yield table.event(at_s + 0.3, "stop worker", dice.choice((4.0, 4.0, 12.0)), draw)
    yield from table.requests(4, at_s + 0.3, 4.0)
    if dice.random() < 0.5:
        yield table.event(at_s + dice.choice((1.0, 2.9, 3.5)), "kill worker", 0.05, draw)


def _leaving(table: _Table, at_s: float) -> Iterator[Step]:
    """A frontend ends while its requests run, or wait for a first worker."""
    dice = table.dice
    yield from table.requests(6, at_s, 0.5)
    yield table.event(at_s + 0.5, dice.choice(("terminate frontend", "kill frontend")))
    yield from table.requests(4, at_s + 0.5, 3.0)


def _planning(table: _Table, at_s: float) -> Iterator[Step]:
    """A planner ends while requests wait for the workers that it starts, or while it writes."""
    dice = table.dice
    yield from table.requests(4, at_s, 0.5)
    yield table.event(at_s + dice.random(), dice.choice(("kill planner", "kill planner at file")))
    yield from table.requests(4, at_s + 0.5, 3.0)


def _ending(table: _Table, at_s: float) -> Iterator[Step]:
    """A planner ends a moment before the deployment is stopped."""
    yield from table.requests(2, at_s, 0.1)
    yield table.event(at_s + 0.2, "kill planner")


def _draining(table: _Table, at_s: float) -> Iterator[Step]:
    """A worker that drains is stopped, and then its operators are killed."""
    dice = table.dice
    worker = dice.choice((0, 1))
    yield from table.requests(6, at_s, 0.05)
    at_s += 0.1
    yield table.operation(at_s, "drain", worker=worker)
    at_s += dice.choice((0.05, 0.1, 0.2))
    yield table.event(at_s, "kill operator")
    yield table.operation(at_s + dice.choice((0.0, 0.02, 0.05)), "circus stop", worker=worker)


def _waking(table: _Table, at_s: float) -> Iterator[Step]:
    """A worker sleeps and wakes again, and the operator of one of both is killed in between."""
    dice = table.dice
    yield table.operation(at_s, "sleep", worker=0)
    kill_s = dice.choice((0.05, 0.1, 0.2, 0.4))
    if dice.random() < 0.25:
        yield table.event(at_s + kill_s, "kill operator")
    at_s += 1.5
    yield table.operation(at_s, "wake", worker=0)
    yield table.event(at_s + kill_s, "kill operator")
    yield from table.requests(3, at_s, 2.0)


def _sessions(table: _Table, at_s: float) -> Iterator[Step]:
    """Two sessions ask often, and a worker is stopped or killed between."""
    dice = table.dice
    for name in ("one", "another"):
        yield from table.requests(8, at_s, 7.0, fields={"session": name})
    yield table.event(at_s + 2.0, dice.choice(("stop worker", "kill worker")), 4.0)


def _crowd(table: _Table, at_s: float) -> Iterator[Step]:
    """The engines are full of long streams when a worker dies: these wait for room elsewhere."""
    yield from table.requests(14, at_s, 0.2)
    yield table.event(at_s + table.dice.choice((0.3, 0.5)), "kill busy worker")
    yield from table.requests(4, at_s + 0.3, 0.5)


def _first_deaths(table: _Table, at_s: float) -> Iterator[Step]:
    """The first two workers of requests die, which may have waited for a worker for long."""
    model = table.dice.choice(table.profile.models)
    yield table.event(at_s, "kill at request")
    for step in (*table.requests(4, at_s, 0.2), *table.requests(2, at_s + 4.0, 4.0)):
        yield replace(step, what=model)


_SITUATIONS: dict[str, Callable[[_Table, float], Iterator[Step]]] = {
    "chain": _chain,
    "silent death": _silent_death,
    "leaving": _leaving,
    "planning": _planning,
    "sessions": _sessions,
    "ending": _ending,
    "draining": _draining,
    "waking": _waking,
    "crowd": _crowd,
    "first deaths": _first_deaths,
}


def dying(scenario: Scenario, profiles: dict[str, Profile], make: Callable[..., Step]) -> Scenario:
    """Let a worker die often in some boxes where nothing else happens, but never thrice in 3 s.

    So its arbiter never gives it up.
    """
    dice = random.Random(f"deaths {scenario.seed}")
    if dice.random() >= _DYING_SHARE or profiles[scenario.profile].planner or scenario.is_calm:
        return scenario
    service = dice.choice(profiles[scenario.profile].services)
    steps = [one for one in scenario.steps if one.kind == "request"]
    for death_s in _DEATHS_S:
        details = {"service": service, "seconds": 0.0}
        at_s = round(death_s + dice.random() * 0.2, 4)
        steps.append(make(0, at_s, "fault", "kill live worker", 0, details))
    steps.sort(key=lambda step: step.at_s)
    numbered = tuple(replace(step, number=number) for number, step in enumerate(steps))
    return replace(scenario, steps=numbered, restarts=(_DYING_BURST, _DYING_WINDOW_S))


def situated(
    scenario: Scenario,
    profile: Profile,
    ask: Callable[..., Step],
    fault: Callable[..., Step],
) -> Scenario:
    """Add a situation to some scenarios: ``ask`` makes a request, ``fault`` a fault of a time."""
    dice = random.Random(f"situation {scenario.seed}")
    able = ["chain", "silent death", "leaving", "sessions", "draining"]
    if profile.planner:
        able = ["leaving", "leaving", "planning", "planning", "silent death", "ending"]
    elif profile.sleeps:
        able = ["waking", "waking", *able[1:]]
    name = dice.choice(able)
    if scenario.limits.engine and not profile.planner:
        name = "crowd"
    if random.Random(f"first deaths {scenario.seed}").random() < _DEATHS_SHARE:
        name = "first deaths"
    limited = bool(scenario.limits) and name != "crowd"
    busy = scenario.is_calm or scenario.is_cut or limited
    busy = busy or scenario.restarts[0] == _DYING_BURST
    if dice.random() >= _SHARE or busy or "{keys}" in scenario.graph:
        return scenario
    graph = scenario.graph
    if name == "sessions":
        if _KV not in graph or "session-affinity" in graph:
            return scenario
        lines = "router-session-affinity-ttl-secs: 3\n  router-session-affinity-mode: "
        graph = graph.replace(_KV, f"{_KV}  {lines}{dice.choice(_MODES)}\n")
    if name == "first deaths":  # streams begin with comments after five seconds
        graph = re.sub("startup-time: .*", f"startup-time: {dice.choice((2, 6, 6))}", graph)
    begin_s = dice.random() * scenario.seconds
    made = list(_SITUATIONS[name](_Table(dice, profile, ask, fault), begin_s))
    until_s = max(one.at_s for one in made) + dice.choice((0.02, 0.05, 0.1))
    ends = name == "ending"
    steps = [one for one in scenario.steps if not ends or one.at_s <= until_s]
    first = max((one.number for one in steps), default=-1) + 1
    steps += [replace(one, number=first + number) for number, one in enumerate(made)]
    ordered = tuple(sorted(steps, key=lambda step: step.at_s))
    if ends:
        return replace(scenario, steps=ordered, seconds=until_s, is_cut=True)
    return replace(scenario, graph=graph, steps=ordered)
