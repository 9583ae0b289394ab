"""A binary heap from which any item can be removed."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

__all__ = ["LazyHeap"]

T = TypeVar("T", bound=Hashable)
_SLACK = 64
"""Removed entries that a small heap may carry before it is rebuilt."""


class LazyHeap(Generic[T]):
    """Items by key, the smallest first; of equal keys the one pushed first.

    ``heapq`` cannot remove from the middle, so a removed entry stays in the list without its item
    until it reaches the top, or until more than half of the list is such entries. Every step is
    O(log n) amortised, memory is O(items).
    """

    __slots__ = ("_entries", "_heap", "_pushes")

    def __init__(self) -> None:
        # [key, number of the push, item or None]; the number is unique, so that items are never
        # compared.
        self._heap: list[list[Any]] = []
        self._entries: dict[T, list[Any]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def push(self, item: T, key: Any) -> None:
        """Add ``item``, or give it another key."""
        self.remove(item)
        self._pushes += 1
        entry = self._entries[item] = [key, self._pushes, item]
        heapq.heappush(self._heap, entry)

    def remove(self, item: T) -> bool:
        """Return whether ``item`` was in the heap; it is not any more."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        entry[-1] = None
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[-1] is not None]
            heapq.heapify(self._heap)
        return True

    def key(self, item: T) -> Any:
        """Return the key of an item. Raises KeyError."""
        return self._entries[item][0]

    def first(self) -> T | None:
        """Return the item with the smallest key, or None; it stays in the heap."""
        heap = self._heap
        while heap:
            item: T | None = heap[0][-1]
            if item is not None:
                return item
            heapq.heappop(heap)
        return None

    def in_order(self) -> list[T]:
        """Return all items, smallest key first. O(n log n)."""
        return [entry[-1] for entry in sorted(self._entries.values())]

    def _check(self) -> None:
        """Assert what must always hold; for tests."""
        alive = [entry for entry in self._heap if entry[-1] is not None]
        assert {entry[-1]: entry for entry in alive} == self._entries
        assert len(alive) == len(self._entries)
        assert len(self._heap) <= 2 * len(self._entries) + _SLACK + 1
