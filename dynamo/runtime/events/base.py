"""The event plane's faces: numbered messages from publishers to whoever listens. Spec 7.6."""

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
"""The number of a publisher's first event; each later one is one more."""

OnEvent = Callable[[int, int, bytes], None]
"""``on_event(publisher_id, sequence, payload)``, called on the loop, in order per publisher."""

OnGap = Callable[[int, int, int], None]
"""``on_gap(publisher_id, expected, got)``, called before the event that revealed the gap.

``got > expected``: events were lost. Those from before the first that arrives are not missing: a
subscriber that joins late asks for what it needs.
``got < expected``: the publisher began anew under its old id.
"""


class EventPublisher(Protocol):
    """Publishes on one topic.

    ``dropped`` counts how often a subscriber's queue was found full. From then until it reads again
    that subscriber, and it alone, loses every event; it sees one gap.
    """

    topic: str
    publisher_id: int
    address: str
    published: int
    dropped: int

    def publish(self, payload: bytes) -> int:
        """Send one event without waiting; its sequence number. Subscribers see a loss as a gap."""

    def close(self) -> None:
        """Release the address. Idempotent."""


class EventSubscriber(Protocol):
    """Listens to any number of publishers of one topic. ``malformed`` counts foreign messages."""

    topic: str
    received: int
    gaps: int
    malformed: int

    def connect(self, address: str, publisher_id: int | None = None) -> None:
        """Listen to one more publisher; it need not exist yet. Idempotent."""

    def disconnect(self, address: str) -> None:
        """Forget the publisher at ``address``. Idempotent."""

    def close(self) -> None:
        """Stop listening; no callback comes after this. Idempotent."""


class EventPlane(Protocol):
    """A transport that needs a server: one connection for all publishers and subscribers."""

    async def start(self) -> None:
        """Connect. Raises ConfigError."""

    async def close(self) -> None:
        """Disconnect, after all publishers and subscribers. Idempotent."""

    def publisher(self, channel: tuple[str, str, str], publisher_id: int) -> EventPublisher:
        """A publisher on the channel (namespace, component, topic)."""

    def subscriber(
        self, topic: str, on_event: OnEvent, on_gap: OnGap | None = None
    ) -> EventSubscriber:
        """A subscriber that knows no publisher yet."""
