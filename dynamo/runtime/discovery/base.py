"""What every discovery backend offers: keys under leases, and watches that are told of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

__all__ = ["Discovery", "KeyEvent", "Lease", "OnKeyEvent", "Watch"]


class KeyEvent(NamedTuple):
    """A key appeared or changed (``put``, with its value) or is gone (``delete``)."""

    kind: Literal["put", "delete"]
    key: str
    value: bytes | None


OnKeyEvent = Callable[[KeyEvent], None]
"""Called on the loop, synchronously, once per change, in order."""


class Lease(Protocol):
    """The liveness of one process: every key put under it lives as long as it does.

    ``id`` is a positive 63-bit integer. ``lost`` is set when the lease is gone for any reason:
    revoked by its owner or by anyone else.
    """

    @property
    def id(self) -> int: ...

    @property
    def lost(self) -> asyncio.Event: ...

    async def revoke(self) -> None:
        """End the lease and remove its keys; harmless when it is gone already."""


class Watch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """No callback comes after this."""

    async def ready(self) -> None:
        """Wait until the keys that existed at the start have been delivered."""


class Discovery(Protocol):
    """A store of keys such as ``v1/instances/<ns>/<component>/<endpoint>/<instance hex>``."""

    async def start(self) -> None:
        """Open the store. Raises ConfigError if it cannot be used."""

    async def close(self) -> None:
        """Revoke the leases granted here and stop all watches; may be called twice."""

    async def grant(self, ttl_s: float, lease_id: int | None = None) -> Lease:
        """A new lease of this process; ``lease_id`` must be unused (default: random)."""

    async def put(self, key: str, value: bytes, lease_id: int) -> None:
        """Write ``key``. Raises WorkerUnavailable if the lease is gone, InvalidArgument for a
        key that the store cannot hold."""

    async def delete(self, key: str) -> None:
        """Remove ``key``; harmless if there is none."""

    async def list(self, prefix: str) -> dict[str, bytes]:
        """All live keys that start with ``prefix``."""

    async def revoke(self, lease_id: int) -> None:
        """End anyone's lease; its owner finds ``lost`` set. Harmless if it is gone already."""

    def watch(self, prefix: str, on_event: OnKeyEvent) -> Watch:
        """Tell ``on_event`` of the existing keys as puts, then of every change."""
