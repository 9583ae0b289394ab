"""The status server of a worker: readiness, liveness, metrics, engine routes."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.config.system import SystemSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.http import NEVER, Exchange, HttpLimits, HttpServer
from dynamo.http.access import Access, OperatorGuard
from dynamo.http.api_keys import ApiKeys
from dynamo.observability.metrics import Registry
from dynamo.runtime.endpoints.health import SystemHealth
from dynamo.runtime.process.sockets import bracketed
from dynamo.runtime.process.tasks import Tasks

__all__ = ["EngineRoute", "StatusServer"]

EngineRoute = Callable[[Any], Awaitable[Any]]
"""``await route(body)``: takes decoded JSON (None without a body), returns a JSON value."""

_LIMITS = HttpLimits(body_bytes=1 << 20, bodies_bytes=16 << 20, connections=256, backlog=64)
_ENGINE = "/engine/"
_TEXT = "text/plain"
log = logging.getLogger(__name__)


class StatusServer:
    """Answers probes and Prometheus, and runs the routes of the engine."""

    def __init__(self, settings: SystemSettings, health: SystemHealth, metrics: Registry) -> None:
        self.routes: dict[str, EngineRoute] = {}
        self.port = -1
        self._started = False
        self._settings = settings
        self._health = health
        self._metrics = metrics
        self._tasks = Tasks("status server")
        self._guard = OperatorGuard(settings.api_key_file is not None, (settings.host,))
        self._server = HttpServer(self._handle, _LIMITS)

    @property
    def url(self) -> str | None:
        """``http://host:port``, local for a wildcard host; None while it does not listen."""
        if self.port < 0:
            return None
        host = self._settings.host
        if host in ("", "0.0.0.0", "::"):
            host = "127.0.0.1"
        return f"http://{bracketed(host)}:{self.port}"

    async def start(self) -> None:
        """Listen if the settings name a port. ConfigError: a taken address or a bad key file."""
        settings = self._settings
        if settings.port < 0 or self._started:
            return
        if settings.api_key_file is not None:
            access = Access(keys=ApiKeys(settings.api_key_file), is_open=_is_open)
            self._server = HttpServer(self._handle, _LIMITS, access=access)
        self._server.is_reserved = _is_open
        self._started = True  # before the first await: endpoints are served concurrently
        try:
            _, self.port = await self._server.bind(settings.host, settings.port, names=())
        except OSError as error:
            self._started = False
            raise ConfigError(
                f"DYN_SYSTEM_PORT={settings.port}: cannot listen on "
                f"{settings.host}:{settings.port}: {error.strerror or error}"
            ) from error
        await self._server.listen()
        log.info("status server listens on %s:%d", settings.host, self.port)

    async def close(self) -> None:
        """Stop listening, cancel engine routes and drop the connections."""
        await self._tasks.close()
        await self._server.close(timeout_s=0)

    def _handle(self, exchange: Exchange) -> None:
        settings, path = self._settings, exchange.path
        if path.startswith(_ENGINE):
            self._handle_engine(exchange, path.removeprefix(_ENGINE))
        elif path not in (settings.health_path, settings.live_path, "/metrics"):
            exchange.respond(404, b"Route not found", _TEXT)
        elif exchange.method not in ("GET", "HEAD"):
            exchange.respond(405, b"Method not allowed", _TEXT, [("allow", "GET, HEAD")])
        elif path == "/metrics":
            accept = exchange.headers.get("accept", "")
            exchange.respond(200, *self._metrics.exposition(accept))
        else:
            report = self._health.report()
            if path == settings.live_path and path != settings.health_path:
                report["status"] = "ready"
            status = 200 if report["status"] == "ready" else 503
            exchange.respond(status, json.dumps(report).encode(), _TEXT)

    def _handle_engine(self, exchange: Exchange, name: str) -> None:
        route = self.routes.get(name)
        if route is None:
            exchange.respond(404, b"Route not found", _TEXT)
        elif exchange.method != "POST":
            exchange.respond(405, b"Method not allowed", _TEXT, [("allow", "POST")])
        elif refusal := self._guard.check(exchange):
            exchange.respond(403, _problem(refusal))
        else:
            exchange.deadline = NEVER  # an engine may take minutes, for example to sleep or wake up
            self._tasks.spawn(_run(exchange, route, name), name=exchange.path)


def _is_open(path: str) -> bool:
    return not path.startswith(_ENGINE)


async def _run(exchange: Exchange, route: EngineRoute, name: str) -> None:
    try:
        request = json.loads(exchange.body) if exchange.body else None
    except (ValueError, RecursionError) as error:
        exchange.respond(400, _problem(f"the body is not JSON: {error}"))
        return
    try:
        answer = json.dumps(await route(request)).encode()
    except DynamoError as error:
        exchange.respond(error.status, _problem(error.message))
    except Exception as error:  # the route responds with the error of the engine
        log.exception("engine route %s failed", name)
        exchange.respond(500, _problem(f"{type(error).__name__}: {error}"))
    else:
        exchange.respond(200, answer)


def _problem(text: str) -> bytes:
    return json.dumps({"error": text}).encode()
