"""Publishers on a real runtime: events arrive in order, numbered, and can be queried again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from until import Changes

from dynamo._fast.hashing import block_hashes, seed_for
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.llm import KvEventPublisher, WorkerMetricsPublisher, compute_block_hash_for_seq
from dynamo.protocols import codec
from dynamo.protocols.kv import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
    KvMetrics,
    KvQuery,
    KvQueryAnswer,
)
from dynamo.runtime import DistributedRuntime, Endpoint

B = 4
TOKENS = list(range(1, 9))


class Subscriber:
    """A second runtime, subscribed to the events of the first."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self.runtime = runtime
        self.batches: list[KvEventBatch] = []
        self.loads: list[KvMetrics] = []
        self._changes = Changes()
        runtime.subscribe("ns", "comp", "kv-events", self._on_events)
        runtime.subscribe("ns", "comp", "kv_metrics", self._on_loads)

    @property
    def events(self) -> list[Any]:
        return [event for batch in self.batches for event in batch.events]

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        await self._changes.until(condition)

    async def connect(self, publisher: KvEventPublisher) -> int:
        """Wait until events of ``publisher`` arrive; return the number of the last one."""
        last = 0
        while not self.events:
            publisher.publish_all_cleared()
            last += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self.wait_until(lambda: bool(self.events))
        await self.wait_until(lambda: self.events[-1].event_id == last)
        self.batches.clear()
        return last

    async def query(self, query: KvQuery) -> KvQueryAnswer:
        client = await self.runtime.endpoint("ns.comp.kv_query").client()
        await client.wait_for_instances()
        items = [item async for item in await client.random(query, annotated=False)]
        return codec.decoder(KvQueryAnswer).decode(codec.encode(items[0]))

    def _on_events(self, publisher: int, sequence: int, payload: bytes) -> None:
        self.batches.append(codec.decoder(KvEventBatch).decode(payload))
        self._changes.changed()

    def _on_loads(self, publisher: int, sequence: int, payload: bytes) -> None:
        self.loads.extend(codec.decoder(list[KvMetrics]).decode(payload))
        self._changes.changed()


def runtime(path: Path) -> DistributedRuntime:
    settings = RuntimeSettings(namespace="ns", state_dir=str(path / "state"))
    return DistributedRuntime(settings=settings, system=SystemSettings(grace_period_s=0))


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    made = runtime(tmp_path)
    yield made.endpoint("ns.comp.generate")
    await made.close()


@pytest.fixture
async def subscriber(tmp_path: Path) -> AsyncIterator[Subscriber]:
    made = runtime(tmp_path)
    await made.start()
    yield Subscriber(made)
    await made.close()


def u64(*values: int) -> bytes:
    return array("Q", values).tobytes()


def local(tokens: list[int]) -> bytes:
    return u64(*compute_block_hash_for_seq(tokens, B))


async def test_events_arrive_in_order(endpoint: Endpoint, subscriber: Subscriber) -> None:
    publisher = KvEventPublisher(endpoint, kv_block_size=B)
    last = await subscriber.connect(publisher)
    publisher.publish_stored(TOKENS, [B, B], [11, -1])
    publisher.publish_stored([9] * B, [B], [13], parent_hash=-1)
    publisher.publish_removed([13])
    publisher.publish_all_cleared()
    await subscriber.wait_until(lambda: len(subscriber.events) == 4)
    assert {batch.worker_id for batch in subscriber.batches} == {endpoint.connection_id()}
    assert [event.event_id for event in subscriber.events] == [last + n for n in (1, 2, 3, 4)]
    assert [event.data for event in subscriber.events] == [
        BlocksStored(u64(11, 2**64 - 1), local(TOKENS)),
        BlocksStored(u64(13), local([9] * B), 2**64 - 1),
        BlocksRemoved(u64(13)),
        BlocksCleared(),
    ]


