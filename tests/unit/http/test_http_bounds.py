"""What one client may cost the others: loop turns, bytes of unfinished bodies, deadlines."""

from __future__ import annotations

import asyncio

import pytest
from http_bench import Bench

from dynamo.http import Exchange

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
KIB = 1024


def status_of(out: bytes) -> int:
    assert out.startswith(b"HTTP/1.1 "), out
    return int(out[9:12])


def announced(size_bytes: int) -> bytes:
    return b"POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size_bytes


async def turns(count: int = 100) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_many_small_chunks_take_many_turns() -> None:
    bench = Bench()
    bench.feed(CHUNKED, b"1\r\na\r\n" * 4000 + b"0\r\n\r\n" + GET)
    assert bench.transport.paused and not bench.seen
    await asyncio.sleep(0)
    assert bench.transport.paused and not bench.seen
    await turns()
    assert [one.body for one in bench.seen] == [b"a" * 4000, b""]
    assert not bench.transport.paused
    assert bench.transport.out.count(b"200 OK") == 2


async def test_connections_with_small_chunks_wait_for_one_another() -> None:
    bench = Bench()
    clients = [bench.connect() for _ in range(50)]
    for _, connection in clients:
        connection.data_received(CHUNKED + b"1\r\na\r\n" * 500 + b"0\r\n\r\n")
    assert all(transport.paused for transport, _ in clients)
    await asyncio.sleep(0)
    # At most so many have been served in this turn; the others are still queued.
    assert 0 < sum(not transport.paused for transport, _ in clients) <= 8
    await turns(200)
    assert not any(transport.paused for transport, _ in clients)
    assert [one.body for one in bench.seen] == [b"a" * 500] * 50


async def test_chunks_that_wait_to_be_decoded_count_too() -> None:
    bench = Bench(bodies_bytes=100 * KIB, body_bytes=100 * KIB)
    clients = [bench.connect() for _ in range(3)]
    for _, connection in clients:
        connection.data_received(CHUNKED + b"1\r\na\r\n" * 20_000)
    assert [bool(transport.out) for transport, _ in clients] == [False, True, True]
    assert status_of(clients[1][0].out) == 503


async def test_a_refused_backlog_is_read_and_discarded() -> None:
    """Unread bytes would reset the connection, and the client would not see the refusal."""
    bench = Bench(body_bytes=2000)
    bench.feed(CHUNKED, b"1\r\na\r\n" * 4000)
    assert bench.transport.paused
    await turns()
    assert status_of(bench.transport.out) == 413 and bench.transport.eof
    bench.feed(b"1\r\na\r\n" * 4000)
    assert not bench.transport.closed and not bench.transport.paused


async def test_a_backlog_of_chunks_ends_with_its_connection() -> None:
    for end in ("lost", "timeout"):
        bench = Bench(body_timeout_s=1)
        bench.feed(CHUNKED, b"1\r\na\r\n" * 2000)
        if end == "lost":
            bench.connection.connection_lost(None)
        else:
            bench.later(2)
            assert status_of(bench.transport.out) == 408
        await turns()
        assert not bench.seen and not bench.server.bodies_bytes


async def test_chunk_framing_must_be_in_proportion() -> None:
    bench = Bench()
    bench.feed(CHUNKED, b"1\r\na\r\n" * 20_000)
    await turns(200)
    assert status_of(bench.transport.out) == 400
    assert b"send larger chunks" in bench.transport.out
    bench = Bench()
    bench.feed(CHUNKED, b"10;x=%b\r\n%b\r\n" % (b"y" * 1000, b"a" * 16) * 70)
    assert status_of(bench.transport.out) == 400
    bench = Bench()
    bench.feed(CHUNKED, b"8\r\naaaaaaaa\r\n" * 20_000 + b"0\r\n\r\n")
    await turns(200)
    assert status_of(bench.transport.out) == 200


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 400)])
def test_framing_may_take_as_much_as_the_content_and_64_kib(more: int, status: int) -> None:
    last = b"0\r\n\r\n"
    lengths = [509] * 127 + [509 - len(last) + more]  # of the line of a chunk with one byte
    chunks = [b"1;x=".ljust(length, b"y") + b"\r\na\r\n" for length in lengths]
    assert sum(map(len, chunks)) + len(last) == 2 * 128 + 64 * KIB + more
    bench = Bench()
    bench.feed(CHUNKED, b"".join([*chunks, last]))
    assert status_of(bench.transport.out) == status


