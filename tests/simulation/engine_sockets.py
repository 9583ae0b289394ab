"""ZeroMQ's PUB and SUB sockets between an engine and its worker, which are one process here.

Nothing is lost between them, and no connection ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import fake_os

if TYPE_CHECKING:
    from machine import Process

__all__ = ["EnginePublisher", "EngineSubscriber"]


Subscribers = dict[str, list["EngineSubscriber"]]
"""Those of a process, by their endpoint."""


class EngineSubscriber:
    """A SUB socket; ``get`` and the monitor say that nothing happens to its connection."""

    _bound: ClassVar[WeakKeyDictionary[Process, Subscribers]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._received: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._endpoints: list[list[EngineSubscriber]] = []

    @classmethod
    def at(cls, endpoint: str) -> list[EngineSubscriber]:
        """Return those of this process that are connected to ``endpoint``."""
        process = fake_os.machine().current
        assert process is not None
        return cls._bound.setdefault(process, {}).setdefault(endpoint, [])

    def get_monitor_socket(self, events: int) -> EngineSubscriber:
        """Return a socket on which nothing arrives."""
        return EngineSubscriber()

    def disable_monitor(self) -> None:
        """There is none."""

    def get(self, option: int) -> int:
        """Return that there is no event."""
        return 0

    def setsockopt(self, *args: Any) -> None:
        """Options have no effect here."""

    setsockopt_string = setsockopt

    def connect(self, endpoint: str) -> None:
        """Receive what is published there from now on."""
        subscribers = self.at(endpoint)
        subscribers.append(self)
        self._endpoints.append(subscribers)

    def recv_multipart(self) -> asyncio.Future[list[bytes]]:
        """Return the next message once it is there."""
        return asyncio.ensure_future(self._received.get())

    def deliver(self, frames: list[bytes]) -> None:
        """Receive a message."""
        self._received.put_nowait(frames)

    def close(self) -> None:
        """Receive no more."""
        for subscribers in self._endpoints:
            if self in subscribers:
                subscribers.remove(self)


class EnginePublisher:
    """A PUB socket of an engine."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def send(self, frames: list[bytes]) -> None:
        """Publish a message; it arrives a moment later, in order."""
        loop = asyncio.get_running_loop()
        for subscriber in EngineSubscriber.at(self._endpoint):
            loop.call_soon(subscriber.deliver, frames)
