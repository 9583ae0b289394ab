"""Routing decisions in order of age, each owning the blocks that no later one has touched."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

__all__ = ["Visit", "VisitLine"]


class Visit(NamedTuple):
    """One decision. It owns those of its ``blocks`` that no later one has touched."""

    number: int
    slot: int
    touched_s: float
    blocks: array[int]


class VisitLine:
    """Visits from the oldest to the newest; ``listed`` counts the blocks they name.

    A cursor goes round and drops what later visits have taken over, so that the line stays within
    a small multiple of what it owns.
    """

    def __init__(self) -> None:
        self.listed = 0
        self._tidied: deque[Visit] = deque()
        self._rest: deque[Visit] = deque()

    def __iter__(self) -> Iterator[Visit]:
        return chain(self._tidied, self._rest)

    def front(self) -> Visit | None:
        """The oldest one."""
        if self._tidied:
            return self._tidied[0]
        return self._rest[0] if self._rest else None

    def append(self, visit: Visit) -> None:
        """Line up the newest one."""
        self._rest.append(visit)
        self.listed += len(visit.blocks)

    def pop_front(self) -> Visit:
        """Take the oldest one out."""
        visit = (self._tidied or self._rest).popleft()
        self.listed -= len(visit.blocks)
        return visit

    def push_front(self, visit: Visit) -> None:
        """Put back what is left of the oldest one."""
        self._tidied.appendleft(visit)
        self.listed += len(visit.blocks)

    def tidy(self, blocks: int, owned: Callable[[Visit], array[int]]) -> None:
        """Move the cursor over about ``blocks`` listed ones."""
        if not self._rest:
            self._tidied, self._rest = self._rest, self._tidied
        while self._rest and blocks > 0:
            visit = self._rest.popleft()
            blocks -= len(visit.blocks) + 1
            left = owned(visit)
            self.listed -= len(visit.blocks) - len(left)
            if len(left):
                self._tidied.append(visit._replace(blocks=left))
