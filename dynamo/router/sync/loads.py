"""The running requests of this router, as numbered batches for its replicas. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dynamo.protocols.sync import (
    AddRequest,
    Free,
    MarkPrefillCompleted,
    SequenceBatch,
    SequenceEvent,
)
from dynamo.router.kv_mode.prompt import HashedPrompt
from dynamo.router.load.active import Reservation

__all__ = ["LocalRequests"]

MAX_BATCH_BYTES = 262_144
"""Approximate size limit of one message: an event plane may reject 1 MiB."""

_EVENT_BYTES = 100


class LocalRequests:
    """The running requests and the events that were not sent yet.

    Every returned batch must be sent: its number is used up, and a receiver takes a missing number
    for a lost message. ``on_pending`` is called when the first event is pending; ``predicts``: add
    the block hashes that replicas need to predict caches.
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
        reservation: Reservation,
        prompt: HashedPrompt,
        prefill_tokens: int,
    ) -> None:
        """Record a request that was sent to a worker. O(blocks), two copies of 8 bytes each."""
        data = AddRequest(
            prompt.chained.tobytes(),
            prompt.isl_tokens,
            prefill_tokens,
            prompt.unique_blocks,
            reservation.overlap_blocks,
            reservation.expected_output_tokens,
            prompt.hashes.tobytes() if self._predicts else b"",
        )
        event = SequenceEvent(request_id, reservation.worker_id, data, reservation.dp_rank)
        self._live[request_id] = event
        self._append(event)

    def prefill_completed(self, request_id: str) -> None:
        """Record a request's first token. Ignores unknown ids."""
        event = self._live.get(request_id)
        if event is not None:
            assert isinstance(event.data, AddRequest), "only AddRequest events are kept"
            event.data.prefill_completed = True  # for later snapshots
            self._append(_step(event, MarkPrefillCompleted()))

    def freed(self, request_id: str) -> None:
        """Record the end of a request. Ignores unknown ids."""
        event = self._live.pop(request_id, None)
        if event is not None:
            self._append(_step(event, Free()))

    def take_pending(self) -> list[SequenceBatch]:
        """Return the events since the last call."""
        events, self._pending = self._pending, []
        return [self._batch(part) for part in _parts(events)]

    def heartbeat(self) -> SequenceBatch:
        """Return a batch without events: its number shows whether a batch before it was lost."""
        return self._batch([])

    def snapshot(self) -> list[SequenceBatch]:
        """Return the pending events, then all running requests. O(running requests).

        The first batch of the snapshot opens it and the last one closes it.
        """
        # A pending event must not follow the snapshot that already contains its effect.
        pending = self.take_pending()
        batches = [self._batch(part) for part in _parts(self._live.values())] or [self._batch([])]
        batches[0].opens = batches[-1].closes = True
        return pending + batches

    def drop_pending(self) -> None:
        """Drop pending events when there are no subscribers; a new peer requests a snapshot."""
        if self._pending:
            self._pending.clear()
            # Discovery may lag behind a new subscriber: the skipped number shows it the gap.
            self._number += 1

    def _append(self, event: SequenceEvent) -> None:
        self._pending.append(event)
        if len(self._pending) == 1:
            self._on_pending()

    def _batch(self, events: list[SequenceEvent]) -> SequenceBatch:
        number, self._number = self._number, self._number + 1
        return SequenceBatch(self.router_id, number, self.block_size, events)


def _step(event: SequenceEvent, data: MarkPrefillCompleted | Free) -> SequenceEvent:
    return SequenceEvent(event.request_id, event.worker_id, data, event.dp_rank)


def _parts(events: Iterable[SequenceEvent]) -> list[list[SequenceEvent]]:
    """Split events into lists of about ``MAX_BATCH_BYTES`` each; none for no events."""
    parts: list[list[SequenceEvent]] = []
    space = 0
    for event in events:
        size = _EVENT_BYTES
        if isinstance(event.data, AddRequest):
            size += len(event.data.token_sequence) + len(event.data.tokens_hashes)
        if not parts or size > space:
            parts.append([])
            space = MAX_BATCH_BYTES
        parts[-1].append(event)
        space -= size
    return parts
