"""Boxes in which a worker of `dynamo.attach` relays a model to the second frontend."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from excuses import RESTART_S
from machine import START_S

if TYPE_CHECKING:
    from box import Box
    from history import Request
    from scenario import Scenario, Step

__all__ = ["RELAYED", "attached", "is_attached", "is_disturbed"]

RELAYED = "far"
"""The relayed model; the server behind it calls it "one"."""
_SHARE = 0.25
"""Of the boxes with two frontends."""
_COUNTS = (4, 8, 12)
_SERVICE = f"""Relay:
  run: dynamo.attach
  url: http://127.0.0.1:8001
  profile: openai
  model-name: {RELAYED}=one
"""
_FAULTS = ("", "", "kill relay", "stop relay")
_FELT_S = 4.0
"""The server counts as down until the next look at it, and a stopped worker as silent."""


def attached(scenario: Scenario, ask: Callable[..., Step]) -> Scenario:
    """Attach a worker to the second frontend in some scenarios, and send it requests.

    ``ask`` makes a request of a time. The other steps keep their numbers.
    """
    dice = random.Random(f"attach {scenario.seed}")
    fault = dice.choice(_FAULTS)
    able = scenario.profile == "replicas" and not (scenario.is_calm or scenario.limits)
    if dice.random() >= _SHARE or not able or "{keys}" in scenario.graph:
        return scenario
    steps = list(scenario.steps)
    for number in range(len(steps), len(steps) + dice.choice(_COUNTS)):
        step = ask(dice, at_s=round(1 + dice.random() * scenario.seconds, 4))
        details = {**step.details, "frontend": 0}
        steps.append(replace(step, number=number, what=RELAYED, details=details))
    if fault:
        at_s = round(1 + dice.random() * scenario.seconds, 4)
        details = {"seconds": dice.choice((0.5, 1.5, 4.0))}
        step = replace(steps[-1], number=len(steps), at_s=at_s, kind="fault", what=fault)
        steps.append(replace(step, details=details))
    ordered = tuple(sorted(steps, key=lambda step: step.at_s))
    return replace(scenario, graph=scenario.graph + _SERVICE, steps=ordered)


def is_attached(box: Box) -> bool:
    """Whether a worker of the box relays a model."""
    return _SERVICE in box.scenario.graph


def is_disturbed(box: Box, request: Request) -> bool:
    """Whether something that may be felt by a relayed request happened in its time, or before.

    That is a fault, an operation, or the start or the end of a process.
    """
    since_s = request.started_s - _FELT_S
    times = [(one.since_s, one.until_s - RESTART_S) for one in box.causes.found]
    for process in box.machine.lived:
        if process.program:
            started_s, ended_s = process.started_s, process.ended_s
            times += [(at_s - START_S,) * 2 for at_s in (started_s, ended_s)]
    return any(begin_s <= request.ended_s and since_s <= end_s for begin_s, end_s in times)
