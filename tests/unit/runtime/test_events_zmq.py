"""The event plane between real sockets: order, gaps, late joiners, full queues, clean ends."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from dynamo.runtime.events import (
    FIRST_SEQUENCE,
    EventPublisher,
    EventSubscriber,
    ZmqPublisher,
    ZmqSubscriber,
    plane,
)

TIMEOUT_S = 20.0
TOPIC = "kv-events"


class Listener:
    """A subscriber that remembers, and can wait."""

    def __init__(self, topic: str = TOPIC) -> None:
        self.events: list[tuple[int, int, bytes]] = []
        self.gaps: list[tuple[int, int, int]] = []
        self.changed = asyncio.Event()
        self.subscriber = ZmqSubscriber(topic, self.on_event, lambda *gap: self.gaps.append(gap))

    def on_event(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        self.events.append((publisher_id, sequence, payload))
        self.changed.set()

    async def have(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.events) < count:
                self.changed.clear()
                await self.changed.wait()

    async def joined(self, publisher: ZmqPublisher) -> None:
        """Publish until the last event arrives, then clear the record."""
        async with asyncio.timeout(TIMEOUT_S):
            last = publisher.publish(b"hello?")
            while not self.events:
                await asyncio.sleep(0.005)
                last = publisher.publish(b"hello?")
            while self.events[-1][1] != last:
                self.changed.clear()
                await self.changed.wait()
        self.events.clear()
        self.gaps.clear()


def ipc(path: Path, name: str = "events") -> str:
    return f"ipc://{path / name}"


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_events_arrive_in_order_with_numbers(tmp_path: Path, kind: str) -> None:
    address = ipc(tmp_path) if kind == "ipc" else "tcp://127.0.0.1:*"
    publisher: EventPublisher = ZmqPublisher(TOPIC, 0xFEDC_BA98_7654_3210, address)
    listener = Listener()
    subscriber: EventSubscriber = listener.subscriber
    subscriber.connect(publisher.address)
    subscriber.connect(publisher.address)
    await listener.joined(publisher)  # type: ignore[arg-type]
    first, *_ = [publisher.publish(b"%d" % i) for i in range(2000)]
    await listener.have(2000)
    assert listener.events == [(0xFEDC_BA98_7654_3210, first + i, b"%d" % i) for i in range(2000)]
    assert listener.gaps == [] and publisher.dropped == 0 and subscriber.malformed == 0
    subscriber.close()
    publisher.close()


async def test_a_late_subscriber_sees_no_gap_until_it_loses_an_event(tmp_path: Path) -> None:
    publisher, listener = ZmqPublisher(TOPIC, 7, ipc(tmp_path)), Listener()
    for _ in range(10):
        publisher.publish(b"before the subscription")
    listener.subscriber.connect(publisher.address, 7)
    async with asyncio.timeout(TIMEOUT_S):
        while not listener.events:
            publisher.publish(b"x")
            await asyncio.sleep(0.005)
    assert listener.events[0][1] >= 10
    assert listener.gaps == [] and listener.subscriber.gaps == 0
    await listener.joined(publisher)
    order: list[str] = []
    listener.subscriber._on_gap = lambda *gap: order.append(f"gap {gap}")

    def on_event(publisher_id: int, sequence: int, payload: bytes) -> None:
        order.append("event")
        listener.on_event(publisher_id, sequence, payload)

    listener.subscriber._on_event = on_event
    expected = publisher._sequence
    publisher._sequence += 5
    publisher.publish(b"x")
    async with asyncio.timeout(TIMEOUT_S):
        while (gap := f"gap (7, {expected}, {expected + 5})") not in order:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert order[order.index(gap) + 1] == "event"
    listener.subscriber.close()
    publisher.close()


async def test_a_lost_event_and_a_restart_are_gaps(tmp_path: Path) -> None:
    publisher, listener = ZmqPublisher(TOPIC, 7, ipc(tmp_path)), Listener()
    listener.subscriber.connect(publisher.address)
    await listener.joined(publisher)
    expected = publisher._sequence
    publisher._sequence += 3
    publisher.publish(b"after the gap")
    await listener.have(1)
    assert listener.gaps == [(7, expected, expected + 3)]
    publisher._sequence = FIRST_SEQUENCE
    publisher.publish(b"restarted")
    await listener.have(2)
    assert listener.gaps[1:] == [(7, expected + 4, FIRST_SEQUENCE)]
    assert listener.subscriber.gaps >= 2
    listener.subscriber.close()
    publisher.close()


async def test_many_publishers_one_subscriber_each_with_its_own_numbers(tmp_path: Path) -> None:
    publishers = [ZmqPublisher(TOPIC, i, ipc(tmp_path, str(i))) for i in range(5)]
    listener = Listener()
    for publisher in publishers:
        listener.subscriber.connect(publisher.address, publisher.publisher_id)
    for publisher in publishers:
        await listener.joined(publisher)
    for _ in range(20):
        for publisher in publishers:
            publisher.publish(b"x")
    await listener.have(100)
    assert listener.gaps == []
    listener.subscriber.disconnect(publishers[0].address)
    listener.subscriber.disconnect(publishers[0].address)
    listener.events.clear()
    await asyncio.sleep(0.05)
    for publisher in publishers:
        publisher.publish(b"y")
    await listener.have(4)
    assert {event[0] for event in listener.events} == {1, 2, 3, 4}
    listener.events.clear()
    listener.subscriber.connect(publishers[0].address, 0)
    await listener.joined(publishers[0])
    assert listener.subscriber.gaps == 0, "what a publisher sent without subscriber is no gap"
    listener.subscriber.close()
    for publisher in publishers:
        publisher.close()


async def test_the_subscriber_may_come_first_and_the_publisher_again(tmp_path: Path) -> None:
    listener = Listener()
    listener.subscriber.connect(ipc(tmp_path))
    for life in range(2):
        publisher = ZmqPublisher(TOPIC, life, ipc(tmp_path))
        await listener.joined(publisher)
        publisher.close()
        await asyncio.sleep(0.05)
    listener.subscriber.close()


async def test_a_burst_is_delivered_in_several_loop_turns(tmp_path: Path) -> None:
    publisher, listener = ZmqPublisher(TOPIC, 1, ipc(tmp_path)), Listener()
    listener.subscriber.connect(publisher.address)
    await listener.joined(publisher)
    for _ in range(20_000):
        publisher.publish(bytes(100))
    largest, seen = 0, 0
    async with asyncio.timeout(TIMEOUT_S):
        while len(listener.events) < 20_000:
            largest, seen = max(largest, len(listener.events) - seen), len(listener.events)
            await asyncio.sleep(0)
    assert largest <= 2 * plane.MESSAGES_PER_TURN and listener.gaps == []
    listener.subscriber.close()
    publisher.close()


async def test_a_full_queue_drops_events_of_one_subscriber_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane, "HIGH_WATER_MESSAGES", 1000)
    publisher, quick, stalled = ZmqPublisher(TOPIC, 1, ipc(tmp_path)), Listener(), Listener()
    for listener in (quick, stalled):
        listener.subscriber.connect(publisher.address)
        await listener.joined(publisher)
    asyncio.get_running_loop().remove_reader(stalled.subscriber._descriptor)
    async with asyncio.timeout(TIMEOUT_S):
        sent = 0
        while not publisher.dropped or sent < 5000:
            quick.events.clear()
            for _ in range(100):
                publisher.publish(bytes(1000))
                sent += 1
            await quick.have(100)
    assert quick.gaps == [] and publisher.dropped > 0
    stalled.subscriber._schedule_drain()
    asyncio.get_running_loop().add_reader(stalled.subscriber._descriptor, stalled.subscriber._drain)
    await stalled.have(1000)
    async with asyncio.timeout(TIMEOUT_S):
        while not stalled.gaps:
            publisher.publish(b"again")
            await asyncio.sleep(0.005)
    publisher.close()
    for listener in (quick, stalled):
        listener.subscriber.close()


async def test_foreign_messages_are_counted_not_fatal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, listener = ZmqPublisher(TOPIC, 1, ipc(tmp_path)), Listener()
    listener.subscriber.connect(publisher.address)
    await listener.joined(publisher)
    topic, number = TOPIC.encode(), struct.pack(">Q", 1)
    for frames in (
        [topic],
        [topic, number],
        [topic, number, number],
        [topic, number, number, b"\x01\x00\x00\x00\x01\x80", b"a fifth frame"],
        [topic, b"short", number, b""],
        [topic, number, number, b""],
        [topic, number, number, b"\x02\x00\x00\x00\x00"],
        [topic, number, number, b"\x01\x00\x00\x00\x09x"],
        [topic, number, number, b"\x01\x00\x00\x00\x01\xc1"],
        [topic + b"-of-another-kind", number, number, b"\x01\x00\x00\x00\x01\x80"],
    ):
        publisher._socket.send_multipart(frames)
    publisher.publish(b"good")
    await listener.have(1)
    assert listener.subscriber.malformed == 10 and "malformed" in caplog.text
    assert listener.gaps == []
    listener.subscriber.close()
    publisher.close()


async def test_an_event_that_was_on_its_way_when_its_publisher_left_is_dropped(
    tmp_path: Path,
) -> None:
    """Else its number would be kept for ever."""
    way, left, listener = ZmqPublisher(TOPIC, 1, ipc(tmp_path)), ipc(tmp_path, "2"), Listener()

    def publish(publisher_id: int, sequence: int) -> None:
        numbers = (struct.pack(">Q", one) for one in (publisher_id, sequence))
        packed = plane.pack(publisher_id, sequence, TOPIC, b"")
        way._socket.send_multipart((TOPIC.encode(), *numbers, packed))

    listener.subscriber.connect(way.address)
    await listener.joined(way)
    listener.subscriber.connect(left, 5)
    publish(5, 0)
    await listener.have(1)
    listener.subscriber.disconnect(left)
    publish(5, 1)
    publish(6, 0)  # one that never left
    await listener.have(2)
    listener.subscriber.connect(left, 5)
    publish(5, 7)
    await listener.have(3)
    assert [event[:2] for event in listener.events] == [(5, 0), (6, 0), (5, 7)]
    assert listener.gaps == []
    listener.subscriber.close()
    way.close()


async def test_a_longer_topic_is_ignored(tmp_path: Path) -> None:
    ours, other = (
        ZmqPublisher(TOPIC, 1, ipc(tmp_path)),
        ZmqPublisher("kv-events-2", 2, ipc(tmp_path, "2")),
    )
    listener = Listener()
    listener.subscriber.connect(ours.address)
    listener.subscriber.connect(other.address)
    await listener.joined(ours)
    for _ in range(20):
        other.publish(b"not for us")
        await asyncio.sleep(0.002)
    ours.publish(b"for us")
    await listener.have(1)
    assert [event[2] for event in listener.events] == [b"for us"]
    listener.subscriber.close()
    ours.close()
    other.close()


async def test_a_failing_callback_does_not_end_the_subscription(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, listener = ZmqPublisher(TOPIC, 1, ipc(tmp_path)), Listener()
    listener.subscriber.connect(publisher.address)
    await listener.joined(publisher)
    real = listener.subscriber._on_event

    def fail_once(publisher_id: int, sequence: int, payload: bytes) -> None:
        listener.subscriber._on_event = real
        raise RuntimeError("cannot apply")

    listener.subscriber._on_event = fail_once
    publisher.publish(b"bad")
    publisher.publish(b"good")
    await listener.have(1)
    assert listener.events[0][2] == b"good" and "cannot apply" in caplog.text
    listener.subscriber.close()
    publisher.close()


async def test_a_callback_may_close_the_subscriber(tmp_path: Path) -> None:
    publisher, listener = ZmqPublisher(TOPIC, 1, ipc(tmp_path)), Listener()
    listener.subscriber.connect(publisher.address)
    await listener.joined(publisher)
    closed = asyncio.Event()

    def close(*event: object) -> None:
        listener.subscriber.close()
        closed.set()

    listener.subscriber._on_event = close
    for _ in range(10):
        publisher.publish(b"x")
    async with asyncio.timeout(TIMEOUT_S):
        await closed.wait()
    listener.subscriber.close()
    listener.subscriber.connect(publisher.address)
    listener.subscriber.disconnect(publisher.address)
    assert listener.subscriber.received >= 1
    publisher.close()


async def test_the_wire_is_the_documented_one(tmp_path: Path) -> None:
    publisher = ZmqPublisher(TOPIC, 258, ipc(tmp_path))
    raw: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    with raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.SUBSCRIBE, b"")
        raw.connect(publisher.address)
        while not raw.poll(5):
            sequence = publisher.publish(b"payload")
        topic, who, number, packed = raw.recv_multipart()
    assert (topic, who) == (b"kv-events", (258).to_bytes(8, "big"))
    assert int.from_bytes(number, "big") <= sequence
    assert packed[0] == 1 and int.from_bytes(packed[1:5], "big") == len(packed) - 5
    envelope = msgspec.msgpack.decode(packed[5:])
    assert envelope["publisher_id"] == 258 and envelope["topic"] == "kv-events"
    assert envelope["payload"] == b"payload" and envelope["published_at"] > 1_600_000_000_000
    publisher.close()


async def test_closing_leaves_no_file_and_is_final(tmp_path: Path) -> None:
    publisher = ZmqPublisher(TOPIC, 1, ipc(tmp_path))
    assert (tmp_path / "events").exists()
    publisher.close()
    publisher.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish(b"x")


def test_an_address_in_use_is_an_error_at_once() -> None:
    first = ZmqPublisher(TOPIC, 1, "tcp://127.0.0.1:*")
    with pytest.raises(zmq.ZMQError):
        ZmqPublisher(TOPIC, 2, first.address)
    first.close()


def test_a_process_that_closes_nothing_still_exits(tmp_path: Path) -> None:
    script = f"""
