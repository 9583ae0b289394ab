"""A set with the order of insertion: that of objects would depend on their addresses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from importlib import import_module
from typing import Any

__all__ = ["order_sets"]

_MODULES = (
    "dynamo.attach.pool",
    "dynamo.frontend.models.registry",
    "dynamo.frontend.requests.registry",
    "dynamo.http.server",
    "dynamo.planner.live.actions",
    "dynamo.planner.live.model_state",
    "dynamo.runtime.process.tasks",
    "dynamo.runtime.requests.server",
    "dynamo.worker.lifecycle",
)
"""They close or cancel what they have in such sets."""


class OrderedSet(MutableSet[Any]):
    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items = dict.fromkeys(items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, value: Any) -> None:
        self._items[value] = None

    def discard(self, value: Any) -> None:
        self._items.pop(value, None)


def order_sets() -> None:
    """Give sets of connections, requests and tasks an order, so that a seed has one history."""
    for name in _MODULES:
        vars(import_module(name))["set"] = OrderedSet
