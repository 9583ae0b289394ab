"""Event channels: publishers registered in discovery, subscriptions to them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec

from dynamo.config.runtime import RuntimeSettings
from dynamo.protocols.control import EVENT_CHANNELS, EventChannelRecord, record_decoder
from dynamo.runtime.discovery import Discovery, KeyEvent, Lease
from dynamo.runtime.events import (
    EventPlane,
    EventPublisher,
    EventSubscriber,
    ZmqPublisher,
    ZmqSubscriber,
)
from dynamo.runtime.events.plane import OnEvent, OnGap
from dynamo.runtime.process.paths import socket_path
from dynamo.runtime.process.sockets import advertised_host, bracketed, event_socket_name

Channel = tuple[str, str, str]
"""(namespace, component, topic)."""

OnPublisher = Callable[[int, bool], None]
"""(publisher id, True: added; False: removed)."""

ZMQ, NATS = "Zmq", "Nats"
"""The kinds of transport in a record."""

SOCKET_CHECK_S = 1.0
_decode = record_decoder(EventChannelRecord)
_ADDRESS = re.compile(r"ipc:///[^\0]{1,106}|tcp://[^\0]{1,255}:[0-9]{1,5}")
log = logging.getLogger(__name__)


class Publishers:
    """The publishers of this process, one per channel.

    ``granted`` returns the lease of this process. A UNIX socket whose file was removed is bound
    again within ``SOCKET_CHECK_S``.
    """

    def __init__(
        self,
        settings: RuntimeSettings,
        discovery: Discovery,
        granted: Callable[[], Awaitable[Lease]],
        instance_id: int,
        nats: EventPlane | None = None,
    ) -> None:
        self._nats = nats
        self._settings = settings
        self._discovery = discovery
        self._granted = granted
        self._instance_id = instance_id
        self._made: dict[Channel, EventPublisher] = {}
        self._socket_check: asyncio.TimerHandle | None = None

    async def get(self, channel: Channel) -> EventPublisher:
        """Return the publisher of ``channel``, registered under the lease of this process."""
        publisher = self._made.get(channel)
        if publisher is not None:
            return publisher
        lease = await self._granted()
        publisher = self._made.get(channel)  # another task may have made it during the await
        if publisher is None:
            publisher = self._make(channel)
            await self._register(channel, publisher, lease.id)
        return publisher

    def close(self) -> None:
        """Close all publishers."""
        if self._socket_check is not None:
            self._socket_check.cancel()
        for publisher in self._made.values():
            publisher.close()
        self._made.clear()

    def _make(self, channel: Channel) -> EventPublisher:
        publisher: EventPublisher
        if self._nats is not None:
            publisher = self._nats.publisher(channel, self._instance_id)
        else:
            publisher = ZmqPublisher(channel[2], self._instance_id, self._address())
            if self._socket_check is None:
                self._check_sockets()
        self._made[channel] = publisher
        return publisher

    def _check_sockets(self) -> None:
        for publisher in self._made.values():
            if isinstance(publisher, ZmqPublisher):
                publisher.restore_file()
        loop = asyncio.get_running_loop()
        self._socket_check = loop.call_later(SOCKET_CHECK_S, self._check_sockets)

    def _address(self) -> str:
        if self._settings.request_plane == "uds":
            name = event_socket_name(self._instance_id, len(self._made))
            return f"ipc://{socket_path(self._settings, name)}"
        host = self._settings.event_plane_host or self._settings.tcp_rpc_host
        # "*": ZeroMQ chooses a free port, which the address of the bound socket then has.
        return f"tcp://{bracketed(host)}:*"

    async def _register(self, channel: Channel, publisher: EventPublisher, lease_id: int) -> None:
        namespace, component, topic = channel
        address = publisher.address
        # The bound host may be a wildcard: register the one under which other boxes reach it.
        if address.startswith("tcp://"):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            host = advertised_host(host.strip("[]"), self._settings)
            address = f"tcp://{bracketed(host)}:{port}"
        record = EventChannelRecord(
            namespace=namespace,
            component=component,
            topic=topic,
            instance_id=self._instance_id,
            lease_id=lease_id,
            transport={"kind": ZMQ if self._nats is None else NATS, "endpoint": address},
        )
        key = f"{_prefix(channel)}{self._instance_id:x}"
        await self._discovery.put(key, msgspec.json.encode(record), lease_id)


class Subscription:
    """A subscription to all present and future publishers of ``channel``.

    Each publisher has its transport; a process without NATS skips those that need it, with a
    warning. ``over`` maps transports to the subscribers to use in place of new ones. ``on_end`` is
    called with :meth:`close` when it ends.
    """

    def __init__(
        self,
        discovery: Discovery,
        channel: Channel,
        on_event: OnEvent,
        on_gap: OnGap | None = None,
        on_publisher: OnPublisher | None = None,
        nats: EventPlane | None = None,
        over: Mapping[str, EventSubscriber] | None = None,
        on_end: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.channel = channel
        self._on_end = on_end
        self._on_event = on_event
        self._on_gap = on_gap
        self._on_publisher = on_publisher
        self._nats = nats
        self._subscribers: dict[str, EventSubscriber] = dict(over or {})
        self._followed: dict[str, _Followed] = {}
        self._watch = discovery.watch(_prefix(channel), self._on_key)

    def publishers(self) -> list[int]:
        """Return the ids of the known publishers."""
        return [followed.publisher_id for followed in self._followed.values()]

    async def ready(self) -> None:
        """Wait until the subscription connects to the existing publishers."""
        await self._watch.ready()

    def close(self) -> None:
        """Stop receiving; no callback runs after this."""
        self._watch.close()
        for subscriber in self._subscribers.values():
            subscriber.close()
        if self._on_end is not None:
            self._on_end(self.close)

    def _on_key(self, event: KeyEvent) -> None:
        if event.value is None:
            self._drop(event.key)
            return
        try:
            record = _decode(event.value)
            kind, address = _transport(record, event.key)
        except ValueError as error:
            log.warning("skipping the event channel %s: %s", event.key, error)
            self._drop(event.key)
            return
        followed = _Followed(record.instance_id, kind, address)
        if self._followed.get(event.key) == followed:
            return
        # Another address is another socket: forget the sequence of the old one first.
        self._drop(event.key)
        subscriber = self._subscriber(kind)
        if subscriber is None:
            log.warning(
                "worker %x publishes %s over %s, which this process does not support: start both "
                "with the same --event-plane",
                record.instance_id,
                self.channel[2],
                kind,
            )
            return
        try:
            subscriber.connect(address, record.instance_id)
        except ValueError as error:
            log.warning("skipping the event channel %s: %s", event.key, error)
            return
        self._followed[event.key] = followed
        if self._on_publisher is not None:
            self._on_publisher(record.instance_id, True)

    def _subscriber(self, kind: str) -> EventSubscriber | None:
        subscriber = self._subscribers.get(kind)
        if subscriber is None:
            topic = self.channel[2]
            if kind == ZMQ:
                subscriber = ZmqSubscriber(topic, self._on_event, self._on_gap)
            elif kind == NATS and self._nats is not None:
                subscriber = self._nats.subscriber(topic, self._on_event, self._on_gap)
            else:
                return None
            self._subscribers[kind] = subscriber
        return subscriber

    def _drop(self, key: str) -> None:
        followed = self._followed.pop(key, None)
        if followed is None:
            return
        self._subscribers[followed.kind].disconnect(followed.address)
        if self._on_publisher is not None:
            self._on_publisher(followed.publisher_id, False)


class _Followed(NamedTuple):
    publisher_id: int
    kind: str
    address: str


def _prefix(channel: Channel) -> str:
    namespace, component, topic = channel
    return f"{EVENT_CHANNELS}namespace/{namespace}/component/{component}/topic/{topic}/"


def _transport(record: EventChannelRecord, key: str) -> tuple[str, str]:
    """Return (kind, address) of the publisher at ``key``. ValueError: the record is bad."""
    if key.rpartition("/")[2] != f"{record.instance_id:x}":
        raise ValueError(f"it is the record of publisher {record.instance_id:x}")
    kind, address = record.transport.get("kind"), record.transport.get("endpoint")
    if kind is None or address is None:
        raise ValueError("its transport has no kind or no endpoint")
    if kind == ZMQ and not _ADDRESS.fullmatch(address):
        raise ValueError(f"{address[:200]!r} is neither ipc:///path nor tcp://host:port")
    return kind, address
