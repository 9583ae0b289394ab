"""Prompts through prefill workers without a network: real pickers, workers in our hands."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.config.router import RouterSettings
from dynamo.errors import (
    CannotConnect,
    Disconnected,
    DynamoError,
    EngineFailure,
    HttpFailure,
    InvalidArgument,
    Overloaded,
    Unavailable,
    WorkerUnavailable,
)
from dynamo.frontend.disagg.metrics import PrefillMetrics
from dynamo.frontend.disagg.pool import prefill_settings
from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.observability.metrics import Registry
from dynamo.protocols.codec import decoder, encode, tokens
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import (
    CompletionUsage,
    EngineOutput,
    PreprocessedRequest,
    PromptTokensDetails,
    Routing,
    StopConditions,
)
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.router.modes.picker import Picker

B = 16
PREFILL, SPARE, DECODE = 11, 12, 21
_request = decoder(PreprocessedRequest).decode


class Stream:
    """What a worker has of one request."""

    def __init__(self, worker_id: int, payload: bytes, sink: Any) -> None:
        self.worker_id = worker_id
        self.request = _request(payload)
        self.sink = sink
        self.killed = False

    def keep_tokens(self) -> None:
        """All items go to ``on_data`` anyway."""

    def pass_tokens(self, *args: Any) -> None:
        """Leave all items to ``on_data``."""

    def kill(self) -> None:
        self.killed = True

    def answer(self, params: dict[str, Any] | None, cached: int = 0) -> None:
        usage = CompletionUsage(prompt_tokens_details=PromptTokensDetails(cached_tokens=cached))
        item = EngineOutput([5], finish_reason="length", completion_usage=usage)
        item.disaggregated_params = params
        self.sink.on_data(encode(item))
        self.sink.on_end()

    def fail(self, error: DynamoError) -> None:
        self.sink.on_error(error)


class Workers:
    """A client whose workers only remember."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.refused: set[int] = set()
        self.inhibited: Any = None

    def open(self, worker_id: int, payload: bytes, sink: Any, headers: Any) -> Any:
        if worker_id in self.refused:
            raise WorkerUnavailable("no such instance")
        self.streams.append(Stream(worker_id, payload, sink))
        return self.streams[-1]

    def on_inhibited(self, callback: Any) -> None:
        self.inhibited = callback


class Caller:
    """An active request with one engine request."""

    def __init__(self) -> None:
        self.closed = self.wants_route = False
        self.trace = None
        self.working = 0
        self.metrics = self
        self.generation = SimpleNamespace(choices=[None])
        self.stages: list[str] = []
        self.prefilled: Any = None
        self.last_activity_s = 0.0
        self.error: DynamoError | None = None
        self.engine_request: EngineRequest

    def fail(self, error: BaseException, by_worker: bool = False) -> None:
        assert isinstance(error, DynamoError)
        self.error, self.closed = error, True
        self.engine_request.release()

    def computing(self, starts: bool) -> None:
        self.working += 1 if starts else -1
        self.last_activity_s = time.monotonic()

    def sent(
        self, engine_request: Any, decision: Any, queued: int, chosen_s: float, first: bool
    ) -> None:
        self.decision = decision

    def routed(self, phase: str) -> None:
        self.stages.append(f"route {phase}")

    def prefilling(self) -> None:
        self.stages.append("dispatch prefill")

    def leave(self) -> None:
        self.closed = True
        self.engine_request.release()


