"""When a request goes on elsewhere, what the next worker gets, and when the request fails."""

from __future__ import annotations

import asyncio
import gc
import weakref
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from http_bench import Bench
from migration_kit import BROKEN, MigratingFleet
from test_request import Stream, ids, turn

from dynamo.errors import (
    CannotConnect,
    DeadlineExceeded,
    Disconnected,
    DynamoError,
    EngineDied,
    EngineFailure,
    EngineKilled,
    HttpFailure,
    InvalidArgument,
    Overloaded,
    Unavailable,
    WorkerAtCapacity,
    WorkerSilent,
)
from dynamo.frontend.requests import dispatch as dispatching
from dynamo.frontend.requests import migration as migrating
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.migration import continued, without_pin
from dynamo.http import NEVER
from dynamo.protocols.codec import tokens
from dynamo.protocols.engine import (
    GENERATED_TOKENS,
    CompletionUsage,
    OutputOptions,
    PreprocessedRequest,
    PromptTokensDetails,
    Routing,
    StopConditions,
)

EXHAUSTED = "Migration limit exhausted"


@pytest.fixture
async def site() -> MigratingFleet:
    return MigratingFleet()


def finish(stream: Stream, token_ids: list[int], **more: Any) -> None:
    stream.say(token_ids, finish_reason="stop", **more)
    stream.sink.on_end()


def test_the_continued_request() -> None:
    stop = StopConditions(max_tokens=10, min_tokens=2, stop=["x"], stop_token_ids=[3])
    request = PreprocessedRequest(
        "m",
        tokens([1, 2]),
        stop,
        output_options=OutputOptions(logprobs=1, prompt_logprobs=2),
        backend_instance_id=5,
        extra_args={"a": 1},
    )
    made = continued(request, tokens([7, 8, 9]), 5)
    assert made.token_ids == array("I", [1, 2, 7, 8, 9])
    assert made.stop_conditions == StopConditions(
        max_tokens=7, min_tokens=0, stop=["x"], stop_token_ids=[3]
    )
    assert made.output_options == OutputOptions(logprobs=1)
    assert made.extra_args == {"a": 1, GENERATED_TOKENS: 3}
    assert made.backend_instance_id is None
    assert request.token_ids == array("I", [1, 2]) and request.backend_instance_id == 5
    unlimited = continued(PreprocessedRequest("m", tokens([1])), tokens([2]), 5)
    assert unlimited.stop_conditions == StopConditions()


def test_without_tokens_the_request_stays_as_it_is() -> None:
    request = PreprocessedRequest("m", tokens([1]), backend_instance_id=4)
    assert continued(request, tokens(()), 5) is request
    assert continued(request, None, 5) is request


def test_only_a_pin_to_the_failed_worker_is_dropped() -> None:
    assert without_pin(None, 5, 3) is None
    kept = Routing(backend_instance_id=6, dp_rank=1, session_id="s", lora_name="l")
    assert without_pin(kept, 5, 3) is kept
    pinned = Routing(decode_worker_id=5, dp_rank=1, session_id="s", required_taints=["t"])
    assert without_pin(pinned, 5, 0) == Routing(session_id="s", required_taints=["t"])
    hinted = Routing(expected_output_tokens=10)
    assert without_pin(hinted, 5, 3) == Routing(expected_output_tokens=7)
    assert without_pin(hinted, 5, 30) == Routing(expected_output_tokens=1)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", BROKEN)
