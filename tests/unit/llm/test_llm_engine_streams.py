"""Random event streams of a model of vLLM's block pool: the index has what the pool has."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from oracle.ingest import Counts

from dynamo._fast.radix import RadixTree
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.llm import KvEventPublisher, engine_events
from dynamo.llm.engine_events import EngineEventRelay
from dynamo.protocols.kv import STORAGE_TIERS, KvEventBatch, KvQuery
from dynamo.router.caches.indexer import Indexer, Recovery
from dynamo.runtime import DistributedRuntime

B = 4
MEDIA = {"GPU": "device", "CPU": "host_pinned"}


class Pool:
    """The copies of each block by medium, and the messages that vLLM would publish."""

    def __init__(self, source: Random) -> None:
        self.source = source
        self.copies = {medium: Counter[int]() for medium in MEDIA}
        self.sent: list[list[Any]] = []
        self.states = Counter[str]()

    def step(self) -> list[Any]:
        """Return the events of one step of the scheduler."""
        kind = self.source.choices(("store", "remove", "clear", "window"), (10, 8, 0.2, 2))[0]
        medium = self.source.choice([*MEDIA])
        if kind == "store":
            return self._store(medium)
        self.states[kind] += 1
        if kind == "clear":
            for held in self.copies.values():
                held.clear()
            return [{"type": "AllBlocksCleared"}]
        if kind == "window":  # the tokens of a span, the block that is left
            return [self._stored([1, 2, 3], 2, None, "GPU", 0, "sliding_window")]
        held = self.copies[medium]
        gone = self.source.sample(sorted(held), min(len(held), self.source.randrange(1, 4)))
        self.states["copy removed"] += sum(held[block] > 1 for block in gone)
        self.states["last removed"] += sum(held[block] == 1 for block in gone)
        self.copies[medium] = held - Counter(gone)
        event = {"type": "BlockRemoved", "block_hashes": gone, "medium": medium, "group_idx": 1}
        window = {**event, "block_hashes": [*range(1000)], "group_idx": 0}
        return [event, window]

    def _store(self, medium: str) -> list[Any]:
        root = self.source.randrange(1, 4)
        chain = [root]
        for _ in range(self.source.randrange(5)):
            chain.append(chain[-1] * 4 + self.source.randrange(3))
        held = self.copies[medium]
        missing = next((n for n, block in enumerate(chain) if not held[block]), len(chain) - 1)
        start = self.source.randrange(missing + 1)
        self.states["copied"] += sum(held[block] > 0 for block in chain[start:])
        self.states[medium] += 1
        held.update(chain[start:])
        return [self._stored(chain, start, None if not start else chain[start - 1], medium)]

    def _stored(
        self,
        chain: list[int],
        start: int,
        parent: int | None,
        medium: str,
        group: int = 1,
        kind: str = "full_attention",
    ) -> dict[str, Any]:
        blocks = chain[start:]
        first = 0 if kind == "sliding_window" else start
        return {
            "type": "BlockStored",
            "block_hashes": blocks,
            "parent_block_hash": parent,
            "token_ids": [block for block in chain[first:] for _ in range(B)],
            "block_size": B,
            "lora_id": None,
            "medium": medium,
            "extra_keys": [["salt"] if chain[0] == 3 and not parent else None] + [None] * 9,
            "group_idx": group,
            "kv_cache_spec_kind": kind,
        }

    def held(self) -> set[tuple[str, int]]:
        return {(MEDIA[medium], block) for medium, held in self.copies.items() for block in +held}

    def counts(self) -> list[int]:
        return [len(+held) for held in self.copies.values()]


class Replaying(EngineEventRelay):
    """A relay whose engine replays ``sent`` at once; None: it has no replay endpoint."""

    sent: list[list[bytes]] | None = None

    async def _replay(self, start: int) -> list[list[bytes]]:
        return (self.sent or [])[start:]


TIMES = itertools.count()


def frames(number: int, events: list[Any]) -> list[bytes]:
    payload = msgspec.msgpack.encode([float(next(TIMES)), events, 0])
    return [b"", number.to_bytes(8, "big"), payload]


def counts(tree: RadixTree) -> list[int]:
    """Return how many blocks each tier has, also those without their parents."""
    return [tree.held(tree.slot(0, 0, tier)) for tier in range(len(MEDIA))]


def contents(tree: RadixTree) -> set[tuple[str, int]]:
    return {
        (STORAGE_TIERS[tier], block)
        for _, _, _, blocks, _, tier in tree.dump_tiers()
        for block in blocks
    }


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("seed", range(6))
async def test_the_index_has_what_the_engine_has(tmp_path: Path, seed: int, replays: bool) -> None:
    settings = RuntimeSettings(namespace="ns", state_dir=str(tmp_path / "state"))
    runtime = DistributedRuntime(settings=settings, system=SystemSettings(grace_period_s=0))
    publisher = KvEventPublisher(runtime.endpoint("ns.comp.generate"), kv_block_size=B)
    relay = Replaying(
        "ipc://engine",
        "",
        publisher._on_engine_events,
        lambda count: None,
        lambda error: pytest.fail(str(error)),
        publisher._on_reset,
        "ipc://replay" if replays else None,
    )
    source = Random(seed)
    pool = Pool(source)
    sent: list[list[bytes]] = []
    relay.sent = sent if replays else None
    log = publisher._sender.event_log(0)
    asked: list[Recovery] = []
    tree = RadixTree()
    router = Indexer(tree, asked.append, Counts())
    router.add(1, 0, tree.slot(1, 0))
    router.recovered(asked.pop(), log.dump())
    applied = 0
    for number in range(600):
        if source.random() < 0.02:
            pool.states["restarted"] += 1
            pool.copies = {medium: Counter() for medium in MEDIA}
            seen = relay._expected or 0
            sent.clear()
            if source.random() < 0.5:  # the first message that arrives continues the old numbers
                pool.states["numbers continue"] += 1
                sent += [frames(n, pool.step()) for n in range(seen + source.randrange(3))]
            # Without a gap, only the connection shows it.
            relay._disconnected = not (replays and len(sent) > seen and source.random() < 0.5)
        events = pool.step()
        sent.append(frames(len(sent), events))
        if source.random() < 0.02 and len(sent) > 1:
            pool.states["lost"] += 1
            continue
        await relay._on_message(sent[-1])
        fresh = [event for event in log._ring if event.event_id > applied]
        applied = log.last_event_id
        if source.random() < 0.1:
            pool.states["router lost"] += bool(fresh)
        else:
            router.apply(KvEventBatch(1, fresh))
        if replays:
            assert counts(log._tree) == pool.counts(), number
        else:
            assert all(a <= b for a, b in zip(counts(log._tree), pool.counts(), strict=True))
        assert contents(log._tree) <= pool.held(), number
        router.verify()
        while asked:
            query = asked.pop()
            router.recovered(query, log.answer(KvQuery(0, query.start, query.end)))
        assert contents(tree) == contents(log._tree), number
    await runtime.close()
    expected = ("clear", "window", "copied", "copy removed", "last removed", "lost", "GPU", "CPU")
    more = ("router lost", "restarted", "numbers continue")
    assert all(pool.states[state] for state in (*expected, *more)), pool.states


async def test_lost_messages_are_read_from_the_replay_socket(tmp_path: Path) -> None:
    """As vLLM answers: an empty frame, topic, number and payload each; then the number -1."""
    address = f"ipc://{tmp_path}/replay"
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.bind(address)
    seen: list[int] = []
    resets: list[None] = []
    relay = EngineEventRelay(
        "ipc://unused",
        "",
        lambda rank, events: seen.append(events[0].block_hashes[0]),  # type: ignore[union-attr]
        lambda count: pytest.fail("dropped"),
        lambda error: pytest.fail(str(error)),
        lambda: resets.append(None),
        address,
    )
    sent = [frames(n, [["BlockRemoved", [n]]]) for n in range(6)]

    async def answer() -> None:
        client, empty, start = await socket.recv_multipart()
        for message in sent[int.from_bytes(start, "big") :]:
            await socket.send_multipart([client, empty, *message])
        await socket.send_multipart([client, empty, b"", b"\xff" * 8, b""])

    async with asyncio.timeout(20):
        await relay._on_message(sent[0])
        task = asyncio.create_task(answer())
        await relay._on_message(sent[3])
        await task
    for message in sent[4:]:  # replayed already
        await relay._on_message(message)
    assert seen == [*range(6)] and not resets
    await relay._on_message(sent[0])
    assert seen[-1] == 0 and len(resets) == 1
    socket.close(linger=0)


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


async def test_an_endpoint_without_replay_is_not_asked_at_each_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_events, "REPLAY_TIMEOUT_S", 0.05)
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
    monkeypatch.setattr(engine_events, "REPLAY_TIMEOUT_S", 20.0)
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
        monkeypatch.setattr(engine_events, "REPLAY_BYTES", 100)
    else:  # another engine, that has sent as many messages
        replayed = [removed(number) for number in range(5)]

    async def answer() -> None:
        while True:
            client, empty, start = await socket.recv_multipart()
            for message in replayed[int.from_bytes(start, "big") :]:
                await socket.send_multipart([client, empty, *message])
            await socket.send_multipart([client, empty, b"", b"\xff" * 8, b""])

    async with asyncio.timeout(20):
        await seen.relay._on_message(sent[0])
        await seen.relay._on_message(sent[1])
        task = asyncio.create_task(answer())
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
