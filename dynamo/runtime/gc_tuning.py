"""Tuning of Python's garbage collector for a serving process.

Reference counts free the objects of a request when it ends, so the collector has nothing to find.
It would still traverse the requests in flight, and sometimes vocabularies and templates, again and
again.
"""

from __future__ import annotations

import gc

__all__ = ["freeze_heap"]

_NEW_OBJECTS = 50_000


def freeze_heap() -> None:
    """Exempt all existing objects from collection, and raise the threshold for new ones.

    For the whole process; call it after each large object was loaded. O(objects).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
