"""A router's own running requests, as it tells them to its replicas: numbered batches. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dynamo.protocols.sync import (
    AddRequest,
    Free,
    MarkPrefillCompleted,
    SequenceBatch,
    SequenceEvent,
)
from dynamo.router.load.active import Reservation
from dynamo.router.prompt import HashedPrompt

__all__ = ["LocalRequests"]

MAX_BATCH_BYTES = 262_144
"""About so much goes into one message (an event plane may refuse 1 MiB)."""

_EVENT_BYTES = 100


class LocalRequests:
    """What runs now, and what has not been told yet. Every batch that it gives must be sent.

    ``on_pending`` is called when there is something to tell again; ``predicts``: tell also what
    others need to predict caches.
    """

    def __init__(
        self, router_id: int, block_size: int, predicts: bool, on_pending: Callable[[], None]
    ) -> None:
        self.router_id = router_id
        self.block_size = block_size
        self._predicts = predicts
        self._on_pending = on_pending
        self._live: dict[str, SequenceEvent] = {}
        self._pending: list[SequenceEvent] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._live)

    def booked(
        self,
        request_id: str,
        reservation_id: Reservation,
        prompt: HashedPrompt,
        prefill_tokens: int,
    ) -> None:
        """The request was sent to a worker. O(blocks), two copies of 8 bytes each."""
        data = AddRequest(
            prompt.chained.tobytes(),
            prompt.isl_tokens,
            prefill_tokens,
            prompt.unique_blocks,
            reservation_id.overlap_blocks,
            reservation_id.expected_output_tokens,
            prompt.hashes.tobytes() if self._predicts else b"",
        )
        event = SequenceEvent(request_id, reservation_id.worker_id, data, reservation_id.dp_rank)
        self._live[request_id] = event
        self._tell(event)

    def prefill_completed(self, request_id: str) -> None:
        """Its first token came. Unknown ids are ignored."""
        event = self._live.get(request_id)
        if event is not None:
            assert isinstance(event.data, AddRequest), "that is how it was added"
            event.data.prefill_completed = True
            self._tell(_step(event, MarkPrefillCompleted()))

    def freed(self, request_id: str) -> None:
        """It has ended. Unknown ids are ignored."""
        event = self._live.pop(request_id, None)
        if event is not None:
            self._tell(_step(event, Free()))

    def take_pending(self) -> list[SequenceBatch]:
        """What has happened since, once."""
        events, self._pending = self._pending, []
        return [self._batch(part) for part in _parts(events)]

    def heartbeat(self) -> SequenceBatch:
        """A batch without events: its number tells whether any before it was lost."""
        return self._batch([])

    def snapshot(self) -> list[SequenceBatch]:
        """All that runs, after what has not been told yet. O(running requests)."""
        told = self.take_pending()
        batches = [self._batch(part) for part in _parts(self._live.values())] or [self._batch([])]
        batches[0].opens = batches[-1].closes = True
        return told + batches

    def drop_pending(self) -> None:
        """Nobody listens: what has happened need not be told, who comes will ask."""
        if self._pending:
            self._pending.clear()
            self._number += 1

    def _tell(self, event: SequenceEvent) -> None:
        self._pending.append(event)
        if len(self._pending) == 1:
            self._on_pending()

    def _batch(self, events: list[SequenceEvent]) -> SequenceBatch:
        number, self._number = self._number, self._number + 1
        return SequenceBatch(self.router_id, number, self.block_size, events)


def _step(event: SequenceEvent, data: MarkPrefillCompleted | Free) -> SequenceEvent:
    return SequenceEvent(event.request_id, event.worker_id, data, event.dp_rank)


def _parts(events: Iterable[SequenceEvent]) -> list[list[SequenceEvent]]:
    """Lists of about ``MAX_BATCH_BYTES`` each; none for no events."""
    parts: list[list[SequenceEvent]] = []
    room = 0
    for event in events:
        size = _EVENT_BYTES
        if isinstance(event.data, AddRequest):
            size += len(event.data.token_sequence) + len(event.data.tokens_hashes)
        if not parts or size > room:
            parts.append([])
            room = MAX_BATCH_BYTES
        parts[-1].append(event)
        room -= size
    return parts
