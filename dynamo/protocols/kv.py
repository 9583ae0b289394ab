"""What workers publish: KV cache events (blocks stored, removed, cleared), load, forward passes.

Hashes are columns of raw u64 little-endian bytes, so that one call applies an event of any length
to the index, without a Python object per block.
"""

from __future__ import annotations

import msgspec

KV_EVENTS = "kv-events"
"""Topic of KV events; a message is one :class:`KvEventBatch`."""
KV_QUERY = "kv_query"
"""Endpoint, beside the worker's own, that answers a :class:`KvQuery` with one
:class:`KvQueryAnswer`."""
STORAGE_TIERS = ("device", "host_pinned", "disk", "external")
"""Where a block is stored, nearest first. ``_fast/kv_events.hpp`` has the same order."""
TIER_NUMBERS = {name: number for number, name in enumerate(STORAGE_TIERS)}
"""Number of a tier in the index, by name."""
KV_METRICS = "kv_metrics"
"""Topic of load reports; a message is a list of :class:`KvMetrics`."""
PREFILL_QUEUE = "prefill_queue"
"""Topic, of the prefill workers' component, on which each frontend publishes
:class:`PrefillQueueState`."""
ON_DEMAND_STATE = "on_demand_state"
"""Topic, of the component ``planner``, on which each frontend publishes :class:`OnDemandState`:
every second, and at once when the first request waits and when none waits any more."""


class KvMetrics(msgspec.Struct, omit_defaults=True):
    """The load of one (worker, dp_rank) after a scheduler step. A missing value is unknown."""

    worker_id: int
    dp_rank: int = 0
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None
    kv_used_blocks: int | None = None
    kv_total_blocks: int | None = None
    num_requests_running: int | None = None
    num_requests_waiting: int | None = None


class PrefillQueueState(msgspec.Struct, omit_defaults=True):
    """The prefill queue of one frontend.

    ``size`` requests of ``model`` are queued (a planner scales on it), ``active`` are sent to
    one of ``workers`` prefill workers.
    """

    model: str
    size: int = 0
    active: int = 0
    workers: int = 0


class OnDemandState(msgspec.Struct, omit_defaults=True):
    """The requests of one frontend for a ``model`` that is started on demand.

    ``waiting`` of them wait for its first worker, the oldest for ``oldest_s``. The frontend has had
    no request of the model for ``idle_s``.
    """

    model: str
    waiting: int = 0
    oldest_s: float = 0.0
    idle_s: float = 0.0


class BlocksStored(msgspec.Struct, tag_field="kind", tag="stored", omit_defaults=True):
    """A chain of blocks under ``parent_hash`` (None = root): equal-length u64le columns.

    ``block_hashes`` are the engine's own 64-bit ids, ``tokens_hashes`` the local block hashes.
    Below the device ``tokens_hashes`` may be empty: then other tiers hold blocks with these ids.
    """

    block_hashes: bytes
    tokens_hashes: bytes
    parent_hash: int | None = None
    start_position: int | None = None


class BlocksRemoved(msgspec.Struct, tag_field="kind", tag="removed"):
    """The worker removed these blocks (u64le engine ids)."""

    block_hashes: bytes


class BlocksCleared(msgspec.Struct, tag_field="kind", tag="cleared"):
    """The (worker, dp_rank) removed all blocks; below the device, all blocks of that tier."""


KvChange = BlocksStored | BlocksRemoved | BlocksCleared
"""A change of the blocks of one rank on one tier."""


class KvEvent(msgspec.Struct, omit_defaults=True):
    """One change; ``event_id`` counts by one per (worker, dp_rank), so a gap is a lost event."""

    event_id: int
    data: KvChange
    dp_rank: int = 0
    storage_tier: str = STORAGE_TIERS[0]


class KvEventBatch(msgspec.Struct):
    """Events of one worker, in order."""

    worker_id: int
    events: list[KvEvent]


class KvQuery(msgspec.Struct, omit_defaults=True):
    """A query to a worker's local indexer: events start..end inclusive; without a start, a dump."""

    dp_rank: int = 0
    start_event_id: int | None = None
    end_event_id: int | None = None


class KvQueryAnswer(msgspec.Struct, omit_defaults=True):
    """The answer to a query; ``kind`` is events, tree_dump, invalid_range or too_new.

    The events of a dump rebuild the tree, parents first; ``last_event_id`` is the state that they
    describe. ``block_size`` is in tokens, None if the worker has none.
    """

    kind: str
    events: list[KvEvent] = []
    last_event_id: int = 0
    newest_available: int | None = None
    block_size: int | None = None


FORWARD_PASS = "forward-pass-metrics"
"""The topic, of an endpoint's component."""
FORWARD_PASS_VERSION = 1


class ScheduledRequests(msgspec.Struct, frozen=True):
    """The requests of the pass; ``kv_tokens`` are those whose KV was read, from cache or before."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueuedRequests(msgspec.Struct, frozen=True):
    """The requests that wait; a decode request has lost its blocks to others."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class ForwardPass(msgspec.Struct, frozen=True):
    """One pass of a rank, numbered by ``counter_id``. An idle rank sends one without a wall time.

    ``worker_id`` is the number of the worker's connection in decimal digits.
    """

    version: int = FORWARD_PASS_VERSION
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: ScheduledRequests = ScheduledRequests()
    queued_requests: QueuedRequests = QueuedRequests()

    @property
    def running(self) -> int:
        """Requests that were computed."""
        done = self.scheduled_requests
        return done.num_prefill_requests + done.num_decode_requests

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        queued = self.queued_requests
        return queued.num_prefill_requests + queued.num_decode_requests

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the requests of this pass hold after it."""
        done = self.scheduled_requests
        return done.sum_prefill_kv_tokens + done.sum_prefill_tokens + done.sum_decode_kv_tokens

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that were computed, or wait."""
        return self.scheduled_requests.sum_prefill_tokens + self.queued_requests.sum_prefill_tokens
