"""No outcome of a request leaves a reference cycle: its memory is free when it ends."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from test_prefill import PREFILL, Workers
from test_queued_requests import Queued, later
from test_request import Site, ids, turn

from dynamo.config.router import RouterSettings
from dynamo.errors import (
    Disconnected,
    DynamoError,
    EngineFailure,
    EngineShutdown,
    NoInstances,
    Overloaded,
)
from dynamo.frontend.disagg.metrics import PrefillMetrics
from dynamo.frontend.disagg.pool import prefill_settings
from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.protocols.codec import encode
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import EngineOutput
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.runtime.requests import RequestClient, RequestServer, ServerStream

COMMON: dict[str, Any] = {
    "n": 2,
    "seed": 5,
    "stop": ["END", "day"],
    "stop_token_ids": [9],
    "logit_bias": {"5": 1.0},
    "max_tokens": 64,
    "min_tokens": 1,
    "user": "u",
    "metadata": {"a": [1]},
    "response_format": {"type": "json_object"},
    "nvext": {
        "extra_fields": ["worker_id", "timing", "stop_reason"],
        "annotations": ["request_id", "token_ids", "formatted_prompt"],
        "agent_hints": {"priority": 1, "osl": 10},
        "routing_constraints": {"preferred_taints": {"a": 1.0}},
        "router_config_override": {"overlap_score_weight": 1.0},
    },
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    "chat": (
        "/v1/chat/completions",
        COMMON
        | {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "chat_template_kwargs": {"a": {"b": 1}},
        },
    ),
    "completion": (
        "/v1/completions",
        COMMON | {"prompt": ["hello", "there"], "echo": True, "logprobs": 2},
    ),
}


def finish(site: Site, text: str = "good ") -> None:
    for stream in list(site.streams):
        found = ids(site, text)
        top = [[{"token_id": each, "logprob": -1.0}] for each in found]
        stream.say(found, log_probs=[-1.0] * len(found), top_logprobs=top)
        stream.say([9], finish_reason="length")
        stream.sink.on_end()


def stopped(site: Site) -> None:
    finish(site, "good day to you")


def fail(site: Site) -> None:
    site.streams[0].say(ids(site, "good"))
    site.streams[0].sink.on_error(EngineFailure("cuda"))


def fail_at_once(site: Site) -> None:
    site.streams[0].sink.on_error(Disconnected())


def garbage(site: Site) -> None:
    site.streams[0].sink.on_data(b"\xc1")


def leave(site: Site) -> None:
    site.streams[0].say(ids(site, "good"))
    site.bench.connection.connection_lost(None)


def overwhelm(site: Site) -> None:
    site.streams[0].say(ids(site, "good"))
    site.bench.connection.pause_writing()
    site.active.held_limit_bytes = 1
    for stream in site.streams:
        stream.say(ids(site, "good day"))


def drained(site: Site) -> None:
    site.active.fail_all(Overloaded("over"))


OUTCOMES = [finish, stopped, fail, fail_at_once, garbage, leave, overwhelm, drained]
REFUSALS: dict[str, dict[str, Any]] = {
    "not a valid value": {"temperature": 9},
    "an unknown field": {"foo": 1},
    "a prompt that does not fit": {"nvext": {"token_data": [5] * 5000}},
    "a worker id out of range": {"nvext": {"prefill_worker_id": 2**64}},
    "no answer wanted": {"stream": True, "nvext": {"annotations": ["query_instance_id:"]}},
}


def post(site: Site, options: str, **more: Any) -> None:
    path, body = OPTIONS[options]
    site.bench.transport, site.bench.connection = site.bench.connect()
    site.post({"model": "tiny", **body, **more}, path)


def hang_up(site: Site) -> None:
    site.streams.clear()
    site.bench.connection.connection_lost(None)


async def left_over(step: Callable[[], Any]) -> Counter[str]:
    """Objects that only the collector frees after ``step``, by type.

    The step is done twice: what the first makes once for all (caches, labels) does not count.
    What exists before the second is frozen, so that a collection takes little time.
    """
    await _settled(step)
    gc.freeze()
    gc.disable()
    try:
        await _settled(step)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(f"{type(each).__module__}.{type(each).__name__}" for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


async def _settled(step: Callable[[], Any]) -> None:
    waiting = step()
    if waiting is not None:
        await waiting
    await later()


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("streaming", [False, True])
async def test_after_any_outcome(
    options: str, streaming: bool, outcome: Callable[[Site], None]
) -> None:
    site = Site()

    def step() -> None:
        more = {"stream_options": {"include_usage": True}} if streaming else {}
        post(site, options, stream=streaming, **more)
        assert site.streams
        outcome(site)
        hang_up(site)

    assert not await left_over(step)
    site.settled()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reason", REFUSALS)
async def test_after_a_refusal(options: str, reason: str) -> None:
    site = Site()

    def step() -> None:
        post(site, options, **REFUSALS[reason])
        assert not site.streams
        hang_up(site)

    assert not await left_over(step)
    site.settled()


@pytest.mark.parametrize("options", OPTIONS)
async def test_after_the_router_refused(options: str) -> None:
    site = Site()

    def step() -> None:
        site.pick_error = NoInstances("none")
        post(site, options)
        assert site.status == 503
        hang_up(site)

    assert not await left_over(step)
    site.settled()


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
async def test_after_a_long_prompt(options: str, leaves: bool) -> None:
    site = Site()
    site.preprocessor.inline_limit_bytes = 10

    async def step() -> None:
        post(site, options)
        assert not site.streams
        if leaves:
            hang_up(site)
        while len(site.tasks):
            await turn()
        finish(site)
        if not leaves:
            assert site.status == 200
            hang_up(site)

    assert not await left_over(step)
    site.settled()


@pytest.mark.parametrize("ending", ["served", "left", "full", "worker gone"])
@pytest.mark.parametrize("options", OPTIONS)
async def test_after_waiting_for_a_worker(options: str, ending: str) -> None:
    site = Queued({"queue_threshold": 0.01, "queue_limit": 1 if ending == "full" else 8})

    async def step() -> None:
        post(site, "plain")
        running = site.bench.connection
        post(site, options)
        assert len(site.streams) == 1
        if ending == "full":
            post(site, options)
            assert site.status == 503
        if ending == "left":
            hang_up(site)
            site.bench.connection = running
        elif ending == "worker gone":
            site.kv.remove_worker(7)
            await later()
            site.kv.add_worker(7, RuntimeConfig(max_num_batched_tokens=100))
        for number in range(8):
            if number < len(site.streams):
                site.finish(number)
            await later()
        running.connection_lost(None)
        hang_up(site)

    assert not await left_over(step)


class Prefilling(Site):
    """A site with one prefill worker before the worker that generates."""

    def __init__(self) -> None:
        super().__init__()
        settings = RouterSettings(mode="kv")
        self.prefillers = Workers()
        metrics = PrefillMetrics(self.metrics, "tiny")
        router = PrefillRouter("tiny", 16, settings, metrics, self.entry.dispatch)
        self.entry.dispatch.prefill = router
        picker = make_picker(prefill_settings(settings), 16, index=make_index(settings))
        router.attach(picker, self.prefillers)  # type: ignore[arg-type]
        picker.add_worker(PREFILL, RuntimeConfig())
        router.add_worker(PREFILL, RuntimeConfig())


@pytest.mark.parametrize("ending", ["computed", "left", "failed", "lost"])
@pytest.mark.parametrize("options", OPTIONS)
async def test_after_a_prefill(options: str, ending: str) -> None:
    site = Prefilling()

    def step() -> None:
        post(site, options)
        assert site.prefillers.streams
        if ending == "left":
            site.bench.connection.connection_lost(None)
        for _ in range(8):
            for stream in [one for one in site.prefillers.streams if not one.killed]:
                if ending == "computed":
                    stream.answer({"a": 1})
                else:
                    stream.fail(EngineFailure("x") if ending == "failed" else Disconnected())
                stream.killed = True
        finish(site)
        site.prefillers.streams.clear()
        hang_up(site)

    assert not await left_over(step)


class Wired(Site):
    """A site whose worker is at the other end of a real connection."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self.requests = RequestClient()

    def open(self, worker_id: int, payload: bytes, sink: Any, headers: Any) -> Any:
        return self.requests.open(self.address, "n/c/e", headers, payload, sink)


