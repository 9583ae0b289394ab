"""The status server: readiness, liveness, metrics and engine routes over real HTTP."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynamo.config import from_env
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.errors import ConfigError
from dynamo.http.api_keys import key_line
from dynamo.observability.metrics import Registry, counter
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.endpoints import health
from dynamo.runtime.endpoints.health import StatusServer, SystemHealth

Start = Callable[..., Awaitable[StatusServer]]


class Parts:
    """What a status server is made of."""

    def __init__(self, **settings: Any) -> None:
        self.settings = SystemSettings(**{"port": 0, "host": "127.0.0.1", **settings})
        self.health = SystemHealth(self.settings)
        self.metrics = Registry()
        self.server = StatusServer(self.settings, self.health, self.metrics)

    async def ask(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(data)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def get(self, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, bytes]:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        answer = await self.ask(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, _, rest = answer.partition(b"\r\n")
        return int(status.split()[1]), rest.partition(b"\r\n\r\n")[2]


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Awaitable[Parts]]]:
    made: list[Parts] = []

    async def build(**settings: Any) -> Parts:
        parts = Parts(**settings)
        made.append(parts)
        await parts.server.start()
        return parts

    yield build
    for parts in made:
        await parts.server.close()


Make = Callable[..., Awaitable[Parts]]


async def test_health_follows_the_endpoints(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        parts = await make()
    assert str(parts.server.port) in caplog.text
    status, body = await parts.get("/health")
    assert status == 503
    assert json.loads(body)["status"] == "notready"
    parts.health.set("generate", True)
    status, body = await parts.get("/health?verbose")
    report = json.loads(body)
    assert status == 200
    assert report["endpoints"] == {"generate": "ready"}
    assert set(report["uptime"]) == {"secs", "nanos"}
    parts.health.set("other", False)
    assert (await parts.get("/health"))[0] == 503
    parts.health.forget("other")
    assert (await parts.get("/health"))[0] == 200
    parts.health.stop()
    assert (await parts.get("/health"))[0] == 503
    assert (await parts.get("/live"))[0] == 200


@pytest.mark.parametrize("names", ['["generate"]', "generate", " generate ,"])
async def test_required_endpoints_alone_decide(make: Make, names: str) -> None:
    parts = await make(use_endpoint_health_status=names, starting_health_status="ready")
    parts.health.set("other", True)
    assert (await parts.get("/health"))[0] == 503
    parts.health.set("generate", True)
    parts.health.set("other", False)
    assert (await parts.get("/health"))[0] == 200


async def test_paths_and_starting_status_are_knobs(make: Make) -> None:
    parts = await make(health_path="/h", live_path="/l", starting_health_status="ready")
    assert (await parts.get("/h"))[0] == 200
    assert (await parts.get("/l"))[0] == 200
    assert await parts.get("/health") == (404, b"Route not found")


@pytest.mark.parametrize("text", ["[1]", "[", '{"a": 1}]', "[null]"])
def test_a_bad_list_of_endpoints_is_named(text: str) -> None:
    if text.startswith("["):
        with pytest.raises(ConfigError, match="USE_ENDPOINT_HEALTH_STATUS"):
            SystemHealth(SystemSettings(use_endpoint_health_status=text))


async def test_concurrent_starts_listen_once(caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts()
    with caplog.at_level(logging.INFO):
        await asyncio.gather(parts.server.start(), parts.server.start())
    assert caplog.text.count("listens on") == 1
    await parts.server.close()


async def test_metrics_are_rendered(make: Make) -> None:
    parts = await make()
    parts.metrics.child(counter("a_total", "help")).value += 3
    status, body = await parts.get("/metrics")
    assert status == 200
    assert b"a_total 3\n" in body
    assert (await parts.get("/metrics", "POST"))[0] == 405
    assert await parts.get("/metrics", "HEAD") == (200, b"")


async def test_engine_routes(make: Make) -> None:
    parts = await make()

    async def sleep(body: Any) -> Any:
        return {"slept": body}

    async def fail(body: Any) -> Any:
        raise RuntimeError("no")

    parts.server.routes.update(sleep=sleep, fail=fail)
    assert await parts.get("/engine/sleep", "POST", b'{"s": 1}') == (200, b'{"slept": {"s": 1}}')
    assert await parts.get("/engine/sleep", "POST") == (200, b'{"slept": null}')
    assert (await parts.get("/engine/sleep", "POST", b"{"))[0] == 400
    assert (await parts.get("/engine/sleep"))[0] == 405
    assert await parts.get("/engine/none", "POST") == (404, b"Route not found")
    status, body = await parts.get("/engine/fail", "POST")
    assert (status, json.loads(body)) == (500, {"error": "RuntimeError: no"})


async def test_a_connection_is_kept_for_the_next_request(make: Make) -> None:
    parts = await make()
    reader, writer = await asyncio.open_connection("127.0.0.1", parts.server.port)
    async with asyncio.timeout(20):
        for _ in range(3):
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            assert json.loads(await reader.readexactly(size))["status"] == "ready"
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01 not http\r\n\r\n", b"400"),
        (
            b"POST /engine/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n"
            + bytes(1 << 20),
            b"413",
        ),
    ],
)
async def test_what_is_not_http_or_too_large_is_refused(
    make: Make, data: bytes, status: bytes
) -> None:
    parts = await make()
    answer = await parts.ask(data)
    assert answer.split()[1] == status


async def test_pipelined_requests_are_answered_in_order(make: Make) -> None:
    parts = await make()
    one = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
    answer = await parts.ask(one % (b"live", b"") + one % (b"none", b"Connection: close\r\n"))
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404"]


async def test_web_pages_get_nothing(make: Make) -> None:
    """A page may reach a loopback port, by its own host name (DNS rebinding) or by number."""
    parts = await make()
    called: list[Any] = []

    async def route(body: Any) -> Any:
        called.append(body)

    parts.server.routes["sleep"] = route
    post = "POST /engine/sleep HTTP/1.1\r\nConnection: close\r\nContent-Length: 0\r\n"
    for more, status in (
        ("Host: evil.example\r\n", 403),
        ("Host: localhost\r\nOrigin: http://evil.example\r\n", 403),
        ("Host: localhost\r\nOrigin: null\r\n", 403),
        ("Host: localhost\r\n", 200),
    ):
        answer = await parts.ask(f"{post}{more}\r\n".encode())
        assert int(answer.split()[1]) == status, more
    assert called == [None]


async def test_engine_routes_with_keys_need_an_operators(make: Make, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", "user", "u") + key_line("root", "operator", "o"))
    keys.chmod(0o600)
    parts = await make(api_key_file=str(keys))
    called: list[Any] = []

    async def route(body: Any) -> Any:
        called.append(body)

    parts.server.routes["sleep"] = route
    post = "POST /engine/sleep HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    for key, status in ((None, 401), ("wrong", 401), ("u", 403), ("o", 200)):
        given = "" if key is None else f"Authorization: Bearer {key}\r\n"
        answer = await parts.ask(f"{post}{given}Content-Length: 0\r\n\r\n".encode())
        assert int(answer.split()[1]) == status, key
    assert called == [None]
    assert (await parts.get("/live"))[0] == 200 and (await parts.get("/metrics"))[0] == 200
    with pytest.raises(ConfigError, match="has mode"):
        keys.chmod(0o644)
        await make(api_key_file=str(keys))


async def test_off_by_default_and_a_used_port_is_a_config_error(make: Make) -> None:
    off = await make(port=-1)
    assert off.server.port == -1
    parts = await make()
    with pytest.raises(ConfigError, match=f"DYN_SYSTEM_PORT={parts.server.port}"):
        await make(port=parts.server.port)


async def test_the_runtime_serves_it() -> None:
    runtime = DistributedRuntime(
        None,
        RuntimeSettings(discovery_backend="mem"),
        system=SystemSettings(port=0, host="127.0.0.1"),
    )

    async def route(body: Any) -> Any:
        return 1

    runtime.register_engine_route("/one/", route)
    await runtime.start_serving()
    assert runtime.status.port > 0
    assert set(runtime.status.routes) == {"one"}
    await runtime.close()


async def test_other_hosts_are_allowed_only_by_configuration() -> None:
    """Its engine routes take commands without authentication."""
    settings = SystemSettings(port=0)
    server = StatusServer(settings, SystemHealth(settings), Registry())
    await server.start()
    listening = [one.laddr for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    assert [one.ip for one in listening if one.port == server.port] == ["127.0.0.1"]
    await server.close()
    assert from_env(SystemSettings, {"DYN_SYSTEM_HOST": "0.0.0.0"}).host == "0.0.0.0"


@pytest.mark.parametrize("extra", ["", "Connection: Upgrade, HTTP2-Settings\r\n"])
async def test_an_upgrade_is_ignored_and_the_request_answered(
    make: Make, caplog: pytest.LogCaptureFixture, extra: str
) -> None:
    parts = await make()
    connection = extra or "Connection: Upgrade\r\n"
    head = f"GET /live HTTP/1.1\r\nHost: localhost\r\n{connection}Upgrade: h2c\r\n\r\n"
    answer = await parts.ask(head.encode() + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" in answer
    assert not caplog.records


async def test_whatever_fails_the_client_gets_an_answer(make: Make) -> None:
    parts = await make()

    async def route(body: Any) -> Any:
        return body

    parts.server.routes["echo"] = route
    status, _ = await parts.get("/engine/echo", "POST", b"[" * 100_000)
    assert status == 400
    parts.metrics.before_render.append(_fail)
    status, body = await parts.get("/metrics")
    assert status == 500 and b"Internal server error" in body


def _fail() -> None:
    raise ZeroDivisionError


async def _servers(port: int, count: int) -> list[StatusServer]:
    """Start ``count`` servers with this port at the same time."""
    settings = SystemSettings(port=port)
    made = [StatusServer(settings, SystemHealth(settings), Registry()) for _ in range(count)]
    await asyncio.gather(*(one.start() for one in made))
    return made


async def test_workers_with_one_port_take_the_next_free_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with DYN_SYSTEM_PORT in the shell of ``dynamo serve``."""
    monkeypatch.setenv("DYN_WATCHER_NAME", "ns_W")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = min(taken.getsockname()[1], 60_000)
        made = await _servers(first, 3)
        ports = [one.port for one in made]
        assert len(set(ports)) == 3 and min(ports) >= first
        assert taken.getsockname()[1] not in ports
        assert f"port {first} is in use: the status server takes the next" in caplog.text
        monkeypatch.setattr(health, "_PORTS", 1)
        monkeypatch.setattr(health, "_LAST_PORT", max(ports))
        caplog.clear()
        (left,) = await _servers(max(ports) - 1, 1)
        assert left.port == -1
        assert "no status server, this port and the 1 behind it are in use" in caplog.text
        for one in (*made, left):
            await one.close()


async def test_a_process_by_itself_refuses_a_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_WATCHER_NAME", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"DYN_SYSTEM_PORT=.*cannot listen on"):
            await _servers(taken.getsockname()[1], 1)
