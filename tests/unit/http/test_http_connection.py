"""Bytes in, bytes out: every rule and limit of a connection, driven through a mock transport."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
from http_bench import Bench, MockTransport
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.http import NEVER, Exchange, WriteBatch, exchange
from dynamo.http.connection import HttpConnection

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


def status_of(out: bytes) -> int:
    assert out.startswith(b"HTTP/1.1 "), out
    return int(out[9:12])


def post(body: bytes, extra: bytes = b"") -> bytes:
    return b"POST /p HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n%b" % (
        extra,
        len(body),
        body,
    )


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    head = b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + body + b"0\r\n" + trailers + b"\r\n"


def test_a_plain_request_and_its_response() -> None:
    bench = Bench()
    out = bench.feed(b"GET /a/b%20c?d=e HTTP/1.1\r\nHost: h:1\r\nX-One: 1\r\nx-one: 2\r\n\r\n")
    exchange = bench.seen[0]
    assert (exchange.method, exchange.path, exchange.query) == ("GET", "/a/b c", "d=e")
    assert exchange.headers == {"host": "h:1", "x-one": "1, 2"}
    head, _, body = out.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert lines[1].startswith(b"date: ") and lines[1].endswith(b" GMT")
    assert lines[2:] == [b"content-type: text/plain", b"content-length: 2"]
    assert body == b"<>"
    assert not bench.transport.closed


@pytest.mark.parametrize(
    "request_bytes",
    [GET, post(b"hello"), post(b""), chunked(b"ab", b"c" * 300, trailers=b"X-Sum: 1\r\n")],
)
def test_every_split_of_the_bytes_gives_the_same(
    request_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_moment = "Fri, 20 Nov 2026 12:00:00 GMT"
    monkeypatch.setattr(exchange, "formatdate", lambda usegmt: one_moment)
    whole = Bench().feed(request_bytes)
    bench = Bench()
    assert bench.feed(*(request_bytes[i : i + 1] for i in range(len(request_bytes)))) == whole
    random_source = random.Random(7)
    for _ in range(50):
        stream = request_bytes * 3
        pieces = []
        while stream:
            abort = random_source.randint(1, len(stream))
            pieces.append(stream[:abort])
            stream = stream[abort:]
        bench = Bench()
        assert bench.feed(*pieces) == whole * 3
        assert len(bench.seen) == 3


def test_pipelined_requests_are_answered_in_order_and_one_at_a_time() -> None:
    bench = Bench()
    bench.answer = False
    bench.feed(post(b"1") + post(b"2"), post(b"3"))
    assert [one.body for one in bench.seen] == [b"1"]
    bench.seen[0].respond(200, b"one")
    assert [one.body for one in bench.seen] == [b"1", b"2"]
    bench.seen[1].start(200, "text/plain")
    bench.seen[1].write(b"two")
    assert len(bench.seen) == 2
    bench.seen[1].end()
    bench.seen[2].respond(200, b"three")
    out = bench.transport.out
    assert out.index(b"one") < out.index(b"two") < out.index(b"three")


async def test_what_a_turn_brings_is_one_write() -> None:
    bench = Bench()
    bench.server.write_batch = WriteBatch()
    bench.feed(GET * 3)
    assert bench.transport.writes == 1 and bench.transport.out.count(b"200 OK") == 3
    bench.answer = False
    bench.feed(GET)
    exchange = bench.seen[-1]
    exchange.start(200, "text/plain")
    exchange.write(b"a")
    exchange.write(b"b")
    assert bench.transport.writes == 1
    await asyncio.sleep(0)
    assert bench.transport.writes == 2
    exchange.write(b"c")
    exchange.end(b"d")
    bench.connection.connection_lost(None)
    await asyncio.sleep(0)
    assert bench.transport.writes == 2


async def test_a_long_pipeline_lets_others_in_between() -> None:
    bench = Bench()
    bench.feed(GET * 100)
    assert len(bench.seen) < 100
    assert bench.transport.paused
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(bench.seen) == 100
    assert not bench.transport.paused
    assert bench.transport.out.count(b"200 OK") == 100


async def test_a_client_that_pipelines_too_much_is_closed_after_its_response() -> None:
    for streaming in (False, True):
        bench = Bench()
        bench.answer = False
        bench.feed(GET, GET)
        exchange = bench.seen[0]
        if streaming:
            exchange.start(200, "text/plain")
        bench.feed(GET * 2000, GET * 2000)
        assert not bench.transport.paused  # or its exit would not be seen
        if streaming:
            exchange.end()
        else:
            exchange.respond(200, b"")
            assert b"\r\nconnection: close\r\n" in bench.transport.out
        assert len(bench.seen) == 1 and bench.transport.eof
        bench.feed(GET)
        bench.later(3)
        assert len(bench.seen) == 1 and bench.transport.aborted


async def test_reading_goes_on_after_a_long_pipeline_when_an_exchange_runs() -> None:
    bench = Bench()
    bench.feed(GET * 32 + GET)
    assert bench.transport.paused
    bench.answer = False
    await asyncio.sleep(0)
    assert len(bench.seen) == 33 and not bench.transport.paused


def test_a_client_that_reads_nothing_is_paused_between_requests() -> None:
    bench = Bench()
    bench.connection.pause_writing()
    bench.feed(*[GET * 100] * 20)
    assert bench.transport.paused and not bench.seen
    bench.connection.resume_writing()
    assert len(bench.seen) > 1


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /x HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /x HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET /x HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: a, b\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: u@a\r\n\r\n", 400),
        (b"POST /x HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nHost:\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
        ),
        (
            b"POST / HTTP/1.1\r\nHost:\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n",
            400,
        ),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n",
            501,
        ),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
            b"Transfer-Encoding: gzip\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %b5\r\n\r\nhello" % (b"0" * 5000), 400),
        (b"GET / HTTP/1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/01.01\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.10\r\nHost: a\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost:\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: \r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: :80\r\n\r\n", 400),
        (b"GET http://:80/x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET http://b/x HTTP/1.1\r\nHost:\r\n\r\n", 400),
        (b"FOO1 /x HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (b"get-x /x HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (b"G(T /x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505),
        (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400),
        (b"GET / http/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /\xc3\xa4 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"BREW /x HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (b"GET /x HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: a\r\nX\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: a\r\n: x\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\nHost: a\n\n", 400),
        (b"\nGET /x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400),
        (b"get /x HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (b"\r\n\r\nGET /x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: a\r\nExpect: magic\r\n\r\n", 417),
        (b"GET /x HTTP/1.1\r\nHost: a\r\nContent-Type: a\r\ncontent-type: b\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS to a plain port
    ],
)
def test_what_is_refused(request_bytes: bytes, status: int) -> None:
    bench = Bench()
    out = bench.feed(request_bytes)
    assert status_of(out) == status
    assert b"\r\nconnection: close\r\n" in out
    body = json.loads(out.partition(b"\r\n\r\n")[2])
    assert body["code"] == status and body["error"]["message"] == body["message"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not bench.seen
    assert bench.refused == [status]
    assert bench.transport.eof
    # What still comes is discarded, and it ends soon.
    assert bench.feed(GET) == out
    bench.later(3)
    assert bench.transport.aborted


def test_an_empty_transfer_coding_is_refused() -> None:
    """By the parser of httptools 0.9 and later; before, as a coding that is not understood."""
    bench = Bench()
    out = bench.feed(
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding:\r\n\r\n"
    )
    assert status_of(out) in (400, 501)
    assert not bench.seen and bench.transport.eof


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /x HTTP/1.0\r\n\r\n",
        b"GET http://h/x HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\r\nGET /x HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: a \r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost:\ta\t\r\n\r\n",
        b"M-SEARCH /x HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 0 \r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: [::1]:80\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Content-Length: 0\r\n\r\n",
    ],
)
def test_what_is_odd_but_accepted(request_bytes: bytes) -> None:
    bench = Bench()
    assert status_of(bench.feed(request_bytes)) == 200
    assert bench.seen[0].path == "/x"


def test_the_request_line_ends_somewhere() -> None:
    fits = b"GET /" + b"a" * (8192 - 14) + b" HTTP/1.1"
    assert len(fits) == 8192
    rest = b"\r\nHost: a\r\n\r\n"
    assert status_of(Bench().feed(fits + rest)) == 200
    assert status_of(Bench().feed(fits.replace(b"/a", b"/aa", 1) + rest)) == 414
    assert status_of(Bench().feed(b"GET /" + b"a" * 9000)) == 414


def test_headers_are_bounded_in_number_and_size() -> None:
    def request(count: int, size_bytes: int = 1) -> bytes:
        headers = b"".join(b"X%d: %b\r\n" % (i, b"v" * size_bytes) for i in range(count - 1))
        return b"GET / HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n"

    assert status_of(Bench().feed(request(100))) == 200
    assert status_of(Bench().feed(request(101))) == 431
    assert status_of(Bench().feed(request(4, 10_000))) == 200
    assert status_of(Bench().feed(request(5, 10_000))) == 431
    assert status_of(Bench().feed(request(5, 10_000)[:-2])) == 431  # not even complete


def test_bodies_are_bounded() -> None:
    assert status_of(Bench(body_bytes=10).feed(post(b"a" * 10))) == 200
    assert status_of(Bench(body_bytes=10).feed(post(b"a" * 11))) == 413
    assert status_of(Bench(body_bytes=10).feed(post(b"a" * 11)[:-11])) == 413
    assert status_of(Bench(body_bytes=10).feed(chunked(b"a" * 5, b"a" * 5))) == 200
    assert status_of(Bench(body_bytes=10).feed(chunked(b"a" * 5, b"a" * 6))) == 413
    huge = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999\r\n\r\n"
    assert status_of(Bench().feed(huge)) == 413


def chunk_request(body: bytes) -> bytes:
    return b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + body


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"3\r\nabc\r\n0\r\n\r\n", 200),
        (b"3;name=value\r\nabc\r\n0\r\nX-T: 1\r\n\r\n", 200),
        (b"00000003\r\nabc\r\n0\r\n\r\n", 200),
        (b'3;n="a;\\"b" ; m\t= v\r\nabc\r\n0\r\n\r\n', 200),
        (b'3;n="a\r\nabc\r\n0\r\n\r\n', 400),
        (b'3;n=a"\r\nabc\r\n0\r\n\r\n', 400),
        (b'3;n="a"b\r\nabc\r\n0\r\n\r\n', 400),
        (b"3;n=\r\nabc\r\n0\r\n\r\n", 400),
        (b"3;\r\nabc\r\n0\r\n\r\n", 400),
        (b"0\r\nHost: b\r\n\r\n", 400),
        (b"0\r\nContent-Length: 5\r\n\r\n", 400),
        (b"0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"0\r\nno colon\r\n\r\n", 400),
        (b"0\r\n folded\r\n\r\n", 400),
        (b"3\r\nabcd\r\n0\r\n\r\n", 400),
        (b"3\nabc\r\n0\r\n\r\n", 400),
        (b"0x3\r\nabc\r\n0\r\n\r\n", 400),
        (b"-3\r\nabc\r\n0\r\n\r\n", 400),
        (b" 3\r\nabc\r\n0\r\n\r\n", 400),
        (b"\r\n", 400),
        (b"g\r\n", 400),
        (b"3;\x00\r\nabc\r\n0\r\n\r\n", 400),
        (b"fffffffffffffffff\r\n", 400),
        (b"ffffffffffffffff\r\n", 413),
        (b"3;" + b"x" * 2000, 400),
        (b"0\r\n" + b"X: %b\r\n" % (b"y" * 500) * 20 + b"\r\n", 431),
    ],
)
def test_chunk_framing(body: bytes, status: int) -> None:
    assert status_of(Bench().feed(chunk_request(body))) == status
    one_by_one = Bench()
    data = chunk_request(body)
    assert status_of(one_by_one.feed(*(data[i : i + 1] for i in range(len(data))))) == status
    if status == 200:
        assert one_by_one.seen[0].body in (b"abc", b"")


def test_expect_100_continue() -> None:
    bench = Bench()
    request = post(b"hello", b"Expect: 100-continue\r\n")
    assert bench.feed(request[:-5]) == b"HTTP/1.1 100 Continue\r\n\r\n"
    spaced = request[:-5].replace(b"continue\r", b"continue \r")
    assert Bench().feed(spaced) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert b"<hello>" in bench.feed(b"hello")
    assert not Bench().feed(request).startswith(b"HTTP/1.1 100")  # the body is there already
    assert status_of(Bench(body_bytes=2).feed(request[:-5])) == 413
    old = request.replace(b"HTTP/1.1", b"HTTP/1.0")
    assert Bench().feed(old[:-5]) == b""


def test_keep_alive_and_close() -> None:
    bench = Bench()
    bench.feed(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Close\r\n\r\n" + GET)
    assert b"connection: close" in bench.transport.out
    assert bench.transport.closed
    assert len(bench.seen) == 1
    bench = Bench()
    bench.feed(b"GET / HTTP/1.0\r\n\r\n")
    assert bench.transport.closed
    bench = Bench()
    bench.feed(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert not bench.transport.closed
    assert b"connection: keep-alive" in bench.transport.out
    bench = Bench()
    bench.feed(b"GET / HTTP/1.0\r\nConnection: TE\r\n\r\n")  # names a header, asks for nothing
    assert b"connection: close" in bench.transport.out and bench.transport.closed


def test_head_has_no_body() -> None:
    bench = Bench()
    out = bench.feed(GET.replace(b"GET", b"HEAD"))
    assert b"content-length: 2" in out
    assert out.endswith(b"\r\n\r\n")
    bench.answer = False
    bench.feed(GET.replace(b"GET", b"HEAD"))
    bench.seen[1].start(200, "text/plain")
    bench.seen[1].write(b"x")
    bench.seen[1].end(b"y")
    assert bench.transport.out.endswith(b"transfer-encoding: chunked\r\n\r\n")
    assert bench.feed(GET) and len(bench.seen) == 3


def test_streaming() -> None:
    bench = Bench()
    bench.answer = False
    bench.feed(GET)
    exchange = bench.seen[0]
    exchange.start(200, "text/event-stream", [("x-a", "b\r\nevil: 1")])
    exchange.write(b"hello")
    exchange.write(b"")
    exchange.end(b"x" * 20)
    exchange.end()
    head, _, body = bench.transport.out.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert b"x-a: b  evil: 1" in head
    assert body == b"5\r\nhello\r\n14\r\n" + b"x" * 20 + b"\r\n0\r\n\r\n"
    with pytest.raises(RuntimeError):
        exchange.respond(200, b"")


def test_streaming_to_http_1_0_ends_with_the_connection() -> None:
    bench = Bench()
    bench.answer = False
    bench.feed(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    bench.seen[0].start(200, "text/plain")
    bench.seen[0].write(b"hello")
    bench.seen[0].end()
    head, _, body = bench.transport.out.partition(b"\r\n\r\n")
    assert b"chunked" not in head and b"connection: close" in head
    assert body == b"hello"
    assert bench.transport.closed


def test_a_client_that_leaves_is_told_once_and_only_before_the_end() -> None:
    for started in (False, True):
        bench = Bench()
        bench.answer = False
        bench.feed(GET + GET)
        calls: list[int] = []
        exchange = bench.seen[0]
        exchange.on_disconnect = lambda calls=calls: calls.append(1)
        if started:
            exchange.start(200, "text/plain")
        bench.connection.eof_received()
        bench.connection.connection_lost(None)
        bench.connection.connection_lost(None)
        assert calls == [1]
        assert exchange.gone
        if not started:
            exchange.start(200, "text/plain")
        exchange.write(b"into the void")
        exchange.end()
        assert len(bench.seen) == 1
        assert b"void" not in bench.transport.out
        assert bench.server.connections == 0


@pytest.mark.parametrize("started", [False, True])
def test_a_half_closed_client_is_gone_at_once_even_if_it_reads_nothing(started: bool) -> None:
    bench = Bench()
    bench.answer = False
    lost: list[int] = []
    bench.feed(GET)
    exchange = bench.seen[0]
    exchange.deadline = bench.connection.deadline = NEVER
    exchange.on_disconnect = lambda: lost.append(1)
    if started:
        exchange.start(200, "text/plain")
        exchange.write(b"some")
        bench.connection.pause_writing()
    bench.connection.eof_received()
    assert lost == [1] and bench.transport.closed and not bench.transport.aborted
    exchange.write(b"void")
    exchange.end()
    assert b"void" not in bench.transport.out
    bench.later(61)  # what is buffered for a client that does not read is dropped in the end
    assert bench.transport.aborted
    bench.connection.connection_lost(None)
    assert lost == [1] and bench.server.connections == 0


def test_what_was_answered_before_the_half_close_is_sent() -> None:
    bench = Bench()
    bench.answer = False
    bench.feed(GET + GET)
    bench.seen[0].respond(200, b"first")
    bench.connection.eof_received()
    assert bench.transport.out.endswith(b"first") and bench.transport.closed
    assert bench.seen[1].gone
    bench.seen[1].start(200, "text/plain")  # discarded: the transport takes no more
    bench.seen[1].end(b"late")


def test_a_route_that_aborts_is_not_called_back() -> None:
    bench = Bench()
    bench.answer = False
    bench.feed(GET)
    exchange = bench.seen[0]
    exchange.on_disconnect = lambda: pytest.fail("it has ended the response itself")
    exchange.start(200, "text/plain")
    exchange.abort()
    bench.connection.connection_lost(None)
    assert bench.transport.aborted and exchange.gone


def test_no_news_after_a_complete_response() -> None:
    bench = Bench()
    bench.answer = False
    bench.feed(GET)
    bench.seen[0].on_disconnect = lambda: pytest.fail("told too late")
    bench.seen[0].respond(200, b"")
    bench.connection.connection_lost(None)


def test_back_pressure_of_a_slow_reader() -> None:
    bench = Bench()
    bench.answer = False
    bench.feed(GET + GET)
    exchange = bench.seen[0]
    drained: list[int] = []
    exchange.on_drain = lambda: drained.append(1)
    exchange.start(200, "text/plain")
    bench.connection.pause_writing()
    assert exchange.above_high_water
    bench.connection.resume_writing()
    assert drained == [1] and not exchange.above_high_water
    bench.connection.pause_writing()
    exchange.end()
    assert len(bench.seen) == 1  # the next request waits until this client reads
    bench.connection.resume_writing()
    assert len(bench.seen) == 2 and drained == [1]
    bench.connection.pause_writing()
    bench.later(59)
    assert not bench.transport.aborted
    bench.later(2)
    assert bench.transport.aborted


def test_deadlines() -> None:
    bench = Bench(header_timeout_s=10, body_timeout_s=20, idle_timeout_s=30)
    bench.later(11)  # connected and said nothing
    assert bench.transport.closed and bench.transport.out == b""

    bench = Bench(header_timeout_s=10, body_timeout_s=20, idle_timeout_s=30)
    for _ in range(9):  # one byte a second buys no time
        bench.feed(b"G")
        bench.later(1)
    assert bench.transport.out == b""
    bench.later(1)
    assert status_of(bench.transport.out) == 408

    bench = Bench(header_timeout_s=10, body_timeout_s=20, idle_timeout_s=30)
    bench.feed(GET)
    bench.later(25)
    bench.feed(GET[:9])  # the head of a later request has no more time than that of the first
    bench.later(9)
    assert bench.refused == []
    bench.later(1)
    assert bench.refused == [408]

    bench = Bench(header_timeout_s=10, body_timeout_s=20, idle_timeout_s=30)
    bench.feed(GET)
    bench.later(29)
    bench.feed(post(b"abc")[:-2])
    bench.later(19)
    bench.feed(b"b")
    assert bench.refused == []
    bench.later(2)
    assert bench.refused == [408]

    bench = Bench(header_timeout_s=10, body_timeout_s=20, idle_timeout_s=30)
    bench.feed(GET)
    bench.later(31)
    assert bench.transport.closed and bench.refused == []

    bench = Bench(header_timeout_s=10)
    bench.answer = False
    bench.feed(GET)
    bench.seen[0].deadline = NEVER
    bench.later(10_000)  # the route has timeouts of its own
    assert not bench.transport.closed and bench.transport.out == b""


LIVE = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"


def crowd(bench: Bench, count: int, peer: str) -> list[MockTransport]:
    """Connections of one client that have a request in progress."""
    transports = []
    for _ in range(count):
        transport, connection = bench.connect(peer)
        connection.data_received(GET)
        transports.append(transport)
    return transports


def test_above_the_cap_only_reserved_paths_are_served() -> None:
    bench = Bench(connections=2)
    bench.answer = False
    bench.feed(GET)
    crowd(bench, 1, "127.0.0.1")
    refused, connection = bench.connect()
    connection.data_received(GET)
    assert status_of(refused.out) == 503 and bench.refused == [503]
    monitor, connection = bench.connect()
    bench.answer = True
    connection.data_received(LIVE)
    assert status_of(monitor.out) == 200 and b"connection: close" in monitor.out.lower()
    bench.connection.connection_lost(None)
    free, connection = bench.connect()
    connection.data_received(GET)
    assert status_of(free.out) == 200


def test_above_the_reserve_a_connection_is_refused_at_once() -> None:
    bench = Bench(connections=1)
    bench.answer = False
    bench.feed(GET)
    for _ in range(100):  # refused ones leave the reserve to others
        _, connection = bench.connect()
        connection.data_received(GET)
    for _ in range(64):
        _, connection = bench.connect()
        connection.data_received(LIVE)
    assert bench.refused == [503] * 100
    refused, _ = bench.connect()
    assert status_of(refused.out) == 503


def test_monitors_get_a_place_while_a_client_connects_again_and_again() -> None:
    bench = Bench(connections=1)
    bench.answer = False
    bench.feed(GET)
    for _ in range(200):
        bench.connect()
    bench.answer = True
    monitor, connection = bench.connect("10.0.0.1")
    connection.data_received(LIVE)
    assert status_of(monitor.out) == 200


def test_idle_connections_give_way() -> None:
    """One client with only idle connections leaves room for others and for itself."""
    bench = Bench(connections=16)
    idle = [bench.transport, *(bench.connect()[0] for _ in range(13))]
    bench.later(2.5)
    newest, connection = bench.connect()
    assert [one.closed for one in idle] == [True] + 13 * [False], "15 of 16: over its share"
    connection.data_received(GET)
    assert status_of(newest.out) == 200
    for number in range(20):
        transport, other = bench.connect(f"10.0.0.{number}")
        other.data_received(GET)
        assert status_of(transport.out) == 200
    assert bench.refused == []


def test_a_client_that_reads_no_answer_keeps_its_place() -> None:
    """It would still have its socket: with others in its place, there were more than the limit."""
    bench = Bench(connections=1)
    bench.feed(GET)
    bench.transport.unsent_bytes = 1
    bench.later(2.5)
    refused, connection = bench.connect()
    connection.data_received(GET)
    assert status_of(refused.out) == 503 and not bench.transport.closed
    bench.transport.unsent_bytes = 0
    served, connection = bench.connect()
    connection.data_received(GET)
    assert status_of(served.out) == 200 and bench.transport.closed


class ConnectionHistory:
    """Random clients of one server, and what must hold after each of their steps."""

    def __init__(self, chance: random.Random, limit: int) -> None:
        self.chance, self.limit = chance, limit
        self.bench = Bench(
            connections=limit, idle_timeout_s=5.0, header_timeout_s=3.0, stall_timeout_s=4.0
        )
        self.alive = [(self.bench.transport, self.bench.connection)]

    def step(self) -> None:
        chance, actions = self.chance, (self.send, self.send, self.respond, self.half_close)
        self.bench.answer = chance.random() < 0.6
        if not self.alive or chance.random() < 0.2:
            peer = chance.choice(("10.0.0.1", "10.0.0.2", "2001:db8::1"))
            self.alive.append(self.bench.connect(peer))
            return
        transport, connection = pair = chance.choice(self.alive)
        if transport.closed or transport.aborted or chance.random() < 0.1:
            self.end(pair)
        else:
            transport.unsent_bytes = chance.choice((0, 0, 9))
            chance.choice((*actions, self.pass_time))(connection)

    def end(self, pair: tuple[MockTransport, HttpConnection]) -> None:
        self.alive.remove(pair)
        pair[1].connection_lost(None)

    def send(self, connection: HttpConnection) -> None:
        text = self.chance.choice(
            (GET, LIVE, GET + GET + GET[:9], b"x\r\n\r\n", post(bytes(99_999)))
        )
        connection.data_received(text[: self.chance.choice((4, 90_000, 200_000))])

    def respond(self, connection: HttpConnection) -> None:
        for pending in [one for one in self.bench.seen if not (one.gone or one.started)][:1]:
            pending.respond(200, b"late", "text/plain")

    def half_close(self, connection: HttpConnection) -> None:
        connection.eof_received()

    def pass_time(self, connection: HttpConnection) -> None:
        server = self.bench.server
        server.clock += 0.4
        for one in [one for one in server._connections if one.deadline <= server.clock]:
            one.sweep()
        if self.chance.random() < 0.02:
            server.drain()

    def check(self) -> None:
        self.bench.server._check()


@settings(deadline=None, max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 20))
def test_any_history_of_connections_leaves_nothing_counted(
    chance: random.Random, limit: int
) -> None:
    history = ConnectionHistory(chance, limit)
    for _ in range(100):
        history.step()
        history.check()
    for pair in list(history.alive):
        history.end(pair)
    bench = history.bench
    assert (bench.server.connections, bench.server.bodies_bytes) == (0, 0)
    bench.answer = True
    served = crowd(bench, limit - limit // 8, "10.0.0.9")
    assert all(status_of(transport.out) == 200 for transport in served)


def test_a_client_with_running_requests_leaves_room_for_others() -> None:
    bench = Bench(connections=16)
    bench.connection.connection_lost(None)
    bench.answer = False
    busy = crowd(bench, 16, "2001:db8::1") + crowd(bench, 2, "2001:db8::2")
    assert [status_of(one.out) if one.out else 0 for one in busy] == 14 * [0] + 4 * [503]
    bench.answer = True
    for peer in ("2001:db8:0:1::1", "::ffff:10.0.0.1"):
        transport, connection = bench.connect(peer)
        connection.data_received(GET)
        assert status_of(transport.out) == 200


def test_a_bug_in_a_route_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()

    def broken(exchange: Exchange) -> None:
        raise ValueError("bug")

    bench.server.handler = broken
    assert status_of(bench.feed(GET)) == 500
    assert "bug" in caplog.text
    assert bench.feed(GET).count(b"500 Internal") == 2

    def later(exchange: Exchange) -> None:
        exchange.start(200, "text/plain")
        raise ValueError("bug")

    bench.server.handler = later
    bench.feed(GET)
    assert bench.transport.aborted


def test_draining_closes_after_the_response() -> None:
    bench = Bench()
    bench.answer = False
    idle, waiting = bench.connect()
    bench.feed(GET)
    bench.server.drain()
    assert not idle.closed and not bench.transport.closed
    waiting.close_when_idle()
    assert idle.closed
    bench.seen[0].respond(200, b"")
    assert b"connection: close" in bench.transport.out and bench.transport.closed
    late, connection = bench.connect()
    bench.answer = True
    connection.data_received(GET)
    assert status_of(late.out) == 200 and late.closed


async def test_a_stall_of_the_server_ends_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came while the process was stopped is read after the sweep that follows."""
    bench = Bench(header_timeout_s=5)
    server, started_s = bench.server, bench.server.clock
    clock = SimpleNamespace(monotonic=lambda: started_s + 30)
    monkeypatch.setattr("dynamo.http.server.time", clock)
    silent, _ = bench.connect()
    server._sweep()
    assert b" 200 " in bench.feed(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    for second in range(31, 40):  # a client that sends nothing then has its usual time
        clock.monotonic = lambda second=second: started_s + second
        server._sweep()
        assert silent.closed == (second >= 34), second


@pytest.mark.parametrize("body", [b"1\r\na\r\n0\r\n\r\n", b"1\r\na\r\n"])
def test_a_body_that_came_with_its_head_is_not_asked_for(body: bytes) -> None:
    """RFC 9110 10.1.1: an interim answer behind the final one would be that of the next request."""
    bench = Bench()
    expects = b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    bench.feed(b"POST /p HTTP/1.1\r\nHost: a\r\n" + expects + body)
    assert b"100 Continue" not in bench.transport.out
