"""TLS on real sockets: handshakes, deadlines, plain HTTP, clients' certificates, rotation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import select
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, needs_openssl, plain_context
from until import until

from dynamo.errors import ConfigError
from dynamo.http import Exchange, HttpLimits, HttpServer
from dynamo.http.access import Access
from dynamo.http.tls import ServerTls, validity

pytestmark = needs_openssl
GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
OPEN = frozenset(("/live",))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


class Site:
    """An echo server behind TLS whose certificate files may be replaced."""

    def __init__(self, at: Path, authority: Authority, client_ca: str | None = None) -> None:
        self.authority = authority
        self.cert, self.key = str(at / "site.crt"), str(at / "site.key")
        self.install("first")
        self.client_ca = client_ca
        self.held: asyncio.Queue[Exchange] = asyncio.Queue()
        self.refused: list[int] = []
        self.port = 0
        self.server: HttpServer

    def install(self, name: str) -> None:
        for made, at in zip(self.authority.sign(name), (self.cert, self.key), strict=True):
            shutil.copy(made, at)

    async def start(self, **limits: Any) -> None:
        tls = ServerTls(self.cert, self.key, self.client_ca)
        given = {"sweep_s": 0.02, "linger_s": 0.1, **limits}
        access = Access(tls=tls, is_open=OPEN.__contains__)
        bounds = HttpLimits(**given)
        self.server = HttpServer(self.handle, bounds, self.refused.append, access=access)
        _, self.port = await self.server.start("127.0.0.1", 0)

    def handle(self, exchange: Exchange) -> None:
        if exchange.path == "/hold":
            self.held.put_nowait(exchange)
        else:
            exchange.respond(200, exchange.body or b"empty", "text/plain")

    async def connect(
        self, context: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = context or self.authority.trust()
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=context, limit=1 << 24)


@pytest.fixture
async def site(tmp_path: Path, authority: Authority) -> AsyncIterator[Site]:
    site = Site(tmp_path, authority)
    await site.start()
    yield site
    await site.server.close(0.2)


async def response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head[9:12]), await reader.readexactly(length)


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


def name_of(writer: asyncio.StreamWriter) -> str:
    subject = writer.get_extra_info("peercert")["subject"]
    return str(dict(pair[0] for pair in subject)["commonName"])


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_keep_alive_and_large_bodies(site: Site, version: ssl.TLSVersion) -> None:
    context = site.authority.trust()
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    reader, writer = await site.connect(context)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    body = bytes(range(256)) * 8192
    for _ in range(3):
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)
        assert await response(reader) == (200, body)
    writer.write(GET * 50)  # pipelined
    assert [await response(reader) for _ in range(50)] == [(200, b"empty")] * 50
    await shut(writer)


async def test_old_versions_are_refused(site: Site) -> None:
    context = plain_context.__wrapped__()
    with pytest.warns(DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1_1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        await site.connect(context)
    await until(lambda: site.server.connections == 0)


async def test_a_stream_ends_with_a_message_of_tls(site: Site) -> None:
    reader, writer = await site.connect()
    writer.write(
        GET.replace(b"/x", b"/hold").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    )
    exchange = await site.held.get()
    assert exchange.peer == "127.0.0.1"
    exchange.start(200, "text/event-stream")
    for number in range(100):
        exchange.write(b"data: %d\n\n" % number)
        await asyncio.sleep(0)
    exchange.end()
    # Without the message, ssl would raise an error for the cut.
    assert (await reader.read()).count(b"data: ") == 100
    await shut(writer)


async def test_a_slow_reader_stops_the_writer_and_starts_it_again(site: Site) -> None:
    reader, writer = await site.connect()
    writer.write(GET.replace(b"/x", b"/hold"))
    exchange = await site.held.get()
    drained = asyncio.Event()
    exchange.on_drain = drained.set
    exchange.start(200, "text/plain")
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    sent = 0
    while not exchange.above_high_water:
        exchange.write(b"#" * 65536)
        sent += 1
        await asyncio.sleep(0)
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    await asyncio.wait_for(drained.wait(), 20)
    exchange.end()
    assert (await reader.readuntil(b"0\r\n\r\n")).count(b"#") == sent * 65536
    await shut(writer)


async def test_a_client_that_leaves_is_noticed(site: Site) -> None:
    for cut in (False, True):
        gone = asyncio.Event()
        _, writer = await site.connect()
        writer.write(GET.replace(b"/x", b"/hold"))
        exchange = await site.held.get()
        exchange.on_disconnect = gone.set
        if cut:
            writer.transport.abort()
        await shut(writer)
        await asyncio.wait_for(gone.wait(), 20)


async def test_a_request_in_pieces(site: Site) -> None:
    """Bytes of records arrive one by one: the handshake and a request."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = site.authority.trust().wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)

    async def send() -> None:
        for byte in outgoing.read():
            writer.write(bytes([byte]))
            await asyncio.sleep(0)

    async def pump(step: Callable[[], Any]) -> Any:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                await send()
                incoming.write(await reader.read(65536))

    await pump(client.do_handshake)
    client.write(GET)
    assert b"200 OK" in await pump(lambda: client.read(65536))
    await shut(writer)


