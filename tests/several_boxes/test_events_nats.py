"""The event plane over a real nats-server: order, gaps, outages, overload, authentication."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from boxes import Nats, needs_nats
from certificates import Authority, needs_openssl, replace_file
from deployment import free_port

from dynamo.config.runtime import NatsSettings, RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.protocols.control import EventChannelRecord
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery import MemoryDiscovery

nats = pytest.importorskip("nats")
pytestmark = needs_nats

from dynamo.runtime.events.nats import link as nats_link  # noqa: E402
from dynamo.runtime.events.nats.plane import NatsPlane, NatsPublisher, NatsSubscriber  # noqa: E402

CHANNEL = ("ns", "comp.with dots", "kv-events")
PATIENCE_S = 20.0
Make = Callable[[], NatsPlane]


@pytest.fixture
def private_server(tmp_path: Path) -> Iterator[Nats]:
    """A server for one test."""
    server = Nats(tmp_path)
    server.start()
    yield server
    server.kill()


class Listener:
    """A subscriber that remembers, and can wait."""

    def __init__(self, plane: NatsPlane, *publishers: NatsPublisher) -> None:
        self.events: list[tuple[int, int, bytes]] = []
        self.gaps: list[tuple[int, int, int]] = []
        self.changed = asyncio.Event()
        self.subscriber: NatsSubscriber = plane.subscriber(
            CHANNEL[2], self.on_event, lambda *gap: self.gaps.append(gap)
        )
        for publisher in publishers:
            self.subscriber.connect(publisher.address, publisher.publisher_id)

    def on_event(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        self.events.append((publisher_id, sequence, payload))
        self.changed.set()

    async def have(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.events) < count:
                self.changed.clear()
                await self.changed.wait()

    async def joined(self, publisher: NatsPublisher) -> None:
        """Publish until the last event arrives, then clear the record."""
        async with asyncio.timeout(PATIENCE_S):
            last = publisher.publish(b"hello?")
            while not self.events:
                await asyncio.sleep(0.01)
                last = publisher.publish(b"hello?")
            while self.events[-1][1] != last:
                self.changed.clear()
                await self.changed.wait()
        self.events.clear()
        self.gaps.clear()


async def planes(server: Nats) -> AsyncIterator[Make]:
    made: list[NatsPlane] = []

    def build() -> NatsPlane:
        made.append(NatsPlane(NatsSettings(servers=server.url)))
        return made[-1]

    yield build
    for plane in made:
        await plane.close()
        await plane.close()


@pytest.fixture
async def make(nats_server: Nats) -> AsyncIterator[Make]:
    """Planes on the shared server."""
    async for build in planes(nats_server):
        yield build


@pytest.fixture
async def make_private(private_server: Nats) -> AsyncIterator[Make]:
    """Planes on the server of this test."""
    async for build in planes(private_server):
        yield build


async def started(make: Make) -> tuple[NatsPlane, NatsPlane]:
    one, two = make(), make()
    await one.start()
    await two.start()
    return one, two


async def test_events_arrive_in_order_with_numbers(make: Make) -> None:
    one, two = await started(make)
    publisher = one.publisher(CHANNEL, 0xFEDC_BA98_7654_3210)
    assert publisher.address == "dynamo.events.ns.comp_with_dots.kv-events.fedcba9876543210"
    listener = Listener(two, publisher, publisher)
    await listener.joined(publisher)
    first, *_ = [publisher.publish(b"%d" % i) for i in range(3000)]
    await listener.have(3000)
    assert listener.events == [(0xFEDC_BA98_7654_3210, first + i, b"%d" % i) for i in range(3000)]
    assert listener.gaps == [] and publisher.dropped == 0
    listener.subscriber.disconnect(publisher.address)
    listener.events.clear()
    publisher.publish(b"without subscriber")
    await asyncio.sleep(0.05)
    assert listener.events == []
    listener.subscriber.connect(publisher.address, publisher.publisher_id)
    await listener.joined(publisher)
    assert listener.subscriber.gaps == 0, "what was sent without subscriber is no gap"
    publisher.close()
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish(b"x")


async def test_a_late_subscriber_sees_no_gap(make: Make) -> None:
    one, two = await started(make)
    publisher = one.publisher(CHANNEL, 7)
    for _ in range(10):
        publisher.publish(b"before the subscription")
    await asyncio.sleep(0.1)
    listener = Listener(two, publisher)
    async with asyncio.timeout(PATIENCE_S):
        while not listener.events:
            publisher.publish(b"x")
            await asyncio.sleep(0.005)
    assert listener.events[0][1] >= 10 and listener.gaps == []


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_events_lost_in_an_outage_are_a_gap(
    make_private: Make, private_server: Nats, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(nats_link, "PING_S", 0.2)
    monkeypatch.setattr(nats_link, "PING_TIMEOUT_S", 0.5)
    monkeypatch.setattr(nats_link, "HIGH_WATER_MESSAGES", 50)
    one, two = await started(make_private)
    publisher = one.publisher(CHANNEL, 7)
    listener = Listener(two, publisher)
    await listener.joined(publisher)
    if how == "killed":
        private_server.kill()
        async with asyncio.timeout(PATIENCE_S):
            while one.link._client is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    else:
        private_server.freeze()
    lost_from = publisher._sequence
    for i in range(200):
        publisher.publish(b"%d" % i)
        if how == "frozen":
            await asyncio.sleep(0.02)
    assert publisher.dropped > 0 or how == "frozen"
    if how == "killed":
        private_server.start()
    else:
        private_server.thaw()
    async with asyncio.timeout(PATIENCE_S):
        while not listener.events or listener.events[-1][2] != b"again":
            publisher.publish(b"again")
            await asyncio.sleep(0.02)
    assert listener.gaps and listener.gaps[0][1] >= lost_from
    assert one.link.connected >= 2 and two.link.connected >= 2
    numbers = [event[1] for event in listener.events]
    assert numbers == sorted(set(numbers)), "nothing twice, nothing out of order"
    await listener.joined(publisher)
    publisher.publish(b"after the outage")
    await listener.have(1)
    assert listener.gaps == []


async def test_overflow_of_a_subscriber_is_a_counted_gap(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = await started(make)
    publisher = one.publisher(CHANNEL, 7)
    with monkeypatch.context() as small:
        small.setattr(nats_link, "HIGH_WATER_MESSAGES", 8)
        slow = Listener(two, publisher)
        await slow.joined(publisher)
    quick = Listener(one, publisher)
    await quick.joined(publisher)
    slow.gaps.clear()
    for _ in range(2000):
        publisher.publish(b"y" * 20)
    await quick.have(2000)
    assert quick.gaps == []
    async with asyncio.timeout(PATIENCE_S):
        while not slow.gaps:
            publisher.publish(b"again")
            await asyncio.sleep(0.01)
    assert two.link.lost > 0 and slow.subscriber.gaps > 0 and "reads too slowly" in caplog.text


async def test_an_oversized_event_is_a_single_gap(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = await started(make)
    publisher = one.publisher(CHANNEL, 7)
    listener = Listener(two, publisher)
    await listener.joined(publisher)
    number = publisher.publish(bytes(2 << 20))
    publisher.publish(b"after")
    await listener.have(1)
    assert listener.gaps == [(7, number, number + 1)] and "max_payload" in caplog.text


async def test_foreign_messages_are_counted_not_fatal(
    make: Make, nats_server: Nats, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = await started(make)
    publisher = one.publisher(CHANNEL, 7)
    listener = Listener(two, publisher)
    await listener.joined(publisher)
    client = await nats.connect(nats_server.url)
    for data in (b"", b"\x02\0\0\0\0", b"\x01\0\0\0\x09x", b"\x01\0\0\0\x01\xc1"):
        await client.publish(publisher.address, data)
    await client.flush()
    await client.close()
    publisher.publish(b"good")
    async with asyncio.timeout(PATIENCE_S):
        while not listener.events or listener.subscriber.malformed < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert listener.subscriber.malformed == 4 and "malformed" in caplog.text


@pytest.mark.parametrize("how", ["user", "token"])
async def test_authentication(tmp_path: Path, how: str) -> None:
    flags = ("--user", "me", "--pass", "secret") if how == "user" else ("--auth", "secret")
    server = Nats(tmp_path, "127.0.0.1", *flags)
    server.start()
    try:
        url = server.url.replace("//", "//me:hush@")
        stranger = NatsPlane(NatsSettings(servers=url, start_timeout_s=30))
        with pytest.raises(ConfigError, match=r"cannot use NATS .*Authorization.*NATS_AUTH") as no:
            await stranger.start()
        assert "hush" not in no.value.message
        await stranger.close()
        settings = (
            NatsSettings(servers=server.url, username="me", password="secret")
            if how == "user"
            else NatsSettings(servers=server.url, token="secret")
        )
        plane = NatsPlane(settings)
        await plane.start()
        publisher = plane.publisher(CHANNEL, 1)
        await Listener(plane, publisher).joined(publisher)
        await plane.close()
    finally:
        server.kill()


@needs_openssl
async def test_renewed_certificates_are_for_the_next_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(nats_link, "PING_S", 0.05)
    (tmp_path / "renewed").mkdir()
    old, new = Authority(tmp_path), Authority(tmp_path / "renewed")
    (cert, key), client = old.sign("server"), old.sign("client")
    trusted = str(tmp_path / "trusted.pem")
    replace_file(trusted, Path(old.ca).read_bytes())
    flags = ("--tls", "--tlsverify", "--tlscert", cert, "--tlskey", key, "--tlscacert", old.ca)
    server = Nats(tmp_path, "127.0.0.1", *flags)
    server.start()
    plane = NatsPlane(
        NatsSettings(servers=server.url, ca=trusted, client_cert=client[0], client_key=client[1])
    )
    try:
        await plane.start()
        publisher = plane.publisher(CHANNEL, 1)
        listener = Listener(plane, publisher)
        await listener.joined(publisher)
        replace_file(trusted, b"half a certifi")
        await logged(caplog, "keeping what was loaded before")
        server.kill()
        server.start()
        await listener.joined(publisher)
        server.kill()
        renewed = (*new.sign("server"), *new.sign("client"), new.ca, new.ca)
        for before, after in zip((cert, key, *client, old.ca, trusted), renewed, strict=True):
            replace_file(before, Path(after).read_bytes())
        server.start()
        await listener.joined(publisher)
        await logged(caplog, "reloaded")
    finally:
        await plane.close()
        server.kill()


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while text not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_unreachable_nats_at_start_is_a_config_error() -> None:
    port = free_port()
    url = f"nats://127.0.0.1:{port}"
    plane = NatsPlane(NatsSettings(servers=url, start_timeout_s=0.6))
    with pytest.raises(ConfigError, match=rf"cannot use NATS at {url}.*NATS_SERVER"):
        await plane.start()
    await plane.close()


@pytest.mark.parametrize("server", ["nats://host:port", "nats://", "me:secret@host:x", "host:0"])
async def test_an_invalid_address_is_a_config_error(server: str) -> None:
    link = nats_link.NatsLink(NatsSettings(servers=server))
    with pytest.raises(ConfigError, match="NATS_SERVER must be like nats://host:4222") as no:
        await link.start()
    assert "secret" not in str(no.value)
    await link.close()


async def test_a_subscription_follows_each_publisher_over_its_own_transport(
    nats_server: Nats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NATS_SERVER", nats_server.url)
    store = MemoryDiscovery().store
    runtimes = [
        DistributedRuntime(
            settings=RuntimeSettings(
                discovery_backend="mem", event_plane=plane, request_plane="tcp"
            ),
            discovery=MemoryDiscovery(store),
        )
        for plane in ("nats", "zmq", "nats", "zmq")
    ]
    nats_worker, zmq_worker, with_nats, without_nats = runtimes
    received: dict[str, set[int]] = {"both": set(), "zmq": set()}
    for name, listener in (("both", with_nats), ("zmq", without_nats)):
        await listener.start()
        seen = received[name]
        listener.subscribe(
            "ns", "c", "t", lambda publisher_id, *_, seen=seen: seen.add(publisher_id)
        )
    publishers = [await one.publisher("ns", "c", "t") for one in (nats_worker, zmq_worker)]
    records = [
        msgspec.json.decode(value, type=EventChannelRecord).transport["kind"]
        for value in (await zmq_worker.discovery.list("v1/event_channels/")).values()
    ]
    assert sorted(records) == ["Nats", "Zmq"]
    ids = {nats_worker.instance_id, zmq_worker.instance_id}
    async with asyncio.timeout(PATIENCE_S):
        while received != {"both": ids, "zmq": {zmq_worker.instance_id}}:
            for publisher in publishers:
                publisher.publish(b"x")
            await asyncio.sleep(0.01)
    assert "over Nats, which this process does not support" in caplog.text
    for one in runtimes:
        await one.close()


async def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "dynamo.runtime.events.nats.plane")
    monkeypatch.delitem(sys.modules, "dynamo.runtime.events.nats.link")
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(ConfigError, match=r"pip install 'dynamo-appliance\[nats\]'"):
        DistributedRuntime(settings=RuntimeSettings(discovery_backend="mem", event_plane="nats"))


async def test_an_nkey_without_its_package_is_a_config_error(
    nats_server: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "nkeys", None)
    plane = NatsPlane(NatsSettings(servers=nats_server.url, nkey="SUAM"))
    with pytest.raises(ConfigError, match="need nkeys"):
        await plane.start()
    await plane.close()
