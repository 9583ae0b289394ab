"""The stream of ``dynamo chat``: reasoning, figures, errors, and what never reaches the screen."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dynamo.cli.chat import _Screen
from dynamo.cli.chat_client import ChatAnswer, ChatTarget, list_models, request_answer
from dynamo.errors import DynamoError
from dynamo.http.client import parse_url

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])


async def talk(*pieces: bytes) -> tuple[ChatAnswer, list[tuple[str, bool]]]:
    """Have a server send ``pieces`` as its response."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    shown: list[tuple[str, bool]] = []
    answer = ChatAnswer()
    async with server:
        target = ChatTarget(parse_url(f"http://127.0.0.1:{port}"), "m")
        messages = [{"role": "user", "content": "x"}]
        await request_answer(target, messages, answer, lambda *piece: shown.append(piece))
    return answer, shown


async def test_reasoning_is_shown_and_not_part_of_the_answer() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    answer, shown = await talk(
        STREAM,
        b": a comment\n\n" + delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="yes") + event(choices=[], usage=usage) + b"data: [DONE]\n\n",
    )
    assert shown == [("hm", True), ("yes", False)]
    assert (answer.text, answer.prompt_tokens, answer.output_tokens) == ("yes", 9, 3)
    assert answer.cached_tokens == 4 and 0 < answer.ttft_s <= answer.last_token_s


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((STREAM, delta(content="a")), r"without \[DONE\]"),
        ((STREAM, event(error={"message": "the engine died"})), "the engine died"),
        ((STREAM, b"data: {\n\n"), "not an event"),
        ((b"HTTP/1.1 503 x\r\ncontent-length: 2\r\n\r\n{}",), "answered 503"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab",), "broke off"),
    ],
)
async def test_bad_streams_are_errors(pieces: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(DynamoError, match=reason):
        await talk(*pieces)


async def test_another_server_is_named() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(DynamoError, match=f"{url} is not an OpenAI endpoint"):
            await list_models(parse_url(url))


def test_the_screen_dims_reasoning_and_drops_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = _Screen()
    for piece in (("think\x1b]0;title\x07", True), ("say\x1b[2J\r", False), ("\ttab\n", False)):
        screen.show(*piece)
    screen.end()
    assert capsys.readouterr().out == "\x1b[2mthink]0;title\n\x1b[0msay[2J\ttab\n\x1b[0m"


async def test_the_reason_of_the_end_stays_when_chunks_follow_it() -> None:
    """Such as that of the usage, or of another choice."""
    ends = event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
    answer, _ = await talk(STREAM, delta(content="a") + ends + delta() + b"data: [DONE]\n\n")
    assert answer.finish_reason == "length"
