"""Publishing to routers: a worker's KV events, its load, and the log that answers KV queries.

Everything recorded in one loop iteration is sent as one message. Call from the loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from dynamo._fast.radix import InvalidSequence, ParentNotFound, RadixTree
from dynamo.errors import InvalidArgument
from dynamo.observability.metrics import Registry, gauge
from dynamo.protocols import codec
from dynamo.protocols.kv import (
    KV_EVENTS,
    KV_METRICS,
    KV_QUERY,
    STORAGE_TIERS,
    TIER_NUMBERS,
    BlocksRemoved,
    BlocksStored,
    KvChange,
    KvEvent,
    KvEventBatch,
    KvMetrics,
    KvQuery,
    KvQueryAnswer,
)
from dynamo.runtime.distributed.component import Endpoint
from dynamo.runtime.requests.stream import ServerStream

REPEAT_S = 1.0
"""Seconds after which an unchanged load report is repeated, for routers that started later."""
Publish = Callable[[bytes], object]
_RANK = "dp_rank dynamo_component dynamo_namespace worker_id"
_TOTAL_BLOCKS = gauge("dynamo_component_total_blocks", "Blocks of the KV cache", _RANK)
_CACHE_USAGE = gauge(
    "dynamo_component_gpu_cache_usage_percent", "Share of the KV cache in use, 0 to 1", _RANK
)
_LOAD_TIME = gauge(
    "dynamo_component_model_load_time_seconds",
    "How long the engine took to load the model",
    "dynamo_component dynamo_namespace model worker_id",
)
_DECODE_QUERY = codec.decoder(KvQuery).decode
RING_EVENTS = 1024
"""Events that the log keeps, and that one message holds at most."""
RING_BYTES = 32 << 20
"""Hashes of these events, and of those of one message; one event may be larger."""
log = logging.getLogger(__name__)


class _Newest(deque[KvEvent]):
    """The newest events: at most ``count``, and :data:`RING_BYTES` of hashes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._bytes = 0

    def add(self, event: KvEvent, size_bytes: int) -> None:
        """Add the next event, which has ``size_bytes``; drop the oldest ones above the bounds."""
        self.append(event)
        self._bytes += size_bytes
        while len(self) > self._count or (self._bytes > RING_BYTES and len(self) > 1):
            self._bytes -= _size(self.popleft())

    def is_full_for(self, size_bytes: int) -> bool:
        """Return whether an event of ``size_bytes`` would displace an older one."""
        return len(self) >= self._count or self._bytes + size_bytes > RING_BYTES


def _size(event: KvEvent) -> int:
    """Return the bytes of the event's hashes."""
    data = event.data
    if type(data) is BlocksStored:
        # The hashes of blocks and of their tokens: two columns of the same length.
        return 2 * len(data.block_hashes)
    return len(data.block_hashes) if type(data) is BlocksRemoved else 0


