"""KV blocks from a prefill worker: bytes, seconds, and what the scheduler does meanwhile."""

from __future__ import annotations

import pytest

from dynamo.mocker.blocks import BlockPool, SequenceBlocks
from dynamo.mocker.reply import random_reply
from dynamo.mocker.scheduler import Limits, Scheduler, Sequence
from dynamo.mocker.timing import Transfer, cached_tokens
from dynamo.protocols.codec import tokens

B = 4


def test_seconds_are_bytes_over_bandwidth_over_speed() -> None:
    transfer = Transfer(bytes_per_token=128_000, bytes_per_s=64e9, speedup=2)
    assert transfer.seconds(1000) == pytest.approx(0.001)
    assert Transfer(speedup=0).seconds(10**6) == 0
    params = transfer.transfer_params(7, 1, 9, B)
    assert params == {
        "worker_id": 7,
        "dp_rank": 1,
        "prompt_tokens": 9,
        "blocks": 3,
        "kv_bytes": 1_152_000,
    }


def test_cached_tokens_as_the_prefill_worker_told() -> None:
    assert cached_tokens({"prompt_tokens_details": {"cached_tokens": 16}}) == 16
    assert cached_tokens({"disaggregated_params": {}}) is None
    assert cached_tokens({"prompt_tokens_details": {"cached_tokens": "x"}}) is None


class Told:
    """Holds its sequence when its blocks have a place, as a transfer does."""

    def __init__(self, holds: bool) -> None:
        self.holds = holds
        self.tokens = 0
        self.places = 0
        self.sequence: Sequence

    def allocated(self) -> None:
        self.places += 1
        self.sequence.paused = self.holds

    def token(self, token_id: int) -> None:
        self.tokens += 1

    def finish(self, token_id: int, reason: str) -> None:
        self.tokens += 1


def expected(length: int, holds: bool, max_tokens: int = 3) -> Told:
    told = Told(holds)
    blocks = SequenceBlocks(tokens(list(range(length))), B)
    told.sequence = Sequence(blocks, random_reply(max_tokens, 1), told)
    told.sequence.expect_transfer(8)
    return told


def test_blocks_are_taken_at_once_and_nothing_is_computed_until_they_are_filled() -> None:
    engine = Scheduler(BlockPool(100, B), Limits())
    told = expected(10, holds=True)
    engine.add(told.sequence)
    batch = engine.schedule()
    assert (batch.prefill_tokens, batch.decodes, batch.producing) == (0, 0, [])
    assert engine.pool.used == 3 and told.places == 1
    assert not engine.schedule().producing
    told.sequence.paused = False
    batch = engine.schedule()
    assert (batch.prefill_tokens, batch.decodes) == (0, 1), "one step, no prompt"
    engine.commit(batch)
    engine._check()
    while engine.running:
        engine.commit(engine.schedule())
        engine._check()
    assert told.tokens == 3 and told.sequence.cached_tokens == 8 and engine.pool.used == 0


def test_a_transfer_without_time_does_not_hold_up_the_first_token() -> None:
    engine = Scheduler(BlockPool(100, B), Limits())
    told = expected(10, holds=False)
    engine.add(told.sequence)
    batch = engine.schedule()
    assert batch.producing == [told.sequence] and batch.prefill_tokens == 0


def test_who_loses_its_blocks_computes_its_prompt_itself() -> None:
    engine = Scheduler(BlockPool(6, B), Limits(watermark=0))
    first, second = expected(10, True, 12), expected(11, True, 4)
    second.sequence.blocks = SequenceBlocks(tokens(list(range(100, 111))), B)
    for told in (first, second):
        engine.add(told.sequence)
    engine.schedule()
    assert engine.pool.used == 6
    first.sequence.paused = second.sequence.paused = False
    prefilled = 0
    while engine.running or engine.waiting:
        batch = engine.schedule()
        prefilled += batch.prefill_tokens
        engine.commit(batch)
        engine._check()
    assert engine.preemptions and prefilled >= 11, "the one preempted, prompt and output so far"
    assert (first.tokens, second.tokens) == (12, 4)
    assert first.places == second.places == 1
