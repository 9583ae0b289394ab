"""The events that a worker publishes as one batch: their fields, checked as a whole.

A module of its own: :class:`~dynamo.llm.publishers.KvEventPublisher` only sends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

__all__ = ["RemovedInput", "StoredInput", "checked_batch"]


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
