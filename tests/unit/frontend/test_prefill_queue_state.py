"""How often the length of a prefill queue is told."""

from __future__ import annotations

import time

import pytest
from until import Changes

from dynamo.frontend.disagg import metrics as prefill_metrics
from dynamo.frontend.disagg.metrics import INTERVAL_S, QueueStatePublisher
from dynamo.protocols.codec import decoder
from dynamo.protocols.kv import PrefillQueueState
from dynamo.router.queue.prefill import Capacity, PrefillQueue

_decode = decoder(PrefillQueueState).decode


class Subscriber:
    """What subscribers hear, and when."""

    def __init__(self) -> None:
        self.received: list[tuple[float, PrefillQueueState]] = []
        self._changes = Changes()

    def __call__(self, payload: bytes) -> None:
        self.received.append((time.monotonic(), _decode(payload)))
        self._changes.changed()

    @property
    def sizes(self) -> list[int]:
        return [state.size for _, state in self.received]

    async def until(self, count: int) -> None:
        await self._changes.until(lambda: len(self.received) >= count)


async def test_publishes_at_once_to_and_from_zero_else_at_intervals() -> None:
    queue: PrefillQueue[int] = PrefillQueue(100)
    subscriber = Subscriber()
    publisher = QueueStatePublisher("tiny", queue, subscriber)
    for number in range(50):
        queue.add(number, 0.0)
        publisher.check()
    assert subscriber.sizes == [0, 1], "the rest within the pause"
    await subscriber.until(3)
    assert (
        subscriber.sizes[2] == 50
        and subscriber.received[2][0] - subscriber.received[1][0] >= INTERVAL_S * 0.9
    )
    for number in range(50):
        queue.remove(number)
        publisher.check()
    assert subscriber.sizes[3:] == [0]
    publisher.close()
    queue.add(99, 0.0)
    publisher.check()
    assert len(subscriber.received) == 4, "closed"


async def test_repeats_an_unchanged_state_for_new_subscribers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_metrics, "REPEAT_S", 0.02)
    queue: PrefillQueue[int] = PrefillQueue(100)
    queue.set_worker(7, Capacity(10, 1))
    queue.add(1, 0.0)
    queue.start(1, 7, 10)
    queue.add(2, 0.0)
    subscriber = Subscriber()
    publisher = QueueStatePublisher("tiny", queue, subscriber)
    await subscriber.until(3)
    assert all(state == PrefillQueueState("tiny", 1, 1, 1) for _, state in subscriber.received)
    publisher.close()
