"""The status server of a worker: readiness, liveness, metrics, routes of the engine. Spec 7.7."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

import httptools

from dynamo.config.system import SystemSettings
from dynamo.errors import ConfigError
from dynamo.observability.metrics import Registry
from dynamo.runtime.health import Health
from dynamo.runtime.tasks import Tasks

__all__ = ["EngineRoute", "StatusServer"]

EngineRoute = Callable[[Any], Awaitable[Any]]
"""``await route(body)``: decoded JSON in (None without a body), JSON-able answer out."""

_MAX_REQUEST_BYTES = 1 << 20
_IDLE_TIMEOUT_S = 30.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_log = logging.getLogger(__name__)


class StatusServer:
    """Small and slow on purpose: a handful of requests a second from probes and Prometheus."""

    def __init__(self, settings: SystemSettings, health: Health, metrics: Registry) -> None:
        self.routes: dict[str, EngineRoute] = {}
        self.port = -1
        self._settings = settings
        self._health = health
        self._metrics = metrics
        self._tasks = Tasks("status server")
        self._server: asyncio.AbstractServer | None = None
        self._exchanges: set[_Exchange] = set()

    async def start(self) -> None:
        """Listen if the settings ask for it. Raises ConfigError if the address is taken."""
        settings = self._settings
        if settings.port < 0 or self._server is not None:
            return
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Exchange(self._exchanges, self._answer, self._tasks),
                settings.host,
                settings.port,
            )
        except OSError as error:
            raise ConfigError(
                f"DYN_SYSTEM_PORT={settings.port}: cannot listen on "
                f"{settings.host}:{settings.port}: {error.strerror or error}"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]
        _log.info("status server listens on %s:%d", settings.host, self.port)

    async def close(self) -> None:
        """Stop listening and drop the connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for exchange in tuple(self._exchanges):
            exchange.drop()
        await self._tasks.close()

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        settings = self._settings
        if path.startswith("/engine/"):
            return await self._engine(method, path.removeprefix("/engine/"), body)
        if path not in (settings.health_path, settings.live_path, "/metrics"):
            return 404, "text/plain", b"Route not found"
        if method not in ("GET", "HEAD"):
            return 405, "text/plain", b"Method not allowed"
        if path == "/metrics":
            return 200, _METRICS_TYPE, self._metrics.render()
        report = self._health.report()
        if path == settings.live_path and path != settings.health_path:
            report["status"] = "ready"
        status = 200 if report["status"] == "ready" else 503
        return status, "text/plain", json.dumps(report).encode()

    async def _engine(self, method: str, name: str, body: bytes) -> tuple[int, str, bytes]:
        route = self.routes.get(name)
        if route is None:
            return 404, "text/plain", b"Route not found"
        if method != "POST":
            return 405, "text/plain", b"Method not allowed"
        try:
            request = json.loads(body) if body else None
        except (ValueError, RecursionError) as error:
            return 400, "application/json", _problem(f"the body is not JSON: {error}")
        try:
            answer = await route(request)
            return 200, "application/json", json.dumps(answer).encode()
        except Exception as error:  # noqa: BLE001 - the engine's failure is this route's answer
            _log.exception("engine route %s failed", name)
            return 500, "application/json", _problem(f"{type(error).__name__}: {error}")


class _Exchange(asyncio.Protocol):
    """One connection: one request after the other, answered in order, closed on any doubt."""

    def __init__(
        self,
        exchanges: set[_Exchange],
        answer: Callable[[str, str, bytes], Awaitable[tuple[int, str, bytes]]],
        tasks: Tasks,
    ) -> None:
        self._exchanges = exchanges
        self._answer = answer
        self._tasks = tasks
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._busy = False
        self._begin()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the server's connections."""
        self._transport = cast(asyncio.Transport, transport)
        self._exchanges.add(self)
        self._rest()

    def connection_lost(self, error: Exception | None) -> None:
        """Leave them."""
        self._exchanges.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; refuse what is too large or not HTTP."""
        self._received_bytes += len(data)
        if self._received_bytes > _MAX_REQUEST_BYTES:
            self._send(413, "text/plain", b"Request too large", keep=False)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # answered over HTTP/1.1 as if it had not asked (RFC 9110 7.8)
        except httptools.HttpParserError:
            self._send(400, "text/plain", b"Bad request", keep=False)

    def drop(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def on_message_begin(self) -> None:
        """Called by the parser: a second request before the answer to the first is refused."""
        if self._busy:
            self.drop()

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._body += body

    def on_message_complete(self) -> None:
        """Called by the parser: answer, reading nothing more until that is done."""
        if self._busy or self._transport is None or self._transport.is_closing():
            return
        self._busy = True
        self._transport.pause_reading()
        if self._deadline is not None:
            self._deadline.cancel()
        method = self._parser.get_method().decode()
        keep = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        path = self._url.split(b"?", 1)[0].decode("latin-1")
        self._tasks.spawn(self._respond(method, path, bytes(self._body), keep))

    async def _respond(self, method: str, path: str, body: bytes, keep: bool) -> None:
        try:
            status, kind, answer = await self._answer(method, path, body)
        except Exception:  # noqa: BLE001 - the client must get an answer
            _log.exception("status server: %s %s failed", method, path)
            self._send(500, "text/plain", b"Internal server error", keep=False)
            return
        self._send(status, kind, answer, keep, head_only=method == "HEAD")

    def _send(
        self, status: int, kind: str, body: bytes, keep: bool, head_only: bool = False
    ) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        connection = "keep-alive" if keep else "close"
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {kind}\r\n"
            f"content-length: {len(body)}\r\nconnection: {connection}\r\n\r\n"
        )
        transport.write(head.encode() if head_only else head.encode() + body)
        if not keep:
            transport.close()
            return
        self._begin()
        self._rest()
        transport.resume_reading()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = bytearray()
        self._received_bytes = 0
        self._busy = False

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(_IDLE_TIMEOUT_S, self.drop)


def _problem(text: str) -> bytes:
    return json.dumps({"error": text}).encode()
