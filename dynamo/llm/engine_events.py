"""KV events that engines (vLLM, SGLang) publish over ZMQ: their decoder.

A message is MessagePack ``[timestamp, [event, …], dp_rank]``, or a map of these names; the last may
be missing. An event is a map with ``type``, or an array of the type and the fields in the order
below; further fields are ignored. A hash is an integer, signed or not, or bytes, of which the last
eight count (big-endian).
``medium`` is the storage of the blocks; on a medium below the device, events may name blocks by
their hashes alone, without tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo.llm.prefix_index import short_hash
from dynamo.protocols.kv import STORAGE_TIERS

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
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
_DEVICE = STORAGE_TIERS[0]
_MEDIA = (
    ("GPU",),
    ("CPU", "CPU_PINNED", "CPU_TIER1"),
    ("CPU_TIER2", "NVME", "STORAGE"),
    ("NETWORK", "REMOTE", "SHARED"),
)
"""The engines' names of each of the ``STORAGE_TIERS``."""
_TIER_OF = {
    name: tier
    for tier, media in zip(STORAGE_TIERS, _MEDIA, strict=True)
    for name in (*media, tier.upper())
}
_decode = msgspec.msgpack.Decoder().decode
_YEAR_2001_S = 1e9  # smaller numbers are of another clock
LORA_VERSION = "\x1f"
"""In an adapter's name, before what our engines add to it so that other weights get other blocks.
No name of a model has it."""
MAX_RANKS = 1024
MAX_GROUPS = 64
"""Of data-parallel ranks and of groups of layers: above, an event is malformed."""


class EngineStored(NamedTuple):
    """Blocks of ``block_size`` tokens each, as a chain under ``parent_hash``.

    Without ``token_ids`` another tier has them. ``group`` is the group of layers that the blocks
    belong to, ``attention`` the kind of these layers; None for engines that do not say.
    ``mm_hashes`` are those of the images in each block, None without any; ``cache_salt`` is known
    only of a chain that begins at the root. ``reused``: the engine held the blocks already, this is
    no further copy of them.
    """

    block_hashes: list[int]
    parent_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None
    storage_tier: str = _DEVICE
    group: int | None = None
    attention: str | None = None
    mm_hashes: list[list[int]] | None = None
    cache_salt: str | None = None
    reused: bool = False


class EngineRemoved(NamedTuple):
    """These blocks of ``group`` were removed from the tier."""

    block_hashes: list[int]
    storage_tier: str = _DEVICE
    group: int | None = None


class EngineCleared(NamedTuple):
    """The engine removed all blocks; below the device, all blocks of that tier."""

    storage_tier: str = _DEVICE


EngineEvent = EngineStored | EngineRemoved | EngineCleared


def tier_of(medium: str | None) -> str | None:
    """Return the storage tier of an engine's ``medium`` (None: the device); None if it is unknown.

    The names of the tiers are valid too, in upper or lower case.
    """
    return _DEVICE if medium is None else _TIER_OF.get(str(medium).upper())


def time_of(payload: bytes) -> float | None:
    """Return when the engine sent a message, in Unix time; None if it does not say."""
    try:
        sent_s = _fields(_decode(payload), _BATCH_FIELDS).get("ts")
    except (msgspec.MsgspecError, TypeError, RecursionError):
        return None
    return float(sent_s) if isinstance(sent_s, int | float) and sent_s > _YEAR_2001_S else None


def decode_events(
    payload: bytes, on_malformed: Callable[[Exception], None]
) -> tuple[int | None, list[EngineEvent]]:
    """Return (dp_rank or None, events) of a message. Raises ValueError for any other payload.

    Events of unknown types and media are skipped; malformed ones are reported to ``on_malformed``,
    and may have been removals, so they clear the rank, except stores. Token ids are not checked.
    """
    try:
        batch = _fields(_decode(payload), _BATCH_FIELDS)
        raw_events, dp_rank = list(batch["events"]), batch.get("data_parallel_rank")
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a KV event batch: {error!r}") from error
    if dp_rank is not None and not (isinstance(dp_rank, int) and 0 <= dp_rank < MAX_RANKS):
        raise ValueError(f"not a KV event batch: data_parallel_rank is {dp_rank!r:.40}")
    events: list[EngineEvent] = []
    for raw in raw_events:
        try:
            event = _event(raw)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            on_malformed(error)
            if _kind(raw) != "BlockStored":  # it may have been a removal
                events.append(EngineCleared())
        else:
            events += [event] if event is not None else []
    return dp_rank, events


def _kind(raw: Any) -> Any:
    """Return the type of an event; None for a value that is no event."""
    if isinstance(raw, dict):
        return raw.get("type")
    return raw[0] if isinstance(raw, list) and raw else None


def _fields(raw: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else dict(zip(names, raw, strict=False))


def _event(raw: Any) -> EngineEvent | None:
    kind = raw["type"] if isinstance(raw, dict) else raw[0]
    names = _FIELDS.get(kind)
    if names is None:
        return None
    event = _fields(raw if isinstance(raw, dict) else raw[1:], names)
    tier = tier_of(event.get("medium"))
    if tier is None:
        return None
    # Another machine holds the blocks, whatever the medium: they count as the last tier.
    if event.get("locality") == "REMOTE":
        tier = STORAGE_TIERS[-1]
    group = _require("group_idx", event.get("group_idx"), int | None)
    if group is not None and not 0 <= group < MAX_GROUPS:
        raise ValueError(f"group_idx is {group}")
    if kind == "BlockRemoved":
        return EngineRemoved([_hash(value) for value in event["block_hashes"]], tier, group)
    if kind == "AllBlocksCleared":
        return EngineCleared(tier)
    parent = event.get("parent_block_hash")
    lora_name = _require("lora_name", event.get("lora_name"), str | None)
    if lora_name is None and event.get("lora_id"):
        # Earlier versions of vLLM have no names: the blocks are not those of the base model.
        lora_name = f"\0{event['lora_id']!r:.40}"
    keys = _require("extra_keys", event.get("extra_keys"), list | tuple | None) or ()
    return EngineStored(
        [_hash(value) for value in event["block_hashes"]],
        None if parent is None else _hash(parent),
        _require("token_ids", event["token_ids"], list | None) or [],
        _require("block_size", event["block_size"], int),
        None if lora_name is None else lora_name.partition(LORA_VERSION)[0],
        tier,
        group,
        _require("kv_cache_spec_kind", event.get("kv_cache_spec_kind"), str | None),
        _mm_hashes(keys) if any(keys) else None,
        _salt(keys[0], lora_name) if parent is None and keys and keys[0] else None,
        event.get("origin") == "REUSED",
    )


def _mm_hashes(keys: Sequence[Any]) -> list[list[int]] | None:
    """Return the hashes of the images in each block; None without any.

    ``keys`` has for each block None, or what its hash depends on besides its tokens: the name of an
    adapter, a salt, and (identifier, offset) of each image.
    """
    by_block = [
        [short_hash(str(key[0])) for key in block or () if isinstance(key, list | tuple)]
        for block in keys
    ]
    return by_block if any(by_block) else None


def _salt(keys: Sequence[Any], lora_name: str | None) -> str | None:
    """Return the salt of a first block."""
    texts = [key for key in keys if isinstance(key, str)]
    if lora_name is not None and texts[:1] == [lora_name]:
        del texts[0]
    return texts[0] if texts else None


def _require(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {type(value).__name__}")
    return value


def _hash(value: int | bytes) -> int:
    return value & _U64 if isinstance(value, int) else int.from_bytes(value[-8:], "big")
