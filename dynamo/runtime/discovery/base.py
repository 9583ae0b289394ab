"""The interface of discovery backends: keys under leases, and watches of their changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

__all__ = ["Discovery", "KeyEvent", "Lease", "OnKeyEvent", "Watch"]


class KeyEvent(NamedTuple):
    """A key was created or changed (``put``, with its value) or removed (``delete``)."""

    kind: Literal["put", "delete"]
    key: str
    value: bytes | None


OnKeyEvent = Callable[[KeyEvent], None]
"""Called on the loop, synchronously, once per change, in order."""


class Lease(Protocol):
    """The liveness of one process: every key put under it exists as long as the lease."""

    @property
    def id(self) -> int:
        """A positive 63-bit integer."""

    @property
    def lost(self) -> asyncio.Event:
        """Set when the lease ends for any reason: its owner or anyone else revoked it."""

    async def revoke(self) -> None:
        """End the lease and remove its keys. Idempotent."""


class Watch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """Stop watching; no callback runs after this."""

    async def ready(self) -> None:
        """Wait until the keys that existed at the start have been delivered."""


class Discovery(Protocol):
    """A store of keys such as ``v1/instances/<ns>/<component>/<endpoint>/<instance hex>``."""

    async def start(self) -> None:
        """Open the store. Raises ConfigError if it cannot be used."""

    async def close(self) -> None:
        """Revoke the leases granted here and stop all watches. Idempotent."""

    async def grant(self, ttl_s: float, lease_id: int | None = None) -> Lease:
        """Grant a lease to this process; ``lease_id`` must be unused (default: random)."""

    async def put(self, key: str, value: bytes, lease_id: int) -> None:
        """Write ``key``. WorkerUnavailable: the lease has ended. InvalidArgument: the store cannot
        hold the key."""

    async def delete(self, key: str) -> None:
        """Remove ``key``; ignore a missing one."""

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return all live keys that start with ``prefix``."""

    async def revoke(self, lease_id: int) -> None:
        """End the lease of any process; its owner finds ``lost`` set. Idempotent."""

    def watch(self, prefix: str, on_event: OnKeyEvent) -> Watch:
        """Pass the existing keys to ``on_event`` as puts, then every change."""
