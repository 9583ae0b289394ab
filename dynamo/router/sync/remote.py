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
class _Peer:
    """One router. ``whole``: nothing is missing; ``told``: what an open account has named."""

    publisher_id: int
    expected: int = 0
    whole: bool = True
    told: set[str] | None = None
    requests: dict[str, SequenceEvent] = field(default_factory=dict)


class RemoteReplicas:
    """Keeps ``board`` true to what other routers tell. ``ask`` is called, synchronously, with the
    id of a router whose account is needed, again at each of its messages until it has come.
    ``publishers`` are the processes that are there."""

    def __init__(self, board: LoadSink, ask: Callable[[int], None]) -> None:
        self._board = board
        self._ask = ask
        self.publishers: set[int] = set()
        self._peers: dict[int, _Peer] = {}
        self.gaps = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._peers)

    def requests(self) -> int:
        """Running requests of all of them."""
        return sum(len(peer.requests) for peer in self._peers.values())

    def is_whole(self) -> bool:
        """Whether nothing is missing, as far as is known."""
        return all(peer.whole for peer in self._peers.values())

    def came(self, publisher_id: int) -> None:
        """A process that routes is there."""
        self.publishers.add(publisher_id)

    def gone(self, publisher_id: int) -> None:
        """It is there no more: its requests are no load any more."""
        self.publishers.discard(publisher_id)
        for router_id, peer in list(self._peers.items()):
            if peer.publisher_id == publisher_id:
                del self._peers[router_id]
                for request_id in peer.requests:
                    self._board.free(_key(router_id, request_id))

    def hear(self, publisher_id: int, batch: SequenceBatch) -> None:
        """Take one message. O(blocks named), an account that closes O(its requests)."""
        if publisher_id not in self.publishers:
            return  # it has left, or will be heard again once discovery tells of it
        peer = self._peers.setdefault(batch.router_id, _Peer(publisher_id))
        if batch.number < peer.expected:
            return
        if batch.number > peer.expected:
            self.gaps += 1
            peer.whole, peer.told = False, None
        peer.expected = batch.number + 1
        if batch.opens:
            peer.told = set()
        for event in batch.events:
            self._take(batch.router_id, peer, event)
        if batch.closes and peer.told is not None:
            for request_id in peer.requests.keys() - peer.told:
                self._free(batch.router_id, peer, request_id)
            peer.whole, peer.told = True, None
        if not peer.whole and peer.told is None:
            self._ask(batch.router_id)

    def worker_added(self, worker_id: int) -> None:
        """Count what runs on a worker that was not known before. O(requests)."""
        for router_id, peer in self._peers.items():
            for request_id, event in peer.requests.items():
                if event.worker_id == worker_id:
                    self._board.book(_key(router_id, request_id), event)

    def _take(self, router_id: int, peer: _Peer, event: SequenceEvent) -> None:
        if isinstance(event.data, AddRequest):
            self._add(router_id, peer, event, event.data)
        elif isinstance(event.data, Free):
            self._free(router_id, peer, event.request_id)
        elif event.request_id in peer.requests:
            self._prefill_completed(router_id, peer.requests[event.request_id])

    def _add(self, router_id: int, peer: _Peer, event: SequenceEvent, data: AddRequest) -> None:
        request_id = event.request_id
        if peer.told is not None:
            peer.told.add(request_id)
        held = peer.requests.get(request_id)
        if held is not None and not _same(held, event):  # its end was lost, and its id used again
            self._free(router_id, peer, request_id)
            held = None
        if held is not None:
            if data.prefill_completed:
                self._prefill_completed(router_id, held)
        elif len(peer.requests) >= MAX_REQUESTS:
            self.refused += 1
        else:
            peer.requests[request_id] = event
            self._board.book(_key(router_id, request_id), event)

    def _prefill_completed(self, router_id: int, held: SequenceEvent) -> None:
        assert isinstance(held.data, AddRequest), "that is how it was added"
        held.data.prefill_completed = True
        self._board.prefill_completed(_key(router_id, held.request_id))

    def _free(self, router_id: int, peer: _Peer, request_id: str) -> None:
        if peer.requests.pop(request_id, None) is not None:
            self._board.free(_key(router_id, request_id))


def _key(router_id: int, request_id: str) -> str:
    return f"{router_id:x}~{request_id}"


def _same(held: SequenceEvent, event: SequenceEvent) -> bool:
    mine, other = held.data, event.data
    assert isinstance(mine, AddRequest) and isinstance(other, AddRequest)
    if mine.prefill_completed and not other.prefill_completed:
        return False  # no prompt becomes uncomputed: it is the next of that id
    places = (held.worker_id, held.dp_rank) == (event.worker_id, event.dp_rank)
    return places and mine.token_sequence == other.token_sequence