async def test_an_upload_in_thousands_of_chunks_goes_on_after_each_pause(site: Site) -> None:
    """The rest of what was received before a pause is read, though nothing follows it."""
    reader, writer = await site.connect()
    count, chunk = 20_000, b"x" * 8  # a thousand in a record of TLS
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write((b"8\r\n" + chunk + b"\r\n") * count + b"0\r\n\r\n")
    async with asyncio.timeout(30):
        assert await response(reader) == (200, chunk * count)
    await shut(writer)


async def test_a_handshake_has_a_deadline_and_counts(tmp_path: Path, authority: Authority) -> None:
    site = Site(tmp_path, authority)
    await site.start(header_timeout_s=1.0)
    half = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(20)]
    await until(lambda: site.server.connections == 20)
    for number, (_, writer) in enumerate(half):
        if number % 2:  # a record header that announces 16 KiB, then a byte now and then
            writer.write(b"\x16\x03\x01\x40\x00")
    reader, writer = await site.connect()
    writer.write(GET)
    assert await response(reader) == (200, b"empty")
    await shut(writer)
    for number, (slow_reader, slow_writer) in enumerate(half):
        if number % 2:
            slow_writer.write(b"\x01")
        assert await slow_reader.read() == b""
        await shut(slow_writer)
    await until(lambda: site.server.connections == 0)
    await site.server.close(0.2)


async def test_many_handshakes_take_many_turns(site: Site) -> None:
    """100 clients that begin at once do not stop the loop for the time of 100 handshakes."""
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        plain_context().wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    data = hello.read()
    clients = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(100)]
    for one in clients:
        one.sendall(data + b"x" * 10)  # the rest of it is not the next message of a handshake
        one.setblocking(False)
    answered = [0]
    while answered[-1] < len(clients):
        await asyncio.sleep(0)
        ready, _, _ = select.select(clients, [], [], 0)
        answered.append(len(ready))
    assert max(after - before for before, after in pairwise(answered)) <= 8
    for one in clients:
        one.close()
    await until(lambda: site.server.connections == 0)


async def test_over_the_limit_is_503_and_a_handshake_gives_way(
    tmp_path: Path, authority: Authority
) -> None:
    site = Site(tmp_path, authority)
    await site.start(connections=1, header_timeout_s=5.0, linger_s=5.0)
    _, idle = await asyncio.open_connection("127.0.0.1", site.port)
    await until(lambda: any(not site.server._is_new(one) for one in site.server._connections))
    _, waiting = await site.connect()  # in the place of the idle one
    waiting.write(GET.replace(b"/x", b"/hold"))
    await site.held.get()
    reader, writer = await site.connect()
    writer.write(GET)
    assert (await response(reader))[0] == 503
    assert await reader.read() == b""
    await shut(writer)
    await shut(idle)
    await shut(waiting)
    await site.server.close(0.2)


