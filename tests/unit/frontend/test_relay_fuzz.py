"""Mutated requests to relayed models: each is relayed or refused, and none is a 500."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hostile_bodies import SHAPES, Mutations
from http_bench import Bench
from relayed_kit import RelaySite

from dynamo.frontend.apis.chat.route import OpenAIRoutes
from dynamo.frontend.apis.operator.routing import ExplainRoutes
from dynamo.frontend.apis.relay.route import RelayRoutes
from dynamo.http.routes import Routes

BODIES = 700
OF_TOKENS = {"/v1/messages", "/v1/responses"}
"""Paths that these models do not have."""


async def finish(site: RelaySite) -> None:
    """Whatever reached a worker is answered."""
    for _ in range(50):
        while running := list(site.tasks._running):
            await asyncio.wait(running)
        relayed, site.relayed = site.relayed, []
        for stream in relayed:
            if site.far.card.model_input == "Http":
                stream.head()
                stream.body(b"{}")
            else:
                stream.items({"choices": []})
            stream.sink.on_end()
        for one in site.streams:
            one.say([5, 300], finish_reason="stop")
            one.sink.on_end()
        site.streams = []
        await asyncio.sleep(0)
        if site.bench.transport.out and not site.tasks._running:
            return
    raise AssertionError("it does not end")


@pytest.mark.parametrize("model_input", ["Http", "Text"])
async def test_no_body_is_a_500(model_input: str, caplog: pytest.LogCaptureFixture) -> None:
    site, mutations = RelaySite(model_input), Mutations(3)
    if model_input == "Http":
        site.far.preprocessor = site.preprocessor
    routes = Routes()
    OpenAIRoutes(site.active, site, site.tasks).install(routes)  # type: ignore[arg-type]
    relay = RelayRoutes(site.active, site, site.tasks)  # type: ignore[arg-type]
    relay.install(routes)
    relay.go_first(routes)
    ExplainRoutes(site, site.tasks, 503, site.active.off_loop).install(routes)  # type: ignore[arg-type]
    seen: dict[int, int] = {}
    with caplog.at_level(logging.ERROR):
        for _ in range(BODIES):
            path = mutations.random.choice(sorted(SHAPES.keys() - OF_TOKENS))
            body = mutations.body(path).replace(b'"tiny"', b'"far"')
            headers = {name.replace("-", "_"): text for name, text in mutations.headers().items()}
            target = "/v1/route" if mutations.random.random() < 0.2 else path
            site.bench = Bench(handler=routes)
            site.post(body, target, **headers)
            await finish(site)
            what = f"{target} {headers} {body[:2000]!r} -> {site.bench.transport.out[:500]!r}"
            seen[site.status] = seen.get(site.status, 0) + 1
            assert 200 <= site.status < 500, what
            assert not caplog.records, (what, caplog.records[0].getMessage())
    site.settled()
    assert set(seen) <= {200, 400, 404, 413} and seen[200] > BODIES / 10 < seen[400], seen
