"""Publishers of a worker's KV events and load, for routers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from dynamo._fast.hashing import block_hashes as hash_blocks
from dynamo._fast.hashing import seed_for
from dynamo.llm.engine_blocks import EngineBlocks
from dynamo.llm.engine_events import EngineEvent, tier_of
from dynamo.llm.engine_relay import EngineEventRelay
from dynamo.llm.prefix_index import mm_hashes_of
from dynamo.llm.register import note_block_size
from dynamo.observability.metrics import counter
from dynamo.protocols.kv import (
    STORAGE_TIERS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvChange,
    KvMetrics,
)
from dynamo.runtime import Component, DistributedRuntime, Endpoint
from dynamo.worker.publish import KvEventSender, LoadSender, connect_kv_events, connect_load

_DROPPED = counter(
    "dynamo_component_kv_publisher_engines_dropped_events_total",
    "KV events of the engine that were lost on the way, or malformed",
    "dynamo_component dynamo_namespace worker_id",
)
_U64 = 0xFFFF_FFFF_FFFF_FFFF
log = logging.getLogger(__name__)
_senders: WeakKeyDictionary[DistributedRuntime, dict[tuple[str, str], KvEventSender]] = (
    WeakKeyDictionary()
)


class StoredInput(
    msgspec.Struct, tag_field="type", tag="stored", forbid_unknown_fields=True, kw_only=True
):
    """New blocks: the arguments of ``publish_stored``."""

    token_ids: list[int]
    num_block_tokens: list[int]
    block_hashes: list[int]
    parent_hash: int | None = None
    block_mm_infos: list[dict[str, Any] | None] | None = None
    lora_name: str | None = None
    is_eagle: bool | None = None
    cache_salt: str | None = None


class RemovedInput(
    msgspec.Struct, tag_field="type", tag="removed", forbid_unknown_fields=True, kw_only=True
):
    """Removed blocks: the arguments of ``publish_removed``."""

    block_hashes: list[int]


def checked_batch(events: Sequence[Mapping[str, Any]]) -> list[StoredInput | RemovedInput]:
    """Return the events with their types. ValueError for one that is not such an event."""
    try:
        return msgspec.convert(list(events), list[StoredInput | RemovedInput])
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"invalid KV event batch: {error}") from None


class KvEventPublisher:
    """The KV events of one data-parallel rank of one worker.

    Create it on the loop of the runtime; publish from any thread, events keep their order. Hashes
    are the engine's own 64-bit ids, signed or unsigned. With ``zmq_endpoint`` the engine's own
    events are relayed; lost messages are read from ``zmq_replay_endpoint``, and without one the
    engine's blocks are cleared. The local index, which answers queries of routers, is always on:
    ``enable_local_indexer`` has no effect, nor do ``image_token_id``, ``video_token_id`` and
    ``kv_state_endpoint``. ValueError for a block size of 0.
    """

    def __init__(  # noqa: PLR0913 - Dynamo's signature
        self,
        endpoint: Endpoint | Component,
        worker_id: int | None = None,
        kv_block_size: int = 0,
        dp_rank: int = 0,
        enable_local_indexer: bool = False,
        zmq_endpoint: str | None = None,
        zmq_topic: str | None = None,
        batching_timeout_ms: float | None = None,
        image_token_id: int | None = None,
        kv_state_endpoint: str | None = None,
        video_token_id: int | None = None,
        *,
        zmq_replay_endpoint: str | None = None,
    ) -> None:
        if kv_block_size <= 0:
            raise ValueError(f"kv_block_size cannot be {kv_block_size}")
        self.kv_block_size = kv_block_size
        self.dp_rank = dp_rank
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        target = _endpoint(endpoint)
        runtime = target.runtime
        delay_s = (batching_timeout_ms or 0.0) / 1000
        self._sender = _sender(
            target, runtime.instance_id if worker_id is None else worker_id, delay_s
        )
        self._sender.block_size = kv_block_size
        note_block_size(target, "KvEventPublisher", kv_block_size)
        labels = (target.component, target.namespace, str(self._sender.worker_id))
        self._dropped = runtime.metrics.child(_DROPPED, *labels)
        self._malformed = 0
        self._engine_blocks = defaultdict[int, EngineBlocks](lambda: EngineBlocks(kv_block_size))
        self._engine: EngineEventRelay | None = None
        self._relay: asyncio.Task[None] | None = None
        if zmq_endpoint is not None:
            self._engine = EngineEventRelay(
                zmq_endpoint,
                zmq_topic or "",
                self._on_engine_events,
                self._dropped.inc,
                self._on_malformed,
                self._on_reset,
                zmq_replay_endpoint,
            )
            self._relay = runtime.tasks.spawn(self._engine.run(), name=f"relay {zmq_endpoint}")

    def publish_stored(  # noqa: PLR0913 - Dynamo's signature
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: int | None = None,
        block_mm_infos: Sequence[Mapping[str, Any] | None] | None = None,
        lora_name: str | None = None,
        is_eagle: bool | None = None,
        cache_salt: str | None = None,
        *,
        medium: str | None = None,
    ) -> None:
        """Publish new blocks, a chain under ``parent_hash`` (None: the root).

        ``num_block_tokens[i]`` tokens of ``token_ids`` belong to ``block_hashes[i]``. The first
        block with another size than ``kv_block_size`` and all after it are dropped with a warning.
        With ``is_eagle`` each block is hashed with the token after it, and ``cache_salt`` is the
        cache namespace of the request; both must agree with the router's requests.
        ``medium`` is the storage: GPU (None), CPU, DISK, EXTERNAL or another name of these tiers.
        Below the device ``token_ids`` may be empty for blocks that another tier holds. ValueError
        for an unknown medium.
        """
        tier = _tier(medium)
        if tier != STORAGE_TIERS[0] and not token_ids:
            self._record(self.dp_rank, [BlocksStored(_column(block_hashes), b"")], tier)
            return
        size = self.kv_block_size
        count = self._complete_blocks(num_block_tokens[: len(block_hashes)])
        local = hash_blocks(
            # With Eagle the last block is hashed with the token behind it.
            token_ids[: count * size + bool(is_eagle)],
            size,
            seed=seed_for(lora_name, cache_salt),
            is_eagle=bool(is_eagle),
            mm_hashes=mm_hashes_of(block_mm_infos[:count] if block_mm_infos else None),
        )
        if local:
            parent = None if parent_hash is None else parent_hash & _U64
            ids = _column(block_hashes[: len(local)])
            self._record(self.dp_rank, [BlocksStored(ids, local.tobytes(), parent)], tier)

    def publish_removed(self, block_hashes: Sequence[int], medium: str | None = None) -> None:
        """Publish that blocks were removed from ``medium``. ValueError for an unknown medium."""
        self._record(self.dp_rank, [BlocksRemoved(_column(block_hashes))], _tier(medium))

    def publish_batch(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Publish ``stored`` and ``removed`` events in order, after all of them were checked.

        Each is a mapping with ``type`` and the arguments of :meth:`publish_stored` (without
        ``medium``) or :meth:`publish_removed`. ValueError for any other; nothing is published then.
        """
        for event in checked_batch(events):
            if isinstance(event, RemovedInput):
                self.publish_removed(event.block_hashes)
            else:
                self.publish_stored(**msgspec.structs.asdict(event))

    def publish_all_cleared(self) -> None:
        """Publish that all blocks were removed. What the engine sent before is ignored."""
        self._engine_blocks[self.dp_rank].cleared()
        if self._engine is not None:
            # Messages with an earlier time are of the blocks that are cleared here.
            self._engine.cleared(time.time())
        self._record(self.dp_rank, [BlocksCleared()], STORAGE_TIERS[0])

    def ask_engine_again(self) -> None:
        """Ask for the engine's blocks, which were cleared in doubt, with its next event."""
        if self._engine is not None:
            self._engine.ask_again()

    def shutdown(self) -> None:
        """Stop relaying the engine's events. Idempotent."""
        if self._relay is not None:
            self._relay.cancel()

    def _complete_blocks(self, num_block_tokens: Iterable[int]) -> int:
        """Count the blocks before the first with another size than ``kv_block_size``."""
        count = 0
        for length in num_block_tokens:
            if length != self.kv_block_size:
                log.warning(
                    "Block size must be %d tokens to be published. Block size is: %d",
                    self.kv_block_size,
                    length,
                )
                break
            count += 1
        return count

    def _record(
        self,
        dp_rank: int,
        changes: Iterable[KvChange],
        tier: str,
    ) -> None:
        if threading.get_ident() == self._thread:
            self._sender.record(dp_rank, changes, tier)
        else:
            self._loop.call_soon_threadsafe(self._sender.record, dp_rank, changes, tier)

    def _on_engine_events(self, dp_rank: int | None, events: list[EngineEvent]) -> None:
        rank = self.dp_rank if dp_rank is None else dp_rank
        blocks = self._engine_blocks[rank]
        # groupby joins neighbours only, so the order between the tiers stays.
        for tier, group in groupby(blocks.select(events), key=attrgetter("storage_tier")):
            changes = []
            for event in group:
                try:
                    changes += blocks.changes(event)
                except (ValueError, TypeError) as error:  # token ids that are not uint32
                    self._on_malformed(error)
            self._record(rank, changes, tier)

    def _on_reset(self) -> None:
        """Clear all ranks of this engine: what they hold is unknown."""
        for rank in {self.dp_rank, *self._engine_blocks}:
            self._engine_blocks[rank].restarted()
            self._record(rank, [BlocksCleared()], STORAGE_TIERS[0])

    def _on_malformed(self, error: Exception) -> None:
        self._malformed += 1
        self._dropped.inc()
        if self._malformed == 1:
            log.warning(
                "dropped a malformed KV event of the engine: %.200r; its rank's blocks are cleared "
                "if it may have removed some; further ones are only counted, in %s",
                error,
                _DROPPED.name,
            )


