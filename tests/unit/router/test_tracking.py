"""What counts as load, and for how long: the switches of load tracking, and the sweep."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.errors import Overloaded
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.decision.explanation import potential_loads
from dynamo.router.modes.kv import KvPicker

BLOCK = 4
PROMPT = array("I", range(14))
QUERY = array("I", range(500, 508))


class Box:
    """A router over some workers, under a clock that the test moves."""

    def __init__(self, workers: int = 1, **settings: Any) -> None:
        self.now_s = 0.0
        index = RadixTree()
        self.picker = KvPicker(
            RouterSettings(mode="kv", **settings), BLOCK, index, clock=lambda: self.now_s
        )
        for worker_id in range(1, workers + 1):
            self.picker.add_worker(worker_id, RuntimeConfig())
        self.index = index

    def potential(self) -> tuple[int, int, int]:
        """What worker 1 would have with a cold query of 8 tokens."""
        inputs = self.picker.weigh(QUERY).inputs
        row = potential_loads(inputs, self.picker.worker_pool, self.picker.active)[0]
        return (
            row["potential_prefill_tokens"],
            row["potential_decode_blocks"],
            row["active_requests"],
        )

    def life(self, **routing: Any) -> list[tuple[int, int, int]]:
        """The potential with a request booked, past its first token, and freed."""
        self.picker.pick("a", PROMPT, routing=Routing(**routing) if routing else None)
        seen = [self.potential()]
        self.picker.mark_prefill_complete("a")
        seen.append(self.potential())
        self.picker.free("a")
        return [*seen, self.potential()]


def cached(box: Box, blocks: int) -> None:
    local = block_hashes(PROMPT, BLOCK)[:blocks]
    box.index.store(box.index.slot(1, 0), None, sequence_hashes(local), local)


def test_the_observed_example() -> None:
    box = Box()
    cached(box, 2)
    assert box.life() == [(14, 5, 1), (8, 5, 1), (8, 2, 0)]


def test_without_active_blocks() -> None:
    assert Box(track_active_blocks=False).life() == [(22, 0, 1), (8, 0, 1), (8, 0, 0)]


def test_without_prefill_tokens() -> None:
    box = Box(track_prefill_tokens=False)
    prefill = [row[0] for row in box.life()]
    assert len(set(prefill)) == 1


@pytest.mark.parametrize(("reuse", "blocks"), [(True, 3 + 2), (False, 6 + 2)])
def test_blocks_that_two_requests_share(reuse: bool, blocks: int) -> None:
    box = Box(assume_kv_reuse=reuse)
    for name in "ab":
        box.picker.pick(name, PROMPT)
    assert box.potential()[1:] == (blocks, 2)
    box.picker.free("a")
    assert box.potential()[1:] == (3 + 2, 1)
    box.picker.free("b")
    assert box.potential()[1:] == (2, 0)


def test_reuse_of_the_querys_own_blocks() -> None:
    assert [Box(assume_kv_reuse=reuse).life()[1][1] for reuse in (True, False)] == [5, 5]
    box = Box(assume_kv_reuse=False)
    box.picker.pick("a", QUERY)
    assert box.potential()[1] == 4  # the same blocks again
    box = Box()
    box.picker.pick("a", QUERY)
    assert box.potential()[1] == 2


def test_output_that_fades() -> None:
    box = Box(track_output_blocks=True)
    box.picker.pick("a", PROMPT, routing=Routing(expected_output_tokens=8))
    box.picker.mark_prefill_complete("a")
    box.picker.add_output_tokens("a", 2)  # 14 + 2: the fourth block is full, a quarter is done
    assert box.potential()[1] == 3 + 2
    box.picker.add_output_tokens("a", 400)
    assert box.potential()[1] == 2
    box.picker.free("a")
    assert box.potential()[1] == 2


def test_the_sweep_frees_what_nobody_freed() -> None:
    box = Box(admission_control="token-capacity", active_prefill_tokens_threshold=5)
    box.picker.pick("old", PROMPT)
    with pytest.raises(Overloaded):
        box.picker.pick("next", PROMPT)
    box.now_s = 100.0
    assert box.picker.expire(100.0) == []
    box.now_s = 100.1
    assert box.picker.expire(100.0) == ["old"]
    assert box.potential() == (8, 2, 0)
    box.picker.pick("next", PROMPT)  # its worker is not busy any more
    box.picker.free("old")
    assert box.potential()[2] == 1


def test_a_worker_that_goes_takes_its_load_along() -> None:
    box = Box()
    box.picker.pick("a", PROMPT)
    box.picker.remove_worker(1)
    box.picker.add_worker(1, RuntimeConfig())
    assert box.potential() == (8, 2, 0)
    box.picker.free("a")
    assert box.potential() == (8, 2, 0)
