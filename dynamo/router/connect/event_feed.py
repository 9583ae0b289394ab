"""Follow the KV events of a router's workers: apply them, ask workers for what was missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from dynamo._fast.radix import RadixTree
from dynamo.errors import DynamoError, StreamIncomplete
from dynamo.protocols import codec
from dynamo.protocols.kv import KV_EVENTS, KV_QUERY, KvEvent, KvEventBatch, KvQuery, KvQueryAnswer
from dynamo.router.caches.event_threads import EventThreads
from dynamo.router.caches.indexer import EventMetrics, Indexer, Recovery
from dynamo.router.labels import RouterLabels
from dynamo.router.worker_pool import Member
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.events.channels import ZMQ, Subscription
from dynamo.runtime.process.tasks import Tasks

log = logging.getLogger(__name__)
_CHECKS_S = (0.05, 0.25, 1.0)
"""Seconds after connecting to a publisher at which its worker is asked for missed events.

What it publishes before the subscription has arrived there is lost, and nothing follows that would
show the gap. Later losses are found by the publisher's next message, or the sweep of the
maintenance.
"""
_decode_batch = codec.decoder(KvEventBatch).decode
BACKOFF_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Pauses between attempts; after one attempt more than pauses the query is abandoned."""
ANSWER_TIMEOUT_S = 5.0
_decode_event = codec.decoder(KvEvent).decode


class _Answer(msgspec.Struct):
    """A ``KvQueryAnswer`` whose events are decoded later: a dump can have 200,000."""

    kind: str
    events: list[msgspec.Raw] = []
    last_event_id: int = 0
    newest_available: int | None = None
    block_size: int | None = None

    def header(self) -> KvQueryAnswer:
        """Return the answer without its events."""
        return KvQueryAnswer(self.kind, [], self.last_event_id, self.newest_available)


_decode_answer = codec.decoder(_Answer).decode


class RecoveryClient:
    """Sends recovery queries, each in a task, to the ``kv_query`` endpoint behind ``client``.

    An answer about blocks of another size than ``block_size`` goes to ``on_foreign_blocks`` (worker
    id, its size) instead of the indexer.
    """

    def __init__(
        self,
        client: Client,
        indexer: Indexer,
        block_size: int,
        on_foreign_blocks: Callable[[int, int], None],
    ) -> None:
        self._client = client
        self._indexer = indexer
        self._block_size = block_size
        self._on_foreign_blocks = on_foreign_blocks
        self._tasks = Tasks("kv recovery")

    def send(self, recovery: Recovery) -> None:
        """Send a query; pass the answer, or that there is none, to the indexer."""
        name = f"kv-query-{recovery.worker_id:x}-{recovery.dp_rank}"
        self._tasks.spawn(self._recover(recovery), name=name)

    async def close(self) -> None:
        """Cancel all queries."""
        await self._tasks.close()
        self._client.close()

    async def _recover(self, recovery: Recovery) -> None:
        failure = ""  # an error would keep this frame, and the frame the error
        pauses = () if recovery.retry else BACKOFF_S
        for pause_s in (*pauses, None):
            try:
                await self._on_answer(recovery, await self._query(recovery))
                return
            except (DynamoError, TimeoutError, msgspec.MsgspecError) as error:
                failure = f"{type(error).__name__}: {error}"
            if not self._indexer.is_pending(recovery):
                return
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        log.log(
            logging.DEBUG if recovery.retry else logging.WARNING,
            "worker %x (dp_rank %d) did not report its KV blocks (%s): "
            "continuing with new events, querying again at every sweep",
            recovery.worker_id,
            recovery.dp_rank,
            failure,
        )
        await self._apply(recovery, None)

    async def _on_answer(self, recovery: Recovery, answer: _Answer) -> None:
        if answer.block_size in (None, self._block_size):
            await self._apply(recovery, answer.header(), map(_decode_event, answer.events))
        # Not pending: the worker has left, or a newer query has replaced this one.
        elif self._indexer.is_pending(recovery):
            self._on_foreign_blocks(recovery.worker_id, answer.block_size)

    async def _apply(
        self,
        recovery: Recovery,
        answer: KvQueryAnswer | None,
        events: Iterable[KvEvent] | None = None,
    ) -> None:
        """Pass the answer to the indexer, one step in each loop iteration."""
        for _ in self._indexer.recovery_steps(recovery, answer, events):
            await asyncio.sleep(0)

    async def _query(self, recovery: Recovery) -> _Answer:
        query = KvQuery(recovery.dp_rank, recovery.start, recovery.end)
        sink = _AnswerSink()
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            stream = self._client.open(recovery.worker_id, codec.encode(query), sink)
            try:
                return _decode_answer(await sink.answer)
            finally:
                if not sink.ended:  # timeout, invalid answer, cancellation
                    stream.kill()
                # An error keeps this frame: without these, connection and error keep each other.
                del sink, stream


