"""Health checks of an idle endpoint: when one is sent, and what its answer means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo.config.system import HealthCheckSettings
from dynamo.errors import DynamoError, EngineFailure, InvalidArgument, WorkerUnavailable
from dynamo.observability.metrics import Registry
from dynamo.protocols import codec
from dynamo.runtime.endpoints import health
from dynamo.runtime.endpoints.health import Canary, CheckedEndpoint
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests import EndpointStats, StreamSink

SHORT = HealthCheckSettings(enabled=True, canary_wait_s=0.02, request_timeout_s=0.02)


class CheckedByTest(CheckedEndpoint):
    """An endpoint; ``answer`` is called with the sink of each health check."""

    path = ("ns", "comp", "gen")

    def __init__(self) -> None:
        self.stats = EndpointStats()
        self.answer: Callable[[StreamSink], None] = lambda sink: sink.on_data(b"")
        self.registered = True
        self.payloads: list[Any] = []
        self.killed = 0
        self.refusals = 0
        self.problems: asyncio.Queue[str] = asyncio.Queue()
        self.checked = asyncio.Event()

    def is_registered(self) -> bool:
        return self.registered

    def open(self, payload: bytes, sink: StreamSink) -> Any:
        self.payloads.append(codec.plain_decode(payload))
        self.checked.set()
        self.answer(sink)
        return self

    def kill(self) -> None:
        self.killed += 1

    async def set_health(self, problem: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise WorkerUnavailable("etcd is away")
        self.problems.put_nowait(problem)

    async def next_check(self) -> None:
        self.checked.clear()
        async with asyncio.timeout(10):
            await self.checked.wait()

    async def problem(self) -> str:
        async with asyncio.timeout(10):
            return await self.problems.get()


@asynccontextmanager
async def checking(endpoint: CheckedByTest) -> AsyncIterator[Registry]:
    registry, tasks = Registry(), Tasks()
    tasks.spawn(Canary(SHORT, endpoint, {"prompt": "x"}, registry).run())
    try:
        yield registry
    finally:
        await tasks.close()


def fail(error: DynamoError) -> Callable[[StreamSink], None]:
    return lambda sink: sink.on_error(error)


@pytest.mark.parametrize(
    "answer",
    [
        lambda sink: sink.on_data(b"x"),
        lambda sink: sink.on_end(),
        fail(InvalidArgument("not a payload of mine")),
    ],
)
async def test_any_answer_is_healthy(
    answer: Callable[[StreamSink], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_LONGEST_POLL_S", 3600.0)  # a short wait ends before it
    endpoint = CheckedByTest()
    endpoint.answer = answer
    async with checking(endpoint) as registry:
        for _ in range(3):
            await endpoint.next_check()
    assert endpoint.problems.empty()
    assert endpoint.payloads[0] == {"prompt": "x", "_HEALTH_CHECK": True}
    assert 'result="failed"' not in registry.exposition("")[0].decode()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda sink: None, "no answer to a health check within 0.02 s"),
        (fail(EngineFailure("broken")), "a health check failed: broken"),
    ],
)
async def test_a_failed_check_and_the_return(
    answer: Callable[[StreamSink], None], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = CheckedByTest()
    endpoint.answer = answer
    async with checking(endpoint) as registry:
        assert await endpoint.problem() == problem
        await endpoint.next_check()  # again and again, without another report
        endpoint.answer = lambda sink: sink.on_data(b"x")
        assert await endpoint.problem() == ""
    assert endpoint.killed >= 2 and endpoint.problems.empty()
    assert 'result="failed"' in registry.exposition("")[0].decode()
    assert f"ns.comp.gen is unhealthy: {problem}" in caplog.text


async def test_a_report_that_discovery_refuses_is_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = CheckedByTest()
    endpoint.answer = lambda sink: None
    endpoint.refusals = 2
    async with checking(endpoint):
        assert await endpoint.problem()
    assert caplog.text.count("cannot be reported: etcd is away") == 2


async def test_the_next_response_item_of_any_request_is_healthy() -> None:
    endpoint = CheckedByTest()
    endpoint.answer = lambda sink: None
    async with checking(endpoint):
        assert await endpoint.problem()
        endpoint.registered = False  # no further check
        endpoint.stats.response_bytes.value += 1
        assert await endpoint.problem() == ""


async def test_an_endpoint_with_traffic_or_out_of_discovery_is_not_checked() -> None:
    endpoint = CheckedByTest()
    endpoint.registered = False
    async with checking(endpoint):
        await asyncio.sleep(0.1)
        assert endpoint.payloads == []
        endpoint.registered = True
        await endpoint.next_check()
