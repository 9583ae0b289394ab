"""The relay beside a PUB and a ROUTER socket, as vLLM and SGLang have them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from until import Changes

from dynamo.llm import engine_relay
from dynamo.llm.engine_events import MAX_RANKS
from dynamo.llm.engine_relay import EngineEventRelay

END = b"\xff" * 8


def payload(block: int, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([time.time(), [["BlockRemoved", [block]]], rank])


class Engine:
    """Numbers its messages, keeps them, and answers requests for them."""

    def __init__(self, path: Path, topic: bool = True) -> None:
        self.address, self.replay = f"ipc://{path}/events", f"ipc://{path}/replay"
        self.kept: list[bytes] = []
        self.topic = topic
        self.pause_s = 0.0
        self.asked: list[int] = []
        self.bind()

    def bind(self) -> None:
        context = zmq.asyncio.Context.instance()
        self.pub, self.router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        for socket, address in ((self.pub, self.address), (self.router, self.replay)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        self.task = asyncio.create_task(self.answer())

    async def answer(self) -> None:
        topic = [b""] if self.topic else []
        while True:
            client, empty, start = await self.router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for number in range(self.asked[-1], len(self.kept)):
                await asyncio.sleep(self.pause_s)
                frames = [number.to_bytes(8, "big"), self.kept[number]]
                await self.router.send_multipart([client, empty, *topic, *frames])
            await self.router.send_multipart([client, empty, *topic, END, b""])

    async def send(self, block: int, lost: bool = False) -> None:
        number = len(self.kept)
        self.kept.append(payload(block))
        if not lost:
            await self.repeat(number)

    async def repeat(self, number: int) -> None:
        await self.pub.send_multipart([b"", number.to_bytes(8, "big"), self.kept[number]])

    def stop(self) -> None:
        self.task.cancel()
        self.pub.close()
        self.router.close()


class Received:
    """What the relay of an engine has called."""

    def __init__(self, address: str, replay: str | None) -> None:
        self.calls: list[Any] = []
        self.changes = Changes()
        self.relay = EngineEventRelay(
            address,
            "",
            lambda rank, events: self.add(*(each for one in events for each in one.block_hashes)),  # type: ignore[union-attr]
            lambda count: self.add(f"{count} lost"),
            lambda error: self.add(str(error)),
            lambda: self.add("reset"),
            replay,
        )

    def add(self, *calls: Any) -> None:
        self.calls += calls
        self.changes.changed()

    async def until(self, condition: Callable[[list[Any]], bool]) -> None:
        await self.changes.until(lambda: condition(self.calls))


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.stop()


async def connected(engine: Engine, replay: bool = True) -> tuple[Received, asyncio.Task[None]]:
    received = Received(engine.address, engine.replay if replay else None)
    task = asyncio.create_task(received.relay.run())
    async with asyncio.timeout(20):
        assert await engine.pub.recv() == b"\x01"
    return received, task


@pytest.mark.parametrize("topic", [True, False])
async def test_a_quiet_engine_is_asked_when_it_is_found(tmp_path: Path, topic: bool) -> None:
    """SGLang and earlier versions of vLLM answer without a topic."""
    engine = Engine(tmp_path, topic)
    for block in range(3):
        await engine.send(block, lost=True)
    received, task = await connected(engine)
    await received.until(lambda calls: calls == [0, 1, 2])
    await engine.send(3, lost=True)
    await engine.send(4)
    await received.until(lambda calls: calls == [0, 1, 2, 3, 4])
    assert engine.asked == [0, 2]
    task.cancel()
    engine.stop()


@pytest.mark.parametrize("replay", [True, False])
async def test_a_restarted_engine_that_is_quiet_has_no_blocks(engine: Engine, replay: bool) -> None:
    received, task = await connected(engine, replay)
    await engine.send(7)
    await received.until(lambda calls: calls == [7])
    engine.stop()
    engine.kept.clear()
    engine.bind()
    await received.until(lambda calls: calls == [7, "reset"])
    task.cancel()


async def test_a_lost_connection_costs_nothing_with_a_replay(engine: Engine) -> None:
    received, task = await connected(engine)
    await engine.send(7)
    await received.until(lambda calls: calls == [7])
    engine.stop()
    await engine.send(8, lost=True)
    engine.bind()
    await received.until(lambda calls: calls == [7, 8])
    task.cancel()


async def test_a_slow_replay_counts_as_long_as_it_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_relay, "REPLAY_TIMEOUT_S", 0.5)
    received, task = await connected(engine)
    await engine.send(0)
    await received.until(lambda calls: calls == [0])
    engine.pause_s = 0.2
    for block in range(1, 6):
        await engine.send(block, lost=True)
    for block in (6, 7):
        await engine.send(block)
    await received.until(lambda calls: calls == [*range(8)])
    task.cancel()


async def test_repeated_and_late_messages_are_ignored(engine: Engine) -> None:
    received, task = await connected(engine, replay=False)
    for block in range(3):
        await engine.send(block)
    for number in (2, 0):
        await engine.repeat(number)
    await engine.send(3, lost=True)
    await engine.send(4)
    await engine.repeat(3)  # it counts as lost: what it says may be undone
    await engine.send(5)
    await received.until(lambda calls: calls[-1:] == [5])
    assert received.calls == [0, 1, 2, "1 lost", "reset", 4, 5]
    engine.kept.clear()
    await engine.send(6)  # the numbers start again
    await received.until(lambda calls: calls[-1:] == [6])
    assert received.calls[-2:] == ["reset", 6]
    task.cancel()


@pytest.mark.parametrize("rank", [0, MAX_RANKS])
async def test_a_malformed_message_clears_at_once(engine: Engine, rank: int) -> None:
    received, task = await connected(engine, replay=False)
    await engine.send(0)
    engine.kept.append(payload(1, rank) if rank else b"\xc1")
    await engine.repeat(1)
    await received.until(lambda calls: calls == [0, "1 lost", "reset"])
    await engine.send(2)
    await received.until(lambda calls: calls == [0, "1 lost", "reset", 2])
    task.cancel()


async def test_a_server_that_kept_its_blocks_is_asked_again(engine: Engine) -> None:
    """It did not answer for a while, so its blocks were cleared."""
    received, task = await connected(engine)
    await engine.send(7)
    await received.until(lambda calls: calls == [7])
    received.relay.cleared(time.time())
    received.relay.ask_again()
    await engine.send(8)
    await received.until(lambda calls: calls == [7, 7, 8])
    await engine.send(9)
    await received.until(lambda calls: calls == [7, 7, 8, 9])
    task.cancel()


async def test_what_was_sent_before_a_clear_is_ignored() -> None:
    received = Received("ipc://unused", None)
    frames = [[b"", number.to_bytes(8, "big"), payload(number)] for number in range(2)]
    received.relay.cleared(time.time())
    frames.append([b"", (2).to_bytes(8, "big"), payload(2)])
    old = msgspec.msgpack.encode([1.5, [["BlockRemoved", [3]]]])  # of another clock
    frames.append([b"", (3).to_bytes(8, "big"), old])
    for message in frames:
        await received.relay._on_message(message)
    assert received.calls == [2, 3]
