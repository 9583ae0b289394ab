"""No outcome of a relayed request leaves a reference cycle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from relayed_kit import RelaySite, event
from test_request_cycles import left_over

from dynamo.errors import Disconnected, EngineFailure, NoInstances, Overloaded


def finish(site: RelaySite) -> None:
    stream = site.relayed[-1]
    stream.body(event({"a": 1}))
    stream.sink.on_end()


def fail(site: RelaySite) -> None:
    stream = site.relayed[-1]
    stream.body(event({"a": 1}))
    stream.sink.on_error(EngineFailure("x"))


def leave(site: RelaySite) -> None:
    site.relayed[-1].body(event({"a": 1}))
    site.bench.connection.connection_lost(None)


def overwhelm(site: RelaySite) -> None:
    stream = site.relayed[-1]
    stream.body(event({"a": 1}))
    site.bench.connection.pause_writing()
    site.active.held_limit_bytes = 1
    stream.body(event({"a": 2}), event({"a": 3}))


def lose(site: RelaySite) -> None:
    """Two workers in a row, the second for good; the head makes the answer begin."""
    site.relayed[-1].sink.on_error(Disconnected("x"))


def drain(site: RelaySite) -> None:
    site.active.fail_all(Overloaded("over"))


@pytest.mark.parametrize("outcome", [finish, fail, leave, overwhelm, lose, drain])
@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_after_any_outcome(content_type: str, outcome: Callable[[RelaySite], None]) -> None:
    site = RelaySite()

    def step() -> None:
        site.bench.transport, site.bench.connection = site.bench.connect()
        stream = site.ask(stream=True)
        stream.head(content_type=content_type)
        outcome(site)
        site.relayed.clear()
        site.bench.connection.connection_lost(None)

    assert not await left_over(step)
    site.settled()


@pytest.mark.parametrize("model_input", ["Http", "Text"])
@pytest.mark.parametrize("body", [{}, {"messages": []}, {"temperature": 9}])
async def test_after_a_refusal_and_a_reroute(model_input: str, body: dict[str, Any]) -> None:
    site = RelaySite(model_input)

    def step() -> None:
        site.bench.transport, site.bench.connection = site.bench.connect()
        site.ask(**body)
        for _ in site.relayed[:]:
            site.relayed[-1].sink.on_error(Disconnected("x"))
            site.relayed[-1].sink.on_error(Disconnected("x"))
        site.relayed.clear()
        site.tokens.clear()
        site.bench.connection.connection_lost(None)
        site.pick_error = None if site.pick_error else NoInstances()
        site.freed = sorted(set(site.freed))

    assert not await left_over(step)
    site.pick_error = None
