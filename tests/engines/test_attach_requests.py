"""Requests through ``dynamo.attach`` to a small real server, byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psutil
import pytest
from attach_kit import CHAT, Upstream, fetch, open_request, upstream
from deployment import Deployment
from mocker_kit import Caller, caller

from dynamo.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    HttpFailure,
    InvalidArgument,
    Overloaded,
)
from dynamo.protocols import codec
from dynamo.protocols.engine import HttpRequest
from dynamo.runtime import Context
from dynamo.runtime.requests import ResponseStream

Shared = tuple[Caller, Upstream]


@asynccontextmanager
async def attached(
    deployment: Deployment, *flags: str, models: tuple[str, ...] = ("m",)
) -> AsyncIterator[tuple[Caller, Upstream]]:
    """Yield a caller of a worker in front of a server."""
    with upstream(deployment, models=models) as server:
        deployment.start("dynamo.attach", "--url", server.url, *flags)
        async with asyncio.timeout(60), caller(deployment) as here:
            yield here, server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Upstream]]:
    """A server and a worker in front of it, for the tests that do not change them."""
    made = Deployment(tmp_path_factory.mktemp("attached"))
    try:
        with upstream(made) as server:
            made.start("dynamo.attach", "--url", server.url)
            yield made, server
    finally:
        made.close()


@pytest.fixture
async def shared(
    running: tuple[Deployment, Upstream],
) -> AsyncIterator[tuple[Caller, Upstream]]:
    """A caller of that worker, and the server, which has seen nothing yet."""
    deployment, server = running
    server.set(seen={"requests": [], "connections": 0, "aborted": 0})
    async with asyncio.timeout(60), caller(deployment) as here:
        yield here, server


async def aborted(server: Upstream, count: int) -> None:
    """Wait until the server has seen ``count`` aborted responses."""
    await asyncio.to_thread(server.until, lambda: server.seen["aborted"] >= count)


async def test_bodies_and_headers_pass_unchanged(shared: Shared) -> None:
    here, server = shared
    body = b'{ "model": "m", "unknown": 1e400, "n":[1, 2.50], "text":"\\u00e9" }'
    headers = (("x-mine", "yes"), ("connection", "x-hop"), ("x-hop", "1"), ("te", "trailers"))
    head, answer = await fetch(here, body, headers=headers)
    assert (head.status, answer) == (200, body)
    path, sent, received = server.seen["requests"][0]
    assert (path, received) == (CHAT, body.decode())
    assert ["x-mine", "yes"] in sent
    assert not {"x-hop", "te", "connection", "authorization"} & {name for name, _ in sent}


async def test_an_error_of_the_server_keeps_status_and_body(shared: Shared) -> None:
    here, _ = shared
    head, answer = await fetch(here, {"model": "m", "status": 429, "why": "slow down"})
    assert head.status == 429 and json.loads(answer)["why"] == "slow down"


async def test_a_stream_arrives_piece_by_piece_on_kept_connections(shared: Shared) -> None:
    here, server = shared
    body = {"model": "m", "mode": "stream", "pieces": 3, "pause_s": 0.2}
    connections = server.seen["connections"]
    for _ in range(2):
        items = [item async for item in open_request(here, body)]
        assert (
            len(items) > 2
        )  # a head, then what has arrived; a busy machine reads two pieces at once
        assert b"x-request-id" in items[0] and b"x-private" not in items[0]
        assert b"".join(items[1:]) == b"data: x\n\n" * 3
    # One for both requests; this question and the one above need one each.
    assert server.seen["connections"] - connections <= 3


@pytest.mark.parametrize("kind", ["stop", "kill"])
async def test_a_cancellation_closes_the_connection(shared: Shared, kind: str) -> None:
    here, server = shared
    context = Context()
    body = {"model": "m", "mode": "stream", "pieces": 1000, "pause_s": 0.02}
    stream = open_request(here, body, context=context)
    await anext(stream)
    assert (await anext(stream)).startswith(b"data: x\n\n")
    (context.stop_generating if kind == "stop" else context.kill)()
    await aborted(server, 1)


async def test_a_slow_reader_pauses_the_server(
    shared: Shared, running: tuple[Deployment, Upstream]
) -> None:
    here, _ = shared
    size, pieces = 1 << 18, 400
    stream = open_request(here, {"model": "m", "mode": "stream", "pieces": pieces, "size": size})
    await anext(stream)
    await asyncio.sleep(0.5)  # the reader is idle: 100 MiB must not collect anywhere
    worker = running[0].processes[0].pid
    assert psutil.Process(worker).memory_info().rss < 150 << 20
    assert sum([len(part) async for part in stream]) == pieces * (size + 8)


async def test_a_broken_response_is_disconnected(shared: Shared) -> None:
    here, _ = shared
    stream = open_request(here, {"model": "m", "mode": "break"})
    await anext(stream)
    with pytest.raises(Disconnected, match="disconnected"):
        await fetch_rest(stream)


async def fetch_rest(stream: ResponseStream) -> bytes:
    return b"".join([item async for item in stream])


async def test_a_silent_server_times_out(deployment: Deployment) -> None:
    async with attached(deployment, "--response-timeout-secs", "0.5") as (here, _):
        with pytest.raises(ConnectionTimeout, match=r"sent nothing for 0\.5 s"):
            await fetch(here, {"model": "m", "mode": "silent"})


async def test_a_request_on_a_connection_that_just_closed_is_sent_again(
    deployment: Deployment,
) -> None:
    async with attached(deployment) as (here, server):
        await fetch(here, {"model": "m"})
        with pytest.raises(Disconnected):
            await fetch(here, {"model": "m", "mode": "drop"})
        # On the kept connection, then once on a new one, where it counts.
        modes = [json.loads(body).get("mode") for _, _, body in server.seen["requests"]]
        assert modes == [None, "drop", "drop"]


async def test_a_dead_server_is_a_connection_error(deployment: Deployment) -> None:
    async with attached(deployment, "--poll-interval-secs", "60") as (here, server):
        server.kill()
        with pytest.raises(CannotConnect, match="cannot connect to http://127"):
            await fetch(here, {"model": "m"})
        await here.until(lambda: not here.client.instance_ids())  # told by the request, no poll


async def test_only_the_routes_of_the_server_are_relayed(shared: Shared) -> None:
    here, server = shared
    for path in ("/metrics", "/v1/other", "/v1/../metrics", "//v1/chat/completions"):
        with pytest.raises(HttpFailure, match="does not offer"):
            await fetch(here, {"model": "m"}, path)
    with pytest.raises(InvalidArgument, match="line end"):
        await fetch(here, {"model": "m"}, headers=(("x", "1\r\ny: 2"),))
    stream = ResponseStream(decode=lambda item: item)
    payload = codec.encode(HttpRequest("CONNECT", CHAT))
    worker = here.client.instance_ids()[0]
    stream.attach(here.client.open(worker, payload, stream.sink))
    with pytest.raises(HttpFailure, match="is not relayed"):
        await anext(stream)
    assert server.seen["requests"] == []


OTHER_METHODS = (
    ("GET /v1/server?a=%20b&model=mine", b"", "GET /v1/server?a=%20b&model=a%2Fm"),
    ("DELETE /v1/responses/mine", b"\0", "DELETE /v1/responses/a%2Fm"),
    ("POST /v1/responses/r_1/cancel", b"{ }", "POST /v1/responses/r_1/cancel"),
    ("GET /v1/responses/r_1?model=other", b"", "GET /v1/responses/r_1?model=other"),
)
"""What is asked, its body, and the line that the server gets."""


async def test_other_methods_pass_unchanged(deployment: Deployment) -> None:
    headers = (("x-mine", "1"), ("connection", "x-hop"), ("x-hop", "1"))
    with upstream(deployment, "vllm", ("a/m",)) as server:
        deployment.start("dynamo.attach", "--url", server.url, "--served-model-name", "mine")
        async with asyncio.timeout(60), caller(deployment) as here:
            for asked, body, line in OTHER_METHODS:
                head, answer = await fetch(here, body, asked, headers)
                sent_line, names, received = answer.split(b"\n", 2)
                assert head.status == 200 and ("content-type", "application/x-echo") in head.headers
                assert sent_line.decode() == f"{line} HTTP/1.1" and received == body
                length = "" if line.startswith("GET") else "content-length "
                assert names.decode() == f"{length}host x-mine"
            for wrong in ("PUT /v1/server", "DELETE /v1/server", "GET /v1/chat/completions"):
                with pytest.raises(HttpFailure, match=r"does not offer|is not relayed"):
                    await fetch(here, b"", wrong)


async def test_the_key_of_the_server_replaces_the_clients(deployment: Deployment) -> None:
    async with attached(deployment, "--api-key", "s3cret") as (here, server):
        await fetch(here, {"model": "m"}, headers=(("authorization", "Bearer client"),))
        sent = [pair for pair in server.seen["requests"][0][1] if pair[0] == "authorization"]
        assert sent == [["authorization", "Bearer s3cret"]]


async def test_a_renamed_model_has_the_servers_name_upstream(deployment: Deployment) -> None:
    async with attached(deployment, "--served-model-name", "mine") as (here, server):
        body = b'{"model" : "mine" , "big": 123456789012345678901234567890, "f": 1.50}'
        head, _ = await fetch(here, body)
        assert head.status == 200
        received = server.seen["requests"][0][2]
        assert received == '{"model":"m","big":123456789012345678901234567890,"f":1.50}'


async def test_admission_is_that_of_every_worker(deployment: Deployment) -> None:
    flags = ("--engine-request-limit", "1")
    body = {"model": "m", "mode": "stream", "pieces": 1000, "pause_s": 0.02}
    async with attached(deployment, *flags) as (here, server):
        context = Context()
        running = open_request(here, body, context=context)
        await anext(running)
        queued = [open_request(here, {"model": "m", "number": n}) for n in range(16)]
        with pytest.raises(Overloaded):
            await fetch(here, {"model": "m", "number": 16})
        assert len(server.seen["requests"]) == 1
        queued[0].sink.stream.kill()  # type: ignore[union-attr]
        context.kill()
        for stream in queued[1:]:
            assert len([item async for item in stream]) >= 2
        numbers = [json.loads(one[2]).get("number") for one in server.seen["requests"]]
        assert numbers == [None, *range(1, 16)]
        await aborted(server, 1)
