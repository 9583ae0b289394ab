"""What changes the caches of workers: operators who clear them, and prompts that fill them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from call import FRONTEND, Call

if TYPE_CHECKING:
    from scenario import Scenario, Step

__all__ = ["CLEAR", "cleared", "filled"]

CLEAR = Call("clear caches", "read", "/clear_kv_blocks", sent=b"", needs=FRONTEND, says="worker")
"""A worker with requests keeps its cache, and says so."""
_SHARE = 0.25
"""Of the boxes that demand no keys."""
_COUNTS = (1, 2, 5)
_PROMPTS = (10, 20)
_CLEARED_SHARE, _AFTER_S = 0.5, 4.0


def cleared(scenario: Scenario, step: type[Step]) -> Scenario:
    """Let caches be cleared in some scenarios. The other steps keep their numbers."""
    dice = random.Random(f"clears {scenario.seed}")
    if dice.random() >= _SHARE or "{keys}" in scenario.graph or not scenario.seed:
        return scenario
    clear = partial(_clear, dice, scenario, step)
    return _with_steps(scenario, dice, dice.choice(_COUNTS), clear)


def filled(scenario: Scenario, ask: Callable[..., Step], step: type[Step]) -> Scenario:
    """Let long prompts come where engines have host memory, for what their devices evict.

    In half of these scenarios the caches are cleared then. ``ask`` makes a request of a time. The
    other steps keep their numbers.
    """
    dice = random.Random(f"long prompts {scenario.seed}")
    others = scenario.limits or "{keys}" in scenario.graph or scenario.is_calm
    if "num-host-blocks" not in scenario.graph or others:
        return scenario

    def long(at_s: float) -> Step:
        made = ask(dice, at_s=at_s)
        return replace(made, details={**made.details, "long": True})

    scenario = _with_steps(scenario, dice, dice.choice(_PROMPTS), long)
    if scenario.is_cut or dice.random() < _CLEARED_SHARE:
        return scenario
    last_s = max(one.at_s for one in scenario.steps)
    times = [round(last_s + dice.random() * _AFTER_S, 4) for _ in range(2)]
    clears = [_clear(dice, scenario, step, at_s) for at_s in sorted(times)]
    return _numbered(scenario, clears)


def _clear(dice: random.Random, scenario: Scenario, step: type[Step], at_s: float) -> Step:
    details: dict[str, Any] = {"call": CLEAR.name, "stream": False}
    if scenario.profile == "replicas":
        details["frontend"] = dice.randrange(2)
    model = next((one.what for one in scenario.steps if one.kind == "request"), "one")
    return step(0, at_s, "request", model, 0, details)


def _with_steps(
    scenario: Scenario, dice: random.Random, count: int, make: Callable[[float], Step]
) -> Scenario:
    until_s = scenario.seconds if scenario.is_cut else max(scenario.seconds, 2.0)
    return _numbered(scenario, [make(round(dice.random() * until_s, 4)) for _ in range(count)])


def _numbered(scenario: Scenario, more: Sequence[Step]) -> Scenario:
    first = max((one.number for one in scenario.steps), default=-1) + 1
    steps = [replace(one, number=number) for number, one in enumerate(more, first)]
    ordered = sorted((*scenario.steps, *steps), key=lambda one: one.at_s)
    return replace(scenario, steps=tuple(ordered))
