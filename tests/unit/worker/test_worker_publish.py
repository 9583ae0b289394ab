"""Senders: one message per loop iteration, events before open, answers to queries."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

from dynamo.errors import DynamoError, InvalidArgument
from dynamo.protocols import codec
from dynamo.protocols.kv import BlocksStored, KvEventBatch, KvMetrics, KvQuery, KvQueryAnswer
from dynamo.worker import publish
from dynamo.worker.publish import RING_EVENTS, KvEventSender, LoadSender

BATCH = codec.decoder(KvEventBatch).decode
LOADS = codec.decoder(list[KvMetrics]).decode


class Stream:
    """The part of a server stream that an answer uses."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.failure: DynamoError | None = None
        self.ended = False

    def send(self, payload: bytes) -> None:
        self.sent.append(payload)

    def end(self) -> None:
        self.ended = True

    def error(self, error: DynamoError) -> None:
        self.failure = error


def stored(*hashes: int) -> BlocksStored:
    column = array("Q", hashes).tobytes()
    return BlocksStored(column, column)


async def next_iteration() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_one_message_per_loop_iteration() -> None:
    sent: list[bytes] = []
    sender = KvEventSender(7)
    sender.open(sent.append)
    sender.record(0, [stored(1), stored(2)])
    sender.record(1, [stored(1)])
    assert not sent
    await next_iteration()
    (payload,) = sent
    batch = BATCH(payload)
    assert batch.worker_id == 7
    assert [(e.dp_rank, e.event_id) for e in batch.events] == [(0, 1), (0, 2), (1, 1)]


async def test_events_before_open_are_bounded() -> None:
    sent: list[bytes] = []
    sender = KvEventSender(7)
    for number in range(RING_EVENTS + 10):
        sender.record(0, [stored(number)])
    sender.open(sent.append)
    events = BATCH(sent[0]).events
    assert (len(events), events[-1].event_id) == (RING_EVENTS, RING_EVENTS + 10)
    sender.close()
    sender.record(0, [stored(1)])
    await next_iteration()
    assert len(sent) == 1


async def test_a_burst_is_sent_in_several_messages() -> None:
    sent: list[bytes] = []
    sender = KvEventSender(7)
    sender.open(sent.append)
    sender.record(0, [stored(n) for n in range(RING_EVENTS * 2 + 5)])
    await next_iteration()
    ids = [event.event_id for payload in sent for event in BATCH(payload).events]
    assert ids == list(range(1, RING_EVENTS * 2 + 6)) and len(sent) == 3


async def test_answers() -> None:
    sender = KvEventSender(7)
    sender.record(0, [stored(1)])
    good, bad, unknown = Stream(), Stream(), Stream()
    answer: Any = sender.answer
    answer(good, codec.encode(KvQuery(0, 1, 1)))
    answer(bad, b"\xc1")
    answer(unknown, codec.encode(KvQuery(5)))
    decode = codec.decoder(KvQueryAnswer).decode
    assert decode(good.sent[0]).events[0].data == stored(1) and good.ended
    assert isinstance(bad.failure, InvalidArgument)
    assert decode(unknown.sent[0]) == KvQueryAnswer("tree_dump")


async def test_load_is_sent_once_per_iteration_and_repeated() -> None:
    sent: list[bytes] = []
    again = asyncio.Event()

    def send(payload: bytes) -> None:
        sent.append(payload)
        if len(sent) == 2:
            again.set()

    sender = LoadSender(7)
    sender.report(KvMetrics(0, active_decode_blocks=1))
    sender.report(KvMetrics(0, active_decode_blocks=2))
    sender.report(KvMetrics(0, 1, active_decode_blocks=9))
    sender.open(send)
    assert LOADS(sent[0]) == [KvMetrics(7, 0, 2), KvMetrics(7, 1, 9)]
    async with asyncio.timeout(publish.REPEAT_S * 5):
        await again.wait()
    assert sent[1] == sent[0]
    sender.report(KvMetrics(0, active_decode_blocks=3))
    await next_iteration()
    assert LOADS(sent[2])[0] == KvMetrics(7, 0, 3)
    sender.close()


async def test_the_last_events_are_sent_when_it_closes() -> None:
    sent: list[bytes] = []
    sender = KvEventSender(7, delay_s=3600.0)
    sender.open(sent.append)
    sender.record(0, [stored(1)])
    assert not sent
    sender.close()
    assert [event.event_id for event in BATCH(sent[0]).events] == [1]
    sender.record(0, [stored(2)])
    await next_iteration()
    assert len(sent) == 1, "later events go to the log only"