class WorkerMetricsPublisher:
    """The load of one worker.

    Call ``create_endpoint`` once, then publish from any thread. The newest state of each rank that
    was published before is sent then.
    """

    def __init__(self) -> None:
        self._sender = LoadSender(0)
        self._call: Callable[..., object] = _call_now
        self._thread = threading.get_ident()

    async def create_endpoint(self, endpoint: Endpoint | Component) -> None:
        """Start publishing as a worker of the endpoint's component."""
        target = _endpoint(endpoint)
        self._sender.worker_id = target.runtime.instance_id
        self._thread = threading.get_ident()
        self._call = asyncio.get_running_loop().call_soon_threadsafe
        await connect_load(target, self._sender)

    def publish(
        self,
        dp_rank: int | None = None,
        active_decode_blocks: int | None = None,
        kv_used_blocks: int | None = None,
    ) -> None:
        """Publish the state of a rank; None is unknown."""
        state = KvMetrics(
            worker_id=0,
            dp_rank=0 if dp_rank is None else dp_rank,
            active_decode_blocks=active_decode_blocks,
            kv_used_blocks=kv_used_blocks,
        )
        if threading.get_ident() == self._thread:
            self._sender.report(state)
        else:
            self._call(self._sender.report, state)


def _sender(endpoint: Endpoint, worker_id: int, delay_s: float) -> KvEventSender:
    """Return the sender that all publishers of a component in this process share."""
    runtime = endpoint.runtime
    senders = _senders.setdefault(runtime, {})
    key = endpoint.path[:2]
    if key not in senders:
        senders[key] = KvEventSender(worker_id, delay_s)
        runtime.tasks.spawn(connect_kv_events(endpoint, senders[key]), name="KV events")
    return senders[key]


def _endpoint(target: Endpoint | Component) -> Endpoint:
    return target if isinstance(target, Endpoint) else target.endpoint("generate")


def _tier(medium: str | None) -> str:
    tier = tier_of(medium)
    if tier is None:
        raise ValueError(f"unknown medium {medium!r}")
    return tier


def _column(hashes: Iterable[int]) -> bytes:
    return array("Q", [value & _U64 for value in hashes]).tobytes()


def _call_now(function: Callable[..., object], *args: object) -> object:
    return function(*args)
