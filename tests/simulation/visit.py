"""Requests that come to some boxes once all has ended and nothing disturbs them any more.

Chance sends each of the requests of :mod:`calls` rarely. Here many come, one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from api_calls import calls_of
from calls import draw_call, exact_groups, groups_of
from exact_verbs import draw_verbs
from presence import API
from wire_calls import ORIGIN

if TYPE_CHECKING:
    from scenario import Profile, Scenario, Step

__all__ = ["VISIT", "visited"]

VISIT = "visit"
"""The detail of steps that wait until all is quiet."""
_KEEPING = ("circus stop", "circus decr", "circus rm", "pause planner")
"""Operations after which workers on demand may lack a GPU for ever."""
_SHARE = 0.3
_CALLS = 50
_EVERY_S = 0.02
_RUN = "  run: dynamo.frontend\n"


def visited(scenario: Scenario, profile: Profile, make: Callable[..., Step]) -> Scenario:
    """Let many requests come to some boxes at the end. The other steps keep their numbers.

    Those with keys get requests with each kind of key. Boxes with limits or a relay refuse for
    reasons of their own, and those whose operators keep GPUs from the planner.
    """
    dice = random.Random(f"visit {scenario.seed}")
    other = "dynamo.attach" in scenario.graph or scenario.is_cut or bool(scenario.limits)
    removed = profile.planner and any(step.what in _KEEPING for step in scenario.steps)
    if not scenario.seed or dice.random() >= _SHARE or other or removed:
        return scenario
    graph, has_keys = scenario.graph, "{keys}" in scenario.graph
    groups = exact_groups(has_keys)
    if not has_keys:
        groups |= groups_of(scenario.format)
        del groups["watches"]  # which disturb nothing, and end late
        if "cors-origins" not in graph:
            graph = graph.replace(_RUN, f"{_RUN}  cors-origins: {ORIGIN}\n")
    written = calls_of(graph) if "\nApi:" in graph else []
    first = max((step.number for step in scenario.steps), default=-1) + 1
    last_s = max((step.at_s for step in scenario.steps), default=0.0)
    steps = list(scenario.steps)
    for number in range(_CALLS):
        asked, models = groups, profile.models
        if written and number % 2:
            asked, models = {"written": written}, (API,)
        model, details = draw_call(dice, asked, models, profile.frontends)
        details[VISIT] = True
        at_s = round(last_s + number * _EVERY_S, 4)
        steps.append(make(first + number, at_s, "request", model, 0, details))
    if scenario.has_shells and not has_keys:
        for number, words in enumerate(draw_verbs(dice, profile)):
            at_s = round(last_s + number * _EVERY_S * 15, 4)
            details = {"words": words, VISIT: True}
            steps.append(make(steps[-1].number + 1, at_s, "shell", words[0], 0, details))
    ordered = tuple(sorted(steps, key=lambda step: (step.at_s, step.number)))
    return replace(scenario, graph=graph, steps=ordered)