async def test_a_broken_stream_goes_on_elsewhere(
    site: MigratingFleet, kind: type[DynamoError], streaming: bool
) -> None:
    site.chat(stream=streaming, max_tokens=9, nvext={"extra_fields": ["worker_id"]})
    first, said = site.streams[0], ids(site, "good day")
    first.say(said)
    await turn()
    first.sink.on_error(kind("gone"))
    _, second = site.streams
    assert second.worker_id == 2 and second.engine_id == first.engine_id
    assert second.request.token_ids.tolist() == first.request.token_ids.tolist() + said
    assert second.request.stop_conditions.max_tokens == 9 - len(said)
    assert second.request.extra_args == {GENERATED_TOKENS: len(said)}
    finish(second, ids(site, " to"))
    await turn()
    assert site.status == 200
    text = [one["choices"][0]["delta"].get("content", "") for one in site.events[:-1]]
    if streaming:
        assert "".join(text) == "good day to"
    else:
        answer = site.answer
        assert answer["choices"][0]["message"]["content"] == "good day to"
        assert answer["nvext"]["worker_id"]["decode_worker_id"] == 2
    assert site.migrated() == 1 and site.migrated("new_request") == 0
    name = "dynamo_frontend_model_migration_duration_seconds_count"
    assert site.sample(name, outcome="success", migration_type="ongoing_request") == 1
    assert site.prefilled == [first.engine_id] * 2, "each worker computes a prompt"
    site.settled()
    assert site.sample("dynamo_frontend_time_to_first_token_seconds_count") == 1


async def test_a_refused_connection_costs_no_migration(site: MigratingFleet) -> None:
    site.chat()
    site.streams[0].sink.on_error(CannotConnect("no"))
    site.streams[1].sink.on_error(CannotConnect("no"))
    finish(site.streams[2], [1])
    await turn()
    assert site.status == 200
    assert site.migrated() == 0 and site.migrated("new_request") == 2
    site.settled()


async def test_the_next_worker_may_refuse_the_rest(site: MigratingFleet) -> None:
    site.chat()
    site.streams[0].say([5, 6])
    site.streams[0].sink.on_error(Disconnected("gone"))
    site.streams[1].sink.on_error(CannotConnect("no"))
    assert site.streams[2].request.token_ids == site.streams[1].request.token_ids
    finish(site.streams[2], [7])
    await turn()
    assert site.answer["usage"]["completion_tokens"] == 3
    site.settled()


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_limit_ends_the_request(streaming: bool) -> None:
    site = MigratingFleet(workers=5, limit=2)
    site.chat(stream=streaming)
    for number in range(3):
        site.streams[number].say([5])
        await turn()
        site.streams[number].sink.on_error(Disconnected("gone"))
        await asyncio.sleep(0.003)
    await turn()
    assert len(site.streams) == 3
    if streaming:
        error = {"message": EXHAUSTED, "type": "service_unavailable", "param": None, "code": 503}
        assert site.events[-2:] == [{"error": error}, "[DONE]"]
    else:
        assert site.status == 503 and site.answer["message"] == EXHAUSTED
    assert site.migrated() == 2
    assert site.sample("dynamo_frontend_failures_total", reason="migration.exhausted") == 1
    site.settled()


LOST = "Two workers died or stopped answering before the first token of this request"


def ask(site: MigratingFleet) -> None:
    """Send a request on a connection of its own."""
    site.bench = Bench(handler=site.routes)
    site.post({"model": "tiny", "prompt": "good day"}, "/v1/completions")


def die(site: MigratingFleet, worker_id: int, error: type[DynamoError] = Disconnected) -> None:
    """The worker ends: it leaves discovery, and each of its open streams gets the error."""
    site.worker_pool.members.pop(worker_id, None)
    for stream in [one for one in site.streams if one.worker_id == worker_id and not one.killed]:
        stream.killed = 1
        stream.sink.on_error(error("gone"))


@pytest.mark.parametrize("kind", [Disconnected, EngineDied, WorkerSilent])
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_request_that_two_workers_did_not_survive_reaches_no_third(
    kind: type[DynamoError], streaming: bool
) -> None:
    site = MigratingFleet(workers=5)
    site.chat(stream=streaming)
    die(site, 1, kind)
    assert [one.worker_id for one in site.streams] == [1, 2]
    die(site, 2, kind)
    await turn()
    assert len(site.streams) == 2 and site.status == 500
    assert site.answer["message"].startswith(LOST)
    assert site.migrated() == 1
    assert site.sample("dynamo_frontend_failures_total", reason="workers.lost") == 1
    site.settled()


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_suspect_of_an_engine_that_died_does_not_reach_the_last_worker(
    streaming: bool,
) -> None:
    site = MigratingFleet(workers=2)
    site.chat(stream=streaming)
    die(site, 1, EngineDied)
    await turn()
    assert len(site.streams) == 1 and site.status == 500
    assert "the last worker of its model" in site.answer["message"]
    site.settled()