class Box:
    """Prefill workers before decode workers."""

    def __init__(self, **settings: Any) -> None:
        given = RouterSettings(mode="kv", **settings)
        self.decoders, self.prefillers = Workers(), Workers()
        self.decode = self.picker(given, DECODE)
        self.registry = Registry()
        metrics = PrefillMetrics(FrontendMetrics(self.registry), "tiny")
        self.dispatch = Dispatch(self.decode, self.decoders)  # type: ignore[arg-type]
        self.router = PrefillRouter("tiny", B, given, metrics, self.dispatch)
        self.dispatch.prefill = self.router
        self.prefill = self.picker(prefill_settings(given))
        self.count = 0

    def picker(self, settings: RouterSettings, *workers: int) -> Picker:
        made = make_picker(settings, B, index=make_index(settings))
        for worker in workers:
            made.add_worker(worker, RuntimeConfig())
        return made

    def join(self, *workers: int, **config: Any) -> None:
        """Prefill workers come."""
        made = RuntimeConfig(**config)
        self.router.attach(self.prefill, self.prefillers)  # type: ignore[arg-type]
        for worker in workers:
            self.prefill.add_worker(worker, made)
            self.router.add_worker(worker, made)

    def part(self, worker: int) -> None:
        self.prefill.remove_worker(worker)
        self.router.remove_worker(worker)

    def send(self, length: int = 40, routing: Routing | None = None, **more: Any) -> Caller:
        """A request of its own prompt; raises what the dispatch raises."""
        self.count += 1
        ids = tokens([self.count * 1000 + i for i in range(length)])
        request = PreprocessedRequest(
            "tiny", ids, StopConditions(max_tokens=7, min_tokens=2), **more
        )
        caller = Caller()
        request.routing = routing
        caller.engine_request = EngineRequest(caller, 0, self.dispatch, f"r{self.count}", request)  # type: ignore[arg-type]
        self.dispatch.send(caller.engine_request)
        return caller

    @property
    def computing(self) -> list[Stream]:
        return [one for one in self.prefillers.streams if not one.killed]

    def counted(self, name: str) -> dict[str, float]:
        """Values of ``dynamo_frontend_prefill_<name>`` by the rest of their labels."""
        out = {}
        for line in self.registry.render().decode().splitlines():
            if line.startswith(f"dynamo_frontend_prefill_{name}{{"):
                labels, _, value = line.rpartition(" ")
                out[labels.partition("reason=")[2].strip('"}')] = float(value)
        return out

    def value(self, name: str) -> float:
        """The one value of the model."""
        (value,) = self.counted(name).values()
        return value

    def nothing_left(self) -> bool:
        line = self.router.queue
        loads = [
            picker.active.load(slot)  # type: ignore[attr-defined]
            for picker in (self.prefill, self.decode)
            for member in picker.worker_pool.members.values()
            for slot in member.slots.values()
        ]
        return not len(line) and not line.running and all(load == (0, 0, 0) for load in loads)


