"""The one adapter for KV events as engines send them (vLLM, SGLang) over ZMQ. Spec 2.7.

A message is MessagePack ``[timestamp, [event, …], dp_rank]``, or a map of these names; the last
may be missing. An event is a map with ``type``, or an array with the type first and the fields in
the order below. A hash is an integer, signed or not, or bytes of which the last eight count
(big-endian).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

__all__ = ["EngineCleared", "EngineEvent", "EngineRemoved", "EngineStored", "decode_events"]

_U64 = 0xFFFF_FFFF_FFFF_FFFF
_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
_ON_DEVICE = frozenset((None, "GPU", "DEVICE"))
_decode = msgspec.msgpack.Decoder().decode


class EngineStored(NamedTuple):
    """Blocks of ``block_size`` tokens each, as a chain under ``parent_hash``."""

    block_hashes: list[int]
    parent_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None


class EngineRemoved(NamedTuple):
    """These blocks are gone."""

    block_hashes: list[int]


class EngineCleared(NamedTuple):
    """The engine has no blocks any more."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


def decode_events(payload: bytes) -> tuple[int | None, list[EngineEvent]]:
    """(dp_rank if it says, events on the device). ValueError: not such a message.

    Blocks in host memory or on disk are left out, and so are events of unknown types.
    """
    try:
        batch = _fields(_decode(payload), _BATCH_FIELDS)
        events = [_event(raw) for raw in batch["events"]]
    except (msgspec.MsgspecError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a KV event batch: {error!r}") from error
    return batch.get("data_parallel_rank"), [event for event in events if event is not None]


def _fields(raw: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else dict(zip(names, raw, strict=False))


def _event(raw: Any) -> EngineEvent | None:
    kind = raw["type"] if isinstance(raw, dict) else raw[0]
    names = _FIELDS.get(kind)
    if names is None:
        return None
    event = _fields(raw if isinstance(raw, dict) else raw[1:], names)
    if event.get("medium") not in _ON_DEVICE:
        return None
    if kind == "BlockRemoved":
        return EngineRemoved([_hash(value) for value in event["block_hashes"]])
    if kind == "AllBlocksCleared":
        return EngineCleared()
    parent = event.get("parent_block_hash")
    return EngineStored(
        [_hash(value) for value in event["block_hashes"]],
        None if parent is None else _hash(parent),
        event["token_ids"],
        event["block_size"],
        event.get("lora_name"),
    )


def _hash(value: int | bytes) -> int:
    return (value if isinstance(value, int) else int.from_bytes(value, "big")) & _U64
