"""Python's garbage collector in a process that serves.

A request leaves nothing to it (its objects go by reference count when it ends), yet it would walk
the requests in flight, and now and then vocabularies and templates, over and over.
"""

from __future__ import annotations

import gc

__all__ = ["freeze_heap"]

_NEW_OBJECTS = 50_000


def freeze_heap() -> None:
    """What exists now stays: never look at it again, and at what comes only once it is much.

    For the whole process; call it after each large thing that was loaded. O(objects).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
