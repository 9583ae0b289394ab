"""Shares booked load among replicas of a router, over the event plane. Spec 3.8.

What one loop turn booked, completed and freed leaves as one message. A beat every second shows a
loss that no later event would show; whoever missed something asks, and is told all that runs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array

import msgspec

from dynamo.protocols import codec
from dynamo.protocols.sync import AddRequest, SequenceEvent, SequenceMessage, SequenceQuery
from dynamo.router.kv import KvPicker
from dynamo.router.load.active import Reservation
from dynamo.router.metrics import RouterLabels
from dynamo.router.sync.local import LocalRequests
from dynamo.router.sync.metrics import show_replicas
from dynamo.router.sync.remote import RemoteReplicas
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.events import EventPublisher
from dynamo.runtime.events.channels import Subscription

__all__ = ["ACTIVE_SEQUENCES", "PickerLoadSink", "ReplicaSync", "decode_message"]

ACTIVE_SEQUENCES = "active_sequences_events"
BEAT_S = 1.0
ASK_AGAIN_S = 0.2

log = logging.getLogger(__name__)
_decoder: msgspec.msgpack.Decoder[SequenceMessage] = msgspec.msgpack.Decoder(SequenceMessage)
decode_message = _decoder.decode


class ReplicaSync:
    """Tells other routers of ``place`` what ``picker`` books, and books there what they tell.

    The replicas are processes: two routers of one process don't hear each other. :meth:`start`,
    then :meth:`close`.
    """

    def __init__(self, runtime: DistributedRuntime, place: RouterLabels, picker: KvPicker) -> None:
        self._runtime = runtime
        self._place = place
        self._picker = picker
        self._publisher: EventPublisher | None = None
        self._subscription: Subscription | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Handle | None = None
        self._asked: dict[int, float] = {}
        self._answering: asyncio.Handle | None = None
        self._foreign: set[int] = set()
        router_id = secrets.randbits(62) + 1
        self.own = LocalRequests(router_id, picker.block_size, picker.believes, self._on_news)
        self.peers = RemoteReplicas(PickerLoadSink(picker), self._ask)
        self._resyncs = show_replicas(runtime.metrics, place, self.peers)

    async def start(self) -> None:
        """Listen, then speak. EngineShutdown when the process is leaving."""
        here = self._place.namespace, self._place.component, ACTIVE_SEQUENCES
        self._subscription = self._runtime.subscribe(
            *here, self._on_message, on_publisher=self._on_publisher
        )
        await self._subscription.ready()
        self._publisher = await self._runtime.publisher(*here)
        self._runtime.track(self)
        self._picker.own_requests = self.own
        self._beat()

    def close(self) -> None:
        """Tell of what has ended, and stop. Idempotent."""
        self._picker.own_requests = None
        self._flush()
        self._publisher = None
        for handle in (self._timer, self._answering):
            if handle is not None:
                handle.cancel()
        if self._subscription is not None:
            self._subscription.close()

    def worker_added(self, worker_id: int) -> None:
        """The picker knows a worker that it may not have known."""
        self.peers.worker_added(worker_id)

    def _on_news(self) -> None:
        self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._is_alone():
            self.own.skip()
        elif self._publisher is not None:
            for batch in self.own.news():
                self._publisher.publish(codec.encode(batch))

    def _is_alone(self) -> bool:
        return not self.peers.publishers

    def _beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
        if self._publisher is not None and not self._is_alone():
            self._flush()
            self._publisher.publish(codec.encode(self.own.beat()))

    def _ask(self, router_id: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._publisher is None or now_s - self._asked.get(router_id, 0.0) < ASK_AGAIN_S:
            return
        self._asked = {one: at for one, at in self._asked.items() if now_s - at < ASK_AGAIN_S}
        self._asked[router_id] = now_s
        self._resyncs.value += 1
        query = SequenceQuery(self.own.router_id, router_id)
        self._publisher.publish(codec.encode(query))

    def _answer(self) -> None:
        self._answering = None
        if self._publisher is not None:
            for batch in self.own.account():
                self._publisher.publish(codec.encode(batch))

    def _on_publisher(self, publisher_id: int, came: bool) -> None:
        if publisher_id == self._runtime.instance_id:
            return
        if came:
            self.peers.came(publisher_id)
        else:
            log.info("replica %x is gone: its requests are no load any more", publisher_id)
            self._foreign.discard(publisher_id)
            self.peers.gone(publisher_id)

    def _on_message(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        if publisher_id == self._runtime.instance_id:
            return
        try:
            message = decode_message(payload)
        except msgspec.MsgspecError as error:
            log.warning("what replica %x tells cannot be read: %s", publisher_id, error)
            return
        if isinstance(message, SequenceQuery):
            if message.of == self.own.router_id and self._answering is None:
                self._answering = asyncio.get_running_loop().call_soon(self._answer)
        elif message.block_size != self.own.block_size:
            self._mismatch(publisher_id, message.block_size)
        else:
            self.peers.hear(publisher_id, message)

    def _mismatch(self, publisher_id: int, block_size: int) -> None:
        if publisher_id not in self._foreign:
            self._foreign.add(publisher_id)
            log.error(
                "a replica counts blocks of %d tokens, this router of %d: its load is ignored "
                "(give all replicas the same --kv-cache-block-size)",
                block_size,
                self.own.block_size,
            )


class PickerLoadSink:
    """Books the load of other replicas at the picker, beside its own."""

    def __init__(self, picker: KvPicker) -> None:
        self._picker = picker

    def book(self, key: str, event: SequenceEvent) -> None:
        picker, data = self._picker, event.data
        assert isinstance(data, AddRequest), "only these are booked"
        member = picker.fleet.members.get(event.worker_id)
        slot = None if member is None else member.slots.get(event.dp_rank)
        if slot is None or key in picker.active:
            return
        chained = array("Q", data.token_sequence)
        shared = None if data.unique_blocks else chained
        now_s = time.perf_counter()
        place = slot, event.worker_id, event.dp_rank, data.isl_tokens, data.overlap_blocks
        reservation_id = Reservation(*place, now_s, data.expected_output_tokens, remote=True)
        prefill = 0 if data.prefill_completed else data.prefill_tokens
        picker.active.book(key, reservation_id, shared, data.unique_blocks, prefill)
        if data.prefill_completed:
            picker.active.mark_prefill_complete(key, now_s)
        if len(data.tokens_hashes) == len(data.token_sequence):
            picker.believe(key, slot, chained, array("Q", data.tokens_hashes), now_s)
        picker.gate.load_changed(event.worker_id)

    def prefill_completed(self, key: str) -> None:
        reservation_id = self._picker.active.mark_prefill_complete(key, time.perf_counter())
        if reservation_id is not None:
            self._picker.gate.load_changed(reservation_id.worker_id)

    def free(self, key: str) -> None:
        picker = self._picker
        reservation_id = picker.active.free(key)
        if picker.predicted is not None:
            picker.predicted.ended(key, time.perf_counter())
        if reservation_id is not None:
            picker.gate.load_changed(reservation_id.worker_id)
