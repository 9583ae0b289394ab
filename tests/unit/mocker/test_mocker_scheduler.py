"""The scheduler in virtual time: budget, chunks, preemption, and that every request ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.mocker.arguments import engine_shape
from dynamo.mocker.blocks import BlockPool, SequenceBlocks
from dynamo.mocker.replies import random_reply
from dynamo.mocker.scheduler import Scheduler, Sequence
from dynamo.mocker.settings import MockerSettings
from dynamo.protocols.codec import tokens

B = 4
LIMITS = engine_shape(MockerSettings()).limits


class Recorder:
    """Collects the tokens of a sequence."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.reason: str | None = None

    def allocated(self) -> None:
        raise AssertionError("not a transferred prompt")

    def token(self, token_id: int) -> None:
        assert self.reason is None
        self.ids.append(token_id)

    def finish(self, token_id: int, reason: str) -> None:
        self.token(token_id)
        self.reason = reason


def sequence(prompt: list[int], max_tokens: int, seed: int = 0) -> tuple[Sequence, Recorder]:
    output = Recorder()
    return Sequence(
        SequenceBlocks(tokens(prompt), B), random_reply(max_tokens, seed), cast(Any, output)
    ), output


def scheduler(blocks: int = 100, caching: bool = True, **limits: object) -> Scheduler:
    return Scheduler(BlockPool(blocks, B, caching), replace(LIMITS, **limits))  # type: ignore[arg-type]


def run(engine: Scheduler, iterations: int = 10_000) -> int:
    for done in range(iterations):
        if not engine.running and not engine.waiting:
            return done
        engine.commit(engine.schedule())
        engine._check()
    raise AssertionError("still busy")


def test_max_tokens_is_exact_and_blocks_are_freed() -> None:
    engine = scheduler()
    one, output = sequence(list(range(10)), 7)
    engine.add(one)
    assert run(engine) == 7
    assert len(output.ids) == 7 and output.reason == "length"
    assert engine.pool.used == 0 and engine.pool.cached == 4


def test_the_watermark_keeps_blocks_for_running_sequences() -> None:
    engine = scheduler(10, watermark=0.3)
    for first, length in ((0, 5 * B), (100, 3 * B)):
        engine.add(sequence(list(range(first, first + length)), 2 * B)[0])
    engine.schedule()
    assert (len(engine.running), len(engine.waiting)) == (1, 1)
    idle = scheduler(10, watermark=0.3)
    idle.add(sequence(list(range(9 * B)), 2)[0])
    idle.schedule()
    assert len(idle.running) == 1, "without others, a prompt may need the reserve"
    run(engine)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine = scheduler(max_num_batched_tokens=8, max_num_seqs=8)
    one, output = sequence(list(range(20)), 1)
    engine.add(one)
    first = engine.schedule()
    assert (first.prefill_tokens, first.producing) == (8, [])
    engine.commit(first)
    engine.commit(engine.schedule())
    last = engine.schedule()
    assert (last.prefill_tokens, last.producing) == (4, [one])
    engine.commit(last)
    assert output.reason == "length"


def test_without_chunked_prefill_a_long_prompt_runs_alone() -> None:
    engine = scheduler(max_num_batched_tokens=8, max_num_seqs=8, chunked_prefill=False)
    short, _ = sequence([1, 2, 3], 5)
    long, _ = sequence(list(range(20)), 1)
    engine.add(short)
    engine.add(long)
    assert engine.schedule().prefill_tokens == 3
    assert run(engine) < 20


def test_decodes_come_before_prefills_within_the_budget() -> None:
    engine = scheduler(max_num_batched_tokens=8, max_num_seqs=8)
    old, _ = sequence([1, 2], 5)
    engine.add(old)
    engine.commit(engine.schedule())
    engine.add(sequence(list(range(20)), 1)[0])
    batch = engine.schedule()
    assert (batch.decodes, batch.prefill_tokens) == (1, 7)


