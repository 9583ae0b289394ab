"""A planner keeps each pool within its minimum and maximum, at each change of a process."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from presence import asleep, service_of

if TYPE_CHECKING:
    from box import Box

__all__ = ["check_least", "check_most"]

_LIMITS = re.compile(r"min: (\d+), max: (\d+)")
_BY_HAND = ("circus incr", "circus start", "circus restart", "load", "wake")
_REMOVE = ("drain", "unload", "sleep", "circus stop", "circus decr", "circus rm", "pause planner")


def _limits(box: Box) -> dict[str, tuple[int, int]]:
    """Return minimum and maximum of each service that the planner scales, and no operator has."""
    found = {}
    service = ""
    for line in box.scenario.graph.splitlines():
        if line[:1].isalpha():
            service = line.partition(":")[0]
        limits = _LIMITS.search(line)
        if limits is not None:
            found[service] = int(limits[1]), int(limits[2])
    for step in box.done:
        if step.details.get("change") == "workers":
            found.pop(step.details["service"], None)
    return found


def check_most(box: Box) -> Iterator[str]:
    """No service has more workers than its maximum, but for what operators start."""
    if not box.profile.planner or any(one.what in _BY_HAND for one in box.done):
        return
    names: dict[str, set[str]] = defaultdict(set)
    for process in box.processes("mocker"):
        leaves = process.pid in box.machine.stop_signals_s
        if not asleep(process) and not leaves:
            names[service_of(process)].add(process.name)
    for service, (_, most) in _limits(box).items():
        if len(names[service]) > most:
            yield f"{service} has {sorted(names[service])}, its maximum is {most}"


def check_least(box: Box) -> Iterator[str]:
    """When all is quiet each service has its minimum, unless an operator removed workers."""
    if not box.processes("planner") or any(one.what in _REMOVE for one in box.done):
        return
    for service, (least, _) in _limits(box).items():
        workers = [one for one in box.processes("mocker") if service_of(one) == service]
        if len(workers) < least:
            yield f"{service} has {workers}, its minimum is {least}"
