"""Event channels: publishers found through discovery, subscriptions that follow them. Spec 7.6."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from dynamo.config.runtime import RuntimeSettings
from dynamo.protocols.control import EventChannelRecord
from dynamo.runtime.discovery import Discovery, KeyEvent
from dynamo.runtime.discovery.remains import event_socket_name
from dynamo.runtime.events import EventPublisher, EventSubscriber, ZmqPublisher, ZmqSubscriber
from dynamo.runtime.paths import socket_path
from dynamo.runtime.serving import Serving, advertised_host

__all__ = ["Channel", "OnEvent", "OnGap", "OnPublisher", "Publishers", "Subscription"]

Channel = tuple[str, str, str]
"""(namespace, component, topic)."""

OnEvent = Callable[[int, int, bytes], None]
"""(publisher id, sequence, payload); the publisher id is the instance id of its process."""

OnGap = Callable[[int, int, int], None]
"""(publisher id, expected sequence, received sequence)."""

OnPublisher = Callable[[int, bool], None]
"""(publisher id, whether it came or went)."""

_decode = msgspec.json.Decoder(EventChannelRecord).decode
_log = logging.getLogger(__name__)


class Publishers:
    """The publishers of this process, one per channel."""

    def __init__(
        self, settings: RuntimeSettings, discovery: Discovery, serving: Serving, instance_id: int
    ) -> None:
        self._settings = settings
        self._discovery = discovery
        self._serving = serving
        self._instance_id = instance_id
        self._made: dict[Channel, EventPublisher] = {}

    async def get(self, channel: Channel) -> EventPublisher:
        """The publisher of ``channel``, registered under this process's lease."""
        publisher = self._made.get(channel)
        if publisher is not None:
            return publisher
        lease = await self._serving.granted()
        publisher = self._made.get(channel)
        if publisher is None:
            publisher = self._make(channel)
            await self._register(channel, publisher, lease.id)
        return publisher

    def close(self) -> None:
        """Release all addresses."""
        for publisher in self._made.values():
            publisher.close()
        self._made.clear()

    def _make(self, channel: Channel) -> EventPublisher:
        topic = channel[2]
        publisher = ZmqPublisher(topic, self._instance_id, self._address(channel))
        self._made[channel] = publisher
        return publisher

    def _address(self, channel: Channel) -> str:
        if self._settings.request_plane == "uds":
            name = event_socket_name(self._instance_id, len(self._made))
            return f"ipc://{socket_path(self._settings, name)}"
        return f"tcp://{self._settings.tcp_rpc_host}:*"

    async def _register(self, channel: Channel, publisher: EventPublisher, lease_id: int) -> None:
        namespace, component, topic = channel
        address = publisher.address
        if address.startswith("tcp://"):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            address = f"tcp://{advertised_host(host)}:{port}"
        record = EventChannelRecord(
            namespace=namespace,
            component=component,
            topic=topic,
            instance_id=self._instance_id,
            lease_id=lease_id,
            transport={"kind": "Zmq", "endpoint": address},
        )
        key = f"{_prefix(channel)}{self._instance_id:x}"
        await self._discovery.put(key, msgspec.json.encode(record), lease_id)


class Subscription:
    """Hears all publishers of ``channel``, those of today and those to come."""

    def __init__(
        self,
        discovery: Discovery,
        channel: Channel,
        on_event: OnEvent,
        on_gap: OnGap | None = None,
        on_publisher: OnPublisher | None = None,
    ) -> None:
        self.channel = channel
        self.subscriber: EventSubscriber = ZmqSubscriber(channel[2], on_event, on_gap)
        self._on_publisher = on_publisher
        self._addresses: dict[str, tuple[int, str]] = {}
        self._watch = discovery.watch(_prefix(channel), self._on_key)

    def publishers(self) -> list[int]:
        """The ids of the publishers that are known now."""
        return [publisher for publisher, _ in self._addresses.values()]

    async def ready(self) -> None:
        """Wait until the publishers that exist already are being connected."""
        await self._watch.ready()

    def close(self) -> None:
        """Stop listening; no callback comes after this."""
        self._watch.close()
        self.subscriber.close()

    def _on_key(self, event: KeyEvent) -> None:
        if event.value is None:
            self._drop(event.key)
            return
        try:
            record = _decode(event.value)
            address = record.transport["endpoint"]
        except (msgspec.MsgspecError, KeyError) as error:
            _log.warning("skipping the event channel %s: %s", event.key, error)
            return
        known = (record.instance_id, address)
        if self._addresses.get(event.key) == known:
            return
        self._drop(event.key)
        self._addresses[event.key] = known
        self.subscriber.connect(address, record.instance_id)
        if self._on_publisher is not None:
            self._on_publisher(record.instance_id, True)

    def _drop(self, key: str) -> None:
        known = self._addresses.pop(key, None)
        if known is None:
            return
        publisher_id, address = known
        self.subscriber.disconnect(address)
        if self._on_publisher is not None:
            self._on_publisher(publisher_id, False)


def _prefix(channel: Channel) -> str:
    namespace, component, topic = channel
    return f"v1/event_channels/namespace/{namespace}/component/{component}/topic/{topic}/"
