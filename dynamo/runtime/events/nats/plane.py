"""The event plane over NATS: one subject per publisher.

NATS stores nothing for an absent subscriber and drops what a slow one does not read: the sequence
numbers in the envelope show every loss as a gap.
"""

from __future__ import annotations

import re

from dynamo.config.runtime import NatsSettings
from dynamo.runtime.events.nats.link import NatsLink
from dynamo.runtime.events.plane import (
    FIRST_SEQUENCE,
    MALFORMED,
    OnEvent,
    OnGap,
    SequencedSubscriber,
    pack,
    unpack,
)

# Dots separate the words of a subject, "*" and ">" are wildcards.
_FOREIGN = re.compile(r"[^A-Za-z0-9_-]")


class NatsPlane:
    """The publishers and subscribers of one process, over one connection."""

    def __init__(self, settings: NatsSettings) -> None:
        self._settings = settings
        self._link: NatsLink | None = None

    @property
    def link(self) -> NatsLink:
        """The connection, created on first use."""
        if self._link is None:
            self._link = NatsLink(self._settings)
        return self._link

    async def start(self) -> None:
        """Connect. Raises ConfigError."""
        await self.link.start()

    async def close(self) -> None:
        """Close the connection, after all publishers and subscribers. Idempotent."""
        if self._link is not None:
            await self._link.close()

    def publisher(self, channel: tuple[str, str, str], publisher_id: int) -> NatsPublisher:
        """Create a publisher on the subject ``dynamo.events.<channel>.<publisher id>``."""
        words = [_FOREIGN.sub("_", word) for word in channel]
        subject = ".".join(("dynamo", "events", *words, f"{publisher_id:x}"))
        return NatsPublisher(self.link, channel[2], publisher_id, subject)

    def subscriber(
        self, topic: str, on_event: OnEvent, on_gap: OnGap | None = None
    ) -> NatsSubscriber:
        """Create a subscriber without publishers."""
        return NatsSubscriber(self.link, topic, on_event, on_gap)


class NatsPublisher:
    """An EventPublisher; ``address`` is its subject, ``dropped`` counts events of a full queue."""

    def __init__(self, link: NatsLink, topic: str, publisher_id: int, address: str) -> None:
        self.topic = topic
        self.publisher_id = publisher_id
        self.address = address
        self.published = 0
        self.dropped = 0
        self._link = link
        self._sequence = FIRST_SEQUENCE
        self._closed = False

    def publish(self, payload: bytes) -> int:
        """See EventPublisher. RuntimeError when closed."""
        if self._closed:
            raise RuntimeError(f"the publisher of {self.topic} is closed")
        sequence = self._sequence
        packed = pack(self.publisher_id, sequence, self.topic, payload)
        if not self._link.send(self.address, packed):
            self.dropped += 1
        # Also for an event that was dropped: subscribers then see the gap.
        self._sequence = sequence + 1
        self.published += 1
        return sequence

    def close(self) -> None:
        """See EventPublisher."""
        self._closed = True


class NatsSubscriber(SequencedSubscriber):
    """An EventSubscriber; an address is a subject."""

    def __init__(
        self, link: NatsLink, topic: str, on_event: OnEvent, on_gap: OnGap | None = None
    ) -> None:
        super().__init__(topic, on_event, on_gap)
        self._link = link
        self._closed = False

    def connect(self, address: str, publisher_id: int | None = None) -> None:
        """See EventSubscriber."""
        if address not in self._addresses and not self._closed:
            self._addresses[address] = publisher_id
            self._link.subscribe(address, self._on_message)

    def disconnect(self, address: str) -> None:
        """See EventSubscriber."""
        if address in self._addresses:
            self._forget(self._addresses.pop(address))
            self._link.unsubscribe(address)

    def close(self) -> None:
        """See EventSubscriber."""
        self._closed = True
        for address in list(self._addresses):
            self.disconnect(address)

    def _on_message(self, packed: bytes) -> None:
        try:
            event = unpack(packed)
        except MALFORMED as error:
            self._count_malformed(error)
            return
        if event.topic == self.topic:
            self._deliver(event.publisher_id, event.sequence, event.payload)