def test_at_most_max_num_seqs_run() -> None:
    engine = scheduler(max_num_seqs=2)
    for start in range(5):
        engine.add(sequence([start], 3)[0])
    engine.schedule()
    assert (len(engine.running), len(engine.waiting)) == (2, 3)


def test_the_watermark_delays_a_prompt_but_not_forever() -> None:
    engine = scheduler(blocks=10, watermark=0.5)
    engine.add(sequence(list(range(16)), 2)[0])
    second, output = sequence(list(range(100, 136)), 4)
    engine.add(second)
    engine.schedule()
    assert second in engine.waiting
    run(engine)
    assert output.reason == "length"


def test_cached_tokens_are_reported() -> None:
    engine = scheduler()
    engine.add(sequence(list(range(20)), 1)[0])
    run(engine)
    again, _ = sequence(list(range(20)), 1)
    engine.add(again)
    batch = engine.schedule()
    assert (again.cached_tokens, batch.prefill_tokens) == (16, 4)


@pytest.mark.parametrize("newest", [True, False])
def test_preemption_does_not_change_the_output(newest: bool) -> None:
    prompts = [[i] * 8 for i in range(4)]
    undisturbed = []
    for seed, prompt in enumerate(prompts):
        alone = scheduler()
        one, output = sequence(prompt, 20, seed)
        alone.add(one)
        run(alone)
        undisturbed.append(output.ids)
    tight = scheduler(blocks=9, watermark=0.0, preempt_newest=newest)
    outputs = []
    for seed, prompt in enumerate(prompts):
        one, output = sequence(prompt, 20, seed)
        tight.add(one)
        outputs.append(output)
    run(tight)
    assert tight.preemptions > 0
    assert [output.ids for output in outputs] == undisturbed


def test_abort_frees_blocks_and_is_idempotent() -> None:
    engine = scheduler()
    running, output = sequence(list(range(9)), 50)
    waiting, _ = sequence([1], 50)
    engine.add(running)
    batch = engine.schedule()
    engine.abort(running)
    engine.commit(batch)
    engine.add(waiting)
    engine.abort(waiting)
    engine.abort(running)
    assert not output.ids and engine.pool.used == 0 and run(engine) == 0


def test_a_request_that_can_never_finish_is_rejected() -> None:
    engine = scheduler(blocks=4)
    engine.check_length(8, 8)
    with pytest.raises(InvalidArgument, match=r"9 tokens.*8.*16 tokens.*lower max_tokens"):
        engine.check_length(9, 8)
    with pytest.raises(InvalidArgument, match="max_model_len"):
        scheduler(max_model_len=10).check_length(9, 2)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=30),
            st.integers(1, 30),
            st.integers(0, 40),
            st.integers(0, 60),
        ),
        max_size=12,
    ),
    blocks=st.integers(15, 30),
    seqs=st.integers(1, 6),
    budget=st.integers(6, 20),
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_every_request_ends_and_nothing_leaks(
    requests: list[tuple[list[int], int, int, int]],
    blocks: int,
    seqs: int,
    budget: int,
    switches: tuple[bool, bool, bool],
) -> None:
    caching, chunked, newest = switches
    engine = scheduler(
        blocks=blocks,
        caching=caching,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        chunked_prefill=chunked,
        preempt_newest=newest,
        watermark=0.1,
    )
    made = [(sequence(ids, count, seed=n), at, kill) for n, (ids, count, at, kill) in
            enumerate(requests)]  # fmt: skip
    for now in range(3000):
        for (one, _), at, kill in made:
            if at == now:
                engine.add(one)
            if kill == now:
                engine.abort(one)
        batch = engine.schedule()
        assert batch.decodes + batch.prefill_tokens <= budget or not chunked
        engine.commit(batch)
        engine._check()
        if now > 60 and not engine.running and not engine.waiting:
            break
    else:
        raise AssertionError("still busy")
    assert engine.pool.used == 0
    for ((one, output), at, kill), (_, count, _, _) in zip(made, requests, strict=True):
        if at > kill:
            continue
        assert (output.reason == "length" and len(output.ids) == count) or kill <= 60
        assert one.generated == len(output.ids)