def test_unfinished_bodies_have_a_budget_together() -> None:
    bench = Bench(bodies_bytes=10, body_bytes=500 * KIB)
    bench.feed(announced(500 * KIB))
    assert bench.transport.out == b""  # one body always fits
    bench = Bench(bodies_bytes=430 * KIB, body_bytes=400 * KIB)
    clients = [bench.connect() for _ in range(4)]
    for transport, connection in clients[:3]:
        connection.data_received(announced(300 * KIB) + b"x" * (160 * KIB))
        assert transport.out == b""
    assert bench.server.bodies_bytes == 3 * 96 * KIB
    transport, connection = clients[3]
    connection.data_received(CHUNKED + b"60000\r\n" + b"x" * (160 * KIB))
    assert transport.out == b""
    connection.data_received(b"x" * (160 * KIB))
    assert status_of(transport.out) == 503
    assert b"\r\nretry-after: 1\r\n" in transport.out
    assert b"Unfinished request bodies exceed" in transport.out
    assert bench.server.bodies_bytes == 3 * 96 * KIB
    # Short bodies are always read.
    transport, connection = bench.connect()
    connection.data_received(announced(60 * KIB))
    connection.data_received(b"x" * 60 * KIB)
    assert status_of(transport.out) == 200
    # Whatever ends a body gives its bytes back.
    clients[0][1].connection_lost(None)
    assert bench.server.bodies_bytes == 2 * 96 * KIB
    clients[1][1].data_received(b"x" * (12 * KIB))
    assert bench.server.bodies_bytes == (96 + 108) * KIB
    clients[1][1].deadline = 0
    clients[1][1].sweep()
    assert status_of(clients[1][0].out) == 408
    assert bench.server.bodies_bytes == 96 * KIB
    clients[2][1].data_received(b"x" * (140 * KIB))
    assert status_of(clients[2][0].out) == 200 and len(bench.seen[-1].body) == 300 * KIB
    assert bench.server.bodies_bytes == 0


def test_an_exchange_without_a_response_ends_at_its_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(response_timeout_s=60)
    bench.answer = False
    bench.feed(GET)
    exchange = bench.seen[0]
    left: list[int] = []
    exchange.on_disconnect = lambda: left.append(1)
    bench.later(59)
    assert bench.transport.out == b""
    bench.later(2)
    assert status_of(bench.transport.out) == 504
    assert left == [1] and exchange.gone and "GET /x: no response in time" in caplog.text
    out = bench.transport.out
    exchange.respond(200, b"too late")  # discarded
    exchange.start(200, "text/plain")
    exchange.write(b"too late")
    exchange.end()
    assert bench.transport.out == out
    bench.feed(GET)
    bench.seen[1].respond(200, b"next")
    assert bench.transport.out.endswith(b"next")


def test_a_started_response_is_cut_at_its_deadline() -> None:
    bench = Bench(response_timeout_s=60)
    bench.answer = False
    bench.feed(GET)
    bench.seen[0].start(200, "text/plain")
    bench.connection.pause_writing()
    bench.connection.resume_writing()
    bench.later(61)
    assert bench.transport.aborted


def test_a_route_may_answer_for_itself_at_the_deadline() -> None:
    bench = Bench(response_timeout_s=60)
    bench.answer = False
    bench.feed(GET)
    exchange = bench.seen[0]
    exchange.on_expired = lambda: exchange.refuse(503, "later")
    exchange.on_disconnect = lambda: pytest.fail("it has responded")
    bench.later(61)
    assert status_of(bench.transport.out) == 503


class Panic(BaseException):
    """What a library in Rust raises when it panics."""


@pytest.mark.parametrize("error", [RecursionError, MemoryError, Panic])
def test_whatever_a_route_raises_is_a_500(error: type[BaseException]) -> None:
    def route(exchange: Exchange) -> None:
        raise error

    bench = Bench(route)
    assert bench.feed(GET, GET).count(b"HTTP/1.1 500 ") == 2


def test_an_error_after_the_response_cuts_nothing() -> None:
    def route(exchange: Exchange) -> None:
        exchange.respond(200, b"good")
        raise ValueError("afterwards")

    bench = Bench(route)
    assert bench.feed(GET, GET).count(b"good") == 2
    assert not bench.transport.aborted


def test_an_error_while_reading_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def read(data: bytes, end: int) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(bench.server.reader, "read", read)
    assert status_of(bench.feed(GET)) == 500
    assert bench.transport.eof
