"""The load of a request: prefill until the first token, blocks until the end."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo.errors import InvalidArgument
from dynamo.router.load.active_load import ActiveLoad, Reservation


def book(
    load: ActiveLoad, request_id: str, isl: int, overlap: int = 0, slot: int = 0, **more: Any
) -> array[int]:
    """Book ``isl`` tokens (all different per request length) with ``overlap`` blocks cached."""
    chained = sequence_hashes(block_hashes(array("I", range(isl)), load.block_size))
    reservation_id = Reservation(slot, 10 + slot, 0, isl, overlap, float(len(load)), **more)
    load.book(request_id, reservation_id, chained, 0, isl - overlap * load.block_size)
    return chained


def test_prefill_then_decode_then_nothing() -> None:
    load = ActiveLoad(4)
    book(load, "a", 14, overlap=2)
    assert load.load(0) == (6, 3, 1)
    first = load.mark_prefill_complete("a", 5.0)
    assert first is not None
    assert first.first_token_at_s == 5.0
    assert load.mark_prefill_complete("a", 6.0) is None
    assert load.load(0) == (0, 3, 1)
    ended = load.free("a")
    assert ended is first
    assert load.free("a") is None
    assert load.load(0) == (0, 0, 0)
    load._check()


def test_free_without_a_first_token_releases_the_prefill_too() -> None:
    load = ActiveLoad(4)
    book(load, "a", 14)
    load.free("a")
    assert load.load(0) == (0, 0, 0)


def test_shared_blocks_count_once() -> None:
    load = ActiveLoad(4)
    book(load, "a", 12)
    book(load, "b", 16)
    assert load.load(0) == (28, 4, 2)
    load.free("b")
    assert load.load(0) == (12, 3, 1)
    load._check()


def test_the_same_id_twice() -> None:
    load = ActiveLoad(4)
    book(load, "a", 12)
    with pytest.raises(InvalidArgument) as caught:
        book(load, "a", 12)
    assert caught.value.message == "Request a already exists (assigned to worker 10)"
    assert load.load(0) == (12, 3, 1)


def test_unknown_ids_are_ignored() -> None:
    load = ActiveLoad(4)
    assert load.mark_prefill_complete("zz", 0.0) is None
    load.add_output_tokens("zz", 5)
    assert load.free("zz") is None


def test_blocks_may_be_left_untracked() -> None:
    load = ActiveLoad(4, track_blocks=False, track_output=True)
    book(load, "a", 12)
    load.add_output_tokens("a", 100)
    assert load.load(0) == (12, 0, 1)
    prefill, decode = array("q", [0]), array("q", [0])
    load.project_into(array("Q", [1, 2]), 3, prefill, decode)
    assert (prefill[0], decode[0]) == (12, 0)


def test_output_blocks_grow_at_block_borders() -> None:
    load = ActiveLoad(4, track_output=True)
    book(load, "a", 14)
    load.add_output_tokens("a", 1)
    assert load.load(0)[1] == 3
    load.add_output_tokens("a", 1)
    assert load.load(0)[1] == 4
    load.add_output_tokens("a", 9)
    assert load.load(0)[1] == 6
    load.free("a")
    assert load.load(0)[1] == 0


def test_output_is_not_tracked_by_default() -> None:
    load = ActiveLoad(4)
    book(load, "a", 14)
    load.add_output_tokens("a", 100)
    assert load.load(0)[1] == 3


def test_expected_length_makes_a_request_fade() -> None:
    load = ActiveLoad(4, track_output=True)
    book(load, "a", 16, expected_output_tokens=8)
    load.add_output_tokens("a", 4)
    assert load.load(0)[1] == 3  # 5 blocks at one half, rounded up
    load.add_output_tokens("a", 400)
    assert load.load(0)[1] == 0
    load._check()


def test_requests_are_found_by_slot() -> None:
    load = ActiveLoad(4)
    for slot, name in enumerate("abc"):
        book(load, name, 12, slot=slot)
    assert load.booked_on({1, 2}) == ["b", "c"]
    load.free("b")
    assert load.booked_on({1, 2}) == ["c"]
    assert load.booked_on(set()) == []
    load._check()


def test_stale_requests_are_returned_oldest_first() -> None:
    load = ActiveLoad(4)
    for name in "abc":
        book(load, name, 12)
    assert load.stale(2.0) == ["a", "b"]
    assert len(load) == 3
    assert load.memory_bytes() > 0
