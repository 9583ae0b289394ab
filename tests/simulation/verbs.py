"""What operators' verbs must do: succeed, or be refused for a reason that is true."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from excuses import RESTART_S, target_of
from machine import Process
from presence import SERVED_BY, asleep, model_of, service_of

if TYPE_CHECKING:
    from box import Box
    from scenario import Step

__all__ = ["unexpected"]


class Refusal(NamedTuple):
    """``text`` is a pattern of the refusal, ``is_true`` whether what it says is so."""

    text: str
    is_true: Callable[[Box, Step], bool]


def _targets(box: Box, step: Step) -> list[Process]:
    """The processes of the service, worker or model that the step names."""
    return [one for one in box.processes("mocker") if _is_target(one, step)]


def _is_target(process: Process, step: Step) -> bool:
    name = target_of(step)
    if not name:
        return model_of(process) == step.details.get("model")
    return name in (process.name, service_of(process))


def _served(box: Box, step: Step) -> bool:
    return any(box.presence.live(service) for service, model in SERVED_BY.items()
               if model == step.details["model"])  # fmt: skip


def _starting(box: Box, step: Step) -> bool:
    """Whether a process of it is new: also one that has had no turn yet, so it is no program."""
    began_s = box.machine.now_s - RESTART_S
    return any(
        one.alive and one.started_s > began_s and _is_target(one, step)
        for one in box.machine.processes.values()
    )


def _lacks_program(box: Box, step: Step) -> bool:
    """Whether the program that circus was asked for has no process: the service's first one."""
    name = f"box_{target_of(step).removeprefix('box_')}"
    return all(one.name != name for one in box.processes("mocker"))


def _reserved(box: Box, step: Step) -> bool:
    """Whether a planner starts or removes one of its targets, or has just started it."""
    from dynamo.serve.state.statefile import Statefile

    if box.profile.planner and _starting(box, step):
        return True
    document, name = Statefile(box.state, "box").read(), target_of(step)
    planners = {one.pid for one in box.processes("planner")}
    began_s = box.machine.now_s - RESTART_S
    return document is not None and any(
        owner.pid in planners and (box.clock_set() or owner.since > began_s)
        for entry in document.components.values()
        if name in (entry.name, entry.service) and (owner := entry.reserved_by) is not None
    )


def _is_full(box: Box, step: Step) -> bool:
    """Whether there may be too few of the two GPUs; each worker of the graph has one."""
    return _workers(box) > 1 or step.details.get("value", 0) > 1


def _workers(box: Box) -> int:
    """Return how many workers there are, those included that begin to start."""
    return sum(one.alive and bool(model_of(one)) for one in box.machine.processes.values())


def _kept(box: Box, step: Step) -> bool:
    """Whether a planner does not let the last worker of a model go."""
    return box.profile.planner and step.details.get("model") not in box.profile.on_demand


_REFUSALS = (
    Refusal("it is served already", _served),
    Refusal("has no process now", lambda box, step: not _targets(box, step)),
    Refusal("is not asleep", lambda box, step: not all(map(asleep, _targets(box, step)))),
    Refusal("sleeps(;| already)", lambda box, step: any(map(asleep, _targets(box, step)))),
    Refusal("holds no GPU", lambda box, step: not _served(box, step)),
    Refusal("no service or worker", lambda box, step: "_" in target_of(step)),
    Refusal("has no sleep mode", lambda box, step: not _sleeps(box, step)),
    Refusal("the planner keeps a worker", lambda box, step: _kept(box, step)),
    Refusal("does not serve yet", _starting),
    Refusal("is being started or removed", _reserved),
    Refusal("GPU .* is in use", lambda box, step: len(box.processes("mocker")) > 1),
    Refusal("No space left", lambda box, step: box.was_full(RESTART_S)),
    Refusal("program .* not found", _lacks_program),
    Refusal("a second process would use", lambda box, step: step.what == "circus incr"),
    Refusal("needs .* GPU", _is_full),
    Refusal("changes it|replaces its process", lambda box, step: box.profile.planner),
    Refusal("no planner runs", lambda box, step: not box.processes("planner")),
)
"""Refusals that depend on nothing but what is so. Any other one needs a cause near: a fault, or
another operation."""


def _sleeps(box: Box, step: Step) -> bool:
    return box.profile.sleeps and step.details["service"] not in ("Half", "Extra")


def unexpected(box: Box, step: Step, result: str, since_s: float) -> str:
    """Return why ``result`` is not what the verb had to do; '' if it is, or is uncertain."""
    if box.disturbed(step, since_s):
        return ""
    if result == "ended":
        return _undone(box, step)
    if not result.startswith("refused"):
        return ""
    for refusal in _REFUSALS:
        if re.search(refusal.text, result):
            return "" if refusal.is_true(box, step) else f"that is not so: {result}"
    return f"nothing was in its way: {result}"


def _undone(box: Box, step: Step) -> str:
    """Return what a verb that ended has not done."""
    targets = _targets(box, step)
    if step.what == "load" and not box.presence.has_card(step.details["model"]):
        return "its model has no worker after it"
    if step.what == "unload" and any(not asleep(one) for one in targets):
        return "a worker runs after it"
    if step.what == "drain" and targets and not box.profile.planner:
        return f"{targets[0]} runs after it"
    if step.what == "sleep" and not all(map(asleep, targets)):
        return "an engine is awake after it"
    if step.what == "wake" and any(map(asleep, targets)):
        return "an engine sleeps after it"
    if step.what == "restart" and not all(
        one.started_s > box.machine.now_s - 60 for one in targets
    ):
        return "the old process runs after it"
    return ""