class _AnswerSink:
    """Receives the only item of the answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.ended = False

    def on_data(self, payload: bytes) -> None:
        """Resolve the future with the answer."""
        if not self.answer.done():
            self.answer.set_result(bytes(payload))

    def on_end(self) -> None:
        """Fail unless the answer was received."""
        self.ended = True
        if not self.answer.done():
            self.answer.set_exception(StreamIncomplete("the worker ended without an answer"))

    def on_error(self, error: DynamoError) -> None:
        """Fail."""
        self.ended = True
        if not self.answer.done():
            self.answer.set_exception(error)


class EventFeed:
    """Keeps ``index`` up to date with the events of one component's workers.

    ``indexer`` applies them, or ``threads`` where ``event_threads`` is above 1.
    ``on_unusable`` is called with each worker whose KV blocks have another size.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        labels: RouterLabels,
        block_size: int,
        index: RadixTree,
        event_threads: int,
    ) -> None:
        self.block_size = block_size
        self.on_unusable: Callable[[int], None] | None = None
        self._runtime = runtime
        self._component = labels.namespace, labels.component
        self._counts = EventMetrics(runtime.metrics, labels, index)
        self.threads: EventThreads | None = None
        if event_threads > 1:
            self.threads = EventThreads(index, event_threads, KV_EVENTS, self._counts)
        ingest = None if self.threads is None else self.threads.ingest
        self.indexer = Indexer(index, self._on_recovery, self._counts, ingest)
        self._recovery: RecoveryClient | None = None
        self._subscription: Subscription | None = None
        self.checks_s: Sequence[float] = _CHECKS_S
        self._checks: dict[int, asyncio.TimerHandle] = {}
        self._closed = False

    async def start(self) -> None:
        """Subscribe. Events that arrive before their worker is added are kept by the indexer."""
        namespace, component = self._component
        query = await self._runtime.endpoint(f"{namespace}.{component}.{KV_QUERY}").client()
        self._recovery = RecoveryClient(
            query, self.indexer, self.block_size, self._on_foreign_blocks
        )
        on_events, over = self._on_events, None
        if self.threads is not None:
            self.threads.start(self.indexer)
            self._runtime.metrics.before_render.append(self.threads.flush)
            # The threads have sockets for ZeroMQ; the loop pushes what other transports bring.
            on_events, over = self.threads.push, {ZMQ: self.threads.subscriber}
        self._subscription = self._runtime.subscribe(
            namespace, component, KV_EVENTS, on_events, self._on_gap, self._on_publisher, over=over
        )
        await self._subscription.ready()

    async def close(self) -> None:
        """Stop following. Idempotent."""
        self._closed = True
        for check in self._checks.values():
            check.cancel()
        if self._subscription is not None:
            self._subscription.close()
        if self.threads is not None:
            self.threads.close()
            before_render = self._runtime.metrics.before_render
            if self.threads.flush in before_render:
                before_render.remove(self.threads.flush)
        if self._recovery is not None:
            await self._recovery.close()

    def add(self, member: Member) -> None:
        """Apply the worker's events, and ask it for the blocks that it has cached already.

        A worker without events is not asked: the picker predicts its cache.
        """
        if member.config.kv_event_publishing_enabled is False:
            return
        for rank, slot in member.slots.items():
            self.indexer.add(member.worker_id, rank, slot, member.config.enable_local_indexer)

    def remove(self, worker_id: int) -> None:
        """Ignore the worker's events."""
        self.indexer.remove(worker_id)

    def reject(self, worker_id: int, worker_tokens: int) -> None:
        """Report a worker whose model card names another block size: no prefix could match."""
        self._mark_unusable(worker_id)
        log.error(
            "worker %x has KV blocks of %d tokens, this router hashes blocks of %d: it gets no "
            "requests. Start the router with --kv-cache-block-size %d, or the worker with blocks "
            "of %d tokens",
            worker_id,
            worker_tokens,
            self.block_size,
            worker_tokens,
            self.block_size,
        )

    def _on_foreign_blocks(self, worker_id: int, events_tokens: int) -> None:
        """Ignore the cache of a worker whose events have another block size than its card."""
        self.indexer.remove(worker_id)
        self._mark_unusable(worker_id)
        log.error(
            "worker %x publishes KV blocks of %d tokens, but is registered with blocks of %d: its "
            "cache stays unknown. Give its KvEventPublisher and register_model the same size",
            worker_id,
            events_tokens,
            self.block_size,
        )

    def _mark_unusable(self, worker_id: int) -> None:
        self._counts.warning("block_size")
        if self.on_unusable is not None:
            self.on_unusable(worker_id)

    def _on_events(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        try:
            batch = _decode_batch(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._counts.warning("malformed")
            log.warning("invalid KV events of publisher %x: %s", publisher_id, error)
            return
        self.indexer.apply(batch)

    def _on_gap(self, publisher_id: int, expected: int, got: int) -> None:
        """Count lost messages; the ids of the next events show which events were lost.

        They do so for the ranks of the message alone that follows, so the others are checked after
        it. A publisher that counts from an earlier number has restarted, and so have its event ids.
        """
        if got < expected:
            self.indexer.publisher_restarted(publisher_id)
        else:
            asyncio.get_running_loop().call_soon(self.indexer.verify, publisher_id)
        self._counts.warning("sequence_gap", max(got - expected, 1))

    def _on_publisher(self, publisher_id: int, added: bool) -> None:
        """Check the worker of a new publisher for events missed while connecting."""
        pending = self._checks.pop(publisher_id, None)
        if pending is not None:
            pending.cancel()
        if added and self.checks_s and not self._closed:
            self._check_later(publisher_id, self.checks_s)

    def _check_later(self, worker_id: int, delays_s: Sequence[float]) -> None:
        loop = asyncio.get_running_loop()
        self._checks[worker_id] = loop.call_later(delays_s[0], self._check, worker_id, delays_s[1:])

    def _check(self, worker_id: int, later_s: Sequence[float]) -> None:
        del self._checks[worker_id]
        self.indexer.verify(worker_id)
        if later_s:
            self._check_later(worker_id, later_s)

    def _on_recovery(self, recovery: Recovery) -> None:
        if self._recovery is not None and not self._closed:
            self._recovery.send(recovery)
