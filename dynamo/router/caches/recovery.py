"""Queries workers for missed KV events over the request plane, with retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from dynamo.errors import DynamoError, StreamIncomplete
from dynamo.protocols import codec
from dynamo.protocols.kv import KvEvent, KvQuery, KvQueryAnswer
from dynamo.router.caches.indexer import Indexer, Recovery
from dynamo.runtime import Client
from dynamo.runtime.process.tasks import Tasks

"""Endpoint of the worker's component that answers a ``KvQuery`` with one ``KvQueryAnswer``."""

BACKOFF_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Pauses between attempts; after one attempt more than pauses the query is abandoned."""

ANSWER_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)
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
        failure: Exception | None = None
        pauses = () if recovery.retry else BACKOFF_S
        for pause_s in (*pauses, None):
            try:
                await self._on_answer(recovery, await self._query(recovery))
                return
            except (DynamoError, TimeoutError, msgspec.MsgspecError) as error:
                failure = error
            if not self._indexer.is_pending(recovery):
                return
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        log.log(
            logging.DEBUG if recovery.retry else logging.WARNING,
            "worker %x (dp_rank %d) did not report its KV blocks (%s: %s): "
            "continuing with new events, querying again at every sweep",
            recovery.worker_id,
            recovery.dp_rank,
            type(failure).__name__,
            failure,
        )
        await self._apply(recovery, None)

    async def _on_answer(self, recovery: Recovery, answer: _Answer) -> None:
        if answer.block_size in (None, self._block_size):
            await self._apply(recovery, answer.header(), map(_decode_event, answer.events))
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
