"""API keys of simulated boxes: requests with one, what it allows, what a frontend must answer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from exact_calls import admin_line
from surface import rank_of

if TYPE_CHECKING:
    from scenario import Scenario, Step

__all__ = ["LATE", "NOT_GRANTED", "demanded", "file_text", "header", "keyed"]

_GRANTS = {"alice": ":priority=10,strict-priority=5,routing,classes", "bob": "", "carol": ""}
LATE = "carol"
"""Her key is added and removed while the box runs."""
_NAMES = (*["alice"] * 4, "bob", "bob", *["carol"] * 5, "none", "wrong")
_SHARE = 0.1
NOT_GRANTED = 403
_ASKS_SHARE = 0.5
_RELOAD_S = 2.0
"""A changed file is in force so soon."""
_LOOK_S = 0.5
"""A frontend that is busy or looks again a moment later."""
_MODE = "  run: dynamo.frontend\n"


def _key(name: str) -> str:
    return f"dyn-{name}-0123456789abcdef0123456789abcdef"


def header(name: str) -> str:
    """Return the header with which ``name`` asks; "none" sends no key, "wrong" an unknown one."""
    return "" if name == "none" else f"authorization: Bearer {_key(name)}\r\n"


def file_text(names: Iterable[str]) -> str:
    """Return the file of keys of ``names``, and of an operator."""
    return admin_line() + "".join(
        f"{name}:user:{hashlib.sha256(_key(name).encode()).hexdigest()}{_GRANTS[name]}\n"
        for name in names
    )


def demanded(
    name: str,
    fields: dict[str, Any],
    changes: list[tuple[float, bool]],
    since_s: float,
    until_s: float,
) -> int:
    """Return the status that a frontend must answer with; 0: it has to serve; -1: either.

    ``changes`` are the times at which the late key was added (True) or removed.
    """
    if name in ("none", "wrong"):
        return 401
    if name == LATE:
        known = _known(changes, since_s, until_s)
        if known is not True:
            return -1 if known is None else 401
    hints = fields.get("nvext", {}).get("agent_hints")
    asks = hints or "x-dynamo-meta-policy-class" in fields or rank_of(fields) is not None
    return NOT_GRANTED if asks and not _GRANTS[name] else 0


def _known(changes: list[tuple[float, bool]], since_s: float, until_s: float) -> bool | None:
    """Whether the late key was in force all the time; None: for a part of it, or unknown."""
    known = False
    for changed_s, added in changes:
        if changed_s > until_s:
            break
        if changed_s > since_s - _RELOAD_S - _LOOK_S:
            return None
        known = added
    return known


def keyed(scenario: Scenario, change: Callable[[int, float, str], Step]) -> Scenario:
    """Demand keys in some scenarios. The other steps keep their numbers.

    ``change`` makes the step that adds or removes the late key.
    """
    dice = random.Random(f"keys {scenario.seed}")
    if dice.random() >= _SHARE or scenario.is_calm:
        return scenario
    steps = [_with_key(dice, one) if one.kind == "request" else one for one in scenario.steps]
    at_s = 0.0
    for what in ("add", "remove", "add"):
        at_s = round(at_s + dice.random() * scenario.seconds / 2, 4)
        if at_s < scenario.seconds:
            steps.append(change(len(steps), at_s, what))
    graph = scenario.graph.replace(_MODE, f"{_MODE}  api-key-file: {{keys}}\n")
    ordered = tuple(sorted(steps, key=lambda step: step.at_s))
    return replace(scenario, graph=graph, steps=ordered)


def _with_key(dice: random.Random, step: Step) -> Step:
    """Give a request a key, and half of those without a grant a priority that needs one."""
    details = {**step.details, "key": dice.choice(_NAMES)}
    if dice.random() < _ASKS_SHARE and not _GRANTS.get(details["key"], "-"):
        details["fields"] = {"nvext": {"agent_hints": {"priority": 3}}}
    return replace(step, details=details)
