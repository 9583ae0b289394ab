"""An exception in the output of a request ends that request with an error, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from answer_cases import TOOLS
from answer_driver import APIS, Cuts, DrivenSite, drive, make_outputs, send
from test_request import turn

from dynamo._fast.frames import pack
from dynamo.errors import InvalidArgument
from dynamo.frontend.answer.choice import Choice
from dynamo.http.connection import WriteBatch
from dynamo.protocols import codec
from dynamo.protocols.engine import InvalidOutput, PreprocessedRequest, decode_output
from dynamo.runtime.requests.frames import DATA


class Broken(Exception):
    """A defect of ours."""


def breaks(*_: Any) -> Any:
    raise Broken


def break_output(site: DrivenSite) -> None:
    (request,) = site.active._active
    request.generation._take = request.generation._chunk = breaks  # type: ignore[attr-defined]


def break_end(site: DrivenSite) -> None:
    (request,) = site.active._active
    request.generation.end = request.generation.unary = breaks  # type: ignore[method-assign]


def break_opening(site: DrivenSite) -> None:
    (request,) = site.active._active
    request.generation.opening = breaks  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("where", "stream"),
    [(break_output, True), (break_opening, True), (break_end, True), (break_end, False)],
)
@pytest.mark.parametrize("api", APIS)
async def test_only_the_broken_request_ends(
    where: Callable[[DrivenSite], None], api: str, stream: bool
) -> None:
    site = DrivenSite()
    site.ask(api, stream=stream)
    where(site)
    await send(site, make_outputs(site.ids("good day"), Cuts()), Cuts())
    assert b"Internal server error" in site.body
    assert site.bench.transport.out.endswith(b"0\r\n\r\n") if stream else site.status == 500
    site.settled()
    site.opened.clear()
    # The next request of the same frontend is served.
    answer = await drive(site, api, site.ids("good day"), Cuts(), stream=True)
    assert answer.parts == [("text", "good day")]
    site.settled()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("tokens", [0, 1])
async def test_an_error_that_cannot_be_written(api: str, tokens: int) -> None:
    """A chat template may raise half a character."""
    site = DrivenSite()
    site.ask(api, stream=True)
    (request,) = site.active._active
    if tokens:
        (output,) = make_outputs(site.ids("good")[:1], Cuts(), None)
        site.worker.data_received(site.frames([output])[0])
        await turn()
    request.fail(InvalidArgument("half \ud83d"))
    await turn()
    assert tokens or site.status == 500
    assert tokens == 0 or site.bench.transport.aborted
    site.settled()


@pytest.mark.parametrize("step", ["push", "close"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_raises(step: str, stream: bool) -> None:
    site = DrivenSite()
    site.ask("chat", stream=stream)
    (request,) = site.active._active
    broken = type("Broken", (Choice,), {step: breaks, "__slots__": ()})
    request.generation.choices[0].__class__ = broken
    outputs = make_outputs(site.ids("good 😀"), Cuts(), None)
    await send(site, outputs, Cuts())
    assert b"Internal server error" in site.bench.transport.out
    site.settled()


async def test_others_of_the_same_turn_are_written() -> None:
    class Producer:
        def __init__(self, *errors: Exception) -> None:
            self.errors = errors
            self.flushed = 0

        def flush(self) -> None:
            self.flushed += 1
            for error in self.errors:
                raise error

    batch = WriteBatch()
    broken, sound, connection = Producer(Broken()), Producer(), Producer()
    for _ in range(2):
        batch.flush_later(connection.flush)
        batch.defer(broken.flush)
        batch.defer(sound.flush)
        await turn()
    assert broken.flushed == sound.flushed == connection.flushed == 2


LONE = '<tool_call>{"name": "f\\ud83d", "arguments": {"a": "\\ud83d"}}</tool_call>'
LONE_ELSEWHERE = "<tool_call>{}</tool_call>".format(
    json.dumps({"name": "f", "arguments": json.dumps({"a": "x"})[:-2] + "\ud83d"})
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_half_a_character_in_a_call(api: str, stream: bool) -> None:
    """It is U+FFFD for the client: no JSON in UTF-8 can hold it."""
    site = DrivenSite("hermes")
    tools: Any = TOOLS
    if api == "responses":
        tools = [{"type": "function", **one["function"]} for one in TOOLS]
    elif api == "messages":
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
    ids = site.ids(LONE)
    answer = await drive(site, api, ids, Cuts(), stream=stream, tools=tools)
    ((kind, name, arguments),) = answer.parts
    assert (kind, name) == ("call", "f\ufffd")
    assert json.loads(arguments) in ({"a": "\ufffd"}, {"a": "\ud83d"})
    ((_, _, arguments),) = (
        await drive(site, api, site.ids(LONE_ELSEWHERE), Cuts(), stream=stream, tools=tools)
    ).parts
    assert "x\ufffd" in arguments or "x\\ufffd" in arguments
    site.settled()


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("\\ud8", ""),
        ("\\ud83d", ""),
        ("\\ud83d\\u", ""),
        ("\\ud83d\\ude00", "😀"),
        ("\\", ""),
        ("\\\\", "\\"),
    ],
)
async def test_arguments_cut_inside_an_escape(end: str, expected: str) -> None:
    """Arguments in a JSON string: all characters before the cut are kept."""
    site = DrivenSite("hermes")
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"Hi' + end
    answer = await drive(site, "chat", site.ids(text), Cuts(), reason="length", tools=TOOLS)
    assert answer.parts == [("call", "f", '{"a": "Hi' + expected)]


@pytest.mark.parametrize(
    "text", ['{"a":' * 300 + "1" + "}" * 300, '{"a": 123456789012345678901234567890}']
)
async def test_a_tool_input_is_what_the_model_wrote(text: str) -> None:
    """However deep it is nested, and whatever its numbers are."""
    site = DrivenSite("hermes")
    site.ask("messages", tools=[{"name": "f", "input_schema": {"type": "object"}}])
    call = f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>'
    await send(site, make_outputs(site.ids(call), Cuts()), Cuts())
    assert site.status == 200 and f'"input":{text}'.encode() in site.body
    site.settled()


def nested(depth: int) -> bytes:
    return b"\x81\xaaextra_args\x81\xa1a" + b"\x91" * depth + b"\xc0"


def item(**fields: Any) -> bytes:
    return codec.encode(fields)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        nested(100_000),
        item(token_ids=[-1]),
        item(token_ids=["1"]),
        item(token_ids=[1] * 1_000_000),
        item(text="x" * 2_000_000),
        item(token_ids=[1], log_probs=["a"], top_logprobs=[[]]),
        item(token_ids=[1], log_probs=[-0.5], top_logprobs=[[{"token_id": 1}]]),
        item(token_ids=[1], log_probs=[-0.5], top_logprobs=[[{"token_id": -1, "logprob": 0.0}]]),
        item(token_ids=[1], log_probs=[-0.5], top_logprobs=[[{"token": 5, "logprob": 0.0}]]),
        item(token_ids=[1], log_probs=[-0.5], top_logprobs=[[7]]),
        item(token_ids=[1] * 2000, log_probs=[-0.5] * 2000),
        item(token_ids=[1], extra_args={"prompt_logprobs": [[{"token_id": -1, "logprob": 0}]]}),
    ],
)
async def test_a_hostile_item_is_one_line_of_the_log(
    payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    site = DrivenSite()
    options = {} if len(payload) > 100_000 else {"logprobs": True, "top_logprobs": 2}
    if b"prompt_logprobs" in payload:
        options["prompt_logprobs"] = 1
    site.ask("chat", stream=False, **options)
    site.worker.data_received(pack(DATA, site.opened[-1]._number, payload))
    await turn()
    assert site.status == 500
    (line,) = [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]
    assert line.exc_info is None and len(line.getMessage()) < 500
    site.settled()
    site.opened.clear()
    answer = await drive(site, "chat", site.ids("good day"), Cuts())
    assert answer.parts == [("text", "good day")]


async def test_an_unknown_token_has_no_text() -> None:
    site = DrivenSite()
    ids = [2**32 - 1, *site.ids("good"), 10**9]
    answer = await drive(site, "chat", ids, Cuts(), stream=True)
    assert answer.parts == [("text", "good")]


def test_the_error_of_an_item_names_the_worker() -> None:
    request = PreprocessedRequest("m", codec.tokens([1]))
    with pytest.raises(InvalidOutput) as raised:
        decode_output(item(token_ids=[1] * 100_000), request)
    assert str(raised.value.at(0x7F)).startswith("worker 7f sent an invalid output: ")
