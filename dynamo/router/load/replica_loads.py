"""The running requests of this router and of its replicas, as numbered batches of events. Pure.

Messages may be lost, doubled or reordered. Each router numbers its batches; a batch with an older
number than the last is ignored, a newer one is applied. After a gap the state may miss requests and
keep ended ones, until a snapshot of all running requests, sent on request, repairs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from dynamo.router.caches.prompt import HashedPrompt
from dynamo.router.load.active_load import Reservation

MAX_BATCH_BYTES = 262_144
"""Approximate size limit of one message: an event plane may reject 1 MiB."""
_EVENT_BYTES = 100
MAX_REQUESTS = 262_144
"""Requests kept of one replica; more are rejected and counted."""
ACTIVE_SEQUENCES = "active_sequences_events"
"""Topic, of the component that is routed to; a message is one :data:`SequenceMessage`."""


class AddRequest(msgspec.Struct, tag_field="kind", tag="add", omit_defaults=True):
    """A request was sent to the worker.

    ``token_sequence`` are the chained hashes of its full prompt blocks. They count as load only if
    ``unique_blocks`` is 0; otherwise that is the number of blocks, none of them shared.
    ``prefill_tokens`` are active until ``prefill_completed``. ``tokens_hashes`` are the local block
    hashes, sent if caches are predicted.
    """

    token_sequence: bytes = b""
    isl_tokens: int = 0
    prefill_tokens: int = 0
    unique_blocks: int = 0
    overlap_blocks: int = 0
    expected_output_tokens: int | None = None
    tokens_hashes: bytes = b""
    prefill_completed: bool = False


class MarkPrefillCompleted(msgspec.Struct, tag_field="kind", tag="prefill_completed"):
    """The first token of the request arrived."""


class Free(msgspec.Struct, tag_field="kind", tag="free"):
    """The request ended."""


class SequenceEvent(msgspec.Struct, omit_defaults=True):
    """One state change of a request."""

    request_id: str
    worker_id: int
    data: AddRequest | MarkPrefillCompleted | Free
    dp_rank: int = 0


class SequenceBatch(msgspec.Struct, tag_field="type", tag="batch", omit_defaults=True):
    """Events of one router in order; ``number`` counts by one from 0, so a gap is a lost batch.

    A snapshot starts with a batch that ``opens`` and ends with the next that ``closes``: its events
    add all running requests and replace earlier state. A batch without events is a heartbeat.
    """

    router_id: int
    number: int
    block_size: int
    events: list[SequenceEvent] = []
    opens: bool = False
    closes: bool = False


class SequenceQuery(msgspec.Struct, tag_field="type", tag="query"):
    """Request a snapshot of router ``of``."""

    router_id: int
    of: int


SequenceMessage = SequenceBatch | SequenceQuery


MOST_SILENT = 5
"""Heartbeats that a router may miss."""


@dataclass(eq=False)
class _Replica:
    """One router. ``in_sync``: no batch is missing; ``listed``: the requests that the snapshot in
    progress has named, None outside of one; ``silent``: the beats since its last message."""

    publisher_id: int
    expected: int = 0
    in_sync: bool = True
    listed: set[str] | None = None
    silent: int = 0
    requests: dict[str, SequenceEvent] = field(default_factory=dict)


class LoadSink(Protocol):
    """Books requests of other routers, each under a ``key`` that no local request has."""

    def book(self, key: str, event: SequenceEvent) -> None:
        """Add the request to the load of its worker, unless the worker is unknown or the request
        is booked already."""

    def prefill_completed(self, key: str) -> None:
        """Remove the request's prompt from the prefill load."""

    def free(self, key: str) -> None:
        """Remove the request from the load."""