class EventLog:
    """The events of one (worker, dp_rank), numbered from 1 without a gap.

    A bounded ring holds the newest events, an index the blocks that result from all of them. A
    query is answered from the ring if it reaches back far enough, otherwise with a dump of the
    index.
    """

    def __init__(self, dp_rank: int = 0, ring_events: int = RING_EVENTS) -> None:
        self.dp_rank = dp_rank
        self.last_event_id = 0
        self.rejected = 0
        self._ring = _Newest(ring_events)
        self._tree = RadixTree()

    def record(
        self,
        data: KvChange,
        storage_tier: str = STORAGE_TIERS[0],
    ) -> KvEvent | None:
        """Store a change and return its event; None if the index rejects it (counted and logged).

        ``storage_tier`` is one of ``STORAGE_TIERS``.
        """
        # The index comes first: a change that it rejects gets no id, because routers would reject
        # it as well, and an id without an event would look like a lost one.
        try:
            self._apply(data, TIER_NUMBERS[storage_tier])
        except (ParentNotFound, InvalidSequence, _UnknownBlocks) as error:
            self.rejected += 1
            if self.rejected & (self.rejected - 1) == 0:  # 1, 2, 4, 8, …: a loss rejects many
                log.warning(
                    "dropped a KV event of dp_rank %d, %d so far: %s",
                    self.dp_rank,
                    self.rejected,
                    error,
                )
            return None
        self.last_event_id += 1
        event = KvEvent(self.last_event_id, data, self.dp_rank, storage_tier)
        self._ring.add(event, _size(event))
        return event

    def answer(self, query: KvQuery) -> KvQueryAnswer:
        """Return events start..end inclusive, or a dump if the ring is too short. O(answer)."""
        start, end = query.start_event_id, query.end_event_id
        if start is None or not self._ring:
            return self.dump()
        if end is not None and end < start:
            return KvQueryAnswer("invalid_range", newest_available=self.last_event_id)
        if start > self.last_event_id:
            return KvQueryAnswer("too_new", newest_available=self.last_event_id)
        first = self._ring[0].event_id  # ids have no gaps: event i is at position i - first
        if start < first:
            return self.dump()
        last = self.last_event_id if end is None else min(end, self.last_event_id)
        events = [self._ring[i - first] for i in range(start, last + 1)]
        return KvQueryAnswer("events", events, last)

    def dump(self) -> KvQueryAnswer:
        """Return events that rebuild the index, parents first; ids count from 0. O(blocks)."""
        events = [
            KvEvent(
                number,
                BlocksStored(blocks.tobytes(), local.tobytes(), parent),
                rank,
                STORAGE_TIERS[tier],
            )
            for number, chain in enumerate(self._tree.dump_tiers())
            for _, rank, parent, blocks, local, tier in (chain,)
        ]
        return KvQueryAnswer("tree_dump", events, self.last_event_id)

    def blocks(self) -> int:
        """Count the blocks in the index, once per tier."""
        return self._tree.blocks()

    def _apply(self, data: KvChange, tier: int) -> None:
        slot = self._tree.slot(0, self.dp_rank, tier)
        if isinstance(data, BlocksStored):
            self._store(slot, data, tier)
        elif isinstance(data, BlocksRemoved):
            self._tree.remove(slot, data.block_hashes)
        elif tier == 0:
            self._tree.clear_all(slot)
        else:
            self._tree.clear(slot)

    def _store(self, slot: int, data: BlocksStored, tier: int) -> None:
        if tier == 0 or data.tokens_hashes:
            self._tree.store(slot, data.parent_hash, data.block_hashes, data.tokens_hashes)
            return
        # Ids alone: the position in the tree comes from another tier. adopt() returns how many
        # have none; an event of which no block was adopted is useless to routers too.
        count = len(data.block_hashes) // 8
        if count and self._tree.adopt(slot, data.block_hashes) == count:
            raise _UnknownBlocks(f"no other tier has any of its {count} blocks")


class _UnknownBlocks(Exception):
    """Blocks without tokens that no other tier has: their content is undefined."""


class KvEventSender:
    """Publishes the KV events of one worker, numbered per rank.

    Before :meth:`open` the newest ``RING_EVENTS`` are pending; routers query the older ones.
    ``block_size`` (tokens), if set, is part of each answer.
    """

    def __init__(self, worker_id: int, delay_s: float = 0.0) -> None:
        self.worker_id = worker_id
        self.block_size: int | None = None
        self.event_logs: dict[int, EventLog] = {}
        self._delay_s = delay_s
        self._publish: Publish | None = None
        self._pending = _Newest(RING_EVENTS)
        self._timer: asyncio.Handle | None = None

    def open(self, publish: Publish) -> None:
        """Start sending with ``publish``, pending events first."""
        self._publish = publish
        self._flush()

    def close(self) -> None:
        """Send pending events and stop; later events go to the log only."""
        self._flush()
        self._publish = None

    def record(
        self,
        dp_rank: int,
        changes: Iterable[KvChange],
        storage_tier: str = STORAGE_TIERS[0],
    ) -> None:
        """Log and publish ``changes`` on ``storage_tier``, one of ``STORAGE_TIERS``.

        The event log drops inconsistent changes with a warning.
        """
        event_log = self.event_log(dp_rank)
        for change in changes:
            event = event_log.record(change, storage_tier)
            if event is not None:
                size_bytes = _size(event)
                # Send what the bound would drop; without a publisher routers ask for it.
                if self._pending.is_full_for(size_bytes):
                    self._flush()
                self._pending.add(event, size_bytes)
        if self._pending and self._timer is None and self._publish is not None:
            loop = asyncio.get_running_loop()
            if self._delay_s:
                self._timer = loop.call_later(self._delay_s, self._flush)
            else:
                self._timer = loop.call_soon(self._flush)

    def event_log(self, dp_rank: int) -> EventLog:
        """Return the log of ``dp_rank``, created on first use."""
        event_log = self.event_logs.get(dp_rank)
        if event_log is None:
            event_log = self.event_logs[dp_rank] = EventLog(dp_rank)
        return event_log

    def answer(self, stream: ServerStream, payload: bytes) -> None:
        """Handle a request to the ``kv_query`` endpoint."""
        try:
            query = _DECODE_QUERY(payload)
        except msgspec.MsgspecError as error:
            stream.error(InvalidArgument(f"not a KvQuery: {error}"))
            return
        event_log = self.event_logs.get(query.dp_rank)
        answer = KvQueryAnswer("tree_dump") if event_log is None else event_log.answer(query)
        answer.block_size = self.block_size
        stream.send(codec.encode(answer))
        stream.end()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._publish is None or not self._pending:
            return
        batch = KvEventBatch(self.worker_id, list(self._pending))
        self._pending = _Newest(RING_EVENTS)
        self._publish(codec.encode(batch))


