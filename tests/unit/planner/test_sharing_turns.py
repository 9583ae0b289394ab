"""Agents that ask for several models in turn on one GPU: few loads, near the best schedule.

In virtual time: the policy alone, asked once a second and when something changes, as in the loop.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest

from dynamo.planner.sharing import SharedModel, SharedService, SharingLimits, share

STEP_S = 0.2  # how often frontends report while requests wait
REQUEST_S = 1.0
DRAIN_S = 0.4
LIMITS = SharingLimits(gpus=1, idle_timeout_s=300)


@dataclass
class Agent:
    """Asks for the models of ``script``, one request after the other."""

    script: str
    at: int = 0
    ends_s: float | None = None

    @property
    def asks(self) -> str:
        return self.script[self.at] if self.at < len(self.script) else ""


@dataclass
class Box:
    """One GPU; a model has at most one worker, and a request takes ``REQUEST_S``."""

    agents: Sequence[Agent]
    load_s: float
    group: bool = False
    now_s: float = 0.0
    awake: str = ""
    starting: tuple[str, float] | None = None
    draining: tuple[str, float] | None = None
    serving_since_s: float = 0.0
    since_s: dict[str, float] = field(default_factory=dict)
    used_s: dict[str, float] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)

    def run(self) -> float:
        models = sorted({name for agent in self.agents for name in agent.script})
        for step in count():
            self.now_s = step * STEP_S
            if not any(agent.asks for agent in self.agents):
                return self.now_s
            assert self.now_s < 10_000, "no progress"
            before = self.awake, bool(self.draining), set(self.since_s), self._idle(self.awake)
            self._work()
            after = self.awake, bool(self.draining), set(self.since_s), self._idle(self.awake)
            if before != after or step % 5 == 0:
                self._decide(models)
        raise AssertionError

    def _idle(self, model: str) -> bool:
        return not any(agent.asks == model for agent in self.agents)

    def _work(self) -> None:
        if self.draining and self.draining[1] <= self.now_s:
            self.draining = None
        if self.starting and self.starting[1] <= self.now_s:
            self.awake, self.serving_since_s = self.starting[0], self.now_s
            self.starting = None
        for agent in self.agents:
            if agent.ends_s is not None and agent.ends_s <= self.now_s:
                agent.at, agent.ends_s = agent.at + 1, None
        for agent in self.agents:
            if agent.asks == self.awake and agent.ends_s is None and agent.asks:
                agent.ends_s = self.now_s + REQUEST_S
        self._note_waits()

    def _note_waits(self) -> None:
        for name in {agent.asks for agent in self.agents if agent.ends_s is None} - {""}:
            if name not in self.since_s:
                self.since_s[name] = self.now_s
                self.waits[name] = self.waits.get(name, 0) + 1
        for name in list(self.since_s):
            if name == self.awake:
                del self.since_s[name]
        for agent in self.agents:
            if agent.asks:
                self.used_s[agent.asks] = self.now_s

    def _decide(self, models: Sequence[str]) -> None:
        found = share([self._seen(name) for name in models], LIMITS)
        for change in found.changes:
            if change.workers:
                self.starting = change.model, self.now_s + self.load_s
                self.loads[change.model] = self.loads.get(change.model, 0) + 1
            else:
                assert change.model == self.awake
                running = [agent.ends_s for agent in self.agents if agent.ends_s is not None]
                self.draining = change.model, max([self.now_s, *running]) + DRAIN_S
                self.awake = ""
        assert not (self.awake and self.starting)

    def _seen(self, name: str) -> SharedModel:
        waits = name in self.since_s
        ready = name == self.awake
        one = SharedService(
            name=name,
            gpus_per_worker=0 if self.group else 1,
            ready=int(ready),
            starting=int(self.starting is not None and self.starting[0] == name),
            draining=int(self.draining is not None and self.draining[0] == name),
        )
        return SharedModel(
            name=name,
            services=(one,),
            waiting=int(waits),
            oldest_s=self.now_s - self.since_s[name] if waits else 0.0,
            idle_s=self.now_s - self.used_s.get(name, 0.0),
            serving_s=self.now_s - self.serving_since_s if ready else 0.0,
            load_s=self.load_s,
            groups=("one",) if self.group else (),
        )


def best_s(scripts: Sequence[str], load_s: float) -> float:
    """Return the time of the best schedule that knows all requests, over all orders of loads."""
    models = {name for script in scripts for name in script}
    queue: list[tuple[float, tuple[int, ...], str]] = [(0.0, (0,) * len(scripts), "")]
    done: set[tuple[tuple[int, ...], str]] = set()
    while queue:
        spent_s, at, awake = heapq.heappop(queue)
        if all(position == len(script) for position, script in zip(at, scripts, strict=True)):
            return spent_s
        if (at, awake) in done:
            continue
        done.add((at, awake))
        for name in models - {awake}:
            ends = tuple(
                position + len(rest) - len(rest.lstrip(name))
                for position, rest in ((p, s[p:]) for p, s in zip(at, scripts, strict=True))
            )
            longest = max(end - position for end, position in zip(ends, at, strict=True))
            if longest:
                cost_s = load_s + DRAIN_S * bool(awake) + longest * REQUEST_S
                heapq.heappush(queue, (spent_s + cost_s, ends, name))
    raise AssertionError


@pytest.mark.parametrize("group", [False, True], ids=["gpu", "group"])
@pytest.mark.parametrize("load_s", [3.0, 8.0, 60.0])
@pytest.mark.parametrize(
    "scripts",
    [
        ("abababab",) * 4,
        ("abababab", "babababa", "abababab", "babababa"),
        ("abababab", "aabbaabb", "bbaabbaa", "babababa"),
        ("abcabc", "bcabca", "cabcab"),
    ],
    ids=["together", "opposite", "mixed", "three models"],
)
def test_agents_on_one_gpu(scripts: Sequence[str], load_s: float, group: bool) -> None:
    box = Box([Agent(script) for script in scripts], load_s, group)
    taken_s = box.run()
    assert taken_s <= 1.2 * best_s(scripts, load_s)
    for model, loads in box.loads.items():
        assert loads <= box.waits[model]  # at most one load for each wait


def test_one_that_never_pauses_lets_the_other_have_its_turn() -> None:
    """It serves for as long as its load takes before, and the loads are half of the time at most
    beside the requests that they wait for."""
    box = Box([Agent("a" * 200), Agent("b" * 40)], 5.0)
    box.run()
    assert 2 <= box.loads["b"] <= box.waits["b"]
    assert sum(box.loads.values()) <= 240 * REQUEST_S / 5.0
