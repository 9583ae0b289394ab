"""Who waits for a prefill worker: priorities, busy workers, constraints, pins, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import prefill_patience
import pytest
from test_prefill import CONDITIONS, DECODE, PREFILL, SPARE, Box, Caller
from until import until

from dynamo.cli.route import table
from dynamo.errors import DynamoError, Overloaded, WorkerAtCapacity
from dynamo.frontend.apis.operator.routing import explain_request
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.protocols.codec import tokens
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import PreprocessedRequest, Routing, StopConditions
from dynamo.protocols.kv import KvMetrics
from dynamo.router.decision.explanation import Explanation
from dynamo.router.modes.kv import KvPicker


def first_tokens(box: Box) -> list[int]:
    """Which requests the prefill workers got, in order (1, 2, …)."""
    return [one.request.token_ids[0] // 1000 for one in box.prefillers.streams]


async def test_all_names_of_priority_count_as_before_decode_workers() -> None:
    box = Box(prefill_slots=1)
    box.join(PREFILL)
    box.send()
    hints = [
        None,
        Routing(priority_jump=50.0),
        Routing(priority=100),
        Routing(priority_jump=200.0, priority=-1),  # the newer name wins; it is no head start
        Routing(strict_priority=1),
    ]
    for routing in hints:
        box.send(routing=routing)
    for number in range(5):
        box.prefillers.streams[number].answer({})
    assert first_tokens(box) == [1, 6, 4, 3, 2, 5]


def busy_box(**more: Any) -> Box:
    settings = {"admission_control": "token-capacity", "active_decode_blocks_threshold": 0.5}
    box = Box(**settings, **more)
    box.join(PREFILL, SPARE, total_kv_blocks=100)
    return box


def report(box: Box, worker: int, used_blocks: int) -> None:
    """The prefill worker says how full it is, as others fill it too."""
    state = KvMetrics(worker, 0, kv_used_blocks=used_blocks, kv_total_blocks=100)
    box.prefill.eligibility.busy.report(state)


async def test_while_all_prefill_workers_are_busy_requests_wait() -> None:
    """No event reports the end of the busy state: the queue polls."""
    box = busy_box()
    report(box, PREFILL, 60)
    report(box, SPARE, 60)
    caller = box.send()
    assert not box.prefillers.streams and len(box.router.queue) == 1 and caller.error is None
    report(box, SPARE, 10)
    await until(lambda: box.prefillers.streams)
    assert box.prefillers.streams[0].worker_id == SPARE
    box.prefillers.streams[0].answer({})
    caller.engine_request.release()
    assert box.nothing_left()


async def test_a_busy_worker_gets_nothing_while_another_is_there_but_its_pins_wait_for_it() -> None:
    box = busy_box()
    report(box, PREFILL, 60)
    pinned = box.send(routing=Routing(prefill_worker_id=PREFILL))
    others = [box.send() for _ in range(3)]
    assert {one.worker_id for one in box.prefillers.streams} == {SPARE}
    assert len(box.router.queue) == 1 and pinned.error is None
    report(box, PREFILL, 0)
    box.prefillers.streams[0].answer({})  # whatever happens next, the line looks
    assert box.prefillers.streams[-1].worker_id == PREFILL
    for caller in (pinned, *others):
        caller.leave()
    assert box.nothing_left()


async def test_the_line_before_busy_workers_is_bounded() -> None:
    box = busy_box(prefill_queue_limit=1)
    report(box, PREFILL, 60)
    report(box, SPARE, 60)
    waiting = box.send()
    with pytest.raises(Overloaded, match="prefill queue is full"):
        box.send()
    box.part(PREFILL)
    box.part(SPARE)
    assert len(box.decoders.streams) == 1, "the last worker has left: decode-only"
    waiting.leave()
    assert box.nothing_left()


@pytest.mark.parametrize(
    "threshold",
    [{"active_prefill_tokens_threshold": 100}, {"active_prefill_tokens_threshold_frac": 1.0}],
)
async def test_prompts_beyond_the_prefill_thresholds_are_refused(threshold: Any) -> None:
    """Those that wait for a slot count, as they would if they had been sent."""
    box = Box(admission_control="token-capacity", prefill_slots=1, **threshold)
    box.join(PREFILL, SPARE, max_num_batched_tokens=100)
    callers = [box.send() for _ in range(6)]  # of 40 tokens; 2 go out
    assert len(box.prefillers.streams) == 2 and len(box.router.queue) == 4
    with pytest.raises(Overloaded, match="too many prompt tokens"):
        box.send()
    assert box.counted("refused_total") == {"overloaded": 1}
    with pytest.raises(Overloaded, match="too many prompt tokens"):
        box.send(routing=Routing(prefill_worker_id=PREFILL))
    box.prefillers.streams[0].answer({})
    box.prefillers.streams[1].answer({})
    callers.append(box.send())
    for caller in callers:
        caller.leave()
    assert box.nothing_left()


async def test_thresholds_out_of_force_refuse_nobody() -> None:
    box = Box(prefill_slots=1, active_prefill_tokens_threshold=10)
    box.join(PREFILL)
    callers = [box.send() for _ in range(6)]
    assert len(box.router.queue) == 5
    for caller in callers:
        caller.leave()
    assert box.nothing_left()


async def test_a_taint_waits_for_a_slot_of_the_workers_that_have_it() -> None:
    box = Box(prefill_slots=1, enforce_disagg=True)
    box.join(PREFILL, taints=["eu"])
    box.join(SPARE)
    box.decode.add_worker(DECODE, RuntimeConfig(taints=["eu"]))
    eu = Routing(required_taints=["eu"])
    callers = [box.send(routing=eu), box.send(routing=eu)]
    assert [one.worker_id for one in box.prefillers.streams] == [PREFILL]
    assert len(box.router.queue) == 1 and all(one.error is None for one in callers)
    box.prefillers.streams[0].answer({})
    assert [one.worker_id for one in box.prefillers.streams] == [PREFILL, PREFILL]
    for caller in callers:
        caller.leave()
    assert box.nothing_left()


async def test_a_pin_beats_the_conditions() -> None:
    box = Box(conditional_disagg=True, conditional_disagg_config=CONDITIONS)
    box.join(PREFILL)
    box.send(10, routing=Routing(prefill_worker_id=PREFILL))
    assert len(box.prefillers.streams) == 1 and box.counted("local_total") == {}


async def test_a_bug_in_the_choice_ends_its_request_and_not_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    box = Box(prefill_slots=1)
    box.join(PREFILL)
    box.send()
    doomed, last = box.send(), box.send()
    pick = KvPicker.pick

    def failing(picker: KvPicker, request_id: str | None, *args: Any, **more: Any) -> Any:
        if request_id == doomed.engine_request.id:
            raise ZeroDivisionError
        return pick(picker, request_id, *args, **more)

    monkeypatch.setattr(KvPicker, "pick", failing)
    box.prefillers.streams[0].answer({})
    assert type(doomed.error) is DynamoError and last.error is None
    assert first_tokens(box) == [1, 3]


def explained(box: Box, length: int = 40, routing: Routing | None = None) -> Explanation:
    """What ``/v1/route`` would say."""
    prompt = tokens(list(range(length)))
    request = PreprocessedRequest("tiny", prompt, StopConditions(max_tokens=7))
    assert isinstance(box.decode, KvPicker)
    return explain_request(box.decode, box.router, request, routing, ())


async def test_the_table_shows_both_choices() -> None:
    box = Box(prefill_slots=1)
    assert explained(box).prefill is None, "there is no prefill worker"
    box.join(PREFILL, SPARE)
    box.send(routing=Routing(prefill_worker_id=PREFILL))
    found = explained(box)
    (decode,) = found.candidates
    assert decode.chosen and decode.cost == 2, "blocks alone: prompts are no load there"
    assert found.prefill is not None
    chosen, full = found.prefill.candidates
    assert (chosen.worker_id, chosen.chosen) == (SPARE, True)
    assert (full.worker_id, full.chosen, full.excluded) == (PREFILL, False, "no free slot")
    lines = table(found).splitlines()
    titles = [number for number, queue in enumerate(lines) if queue.endswith(" workers")]
    assert [lines[number] for number in titles] == ["prefill workers", "decode workers"]
    box.send(routing=Routing(prefill_worker_id=SPARE))
    box.send()
    waits = explained(box).prefill
    assert waits is not None and waits.queued_requests == 1
    assert {row.excluded for row in waits.candidates} == {"no free slot"}
    assert len(box.prefillers.streams) == 2, "nothing was sent"


@pytest.mark.parametrize("patience_s", [3.0, 0.0])
async def test_the_cheapest_has_no_slot_and_is_waited_for_or_not(patience_s: float) -> None:
    box = Box(prefill_slots=1, kv_events=False, prefill_patience_s=patience_s)
    box.join(PREFILL, SPARE)
    prompt = tokens(list(range(64)))
    box.prefill.predict(prompt, PREFILL)  # type: ignore[attr-defined]
    box.send(5, routing=Routing(prefill_worker_id=PREFILL))
    found = explained(box, 64).prefill
    assert found is not None
    first, second = found.candidates
    patient = patience_s > 0
    assert (first.worker_id, first.excluded, first.chosen) == (PREFILL, "no free slot", patient)
    assert (second.worker_id, second.chosen) == (SPARE, not patient)
    assert ("chosen, no free slot" in table(found)) is patient


async def test_the_table_says_why_a_prompt_stays() -> None:
    box = Box(conditional_disagg=True, conditional_disagg_config=CONDITIONS)
    box.join(PREFILL)
    found = explained(box, 50)
    assert found.prefill is None and found.stays == "short"
    assert table(found).splitlines()[-1] == "no prefill worker: the prompt is short"
    assert explained(box, 51).prefill is not None
    assert box.counted("local_total") == {}, "asking counts nothing"


def cached_at(box: Box, worker: int, length: int = 640) -> PreprocessedRequest:
    """A request whose prompt ``worker`` has cached."""
    prompt = tokens(list(range(length)))
    box.prefill.predict(prompt, worker)  # type: ignore[attr-defined]
    return PreprocessedRequest("tiny", prompt, StopConditions(max_tokens=7))


def sent(box: Box, request: PreprocessedRequest) -> Caller:
    caller = Caller()
    caller.engine_request = EngineRequest(caller, 0, box.dispatch, "cached", request)  # type: ignore[arg-type]
    box.dispatch.send(caller.engine_request)
    return caller


async def test_a_prompt_waits_for_the_worker_that_has_it_cached() -> None:
    box = Box(prefill_slots=1, kv_events=False)
    box.join(PREFILL, SPARE)
    request = cached_at(box, PREFILL)
    first = box.send(routing=Routing(prefill_worker_id=PREFILL))
    patient = sent(box, request)
    assert len(box.router.queue) == 1, (
        "the spare one is idle, but all of it would be computed there"
    )
    other = box.send()
    assert box.prefillers.streams[-1].worker_id == SPARE, "others overtake it"
    box.prefillers.streams[0].answer({})
    assert box.prefillers.streams[-1].worker_id == PREFILL
    assert box.prefillers.streams[-1].request.estimated_prefix_hit_num_blocks == 40
    for caller in (first, patient, other):
        caller.leave()
    assert box.nothing_left()


async def test_patience_has_an_end() -> None:
    box = Box(prefill_slots=1, kv_events=False, prefill_patience_s=0.02)
    box.join(PREFILL, SPARE)
    request = cached_at(box, PREFILL)
    box.send(routing=Routing(prefill_worker_id=PREFILL))
    sent(box, request)
    assert len(box.router.queue) == 1
    await until(lambda: not box.router.queue)
    assert box.prefillers.streams[-1].worker_id == SPARE
    box = Box(prefill_slots=1, kv_events=False, prefill_patience_s=0.0)
    box.join(PREFILL, SPARE)
    request = cached_at(box, PREFILL)
    box.send(routing=Routing(prefill_worker_id=PREFILL))
    sent(box, request)
    assert box.prefillers.streams[-1].worker_id == SPARE


async def test_in_a_full_line_nobody_is_patient_and_who_can_go_is_not_refused() -> None:
    box = Box(prefill_slots=1, prefill_queue_limit=1, kv_events=False)
    box.join(PREFILL, SPARE)
    request = cached_at(box, PREFILL)
    box.send(routing=Routing(prefill_worker_id=PREFILL))
    box.send(routing=Routing(prefill_worker_id=PREFILL))
    assert len(box.router.queue) == 1
    sent(box, request)
    assert box.prefillers.streams[-1].worker_id == SPARE and len(box.router.queue) == 1
    with pytest.raises(Overloaded, match="prefill queue is full"):
        box.send()


@pytest.mark.parametrize("leaves", [True, False])
async def test_nobody_waits_for_a_worker_that_has_gone(leaves: bool) -> None:
    box = Box(prefill_slots=1, kv_events=False)
    box.join(PREFILL, SPARE)
    request = cached_at(box, PREFILL)
    box.send(routing=Routing(prefill_worker_id=PREFILL))
    caller = sent(box, request)
    if leaves:
        box.part(PREFILL)
    else:
        box.prefillers.inhibited(PREFILL, True)
    assert box.prefillers.streams[-1].worker_id == SPARE and caller.error is None


def test_the_benchmark_of_patience_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """On the sample trace; its figures are in docs/disaggregation.md."""
    sample = str(Path(__file__).parents[3] / "benchmarks" / "traces" / "sample.jsonl")
    prefill_patience.main(
        ["--trace", sample, "--limit", "40", "--speed", "50", "--patience", "0,3"]
    )
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["0", "3"]


async def test_a_prompt_that_a_full_worker_rejects_goes_to_another() -> None:
    box = Box()
    box.join(PREFILL, SPARE)
    caller = box.send()
    (first,) = box.prefillers.streams
    first.fail(WorkerAtCapacity("Server overloaded: worker at capacity"))
    assert len(box.prefillers.streams) == 2 and caller.error is None
    second = box.prefillers.streams[1]
    assert {first.worker_id, second.worker_id} == {PREFILL, SPARE}
    third = box.send()  # the full one is not asked again
    assert box.prefillers.streams[2].worker_id == second.worker_id
    second.answer({})
    assert len(box.decoders.streams) == 1 and box.counted("fallbacks_total") == {}
    for one in (caller, third):
        one.leave()
    assert box.nothing_left()


async def test_when_all_prefill_workers_are_full_the_decode_worker_computes() -> None:
    box = Box()
    box.join(PREFILL, SPARE)
    caller = box.send()
    for number in range(2):
        box.prefillers.streams[number].fail(WorkerAtCapacity("worker at capacity"))
    assert len(box.prefillers.streams) == 2 and len(box.decoders.streams) == 1
    assert box.counted("fallbacks_total") == {"overloaded": 1}
    caller.leave()
    assert box.nothing_left()
