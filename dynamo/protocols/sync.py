"""Messages by which replicas of a router share the load that they reserve.

Hashes are raw u64 little-endian columns.
"""

from __future__ import annotations

import msgspec

ACTIVE_SEQUENCES = "active_sequences_events"
"""Topic, of the component that is routed to; a message is one :data:`SequenceMessage`."""


class AddRequest(msgspec.Struct, tag_field="kind", tag="add", omit_defaults=True):
    """A request was sent to the worker.

    ``token_sequence`` are the chained hashes of its full prompt blocks. They count as load only if
    ``unique_blocks`` is 0; otherwise that is the number of blocks, none of them shared.
    ``prefill_tokens`` are active until ``prefill_completed``. ``tokens_hashes`` are the local block
    hashes, sent if caches are predicted.
    """

    token_sequence: bytes = b""
    isl_tokens: int = 0
    prefill_tokens: int = 0
    unique_blocks: int = 0
    overlap_blocks: int = 0
    expected_output_tokens: int | None = None
    tokens_hashes: bytes = b""
    prefill_completed: bool = False


class MarkPrefillCompleted(msgspec.Struct, tag_field="kind", tag="prefill_completed"):
    """The first token of the request arrived."""


class Free(msgspec.Struct, tag_field="kind", tag="free"):
    """The request ended."""


class SequenceEvent(msgspec.Struct, omit_defaults=True):
    """One state change of a request."""

    request_id: str
    worker_id: int
    data: AddRequest | MarkPrefillCompleted | Free
    dp_rank: int = 0


class SequenceBatch(msgspec.Struct, tag_field="type", tag="batch", omit_defaults=True):
    """Events of one router in order; ``number`` counts by one from 0, so a gap is a lost batch.

    A snapshot starts with a batch that ``opens`` and ends with the next that ``closes``: its events
    add all running requests and replace earlier state. A batch without events is a heartbeat.
    """

    router_id: int
    number: int
    block_size: int
    events: list[SequenceEvent] = []
    opens: bool = False
    closes: bool = False


class SequenceQuery(msgspec.Struct, tag_field="type", tag="query"):
    """Request a snapshot of router ``of``."""

    router_id: int
    of: int


SequenceMessage = SequenceBatch | SequenceQuery
