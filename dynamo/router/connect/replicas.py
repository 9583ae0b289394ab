"""Shares booked load among the replicas of a router, over the event plane.

All events of one loop iteration are sent as one message. A heartbeat every second reveals the loss
of a last message. A replica that missed a message requests a snapshot of all running requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array

import msgspec

from dynamo.observability.metrics import counter, gauge
from dynamo.protocols import codec
from dynamo.router.labels import COMPONENT, RouterLabels
from dynamo.router.load.active_load import Reservation
from dynamo.router.load.replica_loads import (
    ACTIVE_SEQUENCES,
    AddRequest,
    LocalRequests,
    RemoteReplicas,
    SequenceEvent,
    SequenceMessage,
    SequenceQuery,
)
from dynamo.router.modes.kv import KvPicker
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.events import EventPublisher
from dynamo.runtime.events.channels import Subscription

HEARTBEAT_S = 1.0
REPEAT_QUERY_S = 0.2
"""Minimum time between two snapshot requests to the same router."""

_KNOWN = gauge("dynamo_component_router_replicas", "Other routers that share their load", COMPONENT)
_REQUESTS = gauge(
    "dynamo_component_router_replica_requests",
    "Running requests of other routers that are counted as load",
    COMPONENT,
)
_RESYNCS = counter(
    "dynamo_component_router_replica_resyncs_total",
    "Times that a router was asked for all its requests because something was missed",
    COMPONENT,
)

log = logging.getLogger(__name__)
_decoder: msgspec.msgpack.Decoder[SequenceMessage] = msgspec.msgpack.Decoder(SequenceMessage)
decode_message = _decoder.decode


class ReplicaSync:
    """Sends the bookings of ``picker`` to the other routers of ``labels``, and books theirs.

    Replicas are processes: two routers of one process do not exchange load. :meth:`start`, then
    :meth:`close`.
    """

    def __init__(self, runtime: DistributedRuntime, labels: RouterLabels, picker: KvPicker) -> None:
        self._runtime = runtime
        self._labels = labels
        self._picker = picker
        self._publisher: EventPublisher | None = None
        self._subscription: Subscription | None = None
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._flush_handle: asyncio.Handle | None = None
        self._queried_s: dict[int, float] = {}
        self._answer_handle: asyncio.Handle | None = None
        self._mismatched: set[int] = set()
        router_id = secrets.randbits(62) + 1
        self.local = LocalRequests(router_id, picker.block_size, picker.predicts, self._on_pending)
        self.remote = RemoteReplicas(PickerLoadSink(picker), self._request_snapshot)
        values = labels.component, labels.namespace, labels.router_id
        self._resyncs = runtime.metrics.child(_RESYNCS, *values)
        self._gauges = {
            runtime.metrics.child(spec, *values): read
            for spec, read in ((_KNOWN, self.remote.__len__), (_REQUESTS, self.remote.requests))
        }
        for exported, read in self._gauges.items():
            exported.function = read

    async def start(self) -> None:
        """Subscribe, then publish. Raises EngineShutdown when the process is shutting down."""
        here = self._labels.namespace, self._labels.component, ACTIVE_SEQUENCES
        # Subscribe first: replicas may answer as soon as they discover the publisher.
        self._subscription = self._runtime.subscribe(
            *here, self._on_message, on_publisher=self._on_publisher
        )
        await self._subscription.ready()
        self._runtime.on_close(self.close)
        self._picker.local_requests = self.local
        await self._runtime.publish_when_possible(*here, self._publish)
        self._send_heartbeat()

    def close(self) -> None:
        """Send the last events and stop. Idempotent."""
        self._runtime.off_close(self.close)
        self._picker.local_requests = None
        self._flush()  # before the publisher goes: replicas would keep ended requests
        self._publisher = None
        for handle in (self._heartbeat_timer, self._answer_handle):
            if handle is not None:
                handle.cancel()
        if self._subscription is not None:
            self._subscription.close()
        for exported, read in self._gauges.items():
            if exported.function == read:  # not of a router that has taken its place
                exported.function = None  # it would keep the picker with all its tables

    def worker_added(self, worker_id: int) -> None:
        """Book the load of replicas on a worker that is new to the picker."""
        self.remote.worker_added(worker_id)

    def _on_pending(self) -> None:
        self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)

    def _publish(self, publisher: EventPublisher) -> None:
        if self._picker.local_requests is not None:  # not closed before it could be registered
            self._publisher = publisher

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if self._publisher is None or self._has_no_peers():
            # No peer listens. A new one requests a snapshot, which has everything.
            self.local.drop_pending()
        else:
            for batch in self.local.take_pending():
                self._publisher.publish(codec.encode(batch))

    def _has_no_peers(self) -> bool:
        return not self.remote.publishers

    def _send_heartbeat(self) -> None:
        loop = asyncio.get_running_loop()
        self._heartbeat_timer = loop.call_later(HEARTBEAT_S, self._send_heartbeat)
        self.remote.beat()
        if self._publisher is not None and not self._has_no_peers():
            self._flush()
            self._publisher.publish(codec.encode(self.local.heartbeat()))

    def _request_snapshot(self, router_id: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._publisher is None or now_s - self._queried_s.get(router_id, 0.0) < REPEAT_QUERY_S:
            return
        # Forget older times: else routers that have exited would stay in the table for ever.
        recent = self._queried_s.items()
        self._queried_s = {replica: at for replica, at in recent if now_s - at < REPEAT_QUERY_S}
        self._queried_s[router_id] = now_s
        self._resyncs.value += 1
        query = SequenceQuery(self.local.router_id, router_id)
        self._publisher.publish(codec.encode(query))

    def _answer(self) -> None:
        self._answer_handle = None
        if self._publisher is not None:
            for batch in self.local.snapshot():
                self._publisher.publish(codec.encode(batch))

    def _on_publisher(self, publisher_id: int, added: bool) -> None:
        if publisher_id == self._runtime.instance_id:
            return
        if added:
            self.remote.add_publisher(publisher_id)
        else:
            log.info("replica %x exited: removing the load of its requests", publisher_id)
            self._mismatched.discard(publisher_id)
            self.remote.remove_publisher(publisher_id)

    def _on_message(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        if publisher_id == self._runtime.instance_id:
            return
        try:
            message = decode_message(payload)
        except msgspec.MsgspecError as error:
            log.warning("invalid message from replica %x: %s", publisher_id, error)
            return
        if isinstance(message, SequenceQuery):
            # One snapshot answers all queries of a loop iteration: it goes to every replica.
            if message.of == self.local.router_id and self._answer_handle is None:
                self._answer_handle = asyncio.get_running_loop().call_soon(self._answer)
        elif message.block_size != self.local.block_size:
            self._mismatch(publisher_id, message.block_size)
        else:
            self.remote.receive(publisher_id, message)

    def _mismatch(self, publisher_id: int, block_size: int) -> None:
        if publisher_id not in self._mismatched:
            self._mismatched.add(publisher_id)
            log.error(
                "replica %x uses blocks of %d tokens, this router of %d: its load is ignored "
                "(give all replicas the same --kv-cache-block-size)",
                publisher_id,
                block_size,
                self.local.block_size,
            )


class PickerLoadSink:
    """The :class:`LoadSink` of a picker."""

    def __init__(self, picker: KvPicker) -> None:
        self._picker = picker

    def book(self, key: str, event: SequenceEvent) -> None:
        """See :class:`LoadSink`."""
        picker, data = self._picker, event.data
        assert isinstance(data, AddRequest), "only AddRequest events are booked"
        member = picker.worker_pool.members.get(event.worker_id)
        slot = None if member is None else member.slots.get(event.dp_rank)
        # The requests of an unknown worker are booked once it is added (:meth:`worker_added`).
        if slot is None or key in picker.active:
            return
        chained = array("Q", data.token_sequence)
        shared = None if data.unique_blocks else chained
        now_s = time.perf_counter()
        rank = slot, event.worker_id, event.dp_rank, data.isl_tokens, data.overlap_blocks
        reservation = Reservation(*rank, now_s, data.expected_output_tokens, remote=True)
        prefill = 0 if data.prefill_completed else data.prefill_tokens
        picker.active.book(key, reservation, shared, data.unique_blocks, prefill)
        if data.prefill_completed:
            picker.active.mark_prefill_complete(key, now_s)
        if len(data.tokens_hashes) == len(data.token_sequence):
            picker.predict_blocks(key, slot, chained, array("Q", data.tokens_hashes), now_s)
        picker.eligibility.load_changed(event.worker_id)

    def prefill_completed(self, key: str) -> None:
        """See :class:`LoadSink`."""
        reservation = self._picker.active.mark_prefill_complete(key, time.perf_counter())
        if reservation is not None:
            self._picker.eligibility.load_changed(reservation.worker_id)

    def free(self, key: str) -> None:
        """See :class:`LoadSink`."""
        picker = self._picker
        reservation = picker.active.free(key)
        if picker.predicted is not None:
            picker.predicted.ended(key, time.perf_counter())
        if reservation is not None:
            picker.eligibility.load_changed(reservation.worker_id)
