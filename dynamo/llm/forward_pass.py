"""Publishers and a subscriber of forward-pass metrics, with Dynamo's names (FPM).

The planner reads them as the load of a worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from dynamo.protocols import codec
from dynamo.protocols.control import MODEL_CARDS, decode_card
from dynamo.protocols.kv import (
    FORWARD_PASS,
    ForwardPass,
    QueuedRequests,
    ScheduledRequests,
)
from dynamo.runtime import Endpoint
from dynamo.runtime.discovery import KeyEvent
from dynamo.worker.publish import Publish

HEARTBEAT_S = 1.0
"""Seconds without a pass after which a rank sends that it is idle."""
KEPT_MESSAGES = 10_000
"""Messages that wait for :meth:`FpmEventSubscriber.recv`; the oldest are dropped."""
_HIGH_WATER_MESSAGES = 10_000
_RANKS = 4096
_FRAMES = 3
log = logging.getLogger(__name__)
_decode = codec.decoder(ForwardPass).decode
T = TypeVar("T")


class FpmEventRelay:
    """Publishes what an engine sends to the ZMQ address ``zmq_endpoint``. Create it on the loop.

    A message of the engine has three frames: topic, number, payload. The payload stays as it is.
    """

    def __init__(self, endpoint: Endpoint, zmq_endpoint: str) -> None:
        self._malformed = 0
        self._zmq_endpoint = zmq_endpoint
        work = self._relay(endpoint)
        self._task = endpoint.runtime.tasks.spawn(work, name=f"relay {zmq_endpoint}")

    def shutdown(self) -> None:
        """Stop. Idempotent."""
        self._task.cancel()

    async def _relay(self, endpoint: Endpoint) -> None:
        publish = await _publisher(endpoint)
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MESSAGES)
            socket.setsockopt_string(zmq.SUBSCRIBE, "")
            socket.connect(self._zmq_endpoint)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == _FRAMES:
                    publish(frames[-1])
                    continue
                self._malformed += 1
                if self._malformed == 1:
                    log.warning(
                        "%s: dropped forward-pass metrics of %d frames, not 3; further ones are "
                        "dropped silently", self._zmq_endpoint, len(frames),
                    )  # fmt: skip
        finally:
            socket.close()


class FpmDirectPublisher:
    """Publishes the passes of ``dp_size`` ranks. Create it on the loop; publish from any thread.

    A rank that publishes nothing for a second is reported as idle.
    """

    def __init__(self, endpoint: Endpoint, worker_id: str, dp_size: int = 1) -> None:
        if dp_size < 1:
            raise ValueError(f"dp_size must be at least 1, got {dp_size}")
        self._worker_id = worker_id
        self._counters = [itertools.count(1) for _ in range(dp_size)]
        self._quiet = [True] * dp_size
        self._send: Publish | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._closed = False
        endpoint.runtime.on_close(self.shutdown)
        endpoint.runtime.tasks.spawn(self._open(endpoint), name="forward-pass metrics")

    def publish(  # noqa: PLR0913 - Dynamo's signature
        self,
        *,
        dp_rank: int,
        scheduled_num_prefill_requests: int,
        scheduled_sum_prefill_tokens: int,
        scheduled_sum_prefill_kv_tokens: int,
        scheduled_num_decode_requests: int,
        scheduled_sum_decode_kv_tokens: int,
        queued_num_prefill_requests: int,
        queued_sum_prefill_tokens: int,
        queued_num_decode_requests: int,
        queued_sum_decode_kv_tokens: int,
        wall_time_secs: float,
    ) -> None:
        """Publish one pass. ValueError for an unknown rank."""
        if not 0 <= dp_rank < len(self._quiet):
            raise ValueError(f"dp_rank must be from 0 to {len(self._quiet) - 1}, got {dp_rank}")
        scheduled = ScheduledRequests(
            num_prefill_requests=scheduled_num_prefill_requests,
            sum_prefill_tokens=scheduled_sum_prefill_tokens,
            sum_prefill_kv_tokens=scheduled_sum_prefill_kv_tokens,
            num_decode_requests=scheduled_num_decode_requests,
            sum_decode_kv_tokens=scheduled_sum_decode_kv_tokens,
        )
        queued = QueuedRequests(
            num_prefill_requests=queued_num_prefill_requests,
            sum_prefill_tokens=queued_sum_prefill_tokens,
            num_decode_requests=queued_num_decode_requests,
            sum_decode_kv_tokens=queued_sum_decode_kv_tokens,
        )
        self._quiet[dp_rank] = False
        self._pass(dp_rank, wall_time_secs, scheduled, queued)

    def shutdown(self) -> None:
        """Stop. Idempotent, from any thread."""
        self._closed = True
        if threading.get_ident() == self._thread:
            self._stop()
        else:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._send = None
        if self._timer is not None:
            self._timer.cancel()

    async def _open(self, endpoint: Endpoint) -> None:
        send = await _publisher(endpoint)
        if not self._closed:
            self._send = send
            self._beat()

    def _beat(self) -> None:
        """Report the ranks without a pass since the last time."""
        for rank, quiet in enumerate(self._quiet):
            if quiet:
                self._pass(rank, 0.0, ScheduledRequests(), QueuedRequests())
            self._quiet[rank] = True
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)

    def _pass(
        self, rank: int, wall_time_s: float, scheduled: ScheduledRequests, queued: QueuedRequests
    ) -> None:
        number = next(self._counters[rank])
        report = ForwardPass(
            worker_id=self._worker_id,
            dp_rank=rank,
            counter_id=number,
            wall_time=wall_time_s,
            scheduled_requests=scheduled,
            queued_requests=queued,
        )
        payload = codec.encode(report)
        if threading.get_ident() == self._thread:
            self._deliver(payload)
        else:
            self._loop.call_soon_threadsafe(self._deliver, payload)

    def _deliver(self, payload: bytes) -> None:
        if self._send is not None:
            self._send(payload)


class FpmEventSubscriber:
    """Receives the forward-pass metrics of all workers of an endpoint's component.

    Create it on the loop, and use one of two ways: :meth:`recv` for each message, or
    :meth:`start_tracking` for the newest of each rank.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._messages: queue.Queue[bytes | None] = queue.Queue(KEPT_MESSAGES)
        self._receives = self._tracks = self._closed = False
        self._newest: dict[tuple[str, int], bytes] = {}
        self._cards: dict[str, tuple[int, str]] = {}
        self._close: list[Callable[[], None]] = []
        self._invalid = 0

    def recv(self) -> bytes | None:
        """Wait for the next message and return it; None after :meth:`shutdown`.

        Call it in a thread, as ``await asyncio.to_thread(subscriber.recv)``. RuntimeError on the
        loop's thread, or after :meth:`start_tracking`.
        """
        if self._tracks:
            raise RuntimeError("recv() cannot be used after start_tracking()")
        if threading.get_ident() == self._thread:
            raise RuntimeError("recv() blocks the event loop; call it with asyncio.to_thread")
        if not self._receives:
            self._receives = True
            self._loop.call_soon_threadsafe(self._start, self._keep)
        return None if self._closed else self._messages.get()

    def start_tracking(self) -> None:
        """Keep the newest message of each rank from now on. RuntimeError after :meth:`recv`."""
        if self._receives:
            raise RuntimeError("start_tracking() cannot be used after recv()")
        if not self._tracks:
            self._tracks = True
            self._loop.call_soon_threadsafe(self._start, self._track)

    def get_recent_stats(self) -> dict[tuple[str, int], bytes]:
        """Return the newest message by (worker_id, dp_rank), of workers that are registered."""
        self._require_tracking()
        return dict(self._newest)

    def get_model_cards(self) -> dict[str, str]:
        """Return the model card of each worker as JSON, by worker_id."""
        self._require_tracking()
        # A copy of the values: the loop changes the cards in another thread.
        return {str(worker): text for worker, text in list(self._cards.values())}

    def shutdown(self) -> None:
        """Stop. Idempotent, from any thread."""
        self._closed = True
        # Wakes the thread that waits in recv().
        self._put(None)
        self._loop.call_soon_threadsafe(self._stop)

    def _require_tracking(self) -> None:
        if not self._tracks:
            raise RuntimeError("call start_tracking() first")

    def _start(self, on_event: Callable[[int, int, bytes], None]) -> None:
        self._endpoint.runtime.tasks.spawn(self._open(on_event), name="forward-pass metrics")

    def _stop(self) -> None:
        for close in self._close:
            close()
        self._close.clear()

    async def _open(self, on_event: Callable[[int, int, bytes], None]) -> None:
        runtime = self._endpoint.runtime
        await runtime.start()
        if self._closed:
            return
        namespace, component, _ = self._endpoint.path
        if self._tracks:
            watch = runtime.discovery.watch(MODEL_CARDS, self._on_card)
            self._close.append(watch.close)
        subscription = runtime.subscribe(namespace, component, FORWARD_PASS, on_event)
        self._close.append(subscription.close)
        runtime.on_close(self.shutdown)

    def _keep(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        self._put(payload)

    def _put(self, payload: bytes | None) -> None:
        while True:
            try:
                self._messages.put_nowait(payload)
                return
            except queue.Full:
                # Drop the oldest and try again: another thread may fill the queue first.
                _take(self._messages)

    def _track(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        try:
            report = _decode(payload)
        except msgspec.MsgspecError as error:
            if not self._invalid:
                log.warning("invalid forward-pass metrics of publisher %x: %s", publisher_id, error)
            self._invalid += 1
            return
        key = report.worker_id, report.dp_rank
        # The key is what a message says: a bound keeps wrong ones from filling the memory.
        if key in self._newest or len(self._newest) < _RANKS:
            self._newest[key] = payload

    def _on_card(self, event: KeyEvent) -> None:
        gone = self._cards.pop(event.key, None)
        if event.value is None:
            # An adapter has a card, too: the worker has left when its last one has.
            remaining = {worker_id for worker_id, _ in self._cards.values()}
            if gone is not None and gone[0] not in remaining:
                for key in [key for key in self._newest if key[0] == str(gone[0])]:
                    del self._newest[key]
            return
        try:
            card = decode_card(event.value)
        except ValueError as error:
            log.warning("skipping the model card %s: %s", event.key, error)
            return
        if (card.namespace, card.component) == self._endpoint.path[:2]:
            self._cards[event.key] = card.instance_id, event.value.decode()


def _take(messages: queue.Queue[T]) -> T | None:
    try:
        return messages.get_nowait()
    except queue.Empty:
        return None


async def _publisher(endpoint: Endpoint) -> Publish:
    namespace, component, _ = endpoint.path
    publisher = await endpoint.runtime.publisher(namespace, component, FORWARD_PASS)
    return publisher.publish
