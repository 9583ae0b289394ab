"""Which KV event comes next from each (worker, dp_rank), and what to do when it does not.

A state machine without I/O: events and answers go in, changes to the prefix index and questions
for the worker come out. Where it is in doubt it forgets blocks: under-counting costs a cache hit,
over-counting would send requests to a cache that is not there. Spec 2.1, 2.2, 2.6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dynamo._fast.radix import InvalidSequence, ParentNotFound, RadixTree
from dynamo.protocols.kv import (
    TIER_NUMBERS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
    KvQueryAnswer,
)

__all__ = ["EventCounts", "Indexer", "Recovery", "Threads"]

"""``KvEvent.storage_tier`` to the index's tier. Blocks of others are ignored (and counted).

*Cleared* on the device means that there is nothing at all, on another tier only that one.
"""

MAX_EVENT_ID = 1 << 61
"""Streams whose ids are beyond stay on the loop."""

MAX_HELD_EVENTS = 16_384
"""Live events kept per stream while a question is open; beyond, they make a gap."""

STEP_BLOCKS = 4096
"""About so many blocks of an answer are applied in one step: a millisecond, decoding included."""

_EVENT_BLOCKS = 8
"""An event costs as much as so many blocks, whatever it holds."""


class Recovery(NamedTuple):
    """A question for the worker: events ``start``..``end`` inclusive, or a dump (no start).

    Without an end: everything since ``start``, which may be nothing. ``again``: it failed before
    and is tried once more; nothing has come into doubt since.
    """

    worker_id: int
    dp_rank: int
    start: int | None = None
    end: int | None = None
    again: bool = False


class EventCounts(Protocol):
    """Where events and oddities are counted."""

    def applied(self, event_type: str, status: str, count: int = 1) -> None:
        """Events were applied, or failed with ``status``."""
        ...

    def warning(self, kind: str, count: int = 1) -> None:
        """Something was odd."""
        ...


class Threads(Protocol):
    """Threads that apply what is next in order in the streams given to them.

    :class:`dynamo._fast.ingest.Ingest` tells what each of these does.
    """

    def follow(self, worker: int, dp_rank: int, slot: int) -> None: ...
    def give(self, worker: int, dp_rank: int, last: int | None) -> bool: ...
    def take(self, worker: int, dp_rank: int) -> tuple[int | None, bool] | None: ...
    def heard(self, worker: int, dp_rank: int) -> bool: ...
    def forget(self, worker: int, dp_rank: int) -> None: ...


@dataclass(eq=False)
class _Stream:
    """Events of one (worker, dp_rank). ``last`` is None when any id may come next.

    Held events wait, in order, for the answer to ``asked``; without a question there are none.
    ``incomplete``: the worker has blocks that a recovery did not bring.
    While it is ``given`` to threads, they know the last id and they alone change its blocks.
    """

    worker_id: int
    dp_rank: int
    slot: int
    answers: bool
    last: int | None = None
    asked: Recovery | None = None
    held: deque[KvEvent] = field(default_factory=deque)
    failed_attempts: int = 0
    incomplete: bool = False
    heard: bool = False
    given: bool = False


class Indexer:
    """Keeps ``index`` true to the events of all registered streams.

    ``on_recovery`` is called, synchronously, with each question; give its answer to
    :meth:`recovered`, or :meth:`recovery_steps`; None when none can be had. With ``threads`` a
    stream is theirs as long as its events come in order, and this class's as soon as they do not.
    """

    def __init__(
        self,
        index: RadixTree,
        on_recovery: Callable[[Recovery], None],
        counts: EventCounts,
        threads: Threads | None = None,
    ) -> None:
        self._index = index
        self._ask = on_recovery
        self._counts = counts
        self._threads = threads
        self._streams: dict[tuple[int, int], _Stream] = {}

    def add(self, worker_id: int, dp_rank: int, slot: int, answers: bool = True) -> None:
        """Follow a stream from now on; ``answers`` if the worker has a local indexer to ask."""
        if (worker_id, dp_rank) in self._streams:
            return
        stream = _Stream(worker_id, dp_rank, slot, answers)
        self._streams[worker_id, dp_rank] = stream
        if self._threads is not None:
            self._threads.follow(worker_id, dp_rank, slot)
        if answers:
            self._recover(stream, None, None)
        self._settle(stream)

    def remove(self, worker_id: int) -> None:
        """Forget the streams of a worker whose slots the fleet has freed."""
        for key in [key for key in self._streams if key[0] == worker_id]:
            del self._streams[key]
            if self._threads is not None:
                self._threads.forget(*key)

    def apply(self, batch: KvEventBatch) -> None:
        """Take live events of one worker. O(blocks named)."""
        for event in batch.events:
            stream = self._streams.get((batch.worker_id, event.dp_rank))
            if stream is None:  # not discovered yet: its dump will tell
                self._counts.warning("unknown_worker")
                continue
            if stream.given:
                self._reclaim(stream)
            stream.heard = True
            if stream.asked is None:
                self._next(stream, event)
            else:
                self._hold(stream, event)
        if self._threads is not None:
            for rank in {event.dp_rank for event in batch.events}:
                stream = self._streams.get((batch.worker_id, rank))
                if stream is not None:
                    self._settle(stream)

    def recovered(self, recovery: Recovery, answer: KvQueryAnswer | None) -> None:
        """:meth:`recovery_steps`, all at once."""
        for _ in self.recovery_steps(recovery, answer):
            pass

    def recovery_steps(
        self,
        recovery: Recovery,
        answer: KvQueryAnswer | None,
        events: Iterable[KvEvent] | None = None,
    ) -> Iterator[None]:
        """Take the worker's answer in steps of about ``STEP_BLOCKS`` blocks, or None if there is
        none to be had; ``events`` may be those of the answer, decoded as they are taken.

        Live events may be applied between steps: they are held until the last one. An answer to a
        question that no longer stands, or stands no longer at a later step, is ignored from there.
        """
        stream = self._pending_stream(recovery)
        if stream is None:
            return
        if answer is None:
            self._give_up(stream, recovery)
        else:
            before = stream.last
            for _ in self._taken(stream, answer, answer.events if events is None else events):
                yield
                if not self.is_pending(recovery):
                    return
            if not self._helped(stream, recovery, answer, before):
                return
        yield from self._drained(stream, recovery)
        if self.is_pending(recovery):
            stream.asked = None
            self._settle(stream)

    def is_pending(self, recovery: Recovery) -> bool:
        """Whether the answer to this question is still waited for."""
        return self._pending_stream(recovery) is not None

    def verify(self) -> None:
        """Ask every worker for what came since; finds a lost last event, which shows no gap.

        One that did not answer before is asked for everything again.
        """
        for stream in list(self._streams.values()):
            self._reclaim(stream)
            if stream.answers and stream.asked is None:
                if stream.incomplete:
                    self._recover(stream, None, None, again=True)
                elif stream.last is not None:
                    self._recover(stream, stream.last + 1, None)
            self._settle(stream)

    def renew(self, worker_id: int) -> None:
        """The worker began anew under its id: what it told before is void, ask for everything."""
        for stream in [one for key, one in self._streams.items() if key[0] == worker_id]:
            self._reclaim(stream)
            self._renew(stream)
            self._settle(stream)

    def silent(self, worker_id: int) -> bool:
        """True if the worker is followed, but has no block and has never sent an event."""
        streams = [stream for key, stream in self._streams.items() if key[0] == worker_id]
        return bool(streams) and not any(self._spoke(stream) for stream in streams)

    def recovering(self) -> int:
        """How many streams wait for an answer."""
        return sum(stream.asked is not None for stream in self._streams.values())

    def _spoke(self, stream: _Stream) -> bool:
        if stream.heard or stream.last or self._threads is None:
            return stream.heard or bool(stream.last)
        return self._threads.heard(stream.worker_id, stream.dp_rank)

    def _reclaim(self, stream: _Stream) -> None:
        """Make the stream ours, with what the threads know of it."""
        if stream.given and self._threads is not None:
            stream.given = False
            stream.failed_attempts = 0
            known = self._threads.take(stream.worker_id, stream.dp_rank)
            if known is not None:
                stream.last, heard = known
                stream.heard = stream.heard or heard

    def _settle(self, stream: _Stream) -> None:
        """Give the stream to the threads if nothing is open."""
        if self._threads is None or stream.given or stream.asked is not None or stream.held:
            return
        if (stream.last or 0) < MAX_EVENT_ID:
            stream.given = self._threads.give(stream.worker_id, stream.dp_rank, stream.last)

    def _renew(self, stream: _Stream) -> None:
        self._counts.warning("began_anew")
        stream.held.clear()
        if stream.answers:
            self._recover(stream, None, None)
        else:
            self._restart(stream)

    def _pending_stream(self, recovery: Recovery) -> _Stream | None:
        stream = self._streams.get((recovery.worker_id, recovery.dp_rank))
        return stream if stream is not None and stream.asked is recovery else None

    def _recover(
        self, stream: _Stream, start: int | None, end: int | None, again: bool = False
    ) -> None:
        stream.asked = Recovery(stream.worker_id, stream.dp_rank, start, end, again)
        self._ask(stream.asked)

    def _hold(self, stream: _Stream, event: KvEvent) -> None:
        if len(stream.held) >= MAX_HELD_EVENTS:
            self._counts.warning("held_overflow", len(stream.held))
            stream.held.clear()
        stream.held.append(event)

    def _next(self, stream: _Stream, event: KvEvent) -> None:
        if stream.last is None or event.event_id == stream.last + 1:
            stream.last = event.event_id
            stream.failed_attempts = 0
            self._change(stream, event)
        elif event.event_id <= stream.last:
            self._counts.warning("duplicate")
        else:
            self._counts.warning("gap", event.event_id - stream.last - 1)
            if stream.answers:
                stream.held.appendleft(event)
                self._recover(stream, stream.last + 1, event.event_id - 1)
            else:
                self._restart(stream)
                self._next(stream, event)

    def _taken(
        self, stream: _Stream, answer: KvQueryAnswer, events: Iterable[KvEvent]
    ) -> Iterator[None]:
        """Apply an answer's events; of a dump all, else those that are next in order."""
        is_dump = answer.kind == "tree_dump"
        if is_dump:
            self._index.clear_all(stream.slot)
            stream.incomplete = True
        cost = 0
        for event in events:
            if is_dump:
                self._change(stream, event)
            elif stream.last is not None and event.event_id == stream.last + 1:
                self._next(stream, event)
            cost += _cost(event)
            if cost >= STEP_BLOCKS:
                cost = 0
                yield
        if is_dump:
            stream.last = answer.last_event_id
            stream.incomplete = False

    def _drained(self, stream: _Stream, recovery: Recovery) -> Iterator[None]:
        """Take held events up to the next gap, which is asked for."""
        cost = 0
        while self.is_pending(recovery) and stream.held:
            event = stream.held.popleft()
            self._next(stream, event)
            cost += _cost(event)
            if cost >= STEP_BLOCKS:
                cost = 0
                yield

    def _helped(
        self, stream: _Stream, recovery: Recovery, answer: KvQueryAnswer, before: int | None
    ) -> bool:
        """Whether to go on with held events; False: there is another question."""
        since = recovery.start is not None and recovery.end is None
        if since and answer.kind == "too_new":
            if (answer.newest_available or 0) >= (before or 0):
                return True
            self._renew(stream)
            return False
        if answer.kind == "tree_dump":
            if recovery.end is None or answer.last_event_id >= recovery.end:
                return True
        elif stream.last != before:
            return True
        stream.failed_attempts += 1
        if recovery.again or stream.failed_attempts > 1:
            self._give_up(stream, recovery)
            return True
        self._recover(stream, None, None)
        return False

    def _give_up(self, stream: _Stream, recovery: Recovery) -> None:
        """Go on with live events. What is in doubt is forgotten, and asked for by verify()."""
        self._counts.warning("recovery_failed")
        stream.failed_attempts = 0
        if not recovery.again:
            self._restart(stream)

    def _restart(self, stream: _Stream) -> None:
        self._index.clear_all(stream.slot)
        stream.last = None
        stream.failed_attempts = 0
        stream.incomplete = stream.answers

    def _change(self, stream: _Stream, event: KvEvent) -> None:
        data = event.data
        tier = TIER_NUMBERS.get(event.storage_tier)
        try:
            status = "ignored_tier" if tier is None else self._apply_to_index(stream, data, tier)
        except ParentNotFound:
            status = "parent_block_not_found"
        except (InvalidSequence, ValueError):  # ValueError: a torn column
            status = "invalid_block"
        self._counts.applied(_TYPES[type(data)], status)

    def _apply_to_index(
        self, stream: _Stream, data: BlocksStored | BlocksRemoved | BlocksCleared, tier: int
    ) -> str:
        slot = stream.slot
        if tier:
            slot = self._index.slot(stream.worker_id, stream.dp_rank, tier)
        if isinstance(data, BlocksStored):
            if data.tokens_hashes or not tier:
                self._index.store(slot, data.parent_hash, data.block_hashes, data.tokens_hashes)
            elif self._index.adopt(slot, data.block_hashes):
                return "block_not_found"
        elif isinstance(data, BlocksRemoved):
            if self._index.remove(slot, data.block_hashes):
                return "block_not_found"
        elif tier:
            self._index.clear(slot)
        else:
            self._index.clear_all(slot)
        return "ok"


def _cost(event: KvEvent) -> int:
    """What it costs to apply the event, in blocks."""
    data = event.data
    return _EVENT_BLOCKS + (0 if isinstance(data, BlocksCleared) else len(data.block_hashes) // 8)


_TYPES: dict[type, str] = {
    BlocksStored: "stored",
    BlocksRemoved: "removed",
    BlocksCleared: "cleared",
}
