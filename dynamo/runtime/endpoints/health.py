"""The health of a process: readiness, health checks of its endpoints, the status server."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from dynamo.config.system import HealthCheckSettings, SystemSettings
from dynamo.errors import ConfigError, DynamoError, text_of
from dynamo.health_check import HEALTH_CHECK_KEY
from dynamo.http import NEVER, Exchange, HttpLimits, HttpServer
from dynamo.http.access import Access, OperatorGuard
from dynamo.http.api_keys import ApiKeys
from dynamo.observability.metrics import Registry, counter
from dynamo.protocols import codec
from dynamo.runtime.process.sockets import bracketed
from dynamo.runtime.process.stop_order import is_supervised
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests import ClientStream, EndpointStats, RequestClient, StreamSink
from dynamo.runtime.requests.stream import is_interrupt

if TYPE_CHECKING:
    from dynamo.runtime.endpoints.serving import Serving

_POLLS_PER_WAIT = 4
_LONGEST_POLL_S = 1.0
_PORTS, _LAST_PORT = 128, 65535
"""How many ports behind a taken one are tried."""
_CHECKS = counter(
    "dynamo_component_health_checks_total",
    "Health checks that the worker sent to its endpoint",
    "dynamo_component dynamo_endpoint dynamo_namespace result",
)
log = logging.getLogger(__name__)
EngineRoute = Callable[[Any], Awaitable[Any]]
"""``await route(body)``: takes decoded JSON (None without a body), returns a JSON value."""
_LIMITS = HttpLimits(body_bytes=1 << 20, bodies_bytes=16 << 20, connections=256, backlog=64)
_ENGINE = "/engine/"
_TEXT = "text/plain"


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
        self._server = HttpServer(self._handle, _LIMITS, is_reserved=_is_open)

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
        """Listen if the settings name a port. ConfigError: a taken address or a bad key file.

        A process of ``dynamo serve`` takes the next free port instead: the variable may be of the
        shell, and all workers then have the same one. Without a free one there is no status server.
        """
        settings = self._settings
        if settings.port < 0 or self._started:
            return
        keys = None if settings.api_key_file is None else ApiKeys(settings.api_key_file)
        self._started = True  # before the first await: endpoints are served concurrently
        last_port = settings.port
        if settings.port > 0 and is_supervised():
            last_port = min(settings.port + _PORTS, _LAST_PORT)
        for port in range(settings.port, last_port + 1):
            access = None if keys is None else Access(keys=keys, is_open=_is_open)
            self._server = HttpServer(self._handle, _LIMITS, None, None, access, _is_open)
            try:
                _, self.port = await self._server.bind(settings.host, port, names=())
                await self._server.listen()  # of two that have bound it, the second one fails here
            except OSError as error:
                self.port = -1
                await self._server.close(timeout_s=0)
                if error.errno == errno.EADDRINUSE and last_port > settings.port:
                    continue
                self._started = False
                raise ConfigError(
                    f"DYN_SYSTEM_PORT={settings.port}: cannot listen on "
                    f"{settings.host}:{port}: {error.strerror or error}"
                ) from error
            if port != settings.port:
                log.warning("port %d is in use: the status server takes the next", settings.port)
            log.info("status server listens on %s:%d", settings.host, self.port)
            return
        log.error(
            "DYN_SYSTEM_PORT=%d: no status server, this port and the %d behind it are in use; "
            "set another one",
            settings.port,
            last_port - settings.port,
        )

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
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # of users' code: the client gets it, and the worker continues
        log.exception("engine route %s failed", name)
        exchange.respond(500, _problem(f"{type(error).__name__}: {text_of(error)}"))
        if is_interrupt(error):
            raise
    else:
        exchange.respond(200, answer)


def _problem(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


class CheckedEndpoint:
    """An endpoint of this process, for its own health checks."""

    def __init__(
        self,
        serving: Serving,
        requests: RequestClient,
        path: tuple[str, str, str],
        stats: EndpointStats,
    ) -> None:
        self.path = path
        self.stats = stats
        self._serving = serving
        self._requests = requests

    def is_registered(self) -> bool:
        """Return whether clients may send requests; an endpoint that sleeps is not checked."""
        return self._serving.is_published(self.path)

    def open(self, payload: bytes, sink: StreamSink) -> ClientStream:
        """Send a request as clients do."""
        address = self._serving.address()
        return self._requests.open(address, "/".join(self.path), {}, payload, sink)

    async def set_health(self, problem: str) -> None:
        """Report the endpoint as unhealthy; "": as healthy again."""
        await self._serving.set_health(self.path, problem)


class Canary:
    """Checks ``endpoint`` whenever it sent no response item for a while.

    Any response item or end is healthy, and so is an error below status 500: the endpoint
    handled the request. A request that runs at that time is not touched, however long it takes: an
    unhealthy endpoint is healthy again with its next response item.

    Health checks find an engine that hangs although the process lives: the request plane's pings
    are answered by the process, a health check by the engine.
    """

    def __init__(
        self,
        settings: HealthCheckSettings,
        endpoint: CheckedEndpoint,
        payload: dict[str, Any],
        metrics: Registry,
    ) -> None:
        self.problem = ""
        self._settings = settings
        self._endpoint = endpoint
        self._payload = codec.encode({**payload, HEALTH_CHECK_KEY: True})
        self._checks = metrics.family(_CHECKS)
        self._poll_s = min(settings.canary_wait_s / _POLLS_PER_WAIT, _LONGEST_POLL_S)

    async def run(self) -> None:
        """Check until cancelled."""
        endpoint, wait_s = self._endpoint, self._settings.canary_wait_s
        sent = endpoint.stats.response_bytes.value
        idle_s = 0.0
        while True:
            await asyncio.sleep(self._poll_s)
            idle_s += self._poll_s
            before, sent = sent, endpoint.stats.response_bytes.value
            if sent != before:
                idle_s = 0.0
                await self._report("")
            elif idle_s >= wait_s and endpoint.is_registered():
                idle_s = 0.0
                await self._report(await self._check())

    async def _check(self) -> str:
        """Send one health check; return why it failed, or ""."""
        sink = FirstAnswer()
        stream = self._endpoint.open(self._payload, sink)
        timeout_s = self._settings.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                problem = await sink.found
        except TimeoutError:
            problem = f"no answer to a health check within {timeout_s:g} s"
        finally:
            # After an answer, too: only its first item was wanted.
            stream.kill()
        namespace, component, endpoint = self._endpoint.path
        self._checks[component, endpoint, namespace, "failed" if problem else "ok"].value += 1
        return problem

    async def _report(self, problem: str) -> None:
        """Report a change; one that discovery does not accept is reported with the next check."""
        if bool(problem) == bool(self.problem):
            return
        name = ".".join(self._endpoint.path)
        if problem:
            log.error("%s is unhealthy: %s", name, problem)
        else:
            log.info("%s is healthy again", name)
        try:
            await self._endpoint.set_health(problem)
        except DynamoError as error:
            log.warning("%s: its health cannot be reported: %s", name, error)
        else:
            self.problem = problem


class FirstAnswer:
    """A sink whose ``found`` is the problem in the first answer, "" for none."""

    def __init__(self) -> None:
        self.found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_data(self, payload: bytes) -> None:
        """A response item is healthy."""
        self._find("")

    def on_end(self) -> None:
        """An empty response is healthy."""
        self._find("")

    def on_error(self, error: DynamoError) -> None:
        """An error is healthy if it is the caller's."""
        self._find("" if error.status < 500 else f"a health check failed: {error.message}")

    def _find(self, problem: str) -> None:
        if not self.found.done():
            self.found.set_result(problem)


