"""The batches of a replay against the mocker's own scheduler, both in virtual time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import replace
from statistics import fmean
from typing import Any, cast

import pytest

from dynamo.errors import ConfigError
from dynamo.mocker.blocks import BlockPool, SequenceBlocks
from dynamo.mocker.replies import random_reply
from dynamo.mocker.scheduler import Limits, Scheduler, Sequence
from dynamo.mocker.timing import Timing
from dynamo_lab.simulation.batch_worker import BatchWorker
from dynamo_lab.simulation.request import BLOCK_TOKENS, ReplayRequest, RequestState, flat, generate
from dynamo_lab.simulation.service_model import ServiceModel, service_model

BLOCK = 64


class TimedOutput:
    """Records when a sequence of the mocker gets its first and its last token."""

    def __init__(self) -> None:
        self.now_s = self.arrived_s = self.end_s = 0.0
        self.first_s: float | None = None

    def allocated(self) -> None:
        raise AssertionError("no transfers here")

    def token(self, token_id: int) -> None:
        self.first_s = self.now_s if self.first_s is None else self.first_s

    def finish(self, token_id: int, reason: str) -> None:
        self.token(token_id)
        self.end_s = self.now_s


def mocker_times(requests: Items[ReplayRequest], model: ServiceModel) -> list[tuple[float, float]]:
    """Return TTFT and mean ITL of each request, from the mocker's scheduler and timing."""
    limits = Limits(
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_model_len=None,
        chunked_prefill=True,
        watermark=0.0,
        preempt_newest=True,
    )
    pool = BlockPool(model.kv_tokens // BLOCK, BLOCK)
    scheduler, timing = Scheduler(pool, limits), Timing()
    outputs = [TimedOutput() for _ in requests]
    waiting = [
        (
            request,
            Sequence(_blocks(number, request), random_reply(request.osl, 0), cast(Any, output)),
            output,
        )
        for number, (request, output) in enumerate(zip(requests, outputs, strict=True))
    ]
    waiting.reverse()
    now_s = 0.0
    while waiting or scheduler.waiting or scheduler.running:
        while waiting and waiting[-1][0].at_s <= now_s:
            request, sequence, output = waiting.pop()
            output.arrived_s = request.at_s
            scheduler.add(sequence)
        batch = scheduler.schedule()
        if not batch.producing and not batch.prefill_tokens:
            now_s = waiting[-1][0].at_s
            continue
        usage = batch.decode_kv / model.kv_tokens
        now_s += timing.iteration_s(batch.prefill_tokens, batch.decodes, usage)
        for output in outputs:
            output.now_s = now_s
        scheduler.commit(batch)
    return [
        ((o.first_s or 0.0) - o.arrived_s, (o.end_s - (o.first_s or 0.0)) / max(1, r.osl - 1))
        for o, r in zip(outputs, requests, strict=True)
    ]


def _sequence(number: int, request: ReplayRequest, output: TimedOutput) -> Sequence:
    reply = random_reply(request.osl, 0)
    return Sequence(_blocks(number, request), reply, cast(Any, output))


def _blocks(number: int, request: ReplayRequest) -> SequenceBlocks:
    prefix = len(request.blocks) * BLOCK_TOKENS
    tokens = [hash((block, at)) % 1000 for block in request.blocks for at in range(BLOCK_TOKENS)]
    tokens += [1000 + number] * (request.isl - prefix)
    return SequenceBlocks(array("I", tokens), BLOCK)


def replay_times(requests: Items[ReplayRequest], model: ServiceModel) -> list[tuple[float, float]]:
    worker = BatchWorker(0, model)
    states = [RequestState(n, request, request.at_s) for n, request in enumerate(requests)]
    for state in states:
        while worker.due_s is not None and worker.due_s <= state.arrived_s:
            worker.finish_span()
        worker.submit(state, state.arrived_s)
    while worker.due_s is not None:
        worker.finish_span()
    assert not worker.requests and not worker.kv_used and not worker.prefill_tokens
    return [(state.ttft_s, state.itl_s) for state in states]


@pytest.mark.parametrize(
    ("rate", "limits", "tolerance"),
    [
        (1.0, {}, 0.01),
        (6.0, {}, 0.01),
        (6.0, {"max_num_batched_tokens": 1024}, 0.01),
        (8.0, {"max_num_seqs": 16}, 0.02),
        (8.0, {"kv_tokens": 60_032}, 0.02),
    ],
    ids=["light", "busy", "small chunks", "few sequences", "small cache"],
)
def test_means_agree_with_the_mocker(rate: float, limits: dict[str, int], tolerance: float) -> None:
    """Mean TTFT and ITL agree within 1 %, or 2 % when sequences or blocks run out: the replay
    counts KV in tokens, not in blocks."""
    model = replace(service_model("mocker"), **limits)  # type: ignore[arg-type]
    requests = generate(flat(rate), duration_s=40, isl=2000, osl=120, spread=0.5, seed=3)
    expected, found = mocker_times(requests, model), replay_times(requests, model)
    for number in (0, 1):
        assert fmean(times[number] for times in found) == pytest.approx(
            fmean(times[number] for times in expected), rel=tolerance
        )


def test_reused_prefixes_agree_with_the_mocker() -> None:
    requests = [
        replace(request, isl=3000, blocks=tuple(100 * (number % 7) + k for k in range(5)))
        for number, request in enumerate(generate(flat(5.0), duration_s=30, isl=1, osl=50, seed=1))
    ]
    model = service_model("mocker")
    expected, found = mocker_times(requests, model), replay_times(requests, model)
    for number in (0, 1):
        assert fmean(times[number] for times in found) == pytest.approx(
            fmean(times[number] for times in expected), rel=0.05
        )
    without = replay_times([replace(request, blocks=()) for request in requests], model)
    assert fmean(t for t, _ in found) < 0.8 * fmean(t for t, _ in without)


def spans(worker: BatchWorker, *given: RequestState) -> None:
    """Submit ``given`` at their arrivals and run the worker until it is idle."""
    for state in given:
        while worker.due_s is not None and worker.due_s <= state.arrived_s:
            worker.finish_span()
        worker.submit(state, state.arrived_s)
    while worker.due_s is not None:
        worker.finish_span()


def state(number: int, at_s: float, isl: int, osl: int, blocks: Items[int] = ()) -> RequestState:
    return RequestState(number, ReplayRequest(at_s, isl, osl, tuple(blocks)), at_s)


def test_decodes_pay_for_their_own_kv_only() -> None:
    """The first token of 20,000 tokens beside one reply, as Dynamo's replay 1.6.1 has it."""
    model = service_model("mocker")
    first, second = state(0, 0.0, 1000, 100), state(1, 0.5, 20_000, 5)
    spans(BatchWorker(0, model), first, second)
    assert first.first_s == pytest.approx(0.03211, abs=1e-4)
    assert second.first_s == pytest.approx(0.93395, abs=1e-4)
    assert second.end_s == pytest.approx(0.96121, abs=1e-4)
    requests = [ReplayRequest(0.0, 1000, 100, ()), ReplayRequest(0.5, 20_000, 5, ())]
    (ttft_s, _), (late_ttft_s, itl_s) = mocker_times(requests, model)
    assert ttft_s == pytest.approx(0.03211, abs=1e-4)
    assert 0.5 + late_ttft_s == pytest.approx(0.93395, abs=1e-4)
    assert 0.5 + late_ttft_s + 4 * itl_s == pytest.approx(0.96121, abs=1e-4)


def test_a_prefix_is_found_once_its_prompt_is_admitted() -> None:
    """The second prompt is admitted with the last chunk of the first one, and ends with it."""
    blocks = range(1, 59)
    first, second = state(0, 0.0, 30_000, 5, blocks), state(1, 0.1, 30_000, 5, blocks)
    spans(BatchWorker(0, service_model("mocker")), first, second)
    assert first.first_s == second.first_s == pytest.approx(0.62470, abs=1e-4)


def test_running_sequences_share_the_kv_of_a_prefix() -> None:
    """20,000 and 30,000 tokens share 19,968 and fit 44,800; without a prefix the second waits."""
    model = replace(service_model("mocker"), kv_tokens=44_800)
    blocks = tuple(range(1, 40))
    worker = BatchWorker(0, model)
    second = state(1, 0.6, 30_000, 10, (*blocks, 99))
    spans(worker, state(0, 0.0, 20_000, 100, blocks), second)
    assert second.first_s == pytest.approx(0.87743, abs=2e-4)
    assert not worker.kv_used and worker.overlap(second.blocks) == 40 * BLOCK_TOKENS
    alone, waiting = state(2, 100.0, 20_000, 100), state(3, 100.6, 30_000, 10)
    spans(worker, alone, waiting)
    assert waiting.first_s > alone.end_s


def test_h100_figures() -> None:
    """The figures of the docstring; Qwen3-8B has 144 KiB of KV per token."""
    model = service_model("qwen3-8b-h100")
    assert 1 / model.time.iteration_s(0, 0.0, 1, 0.0) == pytest.approx(150, rel=0.01)
    assert 12_000 / model.prefill_s(12_000) == pytest.approx(40_000, rel=0.02)
    assert model.prefill_s(12_000, cached=6_000) < model.prefill_s(12_000)


def test_unknown_service_model_names_the_presets() -> None:
    with pytest.raises(ConfigError, match="qwen3-8b-h100"):
        service_model("a100")
