"""The memory that an action takes, for tests of bounds that no figure shows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import NamedTuple


class Memory(NamedTuple):
    """Bytes of Python's objects: those that are left, and the most at any time."""

    left: int
    most: int


def memory_of(action: Callable[[], object]) -> Memory:
    """Call ``action``; what it returns counts as left."""
    tracemalloc.start()
    try:
        result = action()
        measured = Memory(*tracemalloc.get_traced_memory())
        del result
        return measured
    finally:
        tracemalloc.stop()