async def test_one_token_there_then_the_whole_answer_here() -> None:
    box = Box()
    box.join(PREFILL)
    caller = box.send()
    (stream,) = box.prefillers.streams
    assert stream.worker_id == PREFILL and not box.decoders.streams
    assert caller.working == 1, "its silence would be an engine's"
    stops = stream.request.stop_conditions
    assert (stops.max_tokens, stops.min_tokens) == (1, 1)
    stream.answer({"where": "there"}, cached=16)
    (answer,) = box.decoders.streams
    assert answer.request.stop_conditions == StopConditions(max_tokens=7, min_tokens=2)
    assert answer.request.prefill_result == {
        "disaggregated_params": {"where": "there"},
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert caller.prefilled.worker_id == PREFILL and caller.decision.worker_id == DECODE
    assert caller.stages == ["route prefill", "dispatch prefill", "route decode"]
    assert caller.working == 0
    slot = box.decode.worker_pool.members[DECODE].slots[0]
    load = box.decode.active.load(slot)  # type: ignore[attr-defined]
    assert load[:2] == (0, 2), "blocks are load there, prompt tokens are not"
    caller.engine_request.release()
    assert box.nothing_left()


@pytest.mark.parametrize(("leaves", "rows"), [(False, 1), (True, 0)])
async def test_a_prefill_worker_that_has_left_gets_no_rows(leaves: bool, rows: int) -> None:
    box = Box()
    box.join(PREFILL)
    caller = box.send()
    if leaves:
        box.part(PREFILL)
    box.prefillers.streams[0].answer({})
    assert len(box.decoders.streams) == 1, "what it has it may finish"
    page = box.registry.render().decode()
    assert page.count("dynamo_frontend_worker_last_time_to_first_token_seconds{") == rows
    caller.leave()


async def test_without_prefill_workers_decode_workers_do_both() -> None:
    box = Box()
    caller = box.send()
    assert box.decoders.streams[0].request.prefill_result is None
    assert caller.stages == [], "the phase is aggregated from the beginning"
    assert box.counted("fallbacks_total") == {}, "no fallback is counted"
    box.join(PREFILL)
    box.part(PREFILL)
    box.send()
    assert len(box.decoders.streams) == 2 and not box.prefillers.streams
    assert box.counted("fallbacks_total") == {"no_worker": 1}


async def test_a_prefill_worker_is_sent_no_more_than_fits() -> None:
    box = Box()
    box.join(PREFILL, max_num_batched_tokens=100)
    for _ in range(5):
        box.send(60)
    assert len(box.prefillers.streams) == 2 and len(box.router.queue) == 3
    assert box.value("queue_depth") == 3 and box.value("active_requests") == 2
    box.prefillers.streams[0].answer({})
    assert len(box.prefillers.streams) == 3 and len(box.decoders.streams) == 1


async def test_slots_may_be_counted_in_requests() -> None:
    box = Box(prefill_slots=1)
    box.join(PREFILL, SPARE)
    for _ in range(3):
        box.send(5)
    assert {one.worker_id for one in box.prefillers.streams} == {PREFILL, SPARE}
    assert len(box.router.queue) == 1


async def test_a_worker_that_dies_gives_its_requests_back_to_the_head() -> None:
    box = Box(prefill_slots=1)
    box.join(PREFILL)
    first, second = box.send(), box.send()
    box.join(SPARE, max_num_batched_tokens=1)
    third = box.send()
    on_spare = box.prefillers.streams[1]
    assert [one.worker_id for one in box.prefillers.streams] == [PREFILL, SPARE]
    box.prefillers.inhibited(PREFILL, True)
    box.prefillers.streams[0].fail(Disconnected("gone"))
    assert len(box.router.queue) == 2
    on_spare.answer({})
    assert box.prefillers.streams[2].request.token_ids[0] == 1000, "the first before the third"
    assert box.value("requeues_total") == 1 and first.error is None and second.error is None
    assert (first.working, second.working) == (1, 0), "who waits again waits for no engine"
    box.prefillers.streams[2].answer({})
    box.prefillers.streams[3].answer({})
    assert len(box.decoders.streams) == 3
    for caller in (first, second, third):
        caller.engine_request.release()
    assert box.nothing_left()


async def test_the_last_worker_dies_and_all_go_without() -> None:
    box = Box(prefill_slots=1)
    box.join(PREFILL)
    callers = [box.send() for _ in range(3)]
    box.prefillers.inhibited(PREFILL, True)
    box.prefillers.streams[0].fail(Disconnected("gone"))
    assert len(box.decoders.streams) == 3
    assert all(one.request.prefill_result is None for one in box.decoders.streams)
    assert box.counted("fallbacks_total") == {"no_worker": 3}
    for caller in callers:
        caller.engine_request.release()
    assert box.nothing_left()


async def test_a_choice_whose_request_has_just_ended_is_not_routed_again() -> None:
    """The last prefill worker dies with both choices of a request, and no decode worker lives."""
    box = Box(prefill_slots=1)
    box.join(PREFILL)
    running, first, second = (box.send() for _ in range(3))

    def fail(error: BaseException, by_worker: bool = False) -> None:
        Caller.fail(first, error, by_worker)
        second.leave()  # a request ends with all its choices

    first.fail = fail  # type: ignore[method-assign]
    box.decode.remove_worker(DECODE)
    box.prefillers.inhibited(PREFILL, True)
    box.prefillers.streams[0].fail(Disconnected("gone"))
    assert running.error is not None and first.error is not None
    assert second.stages == ["route prefill"]
    assert box.nothing_left()


async def test_enforced_nobody_goes_without() -> None:
    box = Box(enforce_disagg=True, prefill_slots=1)
    with pytest.raises(Unavailable, match="--enforce-disagg forbids"):
        box.send()
    box.join(PREFILL)
    callers = [box.send() for _ in range(2)]
    box.prefillers.inhibited(PREFILL, True)
    box.prefillers.streams[0].fail(Disconnected("gone"))
    assert all(isinstance(caller.error, Unavailable) for caller in callers)
    assert not box.decoders.streams and box.counted("refused_total") == {"enforced": 3}
    assert box.nothing_left()


async def test_retries_are_bounded() -> None:
    box = Box(prefill_retries=2)
    box.join(PREFILL, SPARE)
    caller = box.send()
    for tries in range(3):
        box.prefillers.streams[tries].fail(CannotConnect("no"))
    assert len(box.prefillers.streams) == 3 and len(box.decoders.streams) == 1
    assert box.counted("fallbacks_total") == {"retries": 1}
    caller.engine_request.release()
    assert box.nothing_left()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(EngineFailure("boom"), "engine_error"), (Overloaded("full"), "overloaded")],
)
async def test_a_worker_that_fails_without_dying_is_done_without(
    error: DynamoError, reason: str
) -> None:
    box = Box()
    box.join(PREFILL)
    caller = box.send()
    box.prefillers.streams[0].fail(error)
    assert len(box.decoders.streams) == 1 and caller.error is None
    assert box.counted("fallbacks_total") == {reason: 1}