@pytest.mark.parametrize(
    ("workers", "tokens", "kind"),
    [
        (3, [], EngineDied),  # two others are left
        (2, [7], EngineDied),  # the engine had computed the prompt
        (2, [], EngineKilled),  # by a signal
        (2, [], Disconnected),  # the worker died, not its engine
    ],
)
async def test_other_requests_of_a_dead_worker_reach_the_last_one(
    workers: int, tokens: list[int], kind: type[DynamoError]
) -> None:
    site = MigratingFleet(workers=workers)
    site.chat()
    if tokens:
        site.streams[0].say(tokens)
    die(site, 1, kind)
    finish(site.streams[1], [6])
    await turn()
    assert site.status == 200 and site.migrated() == 1
    site.settled()


async def test_a_silent_worker_counts_also_when_it_answers_again() -> None:
    site = MigratingFleet(workers=5)
    site.chat()
    site.streams[0].sink.on_error(WorkerSilent("hung"))
    site.streams[1].sink.on_error(WorkerSilent("hung"))
    await turn()
    assert len(site.streams) == 2 and site.status == 500
    site.settled()


async def test_a_cut_connection_is_no_death() -> None:
    site = MigratingFleet(workers=5)
    site.chat()
    for number in range(3):
        site.streams[number].sink.on_error(Disconnected("the worker lives"))
    finish(site.streams[3], [6])
    await turn()
    assert site.status == 200 and site.migrated() == 3
    site.settled()


async def test_workers_that_died_after_tokens_do_not_count() -> None:
    site = MigratingFleet(workers=5)
    site.chat()
    for worker_id in (1, 2, 3):
        site.streams[-1].say([5])
        die(site, worker_id)
        await turn()
    finish(site.streams[3], [6])
    await turn()
    assert site.status == 200 and site.migrated() == 3
    site.settled()


@pytest.mark.parametrize("place", [0, 3, 9])
async def test_requests_that_shared_the_worker_move_on(place: int) -> None:
    """Ten requests wait for their first token at the worker that one of them ends."""
    site = MigratingFleet(workers=5)
    for _ in range(10):
        ask(site)
    lethal, others = site.streams[place].sink, set()
    deaths = 0
    while open_streams := [one for one in site.streams if not one.killed]:
        ends = next((one for one in open_streams if one.sink is lethal), None)
        if ends is not None:
            deaths += 1
            die(site, ends.worker_id)
        else:
            stream = open_streams[0]
            stream.killed = 1
            others.add(stream.sink)
            finish(stream, [5])
        await turn()
    assert deaths == 2 and len(others) == 9 and lethal not in others
    site.settled()


async def test_each_worker_gets_one_of_them_at_once() -> None:
    site = MigratingFleet(workers=4)
    for _ in range(3):
        ask(site)
    first = [one.worker_id for one in site.streams]
    assert first == [1, 1, 1]
    die(site, 1)
    assert sorted(one.worker_id for one in site.streams[3:]) == [2, 3, 4]
    for stream in site.streams[3:]:
        finish(stream, [5])
    await turn()
    site.settled()


async def test_without_migrations_a_pin_is_no_reason_to_fail() -> None:
    """Its worker has not seen the request: the next one costs nothing."""
    site = MigratingFleet(limit=0)
    site.chat(nvext={"backend_instance_id": 1})
    site.streams[0].sink.on_error(CannotConnect("no"))
    await turn()
    assert [stream.worker_id for stream in site.streams] == [1, 2]
    finish(site.streams[1], [5])
    await turn()
    assert site.status == 200


async def test_a_request_waits_its_turn_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.frontend.requests.cold_start.TRIAL_WAIT_S", 0.01)
    site = MigratingFleet(workers=2)
    for _ in range(3):
        ask(site)
    die(site, 1)
    assert [one.worker_id for one in site.streams] == [1, 1, 1, 2], "one at a time"
    await site.opened(6)
    for stream in site.streams[3:]:
        finish(stream, [5])
    await turn()
    site.settled()


