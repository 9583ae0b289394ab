"""Migrations of requests that prefill workers serve, and of answers with tool calls."""

from __future__ import annotations

import asyncio

import pytest
from migration_kit import MigratingFleet
from test_prefill import DECODE, PREFILL, SPARE, Box
from test_request import MODEL_DIR, ids, turn

from dynamo.errors import CannotConnect, Disconnected, WorkersLost
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.requests.migration import Migrations
from dynamo.protocols.codec import encode
from dynamo.protocols.control import ModelCard, RuntimeConfig
from dynamo.protocols.engine import EngineOutput, Routing

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def box_with(limit: int) -> Box:
    box = Box(prefill_retries=9)
    box.dispatch.migrations = Migrations(limit)
    box.join(PREFILL, SPARE)
    return box


async def test_prefill_workers_share_the_limit() -> None:
    box = box_with(2)
    caller = box.send()
    for _ in range(3):
        box.computing[-1].fail(Disconnected("gone"))
    assert box.counted("fallbacks_total") == {"retries": 1}
    assert caller.engine_request.retries.migrations == 2
    assert len(box.prefillers.streams) == 3 and len(box.decoders.streams) == 1
    caller.leave()
    assert box.nothing_left()


async def test_a_prefill_worker_that_refuses_costs_nothing() -> None:
    box = box_with(1)
    caller = box.send()
    for _ in range(4):
        box.computing[-1].fail(CannotConnect("no"))
    assert caller.engine_request.retries.migrations == 0 and len(box.prefillers.streams) == 5
    caller.leave()
    assert box.nothing_left()


@pytest.mark.parametrize("limit", [0, 3])
async def test_a_prompt_that_ends_two_prefill_workers_reaches_no_third(limit: int) -> None:
    box = box_with(limit)
    box.join(SPARE + 1)
    caller = box.send()
    for _ in range(2):
        stream = box.computing[-1]
        box.part(stream.worker_id)
        stream.fail(Disconnected("gone"))
    assert len(box.prefillers.streams) == 2 and not box.decoders.streams
    assert isinstance(caller.error, WorkersLost)
    assert box.nothing_left()


async def test_without_a_limit_prefill_retries_are_the_only_bound() -> None:
    box = box_with(0)
    caller = box.send()
    for _ in range(9):
        box.computing[-1].fail(Disconnected("gone"))
    assert not box.counted("fallbacks_total")
    caller.leave()


@pytest.mark.parametrize("tokens", [0, 2])
async def test_the_rest_is_prefilled_again(tokens: int) -> None:
    box = box_with(3)
    box.decode.add_worker(DECODE + 1, RuntimeConfig())
    caller = box.send(routing=Routing(prefill_worker_id=PREFILL))
    engine_request = caller.engine_request
    box.prefillers.streams[0].answer({"blocks": "of the first"})
    (first,) = box.decoders.streams
    assert first.request.prefill_result is not None
    # The caller of these tests has no answer: count the tokens by hand.
    engine_request.tokens = tokens
    if tokens:
        assert engine_request.retries.generated is not None
        engine_request.retries.generated.fromlist([5, 6])
    first.fail(Disconnected("gone"))
    again = box.prefillers.streams[1]
    assert again.worker_id == PREFILL, "the pin to a prefill worker that lives stays"
    assert len(again.request.token_ids) == 40 + tokens
    assert again.request.prefill_result is None
    again.answer({"blocks": "of the second"})
    second = box.decoders.streams[1]
    assert second.worker_id != first.worker_id
    assert second.request.prefill_result == {
        "disaggregated_params": {"blocks": "of the second"},
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert second.request.stop_conditions.max_tokens == 7 - tokens
    caller.leave()
    assert box.nothing_left()


async def test_a_decode_worker_that_refuses_gets_no_second_prefill() -> None:
    """It has not seen the request: the blocks still wait for it."""
    box = box_with(3)
    box.decode.add_worker(DECODE + 1, RuntimeConfig())
    caller = box.send()
    box.prefillers.streams[0].answer({"blocks": "here"})
    box.decoders.streams[0].fail(CannotConnect("no"))
    assert len(box.prefillers.streams) == 1 and len(box.decoders.streams) == 2
    assert box.decoders.streams[1].request.prefill_result is not None
    caller.leave()
    assert box.nothing_left()


@pytest.mark.parametrize("cut", range(1, 12))
async def test_a_tool_call_cut_between_two_workers(cut: int) -> None:
    site = MigratingFleet()
    card = ModelCard(
        display_name="tiny",
        slug="tiny",
        source_path=str(MODEL_DIR),
        namespace="n",
        component="c",
        endpoint="e",
        instance_id=7,
        context_length=4096,
        runtime_config=RuntimeConfig(tool_call_parser="hermes"),
    )
    site.preprocessor = site.entry.preprocessor = Preprocessor(card)
    call = ids(site, CALL)
    assert len(call) > 12
    site.chat(tools=TOOLS)
    site.streams[0].say(call[:cut])
    site.streams[0].sink.on_error(Disconnected("gone"))
    site.streams[1].sink.on_data(encode(EngineOutput(call[cut:], finish_reason="stop")))
    site.streams[1].sink.on_end()
    await turn()
    await asyncio.sleep(0)
    choice = site.answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": '{"a": 1}'}
    site.settled()
