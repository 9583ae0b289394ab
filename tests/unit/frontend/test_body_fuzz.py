"""Mutated requests against the real path from body to worker: a client's mistake is never a 500."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hostile_bodies import SHAPES, Mutations
from http_bench import Bench
from test_request import Site

from dynamo.frontend.apis.chat.route import OpenAIRoutes
from dynamo.frontend.apis.messages.route import MessagesRoutes
from dynamo.frontend.apis.operator.routing import ExplainRoutes
from dynamo.frontend.apis.responses.route import ResponseRoutes
from dynamo.frontend.apis.responses.store import ResponseStore
from dynamo.frontend.apis.tokenize import PromptCountRoutes
from dynamo.http.routes import Routes

BODIES = 1500


async def finish(site: Site) -> None:
    """Whatever reached a worker is answered."""
    for _ in range(50):
        while running := list(site.tasks._running):
            await asyncio.wait(running)
        streams, site.streams = site.streams, []
        for stream in streams:
            stream.say([5, 300], finish_reason="stop")
            stream.sink.on_end()
        await asyncio.sleep(0)
        if not streams and not site.tasks._running:
            return
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(3))
async def test_no_body_is_a_500(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    site, mutations = Site(), Mutations(seed)
    routes = Routes()
    openai = OpenAIRoutes(site.active, site, site.tasks)  # type: ignore[arg-type]
    openai.install(routes)
    counts = PromptCountRoutes(site.active, site, site.tasks)  # type: ignore[arg-type]
    MessagesRoutes(site.active, openai, counts).install(routes)
    store = ResponseStore(1 << 20)
    ResponseRoutes(store, lambda exchange: False, routes).install(routes, openai, counts)
    ExplainRoutes(site, site.tasks, 503, site.active.off_loop).install(routes)  # type: ignore[arg-type]
    seen: dict[int, int] = {}
    with caplog.at_level(logging.ERROR):
        for _ in range(BODIES):
            path = mutations.random.choice(sorted(SHAPES))
            body, headers = mutations.body(path), mutations.headers()
            target = "/v1/route" if mutations.random.random() < 0.2 else path
            site.bench = Bench(handler=routes)
            site.post(
                body, target, **{name.replace("-", "_"): text for name, text in headers.items()}
            )
            await finish(site)
            what = f"{target} {headers} {body[:2000]!r} -> {site.bench.transport.out[:500]!r}"
            assert site.bench.transport.out, what
            seen[site.status] = seen.get(site.status, 0) + 1
            assert 200 <= site.status < 500, what
            assert b"Internal Server Error" not in site.bench.transport.out, what
            assert not caplog.records, (what, caplog.records[0].getMessage())
    site.settled()
    assert set(seen) <= {200, 400, 413} and min(seen[200], seen[400]) > BODIES / 12, seen