async def test_many_that_waited_too_long_do_not_stall_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dynamo.frontend.requests.cold_start.TRIAL_WAIT_S", 0.0)
    monkeypatch.setattr("dynamo.frontend.requests.cold_start.RESEND_SLICE_S", 0.0)
    site = MigratingFleet(workers=2)
    for _ in range(60):
        ask(site)
    die(site, 1)
    assert len(site.streams) == 61
    turns = 0
    while len(site.streams) < 120:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 20, "all were sent in a few turns"
    for stream in site.streams[60:]:
        finish(stream, [5])
    await turn()
    site.settled()


async def test_a_request_may_end_while_it_waits_its_turn() -> None:
    site = MigratingFleet(workers=2)
    for _ in range(3):
        ask(site)
    die(site, 1)
    waiting = site.streams[1].sink
    assert waiting.pending is not None and site.entry.dispatch.waiting == 2
    waiting.request.fail(DynamoError("the client left"))
    assert site.entry.dispatch.waiting == 1
    finish(site.streams[3], [5])
    assert site.streams[4].sink is site.streams[2].sink
    finish(site.streams[4], [5])
    await turn()
    site.settled()


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded("slow"),
        DynamoError("x"),
        EngineFailure("cuda"),
        HttpFailure("teapot", 418),
        InvalidArgument("bad"),
        Unavailable("the engine says so"),
    ],
    ids=lambda one: type(one).__name__,
)
async def test_an_error_that_the_engine_raised_is_final(
    site: MigratingFleet, error: DynamoError
) -> None:
    site.chat()
    site.streams[0].sink.on_error(error)
    await turn()
    assert len(site.streams) == 1 and site.status == error.status
    assert site.migrated() == 0
    site.settled()


@pytest.mark.parametrize("limit", [0, 3])
async def test_a_client_that_has_left_gets_no_other_worker(limit: int) -> None:
    site = MigratingFleet(limit=limit)
    site.chat(stream=True)
    site.streams[0].say([5])
    await turn()
    site.bench.connection.connection_lost(None)
    site.streams[0].sink.on_error(Disconnected("gone"))
    assert len(site.streams) == 1 and site.streams[0].killed == 1
    site.settled()


async def test_a_grammar_is_continued_only_before_its_first_token(site: MigratingFleet) -> None:
    site.chat(guided_regex="[a-z]+")
    site.streams[0].sink.on_error(Disconnected("gone"))
    site.streams[1].say([5])
    site.streams[1].sink.on_error(Disconnected("gone"))
    await turn()
    assert len(site.streams) == 2 and site.status == 503
    assert site.answer["message"] == "Service temporarily unavailable"
    site.settled()


async def test_a_text_without_its_tokens_is_not_continued(site: MigratingFleet) -> None:
    site.chat()
    site.streams[0].say([], text="good")
    site.streams[0].sink.on_error(Disconnected("gone"))
    await turn()
    assert len(site.streams) == 1 and site.status == 503
    site.settled()


@pytest.mark.parametrize(("spare", "goes_on"), [(2, True), (1, False)])
async def test_a_long_sequence_is_not_continued(spare: int, goes_on: bool) -> None:
    prompt = len(MigratingFleet().preprocessor.tokenizer.encode("good day", True))
    site = MigratingFleet(max_seq_len=prompt + spare)
    site.post({"model": "tiny", "prompt": "good day"}, "/v1/completions")
    site.streams[0].say([5])
    site.streams[0].say([6])
    site.streams[0].sink.on_error(Disconnected("gone"))
    await turn()
    assert len(site.streams) == 1 + goes_on
    name = "dynamo_frontend_model_migration_max_seq_len_exceeded_total"
    assert site.sample(name, model="tiny") == (not goes_on)
    if goes_on:
        finish(site.streams[1], [7])
    else:
        assert site.status == 503
    await turn()
    site.settled()


async def test_no_limit_keeps_no_tokens() -> None:
    site = MigratingFleet(limit=0)
    site.chat()
    site.streams[0].say([5])
    assert site.streams[0].sink.retries.generated is None
    finish(site.streams[0], [6])


