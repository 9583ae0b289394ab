"""The interfaces of the event plane: sequenced messages to many subscribers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = [
    "FIRST_SEQUENCE",
    "EventPlane",
    "EventPublisher",
    "EventSubscriber",
    "OnEvent",
    "OnGap",
]

FIRST_SEQUENCE = 0
"""The sequence number of a publisher's first event; each later one is one higher."""

OnEvent = Callable[[int, int, bytes], None]
"""``on_event(publisher_id, sequence, payload)``, called on the loop, in order per publisher."""

OnGap = Callable[[int, int, int], None]
"""``on_gap(publisher_id, expected, got)``, called before the event that revealed the gap.

``got > expected``: events were lost. Events before the first received one do not count as lost: a
late subscriber requests what it needs.
``got < expected``: the publisher restarted under the same id.
"""


class EventPublisher(Protocol):
    """Publishes on one topic.

    ``dropped`` counts how often a subscriber's queue was full. From then until it reads again that
    subscriber, and no other, loses every event; it sees one gap.
    """

    topic: str
    publisher_id: int
    address: str
    published: int
    dropped: int

    def publish(self, payload: bytes) -> int:
        """Send one event without waiting; return its sequence number. A loss shows as a gap."""

    def close(self) -> None:
        """Release the address. Idempotent."""


class EventSubscriber(Protocol):
    """Receives from any number of publishers of one topic. ``malformed`` counts bad messages."""

    topic: str
    received: int
    gaps: int
    malformed: int

    def connect(self, address: str, publisher_id: int | None = None) -> None:
        """Add a publisher; it need not exist yet. Idempotent."""

    def disconnect(self, address: str) -> None:
        """Remove the publisher at ``address``. Idempotent."""

    def close(self) -> None:
        """Stop receiving; no callback runs after this. Idempotent."""


class EventPlane(Protocol):
    """A transport that needs a server: one connection for all publishers and subscribers."""

    async def start(self) -> None:
        """Connect. Raises ConfigError."""

    async def close(self) -> None:
        """Disconnect, after all publishers and subscribers. Idempotent."""

    def publisher(self, channel: tuple[str, str, str], publisher_id: int) -> EventPublisher:
        """Create a publisher on the channel (namespace, component, topic)."""

    def subscriber(
        self, topic: str, on_event: OnEvent, on_gap: OnGap | None = None
    ) -> EventSubscriber:
        """Create a subscriber without publishers."""
