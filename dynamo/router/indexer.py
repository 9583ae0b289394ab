"""Which KV event comes next from each (worker, dp_rank), and what to do when it does not.

A state machine without I/O: events and answers go in, changes to the prefix index and questions
for the worker come out. Where it is in doubt it forgets blocks: under-counting costs a cache hit,
over-counting would send requests to a cache that is not there. Spec 2.1, 2.2, 2.6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dynamo._fast.radix import InvalidSequence, ParentNotFound, RadixTree
from dynamo.protocols.kv import Cleared, KvEvent, KvEventBatch, KvQueryAnswer, Removed, Stored

__all__ = ["TIERS", "EventCounts", "Indexer", "Recovery"]

TIERS = {"device": 0, "host_pinned": 1, "disk": 2, "external": 3}
"""``KvEvent.storage_tier`` to the index's tier. Blocks of others are ignored (and counted).

*Cleared* on the device means that there is nothing at all, on another tier only that one.
"""

MAX_HELD_EVENTS = 16_384
"""Live events kept per stream while a question is open; beyond, a full dump is asked for."""


class Recovery(NamedTuple):
    """A question for the worker: events ``start``..``end`` inclusive, or a dump (no start).

    Without an end: everything since ``start``, which may be nothing.
    """

    worker_id: int
    dp_rank: int
    start: int | None = None
    end: int | None = None


class EventCounts(Protocol):
    """Where events and oddities are counted."""

    def applied(self, event_type: str, status: str) -> None:
        """One event was applied, or failed with ``status``."""
        ...

    def warning(self, kind: str, count: int = 1) -> None:
        """Something was odd."""
        ...


@dataclass(eq=False)
class _Stream:
    """Events of one (worker, dp_rank). ``last`` is None when any id may come next."""

    worker_id: int
    dp_rank: int
    slot: int
    answers: bool
    last: int | None = None
    asked: Recovery | None = None
    held: deque[KvEvent] = field(default_factory=deque)
    overflowed: bool = False
    fruitless: int = 0
    heard: bool = False


class Indexer:
    """Keeps ``index`` true to the events of all registered streams.

    ``on_recovery`` is called, synchronously, with each question; give its answer to
    :meth:`recovered`, or :meth:`abandoned` when none can be had.
    """

    def __init__(
        self, index: RadixTree, on_recovery: Callable[[Recovery], None], counts: EventCounts
    ) -> None:
        self._index = index
        self._ask = on_recovery
        self._counts = counts
        self._streams: dict[tuple[int, int], _Stream] = {}

    def add(self, worker_id: int, dp_rank: int, slot: int, answers: bool = True) -> None:
        """Follow a stream from now on; ``answers`` if the worker has a local indexer to ask."""
        if (worker_id, dp_rank) in self._streams:
            return
        stream = _Stream(worker_id, dp_rank, slot, answers)
        self._streams[worker_id, dp_rank] = stream
        if answers:
            self._recover(stream, None, None)

    def remove(self, worker_id: int) -> None:
        """Forget the streams of a worker whose slots the fleet has freed."""
        for key in [key for key in self._streams if key[0] == worker_id]:
            del self._streams[key]

    def apply(self, batch: KvEventBatch) -> None:
        """Take live events of one worker. O(blocks named)."""
        for event in batch.events:
            stream = self._streams.get((batch.worker_id, event.dp_rank))
            if stream is None:  # not discovered yet: its dump will tell
                self._counts.warning("unknown_worker")
                continue
            stream.heard = True
            if stream.asked is not None:
                self._hold(stream, event)
            else:
                self._next(stream, event)

    def recovered(self, recovery: Recovery, answer: KvQueryAnswer) -> None:
        """Take the worker's answer; one to a question that no longer stands is ignored."""
        stream = self._standing(recovery)
        if stream is None:
            return
        stream.asked = None
        before = stream.last
        if answer.kind == "tree_dump":
            self._rebuild(stream, answer)
        else:
            for event in answer.events:
                if stream.last is not None and event.event_id == stream.last + 1:
                    self._take(stream, event)
        since = recovery.start is not None and recovery.end is None
        nothing_new = since and answer.kind == "too_new"
        if nothing_new and (answer.newest_available or 0) < (before or 0):
            self._renew(stream)
        elif answer.kind != "tree_dump" and stream.last == before and not nothing_new:
            self._fruitless(stream)
        elif stream.overflowed:
            stream.overflowed = False
            self._recover(stream, None, None)
        else:
            self._drain(stream)

    def abandoned(self, recovery: Recovery) -> None:
        """No answer can be had: forget the stream's blocks and go on with what is held."""
        stream = self._standing(recovery)
        if stream is not None:
            self._counts.warning("recovery_failed")
            stream.asked = None
            self._restart(stream)

    def stands(self, recovery: Recovery) -> bool:
        """Whether the answer to this question is still waited for."""
        return self._standing(recovery) is not None

    def verify(self) -> None:
        """Ask every worker for what came since; finds a lost last event, which shows no gap."""
        for stream in list(self._streams.values()):
            if stream.answers and stream.asked is None and stream.last is not None:
                self._recover(stream, stream.last + 1, None)

    def renew(self, worker_id: int) -> None:
        """The worker began anew under its id: what it told before is void, ask for everything."""
        for stream in [one for key, one in self._streams.items() if key[0] == worker_id]:
            self._renew(stream)

    def silent(self, worker_id: int) -> bool:
        """True if the worker is followed, but has no block and has never sent an event."""
        streams = [stream for key, stream in self._streams.items() if key[0] == worker_id]
        return bool(streams) and not any(stream.heard or stream.last for stream in streams)

    def recovering(self) -> int:
        """How many streams wait for an answer."""
        return sum(stream.asked is not None for stream in self._streams.values())

    def _renew(self, stream: _Stream) -> None:
        self._counts.warning("began_anew")
        stream.held.clear()
        if stream.answers:
            self._recover(stream, None, None)
        else:
            self._restart(stream)

    def _standing(self, recovery: Recovery) -> _Stream | None:
        stream = self._streams.get((recovery.worker_id, recovery.dp_rank))
        return stream if stream is not None and stream.asked is recovery else None

    def _recover(self, stream: _Stream, start: int | None, end: int | None) -> None:
        stream.asked = Recovery(stream.worker_id, stream.dp_rank, start, end)
        self._ask(stream.asked)

    def _hold(self, stream: _Stream, event: KvEvent) -> None:
        if len(stream.held) >= MAX_HELD_EVENTS:
            self._counts.warning("held_overflow", len(stream.held))
            stream.held.clear()
            stream.overflowed = True
        stream.held.append(event)

    def _next(self, stream: _Stream, event: KvEvent) -> None:
        if stream.last is None or event.event_id == stream.last + 1:
            self._take(stream, event)
        elif event.event_id <= stream.last:
            self._counts.warning("duplicate")
        else:
            self._counts.warning("gap", event.event_id - stream.last - 1)
            stream.held.append(event)
            if stream.answers:
                self._recover(stream, stream.last + 1, event.event_id - 1)
            else:
                self._restart(stream)

    def _drain(self, stream: _Stream) -> None:
        """Take held events up to the next hole; the rest stays held behind its question."""
        held, stream.held = stream.held, deque()
        while held and stream.asked is None:
            self._next(stream, held.popleft())
        stream.held.extend(held)

    def _fruitless(self, stream: _Stream) -> None:
        """The answer did not help: ask for everything, and give up when that does not either."""
        stream.fruitless += 1
        if stream.fruitless > 1:
            self._counts.warning("recovery_failed")
            self._restart(stream)
        else:
            self._recover(stream, None, None)

    def _restart(self, stream: _Stream) -> None:
        self._index.clear_all(stream.slot)
        stream.last = None
        stream.overflowed = False
        stream.fruitless = 0
        self._drain(stream)

    def _rebuild(self, stream: _Stream, answer: KvQueryAnswer) -> None:
        self._index.clear_all(stream.slot)
        for event in answer.events:
            self._change(stream, event)
        stream.last = answer.last_event_id

    def _take(self, stream: _Stream, event: KvEvent) -> None:
        stream.last = event.event_id
        stream.fruitless = 0
        self._change(stream, event)

    def _change(self, stream: _Stream, event: KvEvent) -> None:
        data = event.data
        tier = TIERS.get(event.storage_tier)
        try:
            status = "ignored_tier" if tier is None else self._apply_to_index(stream, data, tier)
        except ParentNotFound:
            status = "parent_block_not_found"
        except (InvalidSequence, ValueError):  # ValueError: a torn column
            status = "invalid_block"
        self._counts.applied(_TYPES[type(data)], status)

    def _apply_to_index(self, stream: _Stream, data: Stored | Removed | Cleared, tier: int) -> str:
        slot = stream.slot
        if tier != 0:
            slot = self._index.slot(stream.worker_id, stream.dp_rank, tier)
        if isinstance(data, Stored) and tier != 0 and not data.tokens_hashes:
            if self._index.adopt(slot, data.block_hashes):
                return "block_not_found"
        elif isinstance(data, Stored):
            self._index.store(slot, data.parent_hash, data.block_hashes, data.tokens_hashes)
        elif isinstance(data, Removed):
            if self._index.remove(slot, data.block_hashes):
                return "block_not_found"
        elif tier == 0:
            self._index.clear_all(slot)
        else:
            self._index.clear(slot)
        return "ok"


_TYPES: dict[type, str] = {Stored: "stored", Removed: "removed", Cleared: "cleared"}
