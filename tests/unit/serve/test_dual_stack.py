"""A frontend at ``::`` is reached by IPv4, too, however it gets its socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest
from boxes import needs_ipv6
from deployment import free_port

from dynamo.errors import ConfigError
from dynamo.http.server import HttpServer
from dynamo.serve.graph.facts import FrontendAddress
from dynamo.serve.readiness import check_free
from dynamo.serve.supervision.supervised_process import FrontendListener


@pytest.mark.parametrize(
    ("host", "families"),
    [
        pytest.param("::", 2, marks=needs_ipv6),
        pytest.param("::1", 1, marks=needs_ipv6),
        ("0.0.0.0", 1),
    ],
)
def test_the_arbiter_binds_both_families(host: str, families: int) -> None:
    port = free_port()
    listener = FrontendListener(FrontendAddress(host, port))
    _, (number,) = listener.inherited({})
    with contextlib.closing(listener), socket.socket(fileno=os.dup(number)) as bound:
        bound.listen()
        reached = 0
        for target in ("127.0.0.1", "::1"):
            with contextlib.suppress(OSError), socket.create_connection((target, port), 5):
                reached += 1
        assert reached == families


@needs_ipv6
def test_an_ipv4_listener_is_in_the_way_of_both() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        check_free(FrontendAddress("::1", port))
        with pytest.raises(ConfigError, match="cannot listen on"):
            check_free(FrontendAddress("::", port))


@needs_ipv6
def test_a_frontend_alone_binds_both_families() -> None:
    async def connect() -> None:
        server = HttpServer(lambda exchange: exchange.respond(200, b""))
        _, port = await server.start("::", 0)
        try:
            for target in ("127.0.0.1", "::1"):
                _, writer = await asyncio.open_connection(target, port)
                writer.close()
                await writer.wait_closed()
        finally:
            await server.close()

    asyncio.run(connect())