class LoadSender:
    """Publishes the newest load of each rank of one worker, at most once per loop iteration, and
    again every ``REPEAT_S``."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self._publish: Publish | None = None
        self._states: dict[int, KvMetrics] = {}
        self._timer: asyncio.Handle | None = None
        self._scheduled = False

    def open(self, publish: Publish) -> None:
        """Start sending with ``publish``, the newest states first."""
        self._publish = publish
        self._send()

    def close(self) -> None:
        """Stop sending."""
        self._publish = None
        if self._timer is not None:
            self._timer.cancel()

    def report(self, state: KvMetrics) -> None:
        """Publish ``state`` of one rank; it replaces the last one."""
        self._states[state.dp_rank] = state
        if self._publish is not None and not self._scheduled:
            self._scheduled = True
            self._schedule(0.0)

    def export(self, metrics: Registry, namespace: str, component: str) -> None:
        """Show the use of the KV cache on ``metrics``, of the ranks that report it."""
        totals, usages = metrics.family(_TOTAL_BLOCKS), metrics.family(_CACHE_USAGE)

        def update() -> None:
            for state in self._states.values():
                if state.kv_total_blocks:
                    labels = (str(state.dp_rank), component, namespace, f"{self.worker_id:x}")
                    totals[labels].value = state.kv_total_blocks
                    usages[labels].value = (state.kv_used_blocks or 0) / state.kv_total_blocks

        metrics.before_render.append(update)

    def _send(self) -> None:
        if self._publish is None:
            return
        self._scheduled = False
        if self._states:
            worker_id = self.worker_id
            states = [replace(state, worker_id=worker_id) for state in self._states.values()]
            self._publish(codec.encode(states))
        self._schedule(REPEAT_S)

    def _schedule(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = (
            loop.call_later(delay_s, self._send) if delay_s else loop.call_soon(self._send)
        )


async def connect_kv_events(endpoint: Endpoint, sender: KvEventSender) -> None:
    """Open ``sender`` on topic ``kv-events`` of the endpoint's component and serve ``kv_query``.

    Call it before the endpoint is served: a router that finds the worker queries it at once.
    """
    runtime = endpoint.runtime
    namespace, component, _ = endpoint.path
    publisher = await runtime.publisher(namespace, component, KV_EVENTS)
    serving = await runtime.start_serving()
    await serving.add((namespace, component, KV_QUERY), sender.answer, True)
    runtime.on_close(sender.close)
    # Last: this sends the newest events, and routers at once ask kv_query for the ones before.
    sender.open(publisher.publish)


def show_load_time(endpoint: Endpoint, model: str, seconds: float) -> None:
    """Show how long the engine of this worker took to load ``model``."""
    namespace, component, _ = endpoint.path
    runtime = endpoint.runtime
    labels = (component, namespace, model, f"{runtime.instance_id:x}")
    runtime.metrics.child(_LOAD_TIME, *labels).value = seconds


async def connect_load(endpoint: Endpoint, sender: LoadSender) -> None:
    """Open ``sender`` on topic ``kv_metrics`` of the endpoint's component."""
    runtime = endpoint.runtime
    namespace, component, _ = endpoint.path
    publisher = await runtime.publisher(namespace, component, KV_METRICS)
    sender.export(runtime.metrics, namespace, component)
    runtime.on_close(sender.close)
    sender.open(publisher.publish)