async def test_block_0_has_children(endpoint: Endpoint, subscriber: Subscriber) -> None:
    publisher = KvEventPublisher(endpoint, kv_block_size=B)
    await subscriber.connect(publisher)
    publisher.publish_stored([1] * B, [B], [0])
    publisher.publish_stored([2] * B, [B], [5], parent_hash=0)
    await subscriber.wait_until(lambda: len(subscriber.events) == 2)
    assert [event.data.parent_hash for event in subscriber.events] == [None, 0]


async def test_what_is_unknown_of_an_engine_is_cleared_on_all_its_ranks(
    endpoint: Endpoint, subscriber: Subscriber
) -> None:
    publisher = KvEventPublisher(endpoint, kv_block_size=B)
    await subscriber.connect(publisher)
    publisher._on_engine_events(1, [])  # an engine with two ranks behind one socket
    publisher._on_reset()
    await subscriber.wait_until(lambda: len(subscriber.events) == 2)
    assert {event.dp_rank for event in subscriber.events} == {0, 1}
    assert all(event.data == BlocksCleared() for event in subscriber.events)


async def test_a_router_may_query_again(endpoint: Endpoint, subscriber: Subscriber) -> None:
    publisher = KvEventPublisher(endpoint, kv_block_size=B, dp_rank=1)
    other = KvEventPublisher(endpoint, kv_block_size=B, dp_rank=0)
    publisher.publish_stored(TOKENS, [B, B], [11, 12])
    publisher.publish_removed([12])
    other.publish_stored(TOKENS, [B], [11])
    dump = await subscriber.query(KvQuery(dp_rank=1))
    assert (dump.kind, dump.last_event_id, dump.block_size) == ("tree_dump", 2, B)
    assert dump.events[0].data == BlocksStored(u64(11), local(TOKENS[:B]))
    again = await subscriber.query(KvQuery(dp_rank=1, start_event_id=2))
    assert [event.data for event in again.events] == [BlocksRemoved(u64(12))]
    assert (await subscriber.query(KvQuery(dp_rank=0))).last_event_id == 1
    assert (await subscriber.query(KvQuery(dp_rank=7))).last_event_id == 0


