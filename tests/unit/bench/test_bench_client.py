"""The measuring client against a real socket that answers known bytes at known cuts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo.bench.client import Connection, Target, parse_url
from dynamo.bench.runner import Runner, calibrate, first_model
from dynamo.bench.workload import Prompts, synthetic
from dynamo.config import from_env
from dynamo.config.bench import BenchSettings
from dynamo.errors import CannotConnect, ConfigError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"c"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n',
    b"data: [DONE]\n\n",
]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@asynccontextmanager
async def server(answers: list[list[bytes]]) -> AsyncIterator[Target]:
    """Serves ``answers`` in turn on one connection; each part of an answer is its own write."""

    handlers: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for parts in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.split(b":")[1]))
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.002)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await answer(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        yield Target("127.0.0.1", port, False)
        if handlers:
            await asyncio.wait(handlers, timeout=5)


def plain(status: str, body: bytes) -> list[bytes]:
    return [f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body]


async def test_stream_is_timed_and_counted() -> None:
    stream = [HEAD, *(chunk(event) for event in EVENTS), b"0\r\n\r\n"]
    async with server([stream, stream]) as target:
        connection = Connection(target)
        await connection.open()
        for _ in range(2):
            outcome, _ = await connection.request("POST", "/x", b"{}", stream=True, timeout_s=5)
            assert outcome.error is None and outcome.ttft_s is not None
            assert len(outcome.gaps_s) == 2 and min(outcome.gaps_s) > 0
            assert (outcome.prompt_tokens, outcome.output_tokens) == (9, 3)
            assert outcome.cached_tokens == 4
        connection.close()


async def test_any_cut_of_the_bytes_gives_the_same_counts() -> None:
    whole = HEAD + b"".join(chunk(event) for event in EVENTS) + b"0\r\n\r\n"
    for size in (1, 7, 64):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)][:600]
        async with server([pieces]) as target:
            connection = Connection(target)
            await connection.open()
            outcome, _ = await connection.request("POST", "/x", b"{}", stream=True, timeout_s=20)
            connection.close()
            assert outcome.error is None and len(outcome.gaps_s) == 2


async def test_failures_are_outcomes_not_exceptions() -> None:
    cut = [HEAD, chunk(EVENTS[1])]
    failed = chunk(b'data: {"error":{"message":"gone","type":"x","code":503}}\n\n')
    answers = (
        (plain("503 Busy", b'{"message":"All busy","code":503}'), "503: All busy"),
        (cut, "disconnected"),
        ([HEAD, failed, b"0\r\n\r\n"], "in stream: gone"),
        ([b"SSH-2.0-x\r\n"], "not HTTP"),
    )
    for parts, reason in answers:
        async with server([parts]) as target:
            connection = Connection(target)
            await connection.open()
            outcome, _ = await connection.request("POST", "/x", b"{}", stream=True, timeout_s=5)
            connection.close()
            assert outcome.error is not None and reason in outcome.error


async def test_runner_sends_everything_and_calibrates() -> None:
    usage = b'{"usage":{"prompt_tokens":%d,"completion_tokens":1}}'
    answers = [plain("200 OK", usage % 20), plain("200 OK", usage % 660)]
    settings = from_env(BenchSettings, {}, stream=False)
    async with server(answers + [plain("200 OK", usage % 5)] * 4) as target:
        prompts = Prompts()
        runner = Runner(target, settings, "m", prompts)
        assert await calibrate(runner, prompts) == pytest.approx(1.25)
        await runner.run(synthetic(4, isl=4, osl=1), concurrency=1)
    assert [o.error for o in runner.outcomes] == [None] * 4


async def test_nothing_there_says_what_to_do() -> None:
    async with server([]) as target:
        pass
    with pytest.raises(CannotConnect, match="point --url"):
        await first_model(target)
    with pytest.raises(ConfigError, match="--url"):
        parse_url("localhost:8000")
    assert parse_url("http://h:1/v1") == Target("h", 1, False)