@pytest.mark.parametrize("field", ["backend_instance_id", "decode_worker_id"])
@pytest.mark.parametrize("error", [Disconnected("gone"), CannotConnect("no")])
async def test_a_pin_to_the_failed_worker_is_dropped(
    site: MigratingFleet, field: str, error: DynamoError
) -> None:
    site.chat(nvext={field: 1, "dp_rank": 0})
    site.streams[0].sink.on_error(error)
    second = site.streams[1]
    assert second.worker_id == 2
    routing = second.request.routing
    assert routing is not None and getattr(routing, field) is None
    assert second.sink.routing.dp_rank is None
    assert second.request.backend_instance_id is None
    finish(second, [5])
    await turn()
    assert site.status == 200
    site.settled()


async def test_the_expected_output_shrinks_with_each_worker(site: MigratingFleet) -> None:
    site.chat(nvext={"agent_hints": {"osl": 20}})
    for count in (3, 4):
        site.streams[-1].say([5] * count)
        site.streams[-1].sink.on_error(Disconnected("gone"))
        await turn()
    found = [one.request.routing for one in site.streams]
    assert [one and one.expected_output_tokens for one in found] == [20, 17, 13]
    finish(site.streams[-1], [6])


async def test_the_only_worker_may_get_the_request_again() -> None:
    site = MigratingFleet(workers=1)
    site.chat()
    site.streams[0].say([5])
    site.streams[0].sink.on_error(Disconnected("only the connection broke"))
    assert [one.worker_id for one in site.streams] == [1, 1]
    finish(site.streams[1], [6])
    await turn()
    assert site.answer["usage"]["completion_tokens"] == 2
    site.settled()


async def test_without_any_worker_it_fails_at_once(site: MigratingFleet) -> None:
    site.chat()
    site.streams[0].say([5])
    site.worker_pool.members.clear()
    site.streams[0].sink.on_error(Disconnected("gone"))
    await turn()
    assert site.status == 503 and site.answer["message"] == "Service temporarily unavailable"
    name = "dynamo_frontend_model_migration_duration_seconds_count"
    assert site.sample(name, outcome="failure") == 1
    site.settled()


async def test_full_workers_are_asked_again(site: MigratingFleet) -> None:
    site.chat()
    site.streams[0].say([5])
    pick, refused = site.pick, []

    def busy(*arguments: Any, **more: Any) -> Any:
        refused.append(1)
        if len(refused) < 3:
            raise Overloaded("all eligible workers are overloaded")
        return pick(*arguments, **more)

    site.pick = busy  # type: ignore[method-assign]
    site.streams[0].sink.on_error(Disconnected("gone"))
    await site.opened(2)
    finish(site.streams[1], [6])
    await turn()
    assert site.status == 200 and site.migrated() == 1
    site.settled()


@pytest.mark.parametrize("tracks_output", [False, True])
async def test_output_tokens_are_counted_once_over_migrations(
    site: MigratingFleet, tracks_output: bool
) -> None:
    """As they arrive, or when a worker ends or fails: all workers' counts are the answer's."""
    site.tracks_output = site.entry.dispatch.tracks_output = tracks_output
    counted: list[int] = []
    free = site.free
    site.add_output_tokens = lambda request_id, count: counted.append(count)  # type: ignore

    def freed(request_id: str, output_tokens: int = 0) -> None:
        counted.append(output_tokens)
        free(request_id, output_tokens)

    site.free = freed  # type: ignore[method-assign]
    site.chat(stream=True, max_tokens=9)
    site.streams[0].say([5, 6, 7])
    site.streams[0].sink.on_error(Disconnected("gone"))
    await site.opened(2)
    site.streams[1].say([5])
    site.streams[1].sink.on_error(Disconnected("gone"))
    await site.opened(3)
    finish(site.streams[2], [6, 7])
    await turn()
    assert sum(counted) == 6
    site.settled()


