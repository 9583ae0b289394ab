"""What a worker tells the routers: KV events as they happen, its load, and answers when asked.

Everything recorded during one loop turn leaves as one message. Use it from the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from dynamo.errors import InvalidArgument
from dynamo.protocols import codec
from dynamo.protocols.kv import (
    KV_EVENTS,
    KV_QUERY,
    STORAGE_TIERS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
    KvQuery,
    KvQueryAnswer,
)
from dynamo.protocols.load import KV_METRICS, KvMetrics
from dynamo.runtime.component import Endpoint
from dynamo.runtime.requests.stream import ServerStream
from dynamo.worker.event_log import RING_EVENTS, EventLog

__all__ = [
    "REPEAT_S",
    "KvEventSender",
    "LoadSender",
    "Publish",
    "connect_kv_events",
    "connect_load",
]

REPEAT_S = 1.0
"""Seconds after which a load report is sent again, unchanged."""

Publish = Callable[[bytes], object]
_DECODE_QUERY = codec.decoder(KvQuery).decode


class KvEventSender:
    """The KV events of one worker, all its ranks, numbered per rank.

    Until :meth:`open` the newest ``RING_EVENTS`` wait; a router that misses older ones asks.
    ``block_size`` (tokens), where it is known, goes with each answer.
    """

    def __init__(self, worker_id: int, delay_s: float = 0.0) -> None:
        self.worker_id = worker_id
        self.block_size: int | None = None
        self.event_logs: dict[int, EventLog] = {}
        self._delay_s = delay_s
        self._publish: Publish | None = None
        self._pending: deque[KvEvent] = deque(maxlen=RING_EVENTS)
        self._timer: asyncio.Handle | None = None

    def open(self, publish: Publish) -> None:
        """Send through ``publish`` from now on, first what has waited."""
        self._publish = publish
        self._flush()

    def close(self) -> None:
        """Send what is left; later events are only remembered."""
        self._flush()
        self._publish = None

    def record(
        self,
        dp_rank: int,
        changes: Iterable[BlocksStored | BlocksRemoved | BlocksCleared],
        storage_tier: str = STORAGE_TIERS[0],
    ) -> None:
        """Number, remember and publish ``changes``; what makes no sense is dropped and logged.

        They all concern ``storage_tier``, one of ``STORAGE_TIERS``.
        """
        event_log = self.event_log(dp_rank)
        for change in changes:
            event = event_log.record(change, storage_tier)
            if event is not None:
                self._pending.append(event)
                if len(self._pending) == RING_EVENTS:
                    self._flush()
        if self._pending and self._timer is None and self._publish is not None:
            loop = asyncio.get_running_loop()
            if self._delay_s:
                self._timer = loop.call_later(self._delay_s, self._flush)
            else:
                self._timer = loop.call_soon(self._flush)

    def event_log(self, dp_rank: int) -> EventLog:
        """The journal of ``dp_rank``, made on first use."""
        found = self.event_logs.get(dp_rank)
        if found is None:
            found = self.event_logs[dp_rank] = EventLog(dp_rank)
        return found

    def answer(self, stream: ServerStream, payload: bytes) -> None:
        """The push handler of the ``kv_query`` endpoint."""
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
        self._pending.clear()
        self._publish(codec.encode(batch))


class LoadSender:
    """The load of one worker's ranks: the newest state of each, sent at the end of the loop turn,
    and again every ``REPEAT_S`` for routers that came later."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self._publish: Publish | None = None
        self._states: dict[int, KvMetrics] = {}
        self._timer: asyncio.Handle | None = None
        self._fresh = False

    def open(self, publish: Publish) -> None:
        """Send through ``publish`` from now on, first the newest states."""
        self._publish = publish
        self._send()

    def close(self) -> None:
        """Send nothing more."""
        self._publish = None
        if self._timer is not None:
            self._timer.cancel()

    def report(self, state: KvMetrics) -> None:
        """Publish ``state`` as this worker's."""
        self._states[state.dp_rank] = state
        if self._publish is not None and not self._fresh:
            self._fresh = True
            self._schedule(0.0)

    def _send(self) -> None:
        if self._publish is None:
            return
        self._fresh = False
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
    """Publish ``sender`` on topic ``kv-events`` of the endpoint's component and answer ``kv_query``
    there. Do it before the endpoint is served, so that routers find both together."""
    runtime = endpoint.runtime
    namespace, component, _ = endpoint.path
    publisher = await runtime.publisher(namespace, component, KV_EVENTS)
    serving = await runtime.start_serving()
    await serving.add((namespace, component, KV_QUERY), sender.answer, True)
    runtime.track(sender)
    sender.open(publisher.publish)


async def connect_load(endpoint: Endpoint, sender: LoadSender) -> None:
    """Publish ``sender`` on topic ``kv_metrics`` of the endpoint's component."""
    runtime = endpoint.runtime
    namespace, component, _ = endpoint.path
    publisher = await runtime.publisher(namespace, component, KV_METRICS)
    runtime.track(sender)
    sender.open(publisher.publish)
