"""Discovery: keys under leases, in memory, in a directory or in etcd.

Its names are imported on first use: readers of the store's files need no event loop.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.runtime.discovery.base import (
        Discovery,
        KeyEvent,
        Lease,
        MemoryDiscovery,
        OnKeyEvent,
        Watch,
    )
    from dynamo.runtime.discovery.file import FileDiscovery

__all__ = [
    "Discovery",
    "FileDiscovery",
    "KeyEvent",
    "Lease",
    "MemoryDiscovery",
    "OnKeyEvent",
    "Watch",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{'file' if name == 'FileDiscovery' else 'base'}")
    value = globals()[name] = getattr(module, name)
    return value