class Worker:
    """What the worker does with a request."""

    def __init__(self) -> None:
        self.error: DynamoError | None = None
        self.hangs = False
        self.arrived = 0

    def __call__(self, stream: ServerStream, payload: bytes) -> None:
        self.arrived += 1
        stream.send(encode(EngineOutput(token_ids=[64])))
        if self.error is not None:
            stream.error(self.error)
        elif not self.hangs:
            stream.send(encode(EngineOutput(token_ids=[65], finish_reason="length")))
            stream.end()


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[tuple[Worker, str]]:
    server, made = RequestServer(), Worker()
    address = await server.start(f"uds:{tmp_path / 'plane.sock'}")
    server.register("n/c/e", made)
    yield made, address
    await server.close()


@pytest.mark.parametrize("ending", ["served", "failed", "shut down", "left"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("streaming", [False, True])
async def test_over_a_connection(
    worker: tuple[Worker, str], streaming: bool, options: str, ending: str
) -> None:
    made, address = worker
    site = Wired(address)
    errors = {"failed": EngineFailure("x"), "shut down": EngineShutdown("x")}
    made.error, made.hangs = errors.get(ending), ending == "left"

    async def step() -> None:
        made.arrived = 0
        post(site, options, stream=streaming)
        async with asyncio.timeout(20):
            while site.active._active and not (ending == "left" and made.arrived):
                await turn()
        hang_up(site)
        async with asyncio.timeout(20):
            while len(site.requests):
                await turn()

    assert not await left_over(step)
    site.settled()
    await site.requests.close()