async def test_blocks_of_another_size_end_the_chain(
    endpoint: Endpoint, subscriber: Subscriber, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = KvEventPublisher(endpoint, kv_block_size=B)
    await subscriber.connect(publisher)
    with caplog.at_level(logging.WARNING):
        publisher.publish_stored(TOKENS, [B, 3, B], [11, 12, 13])
    text = "Block size must be 4 tokens to be published. Block size is: 3"
    assert text in caplog.text
    publisher.publish_stored(TOKENS, [3], [21])
    publisher.publish_stored(TOKENS, [B, B], [31])
    await subscriber.wait_until(lambda: len(subscriber.events) == 2)
    assert [event.data.block_hashes for event in subscriber.events] == [u64(11), u64(31)]


async def test_other_threads_may_publish(endpoint: Endpoint, subscriber: Subscriber) -> None:
    publisher = KvEventPublisher(endpoint, kv_block_size=B)
    load = WorkerMetricsPublisher()
    load.publish(0, 1)
    await load.create_endpoint(endpoint)
    last = await subscriber.connect(publisher)

    def work() -> None:
        for number in range(200):
            publisher.publish_stored(TOKENS[:B], [B], [number])
        load.publish(0, 7, kv_used_blocks=9)

    await asyncio.to_thread(work)
    await subscriber.wait_until(lambda: len(subscriber.events) == 200)
    assert [event.event_id for event in subscriber.events] == [last + n for n in range(1, 201)]
    await subscriber.wait_until(
        lambda: bool(subscriber.loads) and subscriber.loads[-1].kv_used_blocks == 9
    )
    assert subscriber.loads[-1].active_decode_blocks == 7
    assert subscriber.loads[-1].worker_id == endpoint.connection_id()


async def test_blocks_below_the_device(endpoint: Endpoint, subscriber: Subscriber) -> None:
    publisher = KvEventPublisher(endpoint, kv_block_size=B)
    await subscriber.connect(publisher)
    publisher.publish_stored(TOKENS, [B, B], [11, 12])
    publisher.publish_stored(TOKENS, [B, B], [11, 12], medium="CPU")
    publisher.publish_stored([], [], [12], medium="NVME")
    publisher.publish_removed([11], "CPU_PINNED")
    publisher.publish_removed([12])
    await subscriber.wait_until(lambda: len(subscriber.events) == 5)
    assert [(event.storage_tier, event.data) for event in subscriber.events] == [
        ("device", BlocksStored(u64(11, 12), local(TOKENS))),
        ("host_pinned", BlocksStored(u64(11, 12), local(TOKENS))),
        ("disk", BlocksStored(u64(12), b"")),
        ("host_pinned", BlocksRemoved(u64(11))),
        ("device", BlocksRemoved(u64(12))),
    ]
    dump = await subscriber.query(KvQuery())
    assert [(event.storage_tier, event.data) for event in dump.events] == [
        ("device", BlocksStored(u64(11), local(TOKENS[:B]))),
        ("host_pinned", BlocksStored(u64(12), local(TOKENS[B:]), 11)),
        ("disk", BlocksStored(u64(12), local(TOKENS[B:]), 11)),
    ]
    with pytest.raises(ValueError, match="unknown medium 'TAPE'"):
        publisher.publish_removed([1], "TAPE")


async def test_a_block_size_of_zero_is_rejected(endpoint: Endpoint) -> None:
    with pytest.raises(ValueError, match="kv_block_size cannot be 0"):
        KvEventPublisher(endpoint)


@pytest.fixture
async def engine(
    endpoint: Endpoint, subscriber: Subscriber, tmp_path: Path
) -> AsyncIterator[Engine]:
    """An engine whose events are relayed by a publisher of dp_rank 1."""
    address = f"ipc://{tmp_path}/engine"
    socket = zmq.asyncio.Context.instance().socket(zmq.XPUB)
    socket.bind(address)
    publisher = KvEventPublisher(
        endpoint, kv_block_size=B, zmq_endpoint=address, zmq_topic="kv", dp_rank=1
    )
    async with asyncio.timeout(10):
        assert await socket.recv() == b"\x01kv"
    await subscriber.connect(publisher)
    yield Engine(socket)
    publisher.shutdown()
    socket.close(linger=0)


class Engine:
    """Publishes as vLLM does."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket

    async def send(self, sequence: int, *events: Any) -> None:
        payload = msgspec.msgpack.encode([1.5, list(events)])
        await self.socket.send_multipart([b"kv-events", sequence.to_bytes(8, "big"), payload])


def dropped(endpoint: Endpoint) -> float:
    """Return the number of dropped events of engines."""
    text = endpoint.metrics.render().decode()
    (line,) = [line for line in text.splitlines() if "dropped_events_total{" in line]
    return float(line.rpartition(" ")[2])


async def test_the_events_of_an_engine_are_relayed(
    endpoint: Endpoint, subscriber: Subscriber, engine: Engine
) -> None:
    await engine.send(0, ["BlockStored", [11, 12], None, TOKENS, B, None])
    await engine.send(1, {"type": "BlockRemoved", "block_hashes": [12]})
    await engine.socket.send_multipart([b"kv", b"\0" * 8, b"\xc1"])
    await engine.send(
        4,
        ["BlockStored", [11], None, TOKENS[:B], B, None],
        ["BlockStored", [11], None, [], 0, None, "CPU"],
        ["BlockStored", [13], None, TOKENS[B:], B, None, "DISK"],
        ["BlockStored", [14], None, [], 2 * B, None, "CPU"],
        ["AllBlocksCleared"],
    )
    await subscriber.wait_until(lambda: len(subscriber.events) == 7)
    assert (
        [(event.storage_tier, event.data) for event in subscriber.events]
        == [
            ("device", BlocksStored(u64(11, 12), local(TOKENS))),
            ("device", BlocksRemoved(u64(12))),
            ("device", BlocksCleared()),  # messages 2 and 3 are lost
            ("device", BlocksStored(u64(11), local(TOKENS[:B]))),
            ("host_pinned", BlocksStored(u64(11), b"")),
            ("disk", BlocksStored(u64(13), local(TOKENS[B:]))),
            ("device", BlocksCleared()),
        ]
    )
    assert {event.dp_rank for event in subscriber.events} == {1}
    assert dropped(endpoint) == 2


async def test_salted_blocks_are_hashed_as_the_router_does(
    subscriber: Subscriber, engine: Engine
) -> None:
    """VLLM names the salt at the root; blocks below it inherit it until they are removed."""

    def stored(block: int, parent: int | None, *keys: Any) -> dict[str, Any]:
        fields = {"block_hashes": [block], "parent_block_hash": parent, "token_ids": TOKENS[:B]}
        more = {"block_size": B, "lora_id": None, "extra_keys": [list(keys) or None]}
        return {"type": "BlockStored", **fields, **more}

    await engine.send(0, stored(1, None, "salt"), stored(2, 1), stored(3, None), stored(4, 3))
    await engine.send(1, ["BlockRemoved", [1, 2]], stored(1, None), stored(2, 1))
    await subscriber.wait_until(lambda: len(subscriber.events) == 7)
    found = [each.data for each in subscriber.events if isinstance(each.data, BlocksStored)]
    salted = block_hashes(TOKENS[:B], B, seed=seed_for(None, "salt")).tobytes()
    plain = local(TOKENS[:B])
    assert [each.tokens_hashes for each in found] == [salted] * 2 + [plain] * 4


async def test_blocks_with_images_have_their_hashes(subscriber: Subscriber, engine: Engine) -> None:
    fields = {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": TOKENS}
    keys = [None, [["00ab" * 16, 2]]]
    event = {"type": "BlockStored", **fields, "block_size": B, "lora_id": None, "extra_keys": keys}
    await engine.send(0, event)
    await subscriber.wait_until(lambda: len(subscriber.events) == 1)
    hashes = block_hashes(TOKENS, B, mm_hashes=[[], [0x00AB00AB00AB00AB]])
    assert subscriber.events[0].data == BlocksStored(u64(1, 2), hashes.tobytes())


@pytest.mark.parametrize(
    "malformed",
    [
        ["BlockStored", [1], None, [1, 2, -4, 4], B, None],
        ["BlockStored", [1], None, [1, 2, 2**40, 4], B, None],
        ["BlockStored", [1], None, [1, 2, "3", 4], B, None],
        ["BlockStored", [1], None, [1, 2, 3.0, 4], B, None],
        ["BlockStored", [1], None, [1, 2, 3, 4], B, None, "GPU", 7],
        ["BlockRemoved", "all"],
    ],
)
async def test_a_malformed_event_does_not_end_the_relay(
    endpoint: Endpoint,
    subscriber: Subscriber,
    engine: Engine,
    malformed: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = ["BlockStored", [11, 12], None, TOKENS, B, None]
    await engine.send(0, malformed, good, malformed)
    await engine.send(1, malformed)
    await engine.send(2, ["AllBlocksCleared"])
    expected: list[Any] = [BlocksStored(u64(11, 12), local(TOKENS)), BlocksCleared()]
    if malformed[0] == "BlockRemoved":  # of unknown blocks
        expected = [BlocksCleared(), expected[0], *[BlocksCleared()] * 3]
    await subscriber.wait_until(lambda: len(subscriber.events) == len(expected))
    assert [event.data for event in subscriber.events] == expected
    assert dropped(endpoint) == 3
    assert caplog.text.count("malformed") == 1
