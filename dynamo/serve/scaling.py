"""How far the planner may scale a service: ``min``, ``max`` and ``priority`` of a graph. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["SCALING_KEYS", "BadScaling", "Scaling", "read_scaling", "read_workers"]

_MAX_WORKERS = 1024
SCALING_KEYS = ("min", "max", "priority")
"""Keys of ``ServiceArgs`` that only the planner uses."""


class BadScaling(ValueError):
    """The value of ``key`` in ``ServiceArgs`` is wrong; the text says how."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The least and most workers of a service, and its ``priority``: a higher one gets GPUs first.

    None: as the planner's options say.
    """

    minimum: int | None = None
    maximum: int | None = None
    priority: int = 0


def read_workers(args: Mapping[str, Any]) -> int:
    """Return the number of workers at the start, 1 by default. Raises BadScaling."""
    return _integer(args, "workers", 1, 0, _MAX_WORKERS)


def read_scaling(args: Mapping[str, Any], workers: int) -> Scaling:
    """Return the scaling of a service that starts with ``workers``. Raises BadScaling."""
    minimum = _integer(args, "min", 0, 0, _MAX_WORKERS) if "min" in args else None
    maximum = _integer(args, "max", 1, 1, _MAX_WORKERS) if "max" in args else None
    if minimum is not None and maximum is not None and minimum > maximum:
        raise BadScaling("min", f"is {minimum}, more than max, {maximum}")
    if minimum is not None and workers < minimum:
        raise BadScaling("workers", f"is {workers}, less than min, {minimum}")
    if maximum is not None and workers > maximum:
        raise BadScaling("workers", f"is {workers}, more than max, {maximum}")
    priority = _integer(args, "priority", 0, -1000, 1000)
    return Scaling(minimum=minimum, maximum=maximum, priority=priority)


def _integer(args: Mapping[str, Any], key: str, default: int, least: int, most: int) -> int:
    value = args.get(key, default)
    # Not isinstance: `workers: true` would count as 1.
    if type(value) is not int or not least <= value <= most:
        raise BadScaling(key, f"must be an integer between {least} and {most}, got {value!r}")
    return value
