"""What one rank of an engine holds: groups, sizes, salts, and the bounds of hostile events."""

from __future__ import annotations

from array import array
from functools import partial

import pytest
from memory_kit import memory_of

from dynamo._fast.hashing import block_hashes, seed_for
from dynamo.llm import engine_blocks
from dynamo.llm.engine_blocks import EngineBlocks
from dynamo.llm.engine_events import EngineCleared, EngineRemoved, EngineStored
from dynamo.protocols.kv import BlocksCleared, BlocksRemoved, BlocksStored

B = 4
STORED = EngineStored([1], None, [0] * B, B, None, group=0, attention="full_attention")


def u64(*values: int) -> bytes:
    return array("Q", values).tobytes()


def test_a_block_is_absent_until_the_group_that_removed_it_stores_it() -> None:
    blocks = EngineBlocks(B)
    other = STORED._replace(group=1)
    for event in (STORED, other):
        blocks.select([event])
        assert [type(each) for each in blocks.changes(event)] == [BlocksStored]
    assert blocks.changes(EngineRemoved([1], group=0)) == [BlocksRemoved(u64(1))]
    again = blocks.changes(other)  # a copy in the other group
    assert again[1:] == [BlocksRemoved(u64(1))]
    assert [type(each) for each in blocks.changes(STORED)] == [BlocksStored]
    assert blocks.changes(EngineRemoved([1], group=1)) == []
    assert blocks.changes(EngineRemoved([1], group=1)) == [BlocksRemoved(u64(1))]


def test_a_larger_block_is_found_in_parts() -> None:
    blocks = EngineBlocks(B)
    tokens = [*range(4 * B)]
    (stored,) = blocks.changes(STORED._replace(block_hashes=[7, 8], token_ids=tokens, block_size=8))
    assert isinstance(stored, BlocksStored)
    assert stored.tokens_hashes == block_hashes(tokens, B).tobytes()
    ids = array("Q", stored.block_hashes)
    assert (ids[1], ids[3]) == (7, 8) and len({*ids}) == 4
    (removed,) = blocks.changes(EngineRemoved([8], group=0))
    assert removed == BlocksRemoved(ids[2:].tobytes())


@pytest.mark.parametrize("size", [6, 2])
def test_blocks_of_another_size_are_named_once(size: int, caplog: pytest.LogCaptureFixture) -> None:
    blocks = EngineBlocks(B)
    for number in range(100):
        event = STORED._replace(block_hashes=[number], token_ids=[0] * size, block_size=size)
        assert blocks.changes(event) == []
    assert caplog.text.count(f"blocks of {size} tokens, this worker of {B}") == 1


def test_an_adapter_below_a_salted_block_keeps_its_seed() -> None:
    blocks = EngineBlocks(B)
    root = STORED._replace(cache_salt="s", lora_name="sql")
    child = STORED._replace(block_hashes=[2], parent_hash=1, lora_name="sql")
    blocks.changes(root)
    blocks.changes(root._replace(storage_tier="host_pinned", token_ids=[], cache_salt=None))
    assert blocks.changes(EngineRemoved([1], group=0)) == [BlocksRemoved(u64(1))]
    (stored,) = blocks.changes(child)  # host memory still has the parent
    expected = block_hashes([0] * B, B, seed=seed_for("sql", "s")).tobytes()
    assert isinstance(stored, BlocksStored) and stored.tokens_hashes == expected


def test_a_reused_block_is_no_copy() -> None:
    """As later versions of vLLM say in ``origin``; its one removal is the last."""
    blocks = EngineBlocks(B)
    blocks.changes(STORED)
    blocks.changes(STORED._replace(reused=True))
    assert blocks.changes(EngineRemoved([1], group=0)) == [BlocksRemoved(u64(1))]
    blocks.changes(STORED._replace(reused=True))  # its store was lost
    assert blocks.changes(EngineRemoved([1], group=0)) == [BlocksRemoved(u64(1))]


@pytest.mark.parametrize("size", [B, 2 * B, 2])
@pytest.mark.parametrize("salt", [None, "salt"])
def test_what_an_engine_fills_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int, salt: str | None
) -> None:
    monkeypatch.setattr(engine_blocks, "MAX_BLOCKS", 100)
    published = 0
    blocks = EngineBlocks(B)
    blocks.changes(STORED._replace(token_ids=[0] * max(size, B), block_size=max(size, B)))

    def fill(first: int, count: int) -> None:
        nonlocal published
        for number in range(first, first + count):
            event = STORED._replace(
                block_hashes=[number],
                token_ids=[number] * size,
                block_size=size,
                cache_salt=f"{salt}{number}" if salt else None,
            )
            published += len(blocks.changes(event))
            blocks.changes(EngineRemoved([10**9 + number], group=0))  # never stored

    fill(1200, 4000)
    assert memory_of(partial(fill, 10_000, 4000)).left < 20_000
    assert published <= 100
    assert caplog.text.count("more than 100 blocks") == (size >= B)
    assert blocks.changes(EngineCleared()) == [BlocksCleared()]
    whole = STORED._replace(token_ids=[0] * max(size, B), block_size=max(size, B))
    again = [blocks.changes(whole._replace(block_hashes=[1200 + one])) for one in range(101)]
    assert all(again[:100]) and not again[100], "as many as before"
    assert all(blocks.changes(EngineRemoved([1200 + one], group=0)) for one in range(100))


def test_a_cleared_tier_costs_what_it_held() -> None:
    blocks = EngineBlocks(B)
    for number in range(1000):
        blocks.changes(STORED._replace(block_hashes=[number], cache_salt="s"))
    clear = partial(blocks.changes, EngineCleared("host_pinned"))
    assert clear() == [BlocksCleared()]
    assert memory_of(clear).most < 5000, "nothing of the device's 1,000 blocks is copied"