async def test_an_answer_without_params_is_no_prefill() -> None:
    box = Box()
    box.join(PREFILL)
    box.send()
    box.prefillers.streams[0].answer(None)
    box.send()
    box.prefillers.streams[1].sink.on_data(encode(EngineOutput(finish_reason="error: no memory")))
    box.send()
    box.prefillers.streams[2].sink.on_data(b"\xc1")
    assert box.counted("fallbacks_total") == {"engine_error": 3}
    assert len(box.decoders.streams) == 3


@pytest.mark.parametrize("error", [InvalidArgument("too long"), HttpFailure("teapot", 418)])
async def test_what_is_wrong_with_the_request_is_the_clients_to_hear(error: DynamoError) -> None:
    box = Box()
    box.join(PREFILL)
    caller = box.send()
    box.prefillers.streams[0].fail(error)
    assert caller.error is error and not box.decoders.streams
    assert box.nothing_left()


async def test_a_client_that_leaves_stops_the_worker_and_frees_its_slot() -> None:
    box = Box(prefill_slots=1)
    box.join(PREFILL)
    running, waiting, last = box.send(), box.send(), box.send()
    waiting.leave()
    assert len(box.router.queue) == 1
    running.leave()
    assert box.prefillers.streams[0].killed
    assert box.prefillers.streams[1].request.token_ids[0] == 3000
    box.prefillers.streams[1].answer({})
    last.leave()
    assert box.nothing_left() and len(box.decoders.streams) == 1


async def test_a_full_line_refuses() -> None:
    box = Box(prefill_slots=1, prefill_queue_limit=1)
    box.join(PREFILL)
    box.send()
    box.send()
    with pytest.raises(Overloaded, match="prefill queue is full"):
        box.send()
    assert box.counted("refused_total") == {"queue_full": 1}


async def test_pins_name_prefill_workers_and_ranks() -> None:
    box = Box()
    box.join(PREFILL, SPARE, data_parallel_size=2)
    for _ in range(4):
        box.send(routing=Routing(prefill_worker_id=SPARE, prefill_dp_rank=1, dp_rank=0))
    assert {one.worker_id for one in box.prefillers.streams} == {SPARE}
    routing = box.prefillers.streams[0].request.routing
    assert routing is not None and routing.dp_rank == 1
    with pytest.raises(InvalidArgument, match="prefill_worker_id=99 does not identify"):
        box.send(routing=Routing(prefill_worker_id=99))
    box.send(routing=Routing(backend_instance_id=DECODE, allowed_worker_ids=[DECODE]))
    assert box.prefillers.streams[-1].worker_id in (PREFILL, SPARE), "those name decode workers"


async def test_a_pinned_worker_that_leaves_is_waited_for_no_longer() -> None:
    box = Box(prefill_slots=1)
    box.join(PREFILL, SPARE)
    pin = Routing(prefill_worker_id=PREFILL)
    box.send(routing=pin)
    box.send(routing=pin)
    box.part(PREFILL)
    assert len(box.decoders.streams) == 1 and len(box.router.queue) == 0