async def test_refusals_do_not_renew_the_deadline_of_a_migration(
    site: MigratingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that lost its worker waits 30 s for room, however often a worker refuses it."""
    now_s = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(dispatching, "time", clock)
    monkeypatch.setattr(migrating, "time", clock)
    monkeypatch.setattr(dispatching, "_FULL_RETRY_S", 0.0)
    site.eligibility = SimpleNamespace(rejected=lambda worker_id: False)  # type: ignore[attr-defined]
    site.chat()
    site.streams[0].say([5])
    site.streams[0].sink.on_error(Disconnected("gone"))
    refused = 1
    while now_s < 1060 and not site.bench.transport.out:
        await site.opened(refused + 1)
        now_s += 4
        site.streams[refused].sink.on_error(WorkerAtCapacity("full"))
        refused += 1
        for _ in range(3):
            await turn()
    assert site.status == 503 and now_s < 1060
    site.settled()


async def test_a_request_that_waits_for_room_is_not_silent(site: MigratingFleet) -> None:
    """No worker computes it, so that none can be silent: the timeout of silence is not its own."""
    site.chat(stream=True)
    site.streams[0].say([5])
    request = site.streams[0].sink.request
    assert request.last_activity_s < NEVER
    pick = site.pick

    def busy(*arguments: Any, **more: Any) -> Any:
        raise Overloaded("all eligible workers are overloaded")

    site.pick = busy  # type: ignore[method-assign]
    site.streams[0].sink.on_error(Disconnected("gone"))
    assert request.last_activity_s == NEVER and not request.closed
    site.pick = pick  # type: ignore[method-assign]
    await site.opened(2)
    assert request.last_activity_s < NEVER
    finish(site.streams[1], [6])
    await turn()
    site.settled()


async def test_a_full_worker_is_asked_again_when_no_other_can_be_reached() -> None:
    """The one that failed is still registered, and refuses the connection."""
    site: Any = MigratingFleet(workers=2)
    site.eligibility = SimpleNamespace(rejected=lambda worker_id: False)
    site.chat()
    site.streams[0].say([5])
    site.streams[0].sink.on_error(Disconnected("gone"))
    site.worker_pool.members = dict.fromkeys((2, 1))  # from now on the other one is preferred
    for number, worker_id, kind in (
        (1, 2, WorkerAtCapacity),
        (2, 2, WorkerAtCapacity),
        (3, 1, CannotConnect),
    ):
        await site.opened(number + 1)
        assert site.streams[number].worker_id == worker_id
        site.streams[number].sink.on_error(kind("no"))
    await site.opened(5)
    finish(site.streams[4], [6])
    await turn()
    assert site.status == 200 and site.migrated() == 1
    site.settled()


async def test_a_client_may_leave_while_its_request_waits(site: MigratingFleet) -> None:
    site.chat(stream=True)
    site.streams[0].say([5])
    await turn()
    engine_request = site.streams[0].sink

    def full(*arguments: Any, **more: Any) -> Any:
        raise Overloaded("full")

    site.pick = full  # type: ignore[method-assign]
    site.streams[0].sink.on_error(Disconnected("gone"))
    assert engine_request.pending is not None
    site.bench.connection.connection_lost(None)
    assert engine_request.pending is None
    name = "dynamo_frontend_model_migration_duration_seconds_count"
    assert site.sample(name, outcome="cancelled") == 1
    site.settled()


async def test_the_finish_reason_is_enough(site: MigratingFleet) -> None:
    """Nothing is left to generate: the answer is complete without another worker."""
    site.chat()
    site.streams[0].say([5], finish_reason="stop")
    site.streams[0].sink.on_error(Disconnected("before the end frame"))
    await turn()
    assert site.status == 200 and len(site.streams) == 1
    assert site.answer["choices"][0]["finish_reason"] == "stop"
    site.settled()


@pytest.mark.parametrize("streaming", [False, True])
async def test_all_tokens_without_a_finish_reason_are_enough(
    site: MigratingFleet, streaming: bool
) -> None:
    site.chat(max_tokens=2, stream=streaming)
    site.streams[0].say([5, 6])
    site.streams[0].sink.on_error(Disconnected("before the last item"))
    await turn()
    assert site.status == 200 and len(site.streams) == 1
    choice = site.events[-2]["choices"][0] if streaming else site.answer["choices"][0]
    assert choice["finish_reason"] == "length"
    site.settled()


async def test_usage_is_that_of_the_client_s_prompt(site: MigratingFleet) -> None:
    site.chat()
    first = site.streams[0]
    prompt = len(first.request.token_ids)
    first.say([5, 6, 7], completion_usage=CompletionUsage(prompt_tokens=prompt))
    first.sink.on_error(Disconnected("gone"))
    cached = PromptTokensDetails(cached_tokens=prompt + 2)
    usage = CompletionUsage(prompt + 3, 1, prompt + 4, cached)
    finish(site.streams[1], [8], completion_usage=usage)
    await turn()
    assert site.answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 4,
        "total_tokens": prompt + 4,
        "prompt_tokens_details": {"cached_tokens": prompt},
    }
    site.settled()


async def test_a_character_cut_between_two_workers(site: MigratingFleet) -> None:
    word = ids(site, "日本")
    assert len(word) > 2, "its bytes are tokens of their own"
    site.chat()
    site.streams[0].say(word[:1])
    site.streams[0].sink.on_error(Disconnected("gone"))
    finish(site.streams[1], word[1:])
    await turn()
    assert site.answer["choices"][0]["message"]["content"] == "日本"


async def test_a_silent_worker_loses_its_requests() -> None:
    site = MigratingFleet(backend_stream_timeout_s=0.05)
    site.chat()
    site.streams[0].say([5])
    await site.opened(2)
    assert site.streams[0].killed == 1
    finish(site.streams[1], [6])
    await turn()
    assert site.status == 200 and site.answer["usage"]["completion_tokens"] == 2
    site.settled()
    site.active.close()


async def test_a_worker_with_many_requests_does_not_stall_the_loop(site: MigratingFleet) -> None:
    site.chat(n=60)
    for stream in site.streams:
        stream.say([5])
    for stream in site.streams[:60]:
        stream.sink.on_error(Disconnected("gone"))
    assert len(site.streams) == 61, "the others wait for their turn"
    waiting = site.streams[1].sink
    assert waiting.pending is not None and waiting.stream is None
    await site.opened(120)
    for stream in site.streams[60:]:
        finish(stream, [6])
    await turn()
    assert site.status == 200
    site.settled()


async def test_clients_that_leave_while_their_requests_wait_for_a_turn(
    site: MigratingFleet,
) -> None:
    site.chat(n=5, stream=True)
    for stream in site.streams:
        stream.say([5])
    await turn()
    for stream in site.streams[:5]:
        stream.sink.on_error(Disconnected("gone"))
    site.bench.connection.connection_lost(None)
    await asyncio.sleep(0.01)
    assert len(site.streams) == 6 and site.streams[5].killed == 1
    site.settled()


@pytest.mark.parametrize("ending", ["answered", "exhausted"])
async def test_nothing_of_a_migrated_request_needs_the_collector(ending: str) -> None:
    site = MigratingFleet(limit=1)
    site.chat()
    generation = weakref.ref(site.streams[0].sink.request.generation)
    gc.collect()
    gc.disable()
    try:
        site.streams[0].say([5])
        site.streams[0].sink.on_error(Disconnected("gone"))
        if ending == "answered":
            finish(site.streams[1], [1])
        else:
            site.streams[1].sink.on_error(Disconnected("gone"))
        await turn()
        site.streams.clear()
        assert generation() is None
    finally:
        gc.enable()


class PrefillWorkers:
    """A prefill step whose results come when the test says so."""

    active = True

    def __init__(self) -> None:
        self.taken: list[EngineRequest] = []

    def take(self, engine_request: EngineRequest) -> bool:
        self.taken.append(engine_request)
        return True

    def locate(self, tokens: object, routing: object) -> None:
        return None


async def test_behind_prefill_workers_the_only_worker_gets_its_requests_back() -> None:
    """It may have lost its connection only; the second prefill ends in a later turn."""
    site = MigratingFleet(workers=1)
    prefill = site.entry.dispatch.prefill = PrefillWorkers()
    site.chat()
    site.entry.dispatch.decode_later(prefill.taken[0])
    site.streams[0].say([5, 6])
    site.streams[0].sink.on_error(Disconnected("gone"))
    await turn()
    site.entry.dispatch.decode_later(prefill.taken[1])
    assert site.streams[1].worker_id == site.streams[0].worker_id
    finish(site.streams[1], [7])
    await turn()
    assert site.status == 200 and site.answer["usage"]["completion_tokens"] == 3
    site.settled()