import asyncio
from dynamo.runtime.events import ZmqPublisher, ZmqSubscriber
async def main():
    publisher = ZmqPublisher("t", 1, "ipc://{tmp_path}/a")
    subscriber = ZmqSubscriber("t", print)
    subscriber.connect("ipc://{tmp_path}/missing")
    subscriber.connect(publisher.address)
    await asyncio.sleep(0.05)
    for _ in range(100):
        publisher.publish(bytes(100000))
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=20, check=False)
    assert done.returncode == 0


async def test_a_removed_socket_is_bound_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    publisher = ZmqPublisher(TOPIC, 7, ipc(directory))
    early, late = Listener(), Listener()
    early.subscriber.connect(publisher.address)
    await early.joined(publisher)
    publisher.restore_file()
    assert not caplog.text
    directory.rename(tmp_path / "away")
    for _ in range(2):
        publisher.restore_file()
    assert caplog.text.count("new subscribers cannot connect") == 1
    directory.mkdir()
    publisher.restore_file()
    assert caplog.text.count("was removed, bound again") == 1
    late.subscriber.connect(publisher.address)
    await late.joined(publisher)
    await early.have(1)
    assert not early.gaps
    for closing in (early.subscriber, late.subscriber, publisher):
        closing.close()
    assert not list(directory.iterdir())


async def test_a_socket_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        publisher = ZmqPublisher(TOPIC, 1, ipc(tmp_path))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "events").stat().st_mode) & 0o077 == 0
    publisher.close()
