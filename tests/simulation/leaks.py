"""What is reachable in a process of requests that have ended and of workers that left.

Whatever the class: a cleanup that is left out anywhere keeps an id for ever.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterator
from pathlib import PurePath
from types import MethodType
from typing import TYPE_CHECKING, Any

from presence import model_of

if TYPE_CHECKING:
    from box import Box
    from machine import Process

__all__ = ["check_leaks"]

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MOST = 200_000
_LEASE = re.compile(r"(?<![0-9a-f-])[0-9a-f]{12,16}(?![0-9a-f-])")
"""How instances and leases are written."""
_KEPT = {
    "RecentRequests.records",
    "RecentRequests.refused",
    "Pull.decode",
    "Pull.prefill",
    "ModelCard.instance_id",
    "HeadReader._headers",
    "HeadReader._heads",
    "Sessions._bindings",
    "StatusSampler._events",
    "WorkerActions._problems",
    "PlannedModel.text",
    "simulated_subscriber.<locals>.Subscriber._left",
}
"""What is kept on purpose: the last requests and pulls, the card of a model, sessions, the heads
of earlier requests, the latest problems of a planner, the last publishers that left."""
_ROOTS = {
    "DistributedRuntime",
    "HttpServer",
    "MockerWorker",
    "OnDemandRegistry",
    "RequestRegistry",
    "RequestServer",
}
"""The parts of a process that it has to its end."""


def check_leaks(box: Box) -> Iterator[str]:
    """Yield where the processes of the deployment keep an id of what has ended."""
    ended = set(box.machine.received_tokens)
    gone = {
        int(lease, 16)
        for lease, owner in box.presence.owners.items()
        if not owner.alive and model_of(owner)
    }
    for process in (
        *box.processes("frontend"),
        *box.processes("mocker"),
        *box.processes("planner"),
    ):
        for path in _paths(process, ended, gone):
            yield f"{process} keeps {path}"


def _paths(process: Process, ended: set[str], gone: set[int]) -> Iterator[str]:
    seen: set[int] = set()
    todo: deque[tuple[str, Any]] = deque()
    for part in process.parts:
        name = type(part).__qualname__
        if name in _ROOTS and not getattr(part, "_closed", False):
            todo.append((name, part))
    while todo and len(seen) < _MOST:
        path, value = todo.popleft()
        if isinstance(value, PurePath):
            value = value.name
        if isinstance(value, (str, int)):
            if _is_gone(value, ended, gone):
                yield f"{path}: {str(value)[-80:]}"
        elif id(value) not in seen:
            seen.add(id(value))
            todo.extend(_parts(path, value))


def _is_gone(value: str | int, ended: set[str], gone: set[int]) -> bool:
    """Whether it names a request that has ended or a worker that left."""
    if isinstance(value, int):
        return value in gone
    return value in ended or any(int(one, 16) in gone for one in _LEASE.findall(value))


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield f"{path} key", key
            yield f"{path}[]", one
    elif isinstance(value, _CONTAINERS):
        for one in value:
            yield f"{path}[]", one
    elif isinstance(value, MethodType):
        yield path + "()", value.__self__
    elif isinstance(value, functools.partial):
        yield path + "()", value.func
        yield path + "()", value.args
    if any(kind.__module__.startswith("dynamo.") for kind in type(value).__mro__):
        name = f"{path}>{type(value).__qualname__}"
        for attribute, one in _attributes(value):
            if f"{type(value).__qualname__}.{attribute}" not in _KEPT:
                yield f"{name}.{attribute}", one


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()) if kind.__module__.startswith("dynamo.") else ():
            if hasattr(value, name):
                yield name, getattr(value, name)