class RemoteReplicas:
    """Keeps ``sink`` up to date with the requests of other routers.

    ``request_snapshot`` is called, synchronously, with the id of a router that is out of sync, at
    each of its messages until its snapshot begins. ``publishers`` are the live processes.
    """

    def __init__(self, sink: LoadSink, request_snapshot: Callable[[int], None]) -> None:
        self._sink = sink
        self._request_snapshot = request_snapshot
        self.publishers: set[int] = set()
        self._replicas: dict[int, _Replica] = {}
        self.gaps = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._replicas)

    def requests(self) -> int:
        """Return the number of running requests of all replicas."""
        return sum(len(replica.requests) for replica in self._replicas.values())

    def is_in_sync(self) -> bool:
        """Return whether no replica has a known gap."""
        return all(replica.in_sync for replica in self._replicas.values())

    def add_publisher(self, publisher_id: int) -> None:
        """Accept messages of a process that runs a router."""
        self.publishers.add(publisher_id)

    def remove_publisher(self, publisher_id: int) -> None:
        """Remove a process that has exited, with the load of its requests."""
        self.publishers.discard(publisher_id)
        for router_id, replica in list(self._replicas.items()):
            if replica.publisher_id == publisher_id:
                del self._replicas[router_id]
                for request_id in replica.requests:
                    self._sink.free(_key(router_id, request_id))

    def beat(self) -> None:
        """Count a heartbeat's time for each replica, and remove the load of those that are silent.

        A router without known peers sends nothing. One that takes this process for exited, while
        its lease was gone, never says that its requests have ended.
        """
        for router_id, replica in self._replicas.items():
            replica.silent += 1
            # Equal, not above: once. Out of sync, its next message leads to a snapshot.
            if replica.silent == MOST_SILENT:
                replica.in_sync, replica.listed = False, None
                for request_id in list(replica.requests):
                    self._free(router_id, replica, request_id)

    def receive(self, publisher_id: int, batch: SequenceBatch) -> None:
        """Apply one message. O(blocks named); a batch that closes a snapshot O(its requests)."""
        if publisher_id not in self.publishers:
            # Exited, or not discovered yet: its next message will show a gap then.
            return
        replica = self._replicas.setdefault(batch.router_id, _Replica(publisher_id))
        replica.silent = 0
        if batch.number < replica.expected:
            return
        if batch.number > replica.expected:
            self.gaps += 1
            # The lost batch may have been a part of the snapshot in progress: start over.
            replica.in_sync, replica.listed = False, None
        replica.expected = batch.number + 1
        if batch.opens:
            replica.listed = set()
        for event in batch.events:
            self._apply(batch.router_id, replica, event)
        if batch.closes and replica.listed is not None:
            # The end of every request that the snapshot did not name was lost.
            for request_id in replica.requests.keys() - replica.listed:
                self._free(batch.router_id, replica, request_id)
            replica.in_sync, replica.listed = True, None
        if not replica.in_sync and replica.listed is None:
            self._request_snapshot(batch.router_id)

    def worker_added(self, worker_id: int) -> None:
        """Book the requests on a worker that was unknown before. O(requests)."""
        for router_id, replica in self._replicas.items():
            for request_id, event in replica.requests.items():
                if event.worker_id == worker_id:
                    self._sink.book(_key(router_id, request_id), event)

    def _apply(self, router_id: int, replica: _Replica, event: SequenceEvent) -> None:
        if isinstance(event.data, AddRequest):
            self._add(router_id, replica, event, event.data)
        elif isinstance(event.data, Free):
            self._free(router_id, replica, event.request_id)
        elif event.request_id in replica.requests:
            self._prefill_completed(router_id, replica.requests[event.request_id])

    def _add(
        self, router_id: int, replica: _Replica, event: SequenceEvent, data: AddRequest
    ) -> None:
        request_id = event.request_id
        if replica.listed is not None:
            replica.listed.add(request_id)
        booking = replica.requests.get(request_id)
        if booking is not None and not _same(booking, event):
            # The end of the first request was lost, and its id is in use again.
            self._free(router_id, replica, request_id)
            booking = None
        if booking is not None:
            if data.prefill_completed:
                self._prefill_completed(router_id, booking)
        elif len(replica.requests) >= MAX_REQUESTS:
            self.refused += 1
        else:
            replica.requests[request_id] = event
            self._sink.book(_key(router_id, request_id), event)

    def _prefill_completed(self, router_id: int, booked: SequenceEvent) -> None:
        assert isinstance(booked.data, AddRequest), "only AddRequest events are kept"
        booked.data.prefill_completed = True
        self._sink.prefill_completed(_key(router_id, booked.request_id))

    def _free(self, router_id: int, replica: _Replica, request_id: str) -> None:
        if replica.requests.pop(request_id, None) is not None:
            self._sink.free(_key(router_id, request_id))


def _key(router_id: int, request_id: str) -> str:
    return f"{router_id:x}~{request_id}"


def _same(booked: SequenceEvent, event: SequenceEvent) -> bool:
    """Return whether both events describe the same request, not two that share an id."""
    old, new = booked.data, event.data
    assert isinstance(old, AddRequest) and isinstance(new, AddRequest)
    if old.prefill_completed and not new.prefill_completed:
        return False  # a computed prompt stays computed: this is the next request of that id
    same_rank = (booked.worker_id, booked.dp_rank) == (event.worker_id, event.dp_rank)
    return same_rank and old.token_sequence == new.token_sequence


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
        # An event above the limit gets a batch of its own: a prompt's blocks stay together.
        if not parts or size > space:
            parts.append([])
            space = MAX_BATCH_BYTES
        parts[-1].append(event)
        space -= size
    return parts