class SystemHealth:
    """Readiness by endpoint name.

    Ready means that all required endpoints are ready; with none required, that at least one is
    served and all served ones are ready.
    """

    def __init__(self, settings: SystemSettings) -> None:
        self._required = _names(settings.use_endpoint_health_status)
        self._starts_ready = settings.starting_health_status == "ready"
        self._ready: dict[str, bool] = {}
        self._process_ready = True
        self._stopping = False
        self._started = time.monotonic()

    @property
    def uptime_s(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._started

    def set(self, endpoint: str, ready: bool) -> None:
        """Set whether the endpoint accepts requests."""
        self._ready[endpoint] = ready

    def set_process(self, ready: bool) -> None:
        """Set the readiness of the process itself: not ready overrides every endpoint."""
        self._process_ready = self._starts_ready = ready

    def forget(self, endpoint: str) -> None:
        """Remove an endpoint that is no longer served."""
        self._ready.pop(endpoint, None)

    def stop(self) -> None:
        """Report not ready from now on: the process is shutting down."""
        self._stopping = True
        self._ready = dict.fromkeys(self._ready, False)

    def is_ready(self) -> bool:
        """Return the readiness that the health path reports."""
        if self._stopping or not self._process_ready:
            return False
        if self._required:
            return all(self._ready.get(name, False) for name in self._required)
        if not self._ready:
            return self._starts_ready
        return all(self._ready.values())

    def report(self) -> dict[str, Any]:
        """Return the JSON body of the health path."""
        uptime_ns = int(self.uptime_s * 1e9)
        return {
            "status": _status(self.is_ready()),
            "uptime": {"secs": uptime_ns // 10**9, "nanos": uptime_ns % 10**9},
            "endpoints": {name: _status(ready) for name, ready in sorted(self._ready.items())},
        }


def _status(ready: bool) -> str:
    return "ready" if ready else "notready"


def _names(text: str) -> tuple[str, ...]:
    if not text.strip().startswith("["):
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise ConfigError(
        f"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS must be a JSON list of names, got {text!r}"
    )
