"""When the frontend listens: after its models are loaded, but not only then."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo.config.frontend import FrontendSettings
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, EngineShutdown, Unavailable
from dynamo.frontend import service
from dynamo.frontend.service import Frontend
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery.base import Lease


@contextlib.asynccontextmanager
async def frontend(
    tmp_path: Path,
    port: int = 0,
    ui: bool | None = None,
    host: str = "127.0.0.1",
    settings: FrontendSettings | None = None,
) -> AsyncIterator[Frontend]:
    runtime = DistributedRuntime(None, RuntimeSettings(state_dir=str(tmp_path), namespace="ns"))
    await runtime.start()
    settings = settings or FrontendSettings(http_host=host, http_port=port, ui=ui)
    try:
        one = Frontend(runtime, settings, RouterSettings())
        try:
            yield one
        finally:
            await one.close()
    finally:
        await runtime.close()


async def test_it_does_not_wait_for_a_load_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with frontend(tmp_path) as one:
        monkeypatch.setattr(one.models, "loaded", asyncio.Event().wait)
        monkeypatch.setattr(service, "_LOAD_S", 0.05)
        host, port = await one.start()
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert "models are still loading after 0.05 s" in caplog.text


async def test_an_ipv6_address_is_printed_as_a_url(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with frontend(tmp_path, host="::", ui=True) as one:
        try:
            _, port = await one.start()
        except ConfigError:
            pytest.skip("no IPv6")
        assert f"listening on http://[::]:{port}\n" in caplog.text
        assert f"web page at http://[::]:{port}/ui\n" in caplog.text


async def test_clients_leave_open_files_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "allow_open_files", lambda count: 1)
    async with frontend(tmp_path) as one:
        host, port = await one.start()
        assert "open files are limited to 1: at most 0 clients at once" in caplog.text
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        writer.close()


async def test_a_stop_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with frontend(tmp_path) as one:
        monkeypatch.setattr(one.models, "loaded", asyncio.Event().wait)
        asyncio.get_running_loop().call_later(0.05, one.stop)
        await asyncio.wait_for(one.start(), 10)


async def test_a_lost_lease_ends_it(tmp_path: Path) -> None:
    """No other process would find what it publishes: its supervisor starts another."""
    async with frontend(tmp_path) as one:
        await one.start()
        leases = tmp_path / "ns/store/leases"
        async with asyncio.timeout(30):
            while not (found := [*leases.glob("[!.]*")]):  # noqa: ASYNC110 - a file appears
                await asyncio.sleep(0.01)
            found[0].unlink()
            await one.run_until_stopped()


async def test_a_lease_that_was_lost_before_it_was_seen_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full; another part of the process had the lease granted, and it was removed."""
    monkeypatch.setattr(service, "REGISTER_AGAIN_S", 0.05)
    async with frontend(tmp_path) as one:
        full = iter([Unavailable("No space left on device"), EngineShutdown("shutting down")])

        async def granted() -> Lease:
            raise next(full)

        monkeypatch.setattr(one._runtime, "granted", granted)
        await one.start()
        async with asyncio.timeout(30):
            await one.run_until_stopped()


async def test_an_open_page_does_not_delay_a_stop(tmp_path: Path) -> None:
    async with frontend(tmp_path) as one:
        host, port = await one.start()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"event: status\n")
        one.stop()
        await one.run_until_stopped()
        assert b"event: end\n" in await reader.read()  # to the end of the connection
        writer.close()


async def test_what_has_come_before_the_end_gets_a_response(tmp_path: Path) -> None:
    """Also what came while the process was stopped, and was not read."""
    async with frontend(tmp_path) as one:
        host, port = await one.start()
        clients = [socket.create_connection((host, port)) for _ in range(20)]
        for client in clients:
            client.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        one.stop()
        await one.run_until_stopped()
        await one.close()
        for client in clients:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 ")
            client.close()


async def test_without_the_page_there_is_no_page(tmp_path: Path) -> None:
    async with frontend(tmp_path, ui=False) as one:
        host, port = await one.start()
        reader, writer = await asyncio.open_connection(host, port)
        for path in ("/ui", "/ui/ui.js", "/ui/about.json", "/ui/events"):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 404 ")
        writer.close()


async def test_a_second_frontend_on_the_port_fails_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with frontend(tmp_path) as one:
        _, port = await one.start()
        async with frontend(tmp_path / "other", port) as other:
            monkeypatch.setattr(other.models, "start", lambda: pytest.fail("too late"))
            with pytest.raises(ConfigError, match="Address already in use"):
                await other.start()
