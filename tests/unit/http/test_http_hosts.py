"""Which Host headers are served where: the API of a loopback address is not for web pages."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from dynamo.http import HttpServer
from dynamo.http.errors import HttpStatusError
from dynamo.http.head import HeadReader, HttpLimits


def status(reader: HeadReader, host: str | None, target: str = "/x", version: str = "1.1") -> int:
    line = f"GET {target} HTTP/{version}\r\n"
    head = (line + ("" if host is None else f"Host: {host}\r\n") + "\r\n").encode()
    try:
        reader.read(head, len(head) - 4)
    except HttpStatusError as refusal:
        return refusal.status
    return 200


def test_only_names_of_its_own_and_addresses_are_served() -> None:
    reader = HeadReader(HttpLimits())
    assert status(reader, "evil.example") == 200
    reader = HeadReader(HttpLimits())
    reader.serve_only(["Gpu-Box.lan"])
    for host in (
        *("localhost", "localhost:8000", "LOCALHOST", "localhost.", "127.0.0.1:8000", "[::1]:8000"),
        *("127.8.0.1", "192.168.1.2", "gpu-box.lan", "gpu-box.LAN:80", "0.0.0.0:8000"),
    ):
        assert status(reader, host) == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io"):
        assert [status(reader, host), status(reader, host)] == [403, 403], host
    for host in ("2130706433", "0x7f000001", "127.1", "gpu-box", "a.localhost", "[::1", "[1]"):
        assert status(reader, host) in (400, 403), host
    assert status(reader, None, version="1.0") == 200  # no browser
    assert status(reader, "localhost", "http://evil.example/x") == 403
    assert status(reader, "localhost", "http://localhost:80/x") == 200


def test_a_refused_host_is_told_the_remedy() -> None:
    reader = HeadReader(HttpLimits())
    reader.serve_only([], "; ask the operator")
    with pytest.raises(HttpStatusError) as caught:
        reader.read(b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % (b"x" * 5000), 5026)
    assert (
        caught.value.message.endswith("an IP address; ask the operator")
        and len(caught.value.message) < 300
    )


@pytest.mark.parametrize(
    ("address", "names", "served"),
    [
        ("127.0.0.1", None, 200),
        ("127.0.0.1", (), 403),
        ("localhost", (), 403),
        ("127.0.0.1", ("evil.example",), 200),
        ("127.0.0.1", ("*",), 200),
        ("0.0.0.0", (), 200),
        ("0.0.0.0", ("good.example",), 403),
    ],
)
async def test_where_any_host_is_served(
    address: str, names: tuple[str, ...] | None, served: int
) -> None:
    server = HttpServer(lambda exchange: exchange.respond(200, b""))
    _, port = await server.bind(address, 0, names)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)  # bound, but not listening yet
    await server.listen()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /x HTTP/1.1\r\nHost: evil.example\r\n\r\n")
    assert int((await reader.readline())[9:12]) == served
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    await server.close()


async def test_a_server_that_never_listened_can_be_closed() -> None:
    server = HttpServer(lambda exchange: exchange.respond(200, b""))
    await server.bind("127.0.0.1", 0)
    await server.close()
