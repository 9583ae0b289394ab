"""How often the length of a prefill queue is told."""

from __future__ import annotations

import asyncio
import time

import pytest

from dynamo.frontend.disagg import metrics as prefill_metrics
from dynamo.frontend.disagg.metrics import INTERVAL_S, QueueStatePublisher
from dynamo.protocols.codec import decoder
from dynamo.protocols.load import PrefillQueueState
from dynamo.router.queue.prefill import Capacity, PrefillQueue

_decode = decoder(PrefillQueueState).decode


class Ear:
    """What subscribers hear, and when."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, PrefillQueueState]] = []
        self._more = asyncio.Event()

    def __call__(self, payload: bytes) -> None:
        self.heard.append((time.monotonic(), _decode(payload)))
        self._more.set()

    @property
    def sizes(self) -> list[int]:
        return [state.size for _, state in self.heard]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.heard) < count:
                self._more.clear()
                await self._more.wait()


async def test_at_once_to_and_from_zero_else_with_a_pause() -> None:
    line: PrefillQueue[int] = PrefillQueue(100)
    ear = Ear()
    news = QueueStatePublisher("tiny", line, ear)
    for number in range(50):
        line.enter(number, 0.0)
        news.check()
    assert ear.sizes == [0, 1], "the rest within the pause"
    await ear.until(3)
    assert ear.sizes[2] == 50 and ear.heard[2][0] - ear.heard[1][0] >= INTERVAL_S * 0.9
    for number in range(50):
        line.leave(number)
        news.check()
    assert ear.sizes[3:] == [0]
    news.close()
    line.enter(99, 0.0)
    news.check()
    assert len(ear.heard) == 4, "closed"


async def test_those_who_come_later_hear_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_metrics, "REPEAT_S", 0.02)
    line: PrefillQueue[int] = PrefillQueue(100)
    line.set_worker(7, Capacity(10, 1))
    line.enter(1, 0.0)
    line.start(1, 7, 10)
    line.enter(2, 0.0)
    ear = Ear()
    news = QueueStatePublisher("tiny", line, ear)
    await ear.until(3)
    assert all(state == PrefillQueueState("tiny", 1, 1, 1) for _, state in ear.heard)
    news.close()
