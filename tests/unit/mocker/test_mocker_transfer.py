"""KV transfers from a prefill worker: bytes, seconds, and the scheduler during a transfer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from dynamo.mocker.arguments import engine_shape
from dynamo.mocker.blocks import BlockPool, SequenceBlocks
from dynamo.mocker.replies import random_reply
from dynamo.mocker.scheduler import Scheduler, Sequence
from dynamo.mocker.settings import MockerSettings
from dynamo.mocker.timing import Transfer, cached_tokens
from dynamo.protocols.codec import tokens

B = 4
LIMITS = engine_shape(MockerSettings()).limits


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


def test_cached_tokens_of_the_prefill_result() -> None:
    assert cached_tokens({"prompt_tokens_details": {"cached_tokens": 16}}) == 16
    assert cached_tokens({"disaggregated_params": {}}) is None
    assert cached_tokens({"prompt_tokens_details": {"cached_tokens": "x"}}) is None


class Recorder:
    """Pauses its sequence when its blocks are allocated, as a transfer does."""

    def __init__(self, pauses: bool) -> None:
        self.pauses = pauses
        self.tokens = 0
        self.allocations = 0
        self.sequence: Sequence

    def allocated(self) -> None:
        self.allocations += 1
        self.sequence.paused = self.pauses

    def token(self, token_id: int) -> None:
        self.tokens += 1

    def finish(self, token_id: int, reason: str) -> None:
        self.tokens += 1


def transferred(length: int, pauses: bool, max_tokens: int = 3) -> Recorder:
    output = Recorder(pauses)
    blocks = SequenceBlocks(tokens(list(range(length))), B)
    output.sequence = Sequence(blocks, random_reply(max_tokens, 1), cast(Any, output))
    output.sequence.expect_transfer(8)
    return output


def test_nothing_is_computed_until_the_transfer_is_complete() -> None:
    engine = Scheduler(BlockPool(100, B), LIMITS)
    output = transferred(10, pauses=True)
    engine.add(output.sequence)
    batch = engine.schedule()
    assert (batch.prefill_tokens, batch.decodes, batch.producing) == (0, 0, [])
    assert engine.pool.used == 3 and output.allocations == 1
    assert not engine.schedule().producing
    output.sequence.paused = False
    batch = engine.schedule()
    assert (batch.prefill_tokens, batch.decodes) == (0, 1), "one step, no prompt"
    engine.commit(batch)
    engine._check()
    while engine.running:
        engine.commit(engine.schedule())
        engine._check()
    assert output.tokens == 3 and output.sequence.cached_tokens == 8 and engine.pool.used == 0


def test_an_instant_transfer_does_not_delay_the_first_token() -> None:
    engine = Scheduler(BlockPool(100, B), LIMITS)
    output = transferred(10, pauses=False)
    engine.add(output.sequence)
    batch = engine.schedule()
    assert batch.producing == [output.sequence] and batch.prefill_tokens == 0


def test_a_preempted_transfer_is_computed_here() -> None:
    engine = Scheduler(BlockPool(6, B), replace(LIMITS, watermark=0))
    first, second = transferred(10, True, 12), transferred(11, True, 4)
    second.sequence.blocks = SequenceBlocks(tokens(list(range(100, 111))), B)
    for output in (first, second):
        engine.add(output.sequence)
    engine.schedule()
    assert engine.pool.used == 6
    first.sequence.paused = second.sequence.paused = False
    prefilled = 0
    while engine.running or engine.waiting:
        batch = engine.schedule()
        prefilled += batch.prefill_tokens
        engine.commit(batch)
        engine._check()
    assert engine.preemptions and prefilled >= 11, (
        "the preempted sequence, prompt and output so far"
    )
    assert (first.tokens, second.tokens) == (12, 4)
    assert first.allocations == second.allocations == 1
