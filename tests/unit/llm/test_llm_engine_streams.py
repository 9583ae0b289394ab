"""The relay of an engine's events: losses, replays, repeated and late messages, restarts."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from dynamo.llm import engine_relay
from dynamo.llm.engine_relay import EngineEventRelay

TIMES = itertools.count()


def frames(number: int, events: list[Any]) -> list[bytes]:
    payload = msgspec.msgpack.encode([float(next(TIMES)), events, 0])
    return [b"", number.to_bytes(8, "big"), payload]


class Recorded:
    """A relay, and what it called."""

    def __init__(self, endpoint: str = "ipc://unused", replay: str | None = None) -> None:
        self.blocks: list[int] = []
        self.resets = self.dropped = 0
        self.relay = EngineEventRelay(
            endpoint, "", self.on_events, self.on_dropped, self.on_malformed, self.on_reset, replay
        )

    def on_events(self, rank: int | None, events: list[Any]) -> None:
        self.blocks += [block for event in events for block in event.block_hashes]

    def on_dropped(self, count: int) -> None:
        self.dropped += count

    def on_malformed(self, error: Exception) -> None:
        pytest.fail(str(error))

    def on_reset(self) -> None:
        self.resets += 1


def removed(number: int) -> list[bytes]:
    return frames(number, [["BlockRemoved", [number]]])


async def answer(socket: zmq.asyncio.Socket, sent: list[list[bytes]]) -> None:
    """Replay as vLLM: an empty frame, topic, number and payload each; then the number -1."""
    while True:
        client, empty, start = await socket.recv_multipart()
        for message in sent[int.from_bytes(start, "big") :]:
            await socket.send_multipart([client, empty, *message])
        await socket.send_multipart([client, empty, b"", b"\xff" * 8, b""])


async def test_lost_messages_are_read_from_the_replay_socket(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/replay"
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.bind(address)
    seen = Recorded(replay=address)
    sent = [removed(number) for number in range(6)]
    task = asyncio.create_task(answer(socket, sent))
    async with asyncio.timeout(20):
        await seen.relay._on_message(sent[0])
        await seen.relay._on_message(sent[3])
    task.cancel()
    for message in sent[4:]:  # replayed already
        await seen.relay._on_message(message)
    assert (seen.blocks, seen.resets, seen.dropped) == ([*range(6)], 0, 0)
    await seen.relay._on_message(removed(0))
    assert seen.blocks[-1] == 0 and seen.resets == 1
    socket.close(linger=0)


async def test_an_endpoint_without_replay_is_not_asked_at_each_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_relay, "REPLAY_TIMEOUT_S", 0.05)
    seen = Recorded(replay=f"ipc://{tmp_path}/none")
    for number in (0, 2, 4, 6):
        await seen.relay._on_message(removed(number))
    assert (seen.resets, seen.dropped, seen.blocks) == (3, 3, [0, 2, 4, 6])
    assert caplog.text.count("no complete replay") == 1
    wrong = Recorded(replay="nonsense")
    for number in (0, 2):
        await wrong.relay._on_message(removed(number))
    assert wrong.resets == 1


@pytest.mark.parametrize("bad", ["malformed", "large", "other", "short"])
async def test_a_replay_that_does_not_continue_the_stream_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    monkeypatch.setattr(engine_relay, "REPLAY_TIMEOUT_S", 20.0)
    address = f"ipc://{tmp_path}/replay"
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.bind(address)
    sent = [frames(number, [["BlockRemoved", [number] * 40]]) for number in range(5)]
    seen = Recorded(replay=address)
    replayed = list(sent)
    if bad == "malformed":
        replayed[2] = [b"", *sent[2][1:2], b"\xc1"]
    elif bad == "short":
        replayed[2] = [b"", *sent[2][1:2]]
    elif bad == "large":
        monkeypatch.setattr(engine_relay, "REPLAY_BYTES", 100)
    else:  # another engine, that has sent as many messages
        replayed = [removed(number) for number in range(5)]

    async with asyncio.timeout(20):
        await seen.relay._on_message(sent[0])
        await seen.relay._on_message(sent[1])
        task = asyncio.create_task(answer(socket, replayed))
        await seen.relay._on_message(sent[4])
    task.cancel()
    assert seen.resets == 1
    assert seen.blocks[-1] == 4
    socket.close(linger=0)


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_new_connection_that_continues_the_numbers_is_a_new_engine(
    tmp_path: Path, restarts: bool
) -> None:
    address = f"ipc://{tmp_path}/engine"
    context = zmq.asyncio.Context.instance()

    async def publish(number: int) -> None:
        while number not in seen.blocks:
            await socket.send_multipart(removed(number))
            await asyncio.sleep(0.01)

    seen = Recorded(address)
    socket = context.socket(zmq.PUB)
    socket.bind(address)
    task = asyncio.create_task(seen.relay.run())
    async with asyncio.timeout(20):
        await publish(0)
        seen.resets = 0
        seen.relay._newest = 0
        if restarts:
            socket.close(linger=0)
            socket = context.socket(zmq.PUB)
            socket.bind(address)
        await publish(1)
    assert seen.resets >= restarts
    task.cancel()
    socket.close(linger=0)