async def test_plain_http_gets_a_plain_explanation(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(GET)
    status, body = await response(reader)
    assert status == 400 and b"use https://" in body
    assert await reader.read() == b""
    await shut(writer)
    assert site.refused == [400]


@pytest.mark.parametrize("junk", [b"\x00" * 100, b"\x16\x03\x01\x00\x02zz", b"\x80.\x01\x00\x02"])
async def test_junk_costs_its_connection_alone(
    tmp_path: Path, authority: Authority, junk: bytes
) -> None:
    site = Site(tmp_path, authority)
    await site.start(header_timeout_s=0.2)  # some of it looks like a part of a message
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(junk)
    with contextlib.suppress(ConnectionError):
        await reader.read()  # an alert, perhaps
    await shut(writer)
    await until(lambda: site.server.connections == 0)
    await site.server.close(0.2)


async def test_the_server_ends_a_handshake_that_fails(tmp_path: Path, authority: Authority) -> None:
    """At once, also if the client keeps its side open: until its deadline it would hold a place."""
    site = Site(tmp_path, authority)
    await site.start(header_timeout_s=600.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"\x17\x03\x03\x00\x05hello")
    async with asyncio.timeout(20):
        alert = await reader.read()
    assert alert[:2] == b"\x15\x03", "of OpenSSL"
    await shut(writer)
    await site.server.close(0.2)


async def test_damaged_records_end_the_request(site: Site) -> None:
    gone = asyncio.Event()
    raw = socket.create_connection(("127.0.0.1", site.port))
    raw.setblocking(False)
    _, writer = await asyncio.open_connection(sock=raw, ssl=plain_context(), server_hostname="")
    writer.write(GET.replace(b"/x", b"/hold"))
    exchange = await site.held.get()
    exchange.on_disconnect = gone.set
    exchange.start(200, "text/plain")
    other = socket.socket(fileno=os.dup(raw.fileno()))
    other.send(b"\x17\x03\x03\x00\x20" + b"x" * 32)
    other.close()
    await asyncio.wait_for(gone.wait(), 20)
    exchange.write(b"ignored")
    exchange.end()
    await shut(writer)


@pytest.mark.parametrize("seed", range(3))
async def test_random_clients(site: Site, seed: int) -> None:
    """Bodies of any size in any pieces, answered byte for byte; cuts leave nothing behind."""
    chance = random.Random(seed)

    async def client() -> None:
        reader, writer = await site.connect()
        for _ in range(chance.randrange(1, 6)):
            body = chance.randbytes(chance.choice((0, 1, 500, 16384, 70_000, 300_000)))
            head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
            data = head + body
            while data:
                size = chance.choice((1, 7, 4096, 16385, len(data)))
                writer.write(data[:size])
                data = data[size:] if size > 1 or len(data) < 5000 else data[1:]
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
                if chance.random() < 0.01:
                    writer.transport.abort()
                    await shut(writer)
                    return
            assert await response(reader) == (200, body or b"empty")
        await shut(writer)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(client())
    await until(lambda: site.server.connections == 0)
    assert site.server.bodies_bytes == 0


async def test_a_new_certificate_for_new_connections(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await site.connect()
    assert name_of(writer) == "first"
    writer.write(GET)  # within the time for a first head
    assert await response(reader) == (200, b"empty")
    site.install("second")
    await until(lambda: "reloaded" in caplog.text)
    other_reader, other = await site.connect()
    assert name_of(other) == "second"
    for one_reader, one in ((reader, writer), (other_reader, other)):
        one.write(GET)
        assert await response(one_reader) == (200, b"empty")
    caplog.clear()
    third = site.authority.sign("third")
    shutil.copy(third[1], site.key)  # the key alone
    await until(lambda: "is not the key of" in caplog.text)
    _, again = await site.connect()
    assert name_of(again) == "second"
    caplog.clear()
    shutil.copy(third[0], site.cert)  # now its certificate
    await until(lambda: "reloaded" in caplog.text)
    _, last = await site.connect()
    assert name_of(last) == "third"
    for one in (writer, other, again, last):
        await shut(one)


async def test_client_certificates(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "clients").mkdir()
    clients = Authority(tmp_path / "clients", "clients")
    site = Site(tmp_path, authority, clients.ca)
    await site.start()
    own = site.authority.trust()
    own.load_cert_chain(*clients.sign("alice"))
    reader, writer = await site.connect(own)
    writer.write(GET)
    assert await response(reader) == (200, b"empty")
    await shut(writer)
    reader, writer = await site.connect()  # without a certificate
    writer.write(GET.replace(b"/x", b"/live"))
    assert await response(reader) == (200, b"empty")
    writer.write(GET)
    status, body = await response(reader)
    assert status == 403 and b"client certificate" in body
    await shut(writer)
    stranger = site.authority.trust(*authority.sign("mallory"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        reader, writer = await site.connect(stranger)
        writer.write(GET.replace(b"/x", b"/live"))
        await response(reader)
    await site.server.close(0.2)


def test_a_client_cannot_renegotiate(tmp_path: Path, authority: Authority) -> None:
    """Each time costs a handshake, without a new connection that a limit counts."""
    cert, key = authority.sign("fixed")
    context = ServerTls(str(cert), str(key)).context
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_errors_at_the_start(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.sign("one")
    _, other_key = authority.sign("two")
    (tmp_path / "text").write_text("hello")
    text, missing = str(tmp_path / "text"), str(tmp_path / "missing")
    (tmp_path / "locked").write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    (tmp_path / "torn").write_text(Path(key).read_text()[:100])
    for given, message in (
        ((missing, key), f"--tls-cert-path {missing}: No such file"),
        ((cert, missing), f"--tls-key-path {missing}: No such file"),
        ((cert, other_key), f"--tls-key-path {other_key} is not the key of --tls-cert-path {cert}"),
        ((text, key), f"--tls-cert-path {text}: no PEM certificate"),
        ((cert, text), f"--tls-key-path {text}: no PEM private key"),
        ((key, key), "no PEM certificate in it"),
        ((cert, str(tmp_path / "locked")), "is encrypted; write it without a passphrase"),
        ((cert, str(tmp_path / "torn")), f"--tls-cert-path {cert} with --tls-key-path"),
        ((cert, key, missing), f"--tls-client-ca-cert-path {missing}: No such file"),
        ((cert, key, text), f"--tls-client-ca-cert-path {text}: no PEM certificate"),
        ((str(tmp_path), key), f"--tls-cert-path {tmp_path}: Is a directory"),
    ):
        with pytest.raises(ConfigError) as caught:
            ServerTls(*given)
        assert message in caught.value.message


def test_dates(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    ServerTls(*authority.sign("valid"))
    assert not caplog.text
    cert, key = authority.sign("old", days=-1)
    ServerTls(cert, key)
    assert f"{cert} expired on " in caplog.text and "renew it" in caplog.text
    first, last = validity(ssl.PEM_cert_to_DER_cert(Path(authority.sign("dated")[0]).read_text()))
    assert abs((last - first).total_seconds() - 2 * 86400) < 2
    assert abs((datetime.now(UTC) - first).total_seconds()) < 600
    der = ssl.PEM_cert_to_DER_cert(Path(cert).read_text())
    for end in range(60):  # the dates come later
        with pytest.raises(ValueError):
            validity(der[:end])
