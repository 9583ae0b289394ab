"""The Python API of the prefix index: JSON events, exact error texts, dumps."""

from __future__ import annotations

import json

import pytest

from dynamo.llm.prefix_index import RadixTree


def event(data: object, dp_rank: int = 0) -> bytes:
    return json.dumps({"event_id": 1, "data": data, "dp_rank": dp_rank}).encode()


def stored(*pairs: tuple[int, int], parent: int | None = None) -> dict[str, object]:
    blocks = [{"block_hash": block, "tokens_hash": local} for block, local in pairs]
    return {"stored": {"parent_hash": parent, "blocks": blocks}}


def test_scores_are_keyed_by_worker_and_rank() -> None:
    tree = RadixTree()
    tree.apply_event(7, event(stored((11, 1), (12, 2))))
    tree.apply_event(8, event(stored((21, 1)), dp_rank=1))
    found = tree.find_matches([1, 2, 3])
    assert found.scores == {(7, 0): 2, (8, 1): 1}
    assert found.frequencies == []
    assert tree.find_matches([]).scores == {} == tree.find_matches([9]).scores


def test_signed_hashes_keep_their_bits() -> None:
    tree = RadixTree()
    tree.apply_event(1, event(stored((-1, -2))))
    tree.apply_event(1, event(stored((5, 6), parent=2**64 - 1)))
    assert tree.find_matches([2**64 - 2, 6]).scores == {(1, 0): 2}


def test_error_texts() -> None:
    tree = RadixTree()
    with pytest.raises(ValueError, match=r"^Failed to deserialize KvCacheEvent"):
        tree.apply_event(1, b"{}")
    with pytest.raises(ValueError, match=r"^Failed to deserialize KvCacheEvent"):
        tree.apply_event(1, event({}))
    with pytest.raises(RuntimeError, match=r"^Failed to apply event: Failed to find parent block$"):
        tree.apply_event(1, event(stored((1, 1), parent=9)))
    with pytest.raises(RuntimeError, match=r"^Failed to apply event: Failed to find block$"):
        tree.apply_event(1, event({"removed": {"block_hashes": [1]}}))
    tree.apply_event(1, event(stored((1, 1))))
    with pytest.raises(RuntimeError, match=r"^Failed to apply event: Invalid block sequence$"):
        tree.apply_event(1, event(stored((1, 2), parent=1)))


def test_removed_cleared_and_removed_workers() -> None:
    tree = RadixTree()
    for worker in (1, 2, 3):
        tree.apply_event(worker, event(stored((11, 1), (12, 2))))
    tree.apply_event(1, event({"removed": {"block_hashes": [12]}}))
    tree.apply_event(2, event("cleared"))
    assert tree.find_matches([1, 2]).scores == {(1, 0): 1, (3, 0): 2}
    tree.remove_worker(3)
    tree.clear_all_blocks(1)
    assert tree.find_matches([1, 2]).scores == {}


def test_a_dump_rebuilds_the_tree() -> None:
    tree = RadixTree()
    tree.apply_event(1, event(stored((11, 1), (12, 2))))
    tree.apply_event(1, event(stored((13, 3), parent=11)))
    tree.apply_event(2, event(stored((91, 1))))
    copy = RadixTree()
    for line in tree.dump_tree_as_events():
        dumped = json.loads(line)
        copy.apply_event(dumped["worker_id"], json.dumps(dumped["event"]).encode())
    for path in ([1, 2], [1, 3], [1, 9]):
        assert copy.find_matches(path).scores == tree.find_matches(path).scores
