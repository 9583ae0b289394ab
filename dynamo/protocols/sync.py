"""What replicas of a router tell each other of the load they book. Spec 3.8.

Topic ``active_sequences_events`` of the component that is routed to. A message is one
``SequenceBatch`` or one ``SequenceQuery``. Hashes travel as raw u64 little-endian columns.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "ACTIVE_SEQUENCES",
    "AddRequest",
    "Free",
    "MarkPrefillCompleted",
    "SequenceBatch",
    "SequenceEvent",
    "SequenceMessage",
    "SequenceQuery",
]

ACTIVE_SEQUENCES = "active_sequences_events"
"""Topic, of the component that is routed to; a message is one :data:`SequenceMessage`."""


class AddRequest(msgspec.Struct, tag_field="kind", tag="add", omit_defaults=True):
    """A request was sent to the worker.

    ``token_sequence`` are the chained hashes of its full prompt blocks; as load they count only if
    ``unique_blocks`` is 0, which else is how many blocks nobody shares. ``prefill_tokens`` are to
    be computed until ``prefill_completed``. ``tokens_hashes``, the local block hashes, are there
    where caches are predicted.
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
    """Its first token came."""


class Free(msgspec.Struct, tag_field="kind", tag="free"):
    """It has ended."""


class SequenceEvent(msgspec.Struct, omit_defaults=True):
    """One step in the life of a request."""

    request_id: str
    worker_id: int
    data: AddRequest | MarkPrefillCompleted | Free
    dp_rank: int = 0


class SequenceBatch(msgspec.Struct, tag_field="type", tag="batch", omit_defaults=True):
    """Events of one router in order; ``number`` rises by one from 0, and a missing one was lost.

    From a batch that ``opens`` to the next that ``closes`` the events add all requests that run,
    whatever was told before. A batch without events says that the router is there.
    """

    router_id: int
    number: int
    block_size: int
    events: list[SequenceEvent] = []
    opens: bool = False
    closes: bool = False


class SequenceQuery(msgspec.Struct, tag_field="type", tag="query"):
    """Asks router ``of`` for all its requests."""

    router_id: int
    of: int


SequenceMessage = SequenceBatch | SequenceQuery
