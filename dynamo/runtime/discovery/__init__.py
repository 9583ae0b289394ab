"""Discovery: keys under leases, in memory, in a directory or in etcd."""

from dynamo.runtime.discovery.base import Discovery, KeyEvent, Lease, OnKeyEvent, Watch
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.discovery.memory import MemoryDiscovery

__all__ = [
    "Discovery",
    "FileDiscovery",
    "KeyEvent",
    "Lease",
    "MemoryDiscovery",
    "OnKeyEvent",
    "Watch",
]
