"""The decoder accepts every shape in which engines send their KV events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo._fast.hashing import xxh3_64
from dynamo.llm.engine_blocks import AttentionGroup
from dynamo.llm.engine_events import (
    MAX_GROUPS,
    MAX_RANKS,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    decode_events,
    tier_of,
)

BYTES_HASH = bytes(range(32))
FOLDED = int.from_bytes(BYTES_HASH[-8:], "big")
STORED = EngineStored([5, 6], 4, [1, 2, 3, 4], 2, None)


def as_array(**fields: Any) -> list[Any]:
    order = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
             "medium", "lora_name")  # fmt: skip
    return [fields[name] for name in order if name in fields]


def stored(**changes: Any) -> dict[str, Any]:
    fields = {
        "type": "BlockStored",
        "block_hashes": [5, 6],
        "parent_block_hash": 4,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
    }
    return {**fields, **changes}


SHAPES = {
    "array of arrays": ([1.5, [as_array(**stored())], 3], 3, STORED),
    "array of maps": ([1.5, [stored()], 0], 0, STORED),
    "map of maps": ({"ts": 1.5, "events": [stored()], "data_parallel_rank": 1}, 1, STORED),
    "no rank": ([1.5, [as_array(**stored())]], None, STORED),
    "rank is nil": ([1.5, [as_array(**stored())], None], None, STORED),
    "with medium": ([1.5, [as_array(**stored(medium="GPU"))], 0], 0, STORED),
    "with lora": (
        [1.5, [as_array(**stored(medium="GPU", lora_name="sql"))], 0],
        0,
        STORED._replace(lora_name="sql"),
    ),
    # As vLLM before it had names: not a block of the base model.
    "an adapter without a name": (
        [1.5, [stored(lora_id=3)], 0],
        0,
        STORED._replace(lora_name="\x003"),
    ),
    "of reused blocks": ([1.5, [stored(origin="REUSED")], 0], 0, STORED._replace(reused=True)),
    "of new blocks": ([1.5, [stored(origin="NEW")], 0], 0, STORED),
    "elsewhere": (
        [1.5, [stored(medium="STORAGE", locality="REMOTE")], 0],
        0,
        STORED._replace(storage_tier="external"),
    ),
    "signed hashes": (
        [1.5, [stored(block_hashes=[-1, 6], parent_block_hash=-2)], 0],
        0,
        STORED._replace(block_hashes=[2**64 - 1, 6], parent_hash=2**64 - 2),
    ),
    "hashes of bytes": (
        [1.5, [stored(block_hashes=[BYTES_HASH, 6], parent_block_hash=BYTES_HASH)], 0],
        0,
        STORED._replace(block_hashes=[FOLDED, 6], parent_hash=FOLDED),
    ),
    "no parent": (
        [1.5, [stored(parent_block_hash=None)], 0],
        0,
        STORED._replace(parent_hash=None),
    ),
    "a field of the future": (
        [1.5, [[*as_array(**stored()), "GPU", *[None] * 7, 8]], 0],
        0,
        STORED,
    ),
    # vLLM 0.32 writes maps with these fields.
    "a group of layers": (
        [
            1.5,
            [
                stored(
                    medium="GPU",
                    lora_name=None,
                    extra_keys=[["salt"], None],
                    group_idx=1,
                    kv_cache_spec_kind="sliding_window",
                    kv_cache_spec_sliding_window=128,
                    locality="LOCAL",
                )
            ],
            0,
        ],
        0,
        STORED._replace(group=1, attention="sliding_window"),
    ),
    "a salt at the root": (
        [
            1.5,
            [
                stored(
                    parent_block_hash=None, lora_name="sql", extra_keys=[["sql", "salt"], ["sql"]]
                )
            ],
            0,
        ],
        0,
        STORED._replace(parent_hash=None, lora_name="sql", cache_salt="salt"),
    ),
    "images": (
        [1.5, [stored(extra_keys=[None, [["00ab" * 16, -1], ["cat", 1]]])], 0],
        0,
        STORED._replace(mm_hashes=[[], [0x00AB00AB00AB00AB, xxh3_64(b"cat")]]),
    ),
    "a group of layers in an array": (
        [1.5, [[*as_array(**stored()), "GPU", None, None, 2, "mla_attention"]], 0],
        0,
        STORED._replace(group=2, attention="mla_attention"),
    ),
    "removed from a group": (
        [1.5, [{"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 1}], 0],
        0,
        EngineRemoved([5], group=1),
    ),
    "removed": ([1.5, [["BlockRemoved", [5, -1]]], 0], 0, EngineRemoved([5, 2**64 - 1])),
    "removed with medium": ([1.5, [["BlockRemoved", [5], "GPU"]], 0], 0, EngineRemoved([5])),
    "on the host": (
        [1.5, [stored(medium="CPU")], 0],
        0,
        STORED._replace(storage_tier="host_pinned"),
    ),
    "by hashes alone": (
        [1.5, [["BlockStored", [BYTES_HASH], None, [], 0, None, "CPU"]], 0],
        0,
        EngineStored([FOLDED], None, [], 0, None, "host_pinned"),
    ),
    "removed from disk": (
        [1.5, [["BlockRemoved", [5], "DISK"]], 0],
        0,
        EngineRemoved([5], "disk"),
    ),
    "a tier is cleared": (
        [1.5, [{"type": "AllBlocksCleared", "medium": "SHARED"}], 0],
        0,
        EngineCleared("external"),
    ),
    "cleared": ([1.5, [["AllBlocksCleared"]], 0], 0, EngineCleared()),
    "cleared as map": ([1.5, [{"type": "AllBlocksCleared"}], 0], 0, EngineCleared()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape: str) -> None:
    message, rank, event = SHAPES[shape]
    assert decode(msgspec.msgpack.encode(message)) == (rank, [event])


UNKNOWN = (
    ["BlockMoved", 1],
    stored(medium=7),
    stored(medium="TAPE"),
    ["BlockRemoved", [1], "CLOUD"],
)
NONSENSE = (
    b"",
    b"\xc1",
    msgspec.msgpack.encode(7),
    msgspec.msgpack.encode([1.0, 7]),
    msgspec.msgpack.encode([1.0, [], -1]),
    msgspec.msgpack.encode([1.0, [], MAX_RANKS]),
    msgspec.msgpack.encode([1.0, [], "0"]),
    b"\x91" * 100_000,
)
MALFORMED: tuple[Any, ...] = (
    7,
    [],
    [[]],
    ["BlockStored"],
    {"block_hashes": [1]},
    stored(block_hashes=[1.5]),
    stored(block_hashes=["5"]),
    stored(block_hashes=None),
    stored(parent_block_hash="4"),
    stored(token_ids="1234"),
    stored(token_ids={"1": 2}),
    stored(block_size="2"),
    stored(block_size=None),
    stored(lora_name=3),
    stored(group_idx=MAX_GROUPS),
    stored(group_idx=-1),
    stored(group_idx="0"),
    ["BlockRemoved", [None]],
)


def decode(payload: bytes) -> tuple[int | None, list[EngineEvent]]:
    """Decode a message without malformed events."""

    def fail(error: Exception) -> None:
        raise AssertionError(error)

    return decode_events(payload, fail)


@pytest.mark.parametrize(
    ("media", "tier"),
    [
        ((None, "GPU", "DEVICE", "device"), "device"),
        (("CPU", "CPU_PINNED", "CPU_TIER1", "host_pinned"), "host_pinned"),
        (("CPU_TIER2", "DISK", "NVME", "STORAGE"), "disk"),
        (("EXTERNAL", "NETWORK", "REMOTE", "SHARED", "Remote"), "external"),
        (("TAPE", ""), None),
    ],
)
def test_media_are_tiers(media: tuple[str | None, ...], tier: str | None) -> None:
    assert {tier_of(medium) for medium in media} == {tier}


@pytest.mark.parametrize("event", UNKNOWN)
def test_unknown_events_and_media_are_skipped(event: Any) -> None:
    assert decode(msgspec.msgpack.encode([0, [event], 0])) == (0, [])


@pytest.mark.parametrize("message", NONSENSE)
def test_another_payload_is_a_value_error(message: bytes) -> None:
    with pytest.raises(ValueError, match="not a KV event batch"):
        decode(message)


@pytest.mark.parametrize("event", MALFORMED)
def test_a_malformed_event_is_skipped(event: Any) -> None:
    """One that may have removed blocks clears the rank."""
    errors: list[Exception] = []
    message = msgspec.msgpack.encode([0, [stored(), event, stored()], 0])
    is_store = (
        "BlockStored" in (event.get("type"), *event)
        if isinstance(event, dict)
        else (isinstance(event, list) and event[:1] == ["BlockStored"])
    )
    between = [] if is_store else [EngineCleared()]
    assert decode_events(message, errors.append) == (0, [STORED, *between, STORED])
    assert len(errors) == 1


def test_a_hybrid_model_is_cached_as_its_full_attention_says() -> None:
    group = AttentionGroup()
    window = STORED._replace(group=0, attention="sliding_window")
    full = STORED._replace(group=1, attention="full_attention")
    assert group.select([window, full]) == [full]
    assert group.select([EngineRemoved([5], group=0)]) == []
    assert group.select([window, EngineRemoved([5], group=1)]) == [EngineRemoved([5], group=1)]
    assert group.select([EngineCleared()]) == [EngineCleared()]


def test_a_model_with_one_kind_of_layers_needs_no_full_attention() -> None:
    group = AttentionGroup()
    only = STORED._replace(group=0, attention="mamba")
    assert group.select([only]) == [only]
    assert group.select([EngineRemoved([5], group=0)]) == [EngineRemoved([5], group=0)]


def test_engines_without_groups_send_all_events() -> None:
    group = AttentionGroup()
    assert group.select([STORED, EngineRemoved([5])]) == [STORED, EngineRemoved([5])]


def test_full_attention_that_appears_later_replaces_the_first_group() -> None:
    group = AttentionGroup()
    window = STORED._replace(group=0, attention="sliding_window")
    full = STORED._replace(group=1, attention="mla_attention")
    assert group.select([window]) == [window]
    assert group.select([full]) == [EngineCleared(), full]
    assert group.select([window, EngineRemoved([5], group=0)]) == []
    sink = STORED._replace(group=2, attention="sink_full_attention")
    assert group.select([sink, full]) == [sink, full]
