"""The measuring client against a socket that answers known bytes in known pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from boxes import needs_ipv6

from dynamo.bench.client import LoadConnection
from dynamo.bench.runner import Runner, calibrate, first_model
from dynamo.bench.stats import summarize
from dynamo.bench.workload import PlannedRequest, Prompts, synthetic
from dynamo.config import from_env
from dynamo.config.client import BenchSettings
from dynamo.errors import CannotConnect, ConfigError
from dynamo.http.client import Target, parse_url

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
    """Serve ``answers`` in turn on one connection; each part is a separate write."""
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
        connection = LoadConnection(target)
        await connection.open()
        for _ in range(2):
            outcome = await connection.measure("/x", b"{}", stream=True, timeout_s=5)
            assert outcome.error is None and outcome.ttft_s is not None
            assert len(outcome.gaps_s) == 2 and min(outcome.gaps_s) > 0
            assert (outcome.prompt_tokens, outcome.output_tokens) == (9, 3)
            assert outcome.cached_tokens == 4
        connection.close()


async def test_any_split_of_the_bytes_gives_the_same_counts() -> None:
    whole = HEAD + b"".join(chunk(event) for event in EVENTS) + b"0\r\n\r\n"
    for size in (1, 7, 64):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)][:600]
        async with server([pieces]) as target:
            connection = LoadConnection(target)
            await connection.open()
            outcome = await connection.measure("/x", b"{}", stream=True, timeout_s=20)
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
        ([HEAD, *map(chunk, (EVENTS[0], EVENTS[3], EVENTS[4])), b"0\r\n\r\n"], "no token"),
        ([HEAD, chunk(EVENTS[1]), chunk(EVENTS[2]), b"0\r\n\r\n"], "ended without [DONE]"),
        ([HEAD, chunk(EVENTS[1]), chunk(EVENTS[4][:-2]), b"0\r\n\r\n"], "ended without [DONE]"),
        ([HEAD, chunk(EVENTS[1]), chunk(EVENTS[4])], "disconnected"),
        ([HEAD, chunk(b"data: <html>\n\n"), b"0\r\n\r\n"], "not an OpenAI answer: '<html>'"),
        ([HEAD, chunk(b"data: []\n\n"), b"0\r\n\r\n"], "not an OpenAI answer"),
        ([HEAD, chunk(b'data: {"usage":7}\n\n'), b"0\r\n\r\n"], "not an OpenAI answer"),
        ([HEAD, chunk(b'data: {"error":"gone"}\n\n'), b"0\r\n\r\n"], "in stream: gone"),
        (plain("200 OK", b"<html>"), "not an event stream: no content-type"),
        ([HEAD.replace(b"text/event-stream", b"text/html; charset=x")], "stream: text/html"),
        (plain("404 Not Found", b"[1,2]"), "404: '[1,2]'"),
        (plain("500 Oops", b'{"error":"x"}'), "500: x"),
        ([b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhi"], "another protocol"),
    )
    for parts, reason in answers:
        async with server([parts]) as target:
            connection = LoadConnection(target)
            await connection.open()
            outcome = await connection.measure("/x", b"{}", stream=True, timeout_s=5)
            connection.close()
            assert outcome.error is not None and reason in outcome.error


async def test_unusual_but_valid_answers() -> None:
    spaced = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n'
    thought = b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
    closing = b"HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream\r\n\r\n"
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    answers = (
        [HEAD, *(chunk(event.replace(b"\n", b"\r\n")) for event in EVENTS), b"0\r\n\r\n"],
        [HEAD, *(chunk(event.replace(b"\n", b"\r")) for event in EVENTS), b"0\r\n\r\n"],
        [HEAD, chunk(b": ping\n\n"), chunk(spaced), b"0\r\n\r\n"],
        [HEAD, chunk(thought), chunk(EVENTS[4]), b"0\r\n\r\n"],
        [closing, *EVENTS],
        [interim, HEAD, *map(chunk, EVENTS), b"0\r\n\r\n"],
    )
    for parts in answers:
        async with server([parts]) as target:
            connection = LoadConnection(target)
            await connection.open()
            outcome = await connection.measure("/x", b"{}", stream=True, timeout_s=5)
            connection.close()
            assert outcome.error is None and outcome.ttft_s is not None, parts


async def test_gaps_do_not_span_requests() -> None:
    """Two tokens in the first read of a second request on one connection."""
    both = [HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"]
    async with server([both, both]) as target:
        connection = LoadConnection(target)
        await connection.open()
        for _ in range(2):
            outcome = await connection.measure("/x", b"{}", stream=True, timeout_s=5)
            assert len(outcome.gaps_s) == 2
            assert sum(outcome.gaps_s) <= outcome.finished_s - (outcome.first_token_s or 0.0)
            await asyncio.sleep(0.01)
        connection.close()


async def test_the_connect_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = [HEAD, *map(chunk, EVENTS), b"0\r\n\r\n"]
    connect = LoadConnection.open
    delay_s = 0.05

    async def slowly(self: LoadConnection) -> None:
        await asyncio.sleep(delay_s)
        await connect(self)

    monkeypatch.setattr(LoadConnection, "open", slowly)
    async with server([stream, stream]) as target:
        runner = Runner(target, from_env(BenchSettings, {}), "m", Prompts())
        await runner.run(synthetic(2, isl=4, osl=3), concurrency=1)
    first, second = runner.outcomes
    assert first.ttft_s is not None and first.ttft_s >= first.sent_s - first.started_s >= delay_s
    assert second.sent_s >= second.started_s >= first.finished_s, "the connection was kept"
    assert [o.schedule_lag_s for o in runner.outcomes] == [None, None]


async def test_an_open_loop_counts_from_the_scheduled_time() -> None:
    """Two requests due at once and a cap of one: the second waits, and its clock runs."""
    stream = [HEAD, *map(chunk, EVENTS), b"0\r\n\r\n"]
    planned = [PlannedRequest(0.0, ((1, 4),), 3), PlannedRequest(0.0, ((2, 4),), 3)]
    async with server([stream, stream]) as target:
        runner = Runner(target, from_env(BenchSettings, {}), "m", Prompts())
        await runner.run(planned, concurrency=1)
    first, second = runner.outcomes
    assert first.error is None and second.error is None
    assert first.started_s == second.started_s and second.schedule_lag_s is not None
    assert second.schedule_lag_s >= first.latency_s - 0.001
    assert second.ttft_s is not None and second.ttft_s > second.schedule_lag_s
    summary = summarize(runner.outcomes, runner.duration_s)
    assert summary.measured_from == "the scheduled time" and summary.schedule_lag_ms is not None
    assert summary.schedule_lag_ms.max == pytest.approx(second.schedule_lag_s * 1000)


@needs_ipv6
async def test_an_endpoint_on_ipv6() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(plain("200 OK", b'{"data":[{"id":"m"}]}')[0])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "::1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        assert await first_model(parse_url(f"http://[::1]:{port}/v1/")) == "m"
    assert f"host: [::1]:{port}\r\n".encode() in seen[0]


@pytest.mark.parametrize(
    "answer",
    [
        plain("200 OK", b"<html>"),
        plain("200 OK", b"[]"),
        plain("200 OK", b'{"data":[{"name":1}]}'),
        plain("200 OK", b'{"data":[]}'),
        plain("404 Not Found", b"\xff\x00[/red]"),
        [b"SSH-2.0-x\r\n"],
        [HEAD],
    ],
)
async def test_an_endpoint_without_models_is_named(answer: list[bytes]) -> None:
    async with server([answer]) as target:
        with pytest.raises(ConfigError, match=rf"no model at 127\.0\.0\.1:{target.port} .*--model"):
            await first_model(target)


@pytest.mark.parametrize(
    "url",
    ["http://h:99999", "http://h:x", "http://h:0", "http://[::1", "http://", "ftp://h", "h:80"],
)
def test_a_bad_url_is_an_error(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        parse_url(url)


def test_headers_cannot_be_injected() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        parse_url("http://h", "key\r\nx: y")
    assert parse_url("http://h/a b/é").prefix == "/a%20b/%C3%A9"
    assert parse_url("http://h/a%20b/v1").prefix == "/a%20b"


async def test_runner_sends_everything_and_calibrates() -> None:
    usage = b'{"choices":[{}],"usage":{"prompt_tokens":%d,"completion_tokens":1}}'
    answers = [plain("200 OK", usage % 20), plain("200 OK", usage % 660)]
    settings = from_env(BenchSettings, {}, stream=False)
    async with server(answers + [plain("200 OK", usage % 5)] * 4) as target:
        prompts = Prompts()
        runner = Runner(target, settings, "m", prompts)
        assert await calibrate(runner, prompts) == pytest.approx(1.25)
        await runner.run(synthetic(4, isl=4, osl=1), concurrency=1)
    assert [o.error for o in runner.outcomes] == [None] * 4


async def test_a_closed_port_gives_a_remedy() -> None:
    async with server([]) as target:
        pass
    with pytest.raises(CannotConnect, match="point --url"):
        await first_model(target)
    with pytest.raises(ConfigError, match="--url"):
        parse_url("localhost:8000")
    assert parse_url("http://h:1/v1") == Target("h", 1, False)
