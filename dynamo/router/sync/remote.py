"""The requests of other replicas, as far as they have told: a state machine without I/O.

Messages may be lost, doubled or swapped. The newest is always taken and an older one never, so the
state is never older than what was heard; what a hole has swallowed is made good by the account of
all its requests that the replica is asked for. Spec 3.8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dynamo.protocols.sync import AddRequest, Free, SequenceBatch, SequenceEvent

__all__ = ["LoadSink", "RemoteReplicas"]

MAX_REQUESTS = 262_144
"""Requests of one replica that are remembered; more are refused and counted."""


class LoadSink(Protocol):
    """Where the load of other replicas is booked, under ids that no request of our own has."""

    def book(self, key: str, event: SequenceEvent) -> None:
        """Count the request as load of its worker, if that is known and it is not counted yet."""
        ...

    def prefill_completed(self, key: str) -> None:
        """Its prompt is no load any more."""
        ...

    def free(self, key: str) -> None:
        """It has ended."""
        ...


@dataclass(eq=False)
class _Replica:
    """One router. ``in_sync``: nothing is missing; ``listed``: what an open account has named."""

    publisher_id: int
    expected: int = 0
    in_sync: bool = True
    listed: set[str] | None = None
    requests: dict[str, SequenceEvent] = field(default_factory=dict)


class RemoteReplicas:
    """Keeps ``sink`` true to what other routers tell. ``request_snapshot`` is called, synchronously, with the
    id of a router whose account is needed, again at each of its messages until it has come.
    ``publishers`` are the processes that are there."""

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
        """Running requests of all of them."""
        return sum(len(replica.requests) for replica in self._replicas.values())

    def is_in_sync(self) -> bool:
        """Whether nothing is missing, as far as is known."""
        return all(replica.in_sync for replica in self._replicas.values())

    def add_publisher(self, publisher_id: int) -> None:
        """A process that routes is there."""
        self.publishers.add(publisher_id)

    def remove_publisher(self, publisher_id: int) -> None:
        """It is there no more: its requests are no load any more."""
        self.publishers.discard(publisher_id)
        for router_id, replica in list(self._replicas.items()):
            if replica.publisher_id == publisher_id:
                del self._replicas[router_id]
                for request_id in replica.requests:
                    self._sink.free(_key(router_id, request_id))

    def receive(self, publisher_id: int, batch: SequenceBatch) -> None:
        """Take one message. O(blocks named), an account that closes O(its requests)."""
        if publisher_id not in self.publishers:
            return  # it has left, or will be heard again once discovery tells of it
        replica = self._replicas.setdefault(batch.router_id, _Replica(publisher_id))
        if batch.number < replica.expected:
            return
        if batch.number > replica.expected:
            self.gaps += 1
            replica.in_sync, replica.listed = False, None
        replica.expected = batch.number + 1
        if batch.opens:
            replica.listed = set()
        for event in batch.events:
            self._apply(batch.router_id, replica, event)
        if batch.closes and replica.listed is not None:
            for request_id in replica.requests.keys() - replica.listed:
                self._free(batch.router_id, replica, request_id)
            replica.in_sync, replica.listed = True, None
        if not replica.in_sync and replica.listed is None:
            self._request_snapshot(batch.router_id)

    def worker_added(self, worker_id: int) -> None:
        """Count what runs on a worker that was not known before. O(requests)."""
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
        held = replica.requests.get(request_id)
        if held is not None and not _same(held, event):  # its end was lost, and its id used again
            self._free(router_id, replica, request_id)
            held = None
        if held is not None:
            if data.prefill_completed:
                self._prefill_completed(router_id, held)
        elif len(replica.requests) >= MAX_REQUESTS:
            self.refused += 1
        else:
            replica.requests[request_id] = event
            self._sink.book(_key(router_id, request_id), event)

    def _prefill_completed(self, router_id: int, held: SequenceEvent) -> None:
        assert isinstance(held.data, AddRequest), "that is how it was added"
        held.data.prefill_completed = True
        self._sink.prefill_completed(_key(router_id, held.request_id))

    def _free(self, router_id: int, replica: _Replica, request_id: str) -> None:
        if replica.requests.pop(request_id, None) is not None:
            self._sink.free(_key(router_id, request_id))


def _key(router_id: int, request_id: str) -> str:
    return f"{router_id:x}~{request_id}"


def _same(held: SequenceEvent, event: SequenceEvent) -> bool:
    mine, other = held.data, event.data
    assert isinstance(mine, AddRequest) and isinstance(other, AddRequest)
    if mine.prefill_completed and not other.prefill_completed:
        return False  # no prompt becomes uncomputed: it is the next of that id
    places = (held.worker_id, held.dp_rank) == (event.worker_id, event.dp_rank)
    return places and mine.token_sequence == other.token_sequence