async def test_taints_that_no_prefill_worker_has() -> None:
    box = Box()
    box.join(PREFILL)
    box.decode.add_worker(DECODE, RuntimeConfig(taints=["eu"]))
    caller = box.send(routing=Routing(required_taints=["eu"]))
    assert caller.error is None and len(box.decoders.streams) == 1
    assert box.counted("fallbacks_total") == {"constraints": 1}


async def test_enforced_taints_that_no_prefill_worker_has_are_rejected() -> None:
    box = Box(enforce_disagg=True)
    box.join(PREFILL)
    box.decode.add_worker(DECODE, RuntimeConfig(taints=["eu"]))
    caller = box.send(routing=Routing(required_taints=["eu"]))
    assert isinstance(caller.error, InvalidArgument) and "eu" in str(caller.error)
    assert not box.decoders.streams and box.nothing_left()


async def test_a_worker_that_left_and_never_answers_is_given_up() -> None:
    box = Box(prefill_drain_timeout_s=0.0)
    box.join(PREFILL, SPARE, max_num_batched_tokens=1)
    pinned = box.send(routing=Routing(prefill_worker_id=PREFILL))
    box.part(PREFILL)
    async with asyncio.timeout(20):
        while not box.decoders.streams:  # noqa: ASYNC110 - its pin has gone, too
            await asyncio.sleep(0.001)
    assert box.prefillers.streams[0].killed and len(box.decoders.streams) == 1
    unpinned = box.send()
    box.part(SPARE)
    box.join(PREFILL)
    async with asyncio.timeout(20):
        while box.prefillers.streams[-1].worker_id != PREFILL:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert box.value("requeues_total") == 1
    unpinned.leave()
    pinned.leave()
    assert box.nothing_left()


CONDITIONS = '{"max_local_prefill_length": 50, "max_prefill_queue_size": 1}'


async def test_conditional_short_prompts_and_long_queues_stay_local() -> None:
    box = Box(conditional_disagg=True, conditional_disagg_config=CONDITIONS, prefill_slots=1)
    box.join(PREFILL)
    box.send(50)
    assert len(box.decoders.streams) == 1, "50 is not more than 50"
    box.send(51)
    assert len(box.prefillers.streams) == 1
    box.send(51)
    assert len(box.router.queue) == 1
    box.send(51)
    assert len(box.decoders.streams) == 2, "one waits, and one is not fewer than one"
    assert box.counted("local_total") == {"short": 1, "queue": 1}


async def test_conditional_what_the_decode_worker_has_cached_counts() -> None:
    config = '{"eff_isl_threshold": 10, "eff_isl_ratio_threshold": 0.5}'
    box = Box(conditional_disagg=True, conditional_disagg_config=config, kv_events=False)
    box.join(PREFILL)
    request = PreprocessedRequest("tiny", tokens(list(range(64))), StopConditions(max_tokens=3))
    box.decode.predict(tokens(list(range(48))), DECODE)  # type: ignore[attr-defined]
    caller = Caller()
    caller.engine_request = EngineRequest(caller, 0, box.dispatch, "own", request)  # type: ignore[arg-type]
    box.dispatch.send(caller.engine_request)
    assert len(box.decoders.streams) == 1 and box.counted("local_total") == {"cached": 1}


async def test_where_one_worker_has_vanished_the_other_computes() -> None:
    box = Box()
    box.join(PREFILL, SPARE)
    box.prefillers.refused.add(PREFILL)
    callers = [box.send() for _ in range(4)]
    assert [one.worker_id for one in box.prefillers.streams] == [SPARE] * 4
    assert box.counted("fallbacks_total") == {} and not box.decoders.streams
    for caller in callers:
        caller.engine_request.release()
    assert box.nothing_left()


async def test_a_worker_that_vanished_between_choice_and_sending() -> None:
    box = Box(prefill_retries=1)
    box.join(PREFILL)
    box.prefillers.refused.add(PREFILL)
    caller = box.send()
    assert caller.error is None and len(box.decoders.streams) == 1
    caller.engine_request.release()
    assert box.nothing_left()
