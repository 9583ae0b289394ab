"""Applies KV events in order to the prefix index, and recovers the missing ones.

A state machine without I/O: events and answers go in, changes to the index and recovery queries
come out. In doubt it forgets blocks: an undercount costs a cache hit, an overcount sends requests
to a cache that does not exist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo._fast.ingest import Ingest
from dynamo._fast.radix import InvalidSequence, ParentNotFound, RadixTree
from dynamo.observability.metrics import Counter, Registry, counter, gauge
from dynamo.protocols.kv import (
    TIER_NUMBERS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvChange,
    KvEvent,
    KvEventBatch,
    KvQueryAnswer,
)
from dynamo.router.labels import ROUTED, RouterLabels

MAX_EVENT_ID = 1 << 61
"""Streams with larger ids stay on the loop: the threads compute with signed 64-bit ids."""

MAX_HELD_EVENTS = 16_384
"""Live events held per stream during a recovery; beyond, they are dropped and leave a gap."""

STEP_BLOCKS = 4096
"""Blocks of an answer applied in one step: about a millisecond, with decoding."""

_EVENT_BLOCKS = 8
"""Fixed cost of an event, in blocks."""

_EVENTS_APPLIED = counter(
    "dynamo_component_kv_cache_events_applied",
    "KV events by type and outcome",
    "dynamo_component dynamo_namespace event_type status worker_id",
)
_EVENT_WARNINGS = counter(
    "dynamo_component_kv_cache_event_warnings",
    "KV events that were odd but tolerable",
    "dynamo_component dynamo_namespace warning_kind worker_id",
)
_BLOCKS = gauge(
    "dynamo_component_router_index_blocks", "Pairs of block and worker in the prefix index", ROUTED
)
_MEMORY_BYTES = gauge(
    "dynamo_component_router_index_memory_bytes", "Memory of the prefix index", ROUTED
)
_DROPPED_BLOCKS = gauge(
    "dynamo_component_router_index_dropped_blocks",
    "Blocks that the cap of the prefix index refused",
    ROUTED,
)


class Recovery(NamedTuple):
    """A query for the worker: events ``start``..``end`` inclusive, or a dump (no start).

    Without an end: all events since ``start``, which may be none. ``retry``: an earlier query
    failed, and the blocks in the index are not in doubt.
    """

    worker_id: int
    dp_rank: int
    start: int | None = None
    end: int | None = None
    retry: bool = False


@dataclass(eq=False)
class _Stream:
    """Events of one (worker, dp_rank). ``last`` is None when any id may be the next.

    Held events wait, in order, for the answer to ``pending``; without a query there are none.
    ``incomplete``: a recovery failed, the worker has blocks that the index lacks. While the stream
    is ``delegated``, the threads keep the last id, and only they change its blocks.
    """

    worker_id: int
    dp_rank: int
    slot: int
    answers: bool
    last: int | None = None
    pending: Recovery | None = None
    held: deque[KvEvent] = field(default_factory=deque)
    failed_attempts: int = 0
    incomplete: bool = False
    received_any: bool = False
    delegated: bool = False


class EventMetrics:
    """KV events by type and outcome, warnings by kind, and the size of the index."""

    def __init__(self, registry: Registry, labels: RouterLabels, index: RadixTree) -> None:
        self._labels = labels
        self._applied = registry.family(_EVENTS_APPLIED)
        self._warnings = registry.family(_EVENT_WARNINGS)
        self._by_outcome: dict[tuple[str, str], Counter] = {}
        show_index(registry, labels, index)

    def applied(self, event_type: str, status: str, count: int = 1) -> None:
        """Count events."""
        child = self._by_outcome.get((event_type, status))
        if child is None:
            labels = self._labels
            child = self._by_outcome[event_type, status] = self._applied.labels(
                labels.component, labels.namespace, event_type, status, labels.router_id
            )
        child.value += count

    def warning(self, kind: str, count: int = 1) -> None:
        """Count warnings of one kind."""
        labels = self._labels
        values = labels.component, labels.namespace, kind, labels.router_id
        self._warnings.labels(*values).value += count


def show_index(registry: Registry, labels: RouterLabels, index: RadixTree) -> None:
    """Export the size of the index."""
    for spec, read in (
        (_BLOCKS, index.blocks),
        (_MEMORY_BYTES, index.memory_bytes),
        (_DROPPED_BLOCKS, index.dropped),
    ):
        registry.child(spec, *labels.router).function = read


class Indexer:
    """Applies the events of all registered streams to ``index``.

    ``on_recovery`` is called, synchronously, with each query; pass its answer, or None when there
    is none, to :meth:`recovered` or :meth:`recovery_steps`. With ``threads`` a stream is delegated
    to them as long as its events arrive in order. ``recovering_slots`` are those whose blocks in
    the index are in doubt.
    """

    def __init__(
        self,
        index: RadixTree,
        on_recovery: Callable[[Recovery], None],
        counts: EventMetrics,
        threads: Ingest | None = None,
    ) -> None:
        self._index = index
        self._ask = on_recovery
        self._counts = counts
        self._threads = threads
        self._streams: dict[tuple[int, int], _Stream] = {}
        self.recovering_slots: set[int] = set()

    def add(self, worker_id: int, dp_rank: int, slot: int, answers: bool = True) -> None:
        """Register a stream; ``answers``: the worker has a local indexer that answers queries."""
        if (worker_id, dp_rank) in self._streams:
            return
        stream = _Stream(worker_id, dp_rank, slot, answers)
        self._streams[worker_id, dp_rank] = stream
        if self._threads is not None:
            self._threads.add(worker_id, dp_rank, slot)
        if answers:
            self._recover(stream, None, None)
        self._delegate(stream)

    def remove(self, worker_id: int) -> None:
        """Remove the streams of a worker whose slots were freed."""
        for key in [key for key in self._streams if key[0] == worker_id]:
            self.recovering_slots.discard(self._streams.pop(key).slot)
            if self._threads is not None:
                self._threads.remove(*key)

    def apply(self, batch: KvEventBatch) -> None:
        """Apply live events of one worker. O(blocks named)."""
        for event in batch.events:
            stream = self._streams.get((batch.worker_id, event.dp_rank))
            if stream is None:  # not discovered yet: its dump will have the blocks
                self._counts.warning("unknown_worker")
                continue
            # A handoff of the threads: take the stream back before changing it.
            if stream.delegated:
                self._reclaim(stream)
            stream.received_any = True
            if stream.pending is None:
                self._apply_live(stream, event)
            else:
                self._hold(stream, event)
        if self._threads is not None:
            # After the whole batch: its next event would take the stream back at once.
            for rank in {event.dp_rank for event in batch.events}:
                stream = self._streams.get((batch.worker_id, rank))
                if stream is not None:
                    self._delegate(stream)

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
        """Apply the worker's answer (None: it gave none) in steps of about ``STEP_BLOCKS`` blocks.

        ``events`` are those of the answer, decoded lazily. Live events may arrive between steps:
        they are held until the last one. As soon as the query is not pending any more, the rest of
        the answer is ignored.
        """
        stream = self._pending_stream(recovery)
        if stream is None:
            return
        if answer is None:
            self._give_up(stream, recovery)
        else:
            before = stream.last
            for _ in self._apply_answer(
                stream, answer, answer.events if events is None else events
            ):
                yield
                if not self.is_pending(recovery):
                    return
            if not self._made_progress(stream, recovery, answer, before):
                return
        yield from self._apply_held(stream, recovery)
        # Otherwise a gap among the held events has started another recovery, which continues.
        if self.is_pending(recovery):
            stream.pending = None
            self._note_doubt(stream)
            self._delegate(stream)

    def is_pending(self, recovery: Recovery) -> bool:
        """Return whether this query is still waiting for its answer."""
        return self._pending_stream(recovery) is not None

    def verify(self, worker_id: int | None = None) -> None:
        """Query a worker, or all, for events since the last: a lost last event leaves no gap.

        A worker whose last recovery failed is queried for a dump again.
        """
        for stream in list(self._streams.values()):
            if worker_id is not None and stream.worker_id != worker_id:
                continue
            self._reclaim(stream)
            if stream.answers and stream.pending is None:
                if stream.incomplete:
                    self._recover(stream, None, None, retry=True)
                elif stream.last is not None:
                    self._recover(stream, stream.last + 1, None)
            self._delegate(stream)

    def publisher_restarted(self, worker_id: int) -> None:
        """Recover everything: the worker's publisher restarted, its earlier events do not count."""
        for stream in [self._streams[key] for key in self._streams if key[0] == worker_id]:
            self._reclaim(stream)
            self._resync(stream)
            self._delegate(stream)

    def silent(self, worker_id: int) -> bool:
        """Return whether a registered worker has no block and never sent an event."""
        streams = [stream for key, stream in self._streams.items() if key[0] == worker_id]
        return bool(streams) and not any(self._has_data(stream) for stream in streams)

    def recovering(self) -> int:
        """Return the number of streams with a pending query."""
        return sum(stream.pending is not None for stream in self._streams.values())

    def _has_data(self, stream: _Stream) -> bool:
        if stream.received_any or stream.last or self._threads is None:
            return stream.received_any or bool(stream.last)
        return self._threads.received_any(stream.worker_id, stream.dp_rank)

    def _reclaim(self, stream: _Stream) -> None:
        """Return the stream to the loop, with the state that the threads kept."""
        if stream.delegated and self._threads is not None:
            stream.delegated = False
            stream.failed_attempts = 0
            state = self._threads.reclaim(stream.worker_id, stream.dp_rank)
            if state is not None:
                stream.last, received_any = state
                stream.received_any = stream.received_any or received_any

    def _delegate(self, stream: _Stream) -> None:
        """Delegate the stream to the threads unless a recovery is pending."""
        if self._threads is None or stream.delegated or stream.pending is not None or stream.held:
            return
        # The threads refuse it while handoffs are pending; the last of those tries again.
        if (stream.last or 0) < MAX_EVENT_ID:
            stream.delegated = self._threads.delegate(stream.worker_id, stream.dp_rank, stream.last)

    def _resync(self, stream: _Stream) -> None:
        self._counts.warning("began_anew")
        stream.held.clear()
        if stream.answers:
            self._recover(stream, None, None)
        else:
            self._forget_blocks(stream)

    def _pending_stream(self, recovery: Recovery) -> _Stream | None:
        stream = self._streams.get((recovery.worker_id, recovery.dp_rank))
        return stream if stream is not None and stream.pending is recovery else None

    def _recover(
        self, stream: _Stream, start: int | None, end: int | None, retry: bool = False
    ) -> None:
        stream.pending = Recovery(stream.worker_id, stream.dp_rank, start, end, retry)
        self._note_doubt(stream)
        self._ask(stream.pending)

    def _note_doubt(self, stream: _Stream) -> None:
        """Keep ``recovering_slots`` true after a change of ``stream``.

        A query for events since the last one is a check: nothing is known to be missing.
        """
        pending = stream.pending
        is_check = pending is not None and pending.start is not None and pending.end is None
        if stream.incomplete or (pending is not None and not is_check):
            self.recovering_slots.add(stream.slot)
        else:
            self.recovering_slots.discard(stream.slot)

    def _hold(self, stream: _Stream, event: KvEvent) -> None:
        # Drop them all at once: the next event then shows one gap, which one query repairs.
        if len(stream.held) >= MAX_HELD_EVENTS:
            self._counts.warning("held_overflow", len(stream.held))
            stream.held.clear()
        stream.held.append(event)

    def _apply_live(self, stream: _Stream, event: KvEvent) -> None:
        if stream.last is None or event.event_id == stream.last + 1:
            stream.last = event.event_id
            stream.failed_attempts = 0
            self._apply(stream, event)
        elif event.event_id <= stream.last:
            self._counts.warning("duplicate")
        else:
            self._counts.warning("gap", event.event_id - stream.last - 1)
            if stream.answers:
                # To the front: while held events are applied, this one was just taken from there.
                stream.held.appendleft(event)
                self._recover(stream, stream.last + 1, event.event_id - 1)
            else:
                # This worker answers no queries. ``last`` is None then: the call accepts any id.
                self._forget_blocks(stream)
                self._apply_live(stream, event)

    def _apply_answer(
        self, stream: _Stream, answer: KvQueryAnswer, events: Iterable[KvEvent]
    ) -> Iterator[None]:
        """Apply all events of a dump, or those of a range that are next in order."""
        is_dump = answer.kind == "tree_dump"
        if is_dump:
            self._index.clear_all(stream.slot)
            stream.incomplete = True  # until the last step
        cost = 0
        for event in events:
            if is_dump:
                self._apply(stream, event)
            elif stream.last is not None and event.event_id == stream.last + 1:
                self._apply_live(stream, event)
            cost += _cost(event)
            if cost >= STEP_BLOCKS:
                cost = 0
                yield
        if is_dump:
            stream.last = answer.last_event_id
            stream.incomplete = False

    def _apply_held(self, stream: _Stream, recovery: Recovery) -> Iterator[None]:
        """Apply held events up to the next gap, which starts another recovery."""
        cost = 0
        while self.is_pending(recovery) and stream.held:
            event = stream.held.popleft()
            self._apply_live(stream, event)
            cost += _cost(event)
            if cost >= STEP_BLOCKS:
                cost = 0
                yield

    def _made_progress(
        self, stream: _Stream, recovery: Recovery, answer: KvQueryAnswer, before: int | None
    ) -> bool:
        """Return whether to apply the held events; False: another query was sent.

        An answer that brings no progress is followed by one query for a dump, then by giving up:
        a worker whose answers are useless must not be queried forever.
        """
        since = recovery.start is not None and recovery.end is None
        if since and answer.kind == "too_new":
            # Nothing is missing, unless the worker counts from the start again.
            if (answer.newest_available or 0) >= (before or 0):
                return True
            self._resync(stream)
            return False
        if answer.kind == "tree_dump":
            if recovery.end is None or answer.last_event_id >= recovery.end:
                return True
        elif stream.last != before:
            return True
        stream.failed_attempts += 1
        if recovery.retry or stream.failed_attempts > 1:
            self._give_up(stream, recovery)
            return True
        self._recover(stream, None, None)
        return False

    def _give_up(self, stream: _Stream, recovery: Recovery) -> None:
        """Continue with live events. Blocks in doubt are forgotten; verify() queries them again."""
        self._counts.warning("recovery_failed")
        stream.failed_attempts = 0
        if not recovery.retry:
            self._forget_blocks(stream)

    def _forget_blocks(self, stream: _Stream) -> None:
        self._index.clear_all(stream.slot)
        stream.last = None
        stream.failed_attempts = 0
        stream.incomplete = stream.answers
        self._note_doubt(stream)

    def _apply(self, stream: _Stream, event: KvEvent) -> None:
        data = event.data
        tier = TIER_NUMBERS.get(event.storage_tier)
        try:
            status = "ignored_tier" if tier is None else self._apply_to_index(stream, data, tier)
        except ParentNotFound:
            status = "parent_block_not_found"
        except (InvalidSequence, ValueError):  # ValueError: a column of partial integers
            status = "invalid_block"
        self._counts.applied(_TYPES[type(data)], status)

    def _apply_to_index(self, stream: _Stream, data: KvChange, tier: int) -> str:
        slot = stream.slot
        if tier:
            slot = self._index.slot(stream.worker_id, stream.dp_rank, tier)
        if isinstance(data, BlocksStored):
            # A block that moves to a lower tier keeps its position: its id is enough.
            if data.tokens_hashes or not tier:
                self._index.store(slot, data.parent_hash, data.block_hashes, data.tokens_hashes)
            elif self._index.adopt(slot, data.block_hashes):
                return "block_not_found"
        elif isinstance(data, BlocksRemoved):
            if self._index.remove(slot, data.block_hashes):
                return "block_not_found"
        elif tier:
            self._index.clear(slot)
        else:  # an engine that clears the device has dropped the lower tiers, too
            self._index.clear_all(slot)
        return "ok"


def _cost(event: KvEvent) -> int:
    """Return the cost of applying the event, in blocks."""
    data = event.data
    return _EVENT_BLOCKS + (0 if isinstance(data, BlocksCleared) else len(data.block_hashes) // 8)


_TYPES: dict[type, str] = {
    BlocksStored: "stored",
    BlocksRemoved: "removed",
    BlocksCleared: "cleared",
}
