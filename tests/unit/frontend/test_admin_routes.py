"""/busy_threshold and /v1/route: bad bodies, exceptions and deadlines all end in a response."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from http_bench import Bench

from dynamo.config import from_env
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import InvalidArgument, ModelNotFound
from dynamo.frontend.apis.operator.info import BusyThresholdRoutes
from dynamo.frontend.apis.operator.planner import PlannerRoutes
from dynamo.frontend.apis.operator.routing import ExplainRoutes
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.http import Exchange
from dynamo.http.routes import Routes, in_task
from dynamo.operations.planner_client import ask_planner
from dynamo.protocols.control import PlannerChange
from dynamo.router.eligibility.eligibility_filter import Thresholds
from dynamo.runtime.process.tasks import Tasks

NESTED = b"[" * 100_000


class Site:
    """Both routes over one model, whose gate has admission control or not."""

    def __init__(self, admission_control: bool = True) -> None:
        self.eligibility = SimpleNamespace(
            thresholds=Thresholds(), admission_control=admission_control
        )
        self.entry = SimpleNamespace(
            name="m", served=True, picker=SimpleNamespace(eligibility=self.eligibility)
        )
        self.entry.loaded = self.entry
        self.entry.limit = self.limit
        self.relays = False
        self.on_demand = SimpleNamespace(not_loaded={}.get, models=set)
        self.tasks = Tasks("test")
        routes = Routes()
        BusyThresholdRoutes(self, self.tasks).install(routes)  # type: ignore[arg-type]
        runtime: Any = SimpleNamespace(settings=from_env(RuntimeSettings))
        PlannerRoutes(runtime, self.tasks, 503).install(routes)
        ExplainRoutes(self, self.tasks, 503, OffLoop()).install(routes)  # type: ignore[arg-type]
        self.bench = Bench(routes)

    async def limit(self, thresholds: Thresholds) -> None:
        self.eligibility.thresholds = thresholds

    def named(self, name: str) -> Any:
        return self.entry if name == "m" else None

    def entries(self) -> list[Any]:
        return [self.entry]

    loaded_models = entries

    def find(self, name: str, model_type: str) -> Any:
        if name == "bug":
            raise RuntimeError("a bug")
        raise ModelNotFound(f"Model not found: {name}")

    async def ask(self, path: str, body: bytes | None) -> tuple[int, Any]:
        method = b"GET" if body is None else b"POST"
        head = b"%b %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        head = head % (method, path.encode())
        body = body or b""
        self.bench.feed(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await asyncio.gather(*self.tasks._running, return_exceptions=True)
        out, self.bench.transport.out = self.bench.transport.out, b""
        assert out.startswith(b"HTTP/1.1 "), out
        return int(out[9:12]), json.loads(out.partition(b"\r\n\r\n")[2])


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    yield site
    await site.tasks.close()


def errors(answer: Any) -> Iterator[str]:
    yield from (one for one in answer.values() if isinstance(one, str))


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**64), 10**300])
async def test_numbers_beyond_the_wire_are_named(site: Site, number: int) -> None:
    """Of all routes of operators that take one; the planner is not even asked."""
    tokens = {"model": "m", "active_prefill_tokens_threshold": number}
    status, answer = await site.ask("/busy_threshold", json.dumps(tokens).encode())
    wanted = "active_prefill_tokens_threshold must be at most 9223372036854775807, got "
    assert (status, wanted in str(answer)) == (400, True) or (status == 422 and number < 0)
    for change in (
        {"max_gpu_budget": number},
        {"min_gpu_budget": number},
        {"minima": {"W": number}},
        {"ttft_ms": number},
        {"itl_ms": number},
    ):
        status, answer = await site.ask("/v1/planner", json.dumps(change).encode())
        (name,) = change
        assert status == 400 and re.search(f"{name}.* must be .*, got ", str(answer))
        with pytest.raises(InvalidArgument, match=f"{name}.* must be"):
            await ask_planner(from_env(RuntimeSettings), msgspec.convert(change, PlannerChange))


@pytest.mark.parametrize("path", ["/busy_threshold", "/v1/route"])
@pytest.mark.parametrize(
    "body", [b'{"model":"\xff"}', b"{", b"", NESTED, b'{"model":' + NESTED, b'{"x":' + NESTED]
)
async def test_a_bad_body_is_a_400(site: Site, path: str, body: bytes) -> None:
    status, answer = await site.ask(path, body)
    if path == "/busy_threshold" and b"[" in body and b"x" not in body:
        assert status == 422  # the type is wrong before the depth is
    else:
        assert status == 400
        text = "".join(errors(answer))
        assert "Failed to deserialize the JSON body" in text or "nested too deeply" in text


async def test_what_is_quoted_is_cut(site: Site) -> None:
    name = "x" * 1_000_000
    status, answer = await site.ask("/busy_threshold", json.dumps({"model": name}).encode())
    assert status == 404 and len(answer["error"]) < 500
    body = json.dumps({"model": name, "prompt": "a"}).encode()
    status, answer = await site.ask("/v1/route", body)
    assert status == 404 and len(answer["message"]) <= 8192


async def test_an_exception_in_a_task_is_a_500(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await site.ask("/v1/route", b'{"model":"bug","prompt":"a"}')
    assert (status, answer["message"]) == (500, "Internal server error")
    assert "POST /v1/route failed" in caplog.text


async def test_a_task_ends_with_its_exchange() -> None:
    tasks, cancelled = Tasks("test"), asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    for end in ("deadline", "lost"):
        cancelled.clear()
        bench = Bench(in_task(tasks.spawn, answer))
        bench.feed(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.sleep(0)
        if end == "deadline":
            bench.later(61)
            assert bench.transport.out.startswith(b"HTTP/1.1 504 ")
        else:
            bench.connection.connection_lost(None)
        await asyncio.wait_for(cancelled.wait(), 20)


async def test_thresholds_say_whether_they_are_in_force(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    body = b'{"model":"m","active_prefill_tokens_threshold":5}'
    for in_force in (True, False):
        caplog.clear()
        site = Site(in_force)
        status, answer = await site.ask("/busy_threshold", body)
        assert (status, answer["active_prefill_tokens_threshold"]) == (200, 5)
        assert ("warning" in answer) is not in_force
        _, listed = await site.ask("/busy_threshold", None)
        assert listed == {"thresholds": [answer]}
        assert ("busy thresholds set" in caplog.text) is in_force
        if not in_force:
            assert "needs --admission-control token-capacity" in answer["warning"]
