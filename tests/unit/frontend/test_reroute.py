"""A request that no handler has seen goes to another worker; the client notices nothing."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from test_request import Site, ids, turn

from dynamo.errors import (
    CannotConnect,
    ConnectionTimeout,
    ConnectTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    InstanceGone,
    UnknownEndpoint,
    WorkerLeaving,
)
from dynamo.http import NEVER
from dynamo.router.decision.decision import Attempt, Decision
from dynamo.router.eligibility.filters import NoneAllowed

UNSENT = [CannotConnect, ConnectTimeout, UnknownEndpoint, WorkerLeaving]
MAYBE_SENT = [ConnectionTimeout, Disconnected, EngineShutdown]


class Fleet(Site):
    """Workers 1, 2, …; the lowest that a request allows gets it."""

    def __init__(self, workers: int = 3, **settings: Any) -> None:
        super().__init__(**settings)
        members = dict.fromkeys(range(1, workers + 1))
        self.worker_pool = SimpleNamespace(members=members, avoided=set())
        self.gone: set[int] = set()

    def pick(
        self,
        request_id: str | None,
        tokens: Any,
        *,
        routing: Any,
        override: Any = None,
        attempt: Attempt | None = None,
    ) -> Decision:
        limited = routing if attempt is None else attempt.limit(routing)
        allowed = None if limited is None else limited.allowed_worker_ids
        found = [one for one in self.worker_pool.members if allowed is None or one in allowed]
        if not found:
            raise NoneAllowed("none is left")
        assert request_id is not None
        assert sorted(self.booked) == sorted(set(self.booked)) and request_id not in self.live
        self.booked[request_id] = 0
        self.live.add(request_id)
        return Decision(found[0], 0, 0, 4)

    @property
    def live(self) -> set[str]:
        return self.__dict__.setdefault("_live", set())  # type: ignore[no-any-return]

    def free(self, request_id: str, output_tokens: int = 0) -> None:
        self.live.remove(request_id)

    def open(self, worker_id: int, payload: bytes, sink: Any, headers: Any) -> Any:
        if worker_id in self.gone:
            raise InstanceGone("left")
        return super().open(worker_id, payload, sink, headers)

    def settled(self) -> None:
        assert not self.live
        self.freed = list(self.booked)
        super().settled()


@pytest.fixture
async def site() -> Fleet:
    return Fleet()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", UNSENT)
async def test_another_worker_answers(
    site: Fleet, kind: type[DynamoError], streaming: bool
) -> None:
    site.chat(stream=streaming, nvext={"extra_fields": ["worker_id"]})
    first = site.streams[0]
    first.sink.on_error(kind("no"))
    assert [one.worker_id for one in site.streams] == [1, 2]
    again = site.streams[1]
    assert again.request.token_ids == first.request.token_ids
    assert again.request.routing == first.request.routing
    again.say(ids(site, "good"), finish_reason="stop")
    again.sink.on_end()
    await turn()
    assert site.status == 200 and b"good" in site.body
    shown = site.events[0] if streaming else site.answer
    assert shown["nvext"]["worker_id"]["decode_worker_id"] == 2
    site.settled()
    assert site.ended("", "stream" if streaming else "unary") == 1


async def test_a_worker_that_left_before_the_request_was_opened(site: Fleet) -> None:
    site.gone = {1, 2}
    site.chat()
    assert [one.worker_id for one in site.streams] == [3]
    request = site.streams[0].sink.request
    assert request.last_activity_s < NEVER
    site.streams[0].say(ids(site, "good"), finish_reason="stop")
    site.streams[0].sink.on_end()
    await turn()
    assert site.status == 200 and request.last_activity_s == NEVER
    site.settled()


@pytest.mark.parametrize("how", ["open", "error", "both"])
async def test_the_error_comes_when_every_worker_was_tried(site: Fleet, how: str) -> None:
    site.gone = {"open": {1, 2, 3}, "error": set(), "both": {2}}[how]
    site.chat()
    for _ in range(10):
        for stream in [one for one in site.streams if not one.killed]:
            stream.killed = 1
            stream.sink.on_error(CannotConnect("no"))
    await turn()
    tried = [one.worker_id for one in site.streams]
    assert tried == {"open": [], "error": [1, 2, 3], "both": [1, 3]}[how]
    assert site.status == 503 and site.answer["message"] == "Service temporarily unavailable"
    site.settled()
    assert site.ended("unavailable") == 1


async def test_the_request_s_own_workers_are_not_left(site: Fleet) -> None:
    site.chat(nvext={"backend_instance_id": 1})
    routing = site.streams[0].request.routing
    assert routing is not None and routing.allowed_worker_ids is None
    site.worker_pool.members.clear()
    site.streams[0].sink.on_error(CannotConnect("no"))
    await turn()
    assert site.status == 503
    site.settled()


@pytest.mark.parametrize("kind", MAYBE_SENT)
async def test_what_a_handler_may_have_seen_is_not_sent_again(
    site: Fleet, kind: type[DynamoError]
) -> None:
    site.chat()
    site.streams[0].sink.on_error(kind("no"))
    await turn()
    assert len(site.streams) == 1 and site.status == 503
    site.settled()


async def test_nothing_is_sent_again_after_the_first_token(site: Fleet) -> None:
    site.chat()
    site.streams[0].say(ids(site, "good"))
    site.streams[0].sink.on_error(CannotConnect("a broken peer"))
    await turn()
    assert len(site.streams) == 1 and site.status == 503
    site.settled()


async def test_each_choice_finds_its_own_way(site: Fleet) -> None:
    site.chat(n=2)
    site.streams[0].sink.on_error(CannotConnect("no"))
    assert [one.worker_id for one in site.streams] == [1, 1, 2]
    for stream in site.streams[1:]:
        stream.say(ids(site, "good"), finish_reason="stop")
        stream.sink.on_end()
    await turn()
    assert len(site.answer["choices"]) == 2
    site.settled()


@pytest.mark.parametrize("ending", ["answered", "refused"])
async def test_nothing_of_a_rerouted_call_needs_the_collector(site: Fleet, ending: str) -> None:
    site.chat()
    call = weakref.ref(site.streams[0].sink.request.generation)
    gc.collect()
    gc.disable()
    try:
        site.streams[0].sink.on_error(CannotConnect("no"))
        if ending == "answered":
            site.streams[1].say([1], finish_reason="stop")
            site.streams[1].sink.on_end()
        else:
            site.streams[1].sink.on_error(CannotConnect("no"))
            site.streams[2].sink.on_error(CannotConnect("no"))
        await turn()
        site.streams.clear()
        assert call() is None
    finally:
        gc.enable()
