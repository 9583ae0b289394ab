"""The frontend as a process: connect its parts, listen, measure the event loop, drain, clean up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from dynamo._fast.histogram import Histogram
from dynamo.config.frontend import FrontendSettings
from dynamo.config.router import RouterSettings, with_policies
from dynamo.errors import ConfigError, EngineShutdown, Unavailable
from dynamo.frontend.access import (
    frontend_access,
    frontend_cors,
    guard_operator_routes,
    guard_ui_routes,
    is_reserved,
    operator_guard,
    show_key_requests,
    warn_if_exposed,
)
from dynamo.frontend.apis.chat.route import OpenAIRoutes
from dynamo.frontend.apis.extensions import ExtensionRoutes, load_routes
from dynamo.frontend.apis.invocations import InvocationRoutes
from dynamo.frontend.apis.messages.route import MessagesRoutes, messages_error_body
from dynamo.frontend.apis.operator.adapters import AdapterRoutes
from dynamo.frontend.apis.operator.cache import CacheRoutes
from dynamo.frontend.apis.operator.info import BusyThresholdRoutes, InfoRoutes
from dynamo.frontend.apis.operator.planner import PlannerRoutes
from dynamo.frontend.apis.operator.record import RecordRoutes
from dynamo.frontend.apis.operator.routing import ExplainRoutes
from dynamo.frontend.apis.operator.status import RecentRoutes, StatusRoutes
from dynamo.frontend.apis.pooling.route import PoolingRoutes
from dynamo.frontend.apis.relay.route import RelayRoutes
from dynamo.frontend.apis.responses.route import (
    ResponseRoutes,
    responses_error_body,
    show_stored_responses,
)
from dynamo.frontend.apis.responses.store import ResponseStore
from dynamo.frontend.apis.tokenize import PromptCountRoutes, TokenizeRoutes
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import MAX_BODY_BYTES, body_limit_bytes
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.ui.route import OwnFacts, UiRoutes
from dynamo.frontend.ui.routing import RoutingFeed
from dynamo.frontend.ui.source import BoxSource
from dynamo.http import HttpLimits, HttpServer, WriteBatch
from dynamo.http.access import OperatorGuard
from dynamo.http.head import allow_open_files
from dynamo.http.routes import Routes
from dynamo.observability.logs import counted
from dynamo.observability.metrics import Counter
from dynamo.router.load.prefill_model import prefill_model
from dynamo.router.modes.factory import ineffective_settings, summarize
from dynamo.router.modes.policy_types import check_policies
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.distributed.runtime import REGISTER_AGAIN_S
from dynamo.runtime.process.os_process import StopSignals
from dynamo.runtime.process.paths import state_path
from dynamo.runtime.process.sockets import bracketed
from dynamo.runtime.process.tasks import Tasks
from dynamo.serve.state.events import BoxEventLog
from dynamo.serve.state.frontends import local_key

log = logging.getLogger(__name__)
_MIB = 1024 * 1024
_SPARE_FILES = 256
_LAST_REQUEST_S = 1.0  # for a connected client to send it
_LOAD_S = 30.0  # then listen without the models that are still loading
_PERIOD_S = 0.1
_STALL_S = 0.1


class LoopDelay:
    """Measures ten times a second how late a timer fires; each takes a few µs."""

    def __init__(self, delays: Histogram, stalls: Counter) -> None:
        self._delays = delays
        self._stalls = stalls
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start on the running loop."""
        self._due = time.monotonic() + _PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._measure)

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _measure(self) -> None:
        # The timers of the loop have a resolution of a millisecond and may fire early.
        late_s = max(0.0, time.monotonic() - self._due - 0.001)
        self._delays.observe(late_s)
        if late_s >= _STALL_S:
            self._stalls.value += 1
        # From now, not from the due time: a stall must not be followed by a burst of timers.
        self.start()


class Frontend:
    """One HTTP frontend on ``runtime``. Create it on the running loop. Raises ConfigError.

    ``on_loaded`` is called after each model that was loaded.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        settings: FrontendSettings,
        router: RouterSettings,
        on_loaded: Callable[[], None] | None = None,
    ) -> None:
        router = _checked(router)
        access = frontend_access(settings, local_key(runtime.settings), self._keys_changed)
        self._runtime = runtime
        self._settings = settings
        self._router = router
        self._tasks = Tasks("frontend")
        metrics = FrontendMetrics(runtime.metrics, settings.metrics_prefix)
        write_batch = WriteBatch()
        routes = Routes()
        self.models = Models(
            runtime,
            settings,
            router,
            metrics,
            self._tasks,
            again=routes,
            on_loaded=self._loaded,
            # The routes of relayed models are made later: they need these models.
            on_relayed=lambda: self._relay.go_first(routes),
        )
        guard = None if settings.disable_admin_api else operator_guard(settings)
        self._requests = RequestRegistry(
            settings,
            metrics,
            write_batch,
            hold=self.models.hold,
            guard=guard,
            tracing=runtime.tracing,
        )
        self._delay = LoopDelay(metrics.loop_delay, metrics.loop_stalls)
        self._status = StatusRoutes(self.models, self._requests)
        self._relay = self._install_models(routes)
        InfoRoutes(self.models, self._requests, runtime.metrics, self._tasks).install(routes)
        self._routing = RoutingFeed(runtime, self.models, self._requests)
        self._ui = self._web_page(routes) if settings.serves_ui else None
        if guard is not None:
            self._install_operators(routes, guard)
        self._install_extensions(routes)
        self._server = HttpServer(
            routes,
            _limits(settings),
            metrics.refused,
            write_batch,
            access,
            is_reserved=is_reserved,
            error_bodies=_error_body,
            cors=frontend_cors(settings),
        )
        if access is not None and access.keys is not None:
            show_key_requests(metrics, access.keys)
        metrics.http_connections.function = lambda: self._server.connections
        self._stop = asyncio.Event()
        self._on_loaded = on_loaded

    def url(self, host: str, port: int) -> str:
        """Return the base URL at the address that :meth:`start` returned."""
        scheme = "http" if self._settings.tls_cert_path is None else "https"
        return f"{scheme}://{bracketed(host)}:{port}"

    def _install_models(self, routes: Routes) -> RelayRoutes:
        """Add the routes of requests to models; return those of relayed ones."""
        requests, settings = self._requests, self._settings
        parts = requests, self.models, self._tasks
        openai, counts = OpenAIRoutes(*parts), PromptCountRoutes(*parts)
        openai.install(routes)
        InvocationRoutes(*parts).install(routes)
        PoolingRoutes(*parts).install(routes)
        TokenizeRoutes(*parts).install(routes)
        if settings.anthropic_api:
            MessagesRoutes(requests, openai, counts).install(routes)
        relay = RelayRoutes(*parts)
        store = ResponseStore(settings.responses_store_mb * _MIB)
        ResponseRoutes(store, relay.has_route, relay.serve_rest).install(routes, openai, counts)
        show_stored_responses(requests.metrics, store)
        relay.install(routes)
        return relay

    def _install_operators(self, routes: Routes, guard: OperatorGuard) -> None:
        """Add the routes that show or change what the frontend does."""
        requests, models, tasks = self._requests, self.models, self._tasks
        status, threads = requests.overload_status, requests.off_loop
        ignores_nvext = self._settings.disable_nvext
        ExplainRoutes(models, tasks, status, threads, ignores_nvext).install(routes)
        BusyThresholdRoutes(models, tasks).install(routes)
        RecordRoutes(requests, models, tasks).install(routes)
        PlannerRoutes(self._runtime, tasks, status).install(routes)
        CacheRoutes(self._runtime, models, tasks, status).install(routes)
        AdapterRoutes(self._runtime, models, tasks, status).install(routes)
        self._status.install(routes)
        RecentRoutes(requests.metrics.recent).install(routes)
        page_guard = operator_guard(self._settings, own_pages=self._settings.serves_ui)
        guard_operator_routes(routes, guard, page_guard)

    def _install_extensions(self, routes: Routes) -> None:
        """Add the routes of other packages, which may have no path of the frontend's own."""
        extensions = load_routes(self._settings.route_extensions)
        ExtensionRoutes(extensions, self.models, self._requests, self._tasks).install(routes)

    def _web_page(self, routes: Routes) -> UiRoutes:
        has_keys = self._settings.api_key_file is not None
        box = BoxSource(self._runtime, has_keys)
        guard = operator_guard(self._settings, own_pages=True)
        own = OwnFacts(
            self._status.status,
            self._requests.metrics.recent,
            self._requests.running,
            self._requests.recorded_content,
            self._routing.read,
        )
        page = UiRoutes(box, own, self._tasks, guard, has_keys)
        page.install(routes)
        guard_ui_routes(routes, guard)
        return page

    def _keys_changed(self, text: str) -> None:
        """Add the change to the events of the deployment; each of its frontends sees it."""
        settings = self._runtime.settings
        events = BoxEventLog(state_path(settings) / settings.namespace)
        events.add("keys", Path(self._settings.api_key_file or "").name, text, once=True)

    def _limit_connections(self) -> None:
        """Accept no more clients than there may be open files."""
        wanted = self._settings.max_connections + _SPARE_FILES
        files = allow_open_files(wanted)
        if files < wanted:
            # Where even the spare files are too many, half of all are for clients.
            clients = max(files - _SPARE_FILES, files // 2)
            self._server.limits = dataclasses.replace(self._server.limits, connections=clients)
            log.warning(
                "open files are limited to %d: at most %d clients at once, more get 503; raise it: "
                "ulimit -n %d", files, clients, wanted,
            )  # fmt: skip

    async def start(self) -> tuple[str, int]:
        """Bind, load the models whose workers are registered, listen; return the bound address.

        Raises ConfigError if the address can't be bound.
        """
        self._limit_connections()
        settings = self._settings
        try:
            bound = await self._server.bind(
                settings.http_host,
                settings.http_port,
                settings.allowed_hosts,
                ", or name it in DYN_HTTP_ALLOWED_HOSTS",
                settings.http_listen_fd,
            )
        except OSError as error:
            raise self._cannot_listen(error) from None
        self._delay.start()
        self._status.windows.start()
        log.info("router: %s", summarize(self._router))
        for line in ineffective_settings(self._router):
            log.warning("%s", line)
        await self.models.start()
        # A port in use has failed above; clients are accepted once there is something to serve.
        await self._load_models()
        try:
            await self._server.listen()
        except OSError as error:  # another process bound the same address and listened first
            raise self._cannot_listen(error) from None
        log.info("listening on %s", self.url(*bound))
        if self._ui is not None:
            log.info("web page at %s/ui", self.url(*bound))
            self._ui.sampler.start()
        warn_if_exposed(settings, bound[0])
        if self._runtime.settings.discovery_backend == "file":
            self._tasks.spawn(self._hold_lease(), name="lease")
        return bound

    async def _hold_lease(self) -> None:
        """Grant the lease by which `dynamo serve` sees that it listens, also on a full disk.

        Without it no other process finds what this one publishes: drain, exit and start again.
        """
        while True:
            try:
                lease = await self._runtime.granted()
                await lease.lost.wait()
                break
            except EngineShutdown:  # granted to another part, and lost, since the last try
                break
            except Unavailable as error:
                log.warning("%s; trying again in %g s", error.message, REGISTER_AGAIN_S)
                await asyncio.sleep(REGISTER_AGAIN_S)
        if not self._stop.is_set():
            self.stop()

    async def _load_models(self) -> None:
        """Wait for the models that are loading, up to a limit and until stopped."""
        loaded = self._tasks.spawn(self.models.loaded(), name="models loaded")
        stopped = self._tasks.spawn(self._stop.wait(), name="stopped")
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait((loaded, stopped), timeout=_LOAD_S, return_when=first)
        loaded.cancel()
        stopped.cancel()
        if not done:
            log.warning("models are still loading after %g s; listening without them", _LOAD_S)

    def _cannot_listen(self, error: OSError) -> ConfigError:
        settings = self._settings
        reason = os.strerror(error.errno) if error.errno else str(error)
        return ConfigError(
            f"can't listen on {settings.http_host}:{settings.http_port} ({reason}); "
            "choose another with --http-port or --http-host"
        )

    def stop(self) -> None:
        """Drain, then end; a second call ends running requests at once."""
        if self._stop.is_set():
            log.warning("second stop signal: ending %s at once", self._admitted())
            self._end_requests()
        self._stop.set()

    def _end_requests(self) -> None:
        self.models.on_demand.stop()
        self._requests.fail_all(Unavailable("Service is shutting down"))

    def stop_on_signals(self) -> Callable[[], None]:
        """Stop at SIGTERM or SIGINT, at once at a second SIGINT. The result undoes this."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        requests = StopSignals()

        def on_signal(number: int) -> None:
            if requests.received(number, loop.time()):
                self.stop()

        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)

        def undo() -> None:
            for number in numbers:
                loop.remove_signal_handler(number)

        return undo

    async def run_until_stopped(self) -> None:
        """Serve, then drain: 503 for /health and new requests; running requests may finish.

        New connections are accepted until the end, unless the socket was inherited: then they wait
        for the next frontend, and clients that are connected get one more response.
        """
        await self._stop.wait()
        self._server.drain()
        if self._ui is not None:
            self._ui.stop()
        self.models.on_demand.drain()
        timeout_s = self._settings.graceful_shutdown_timeout_s
        deadline_s = time.monotonic() + timeout_s
        log.info("draining %s, at most %g s", self._admitted(), timeout_s)
        if self._settings.http_listen_fd is not None:
            self._requests.draining = True
            self._server.stop_accepting()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._part_with_clients()
        if not await self._requests.drain(max(0.0, deadline_s - time.monotonic())):
            log.warning("%s did not end in time", self._admitted())
            self._end_requests()
        await self._server.catch_up()

    def _admitted(self) -> str:
        return counted(self._requests.admitted, "request")

    async def _part_with_clients(self) -> None:
        """Serve until each client has a response that announces the end, or sends nothing more."""
        while not await self._server.gone(_LAST_REQUEST_S) and self._requests.admitted:
            await self._requests.idle()

    def _loaded(self) -> None:
        """Adapt the default limit on bodies to the contexts that are served now."""
        if self._settings.body_limit_mb is None:
            lengths = [model.context_length for model in self.models.loaded_models()]
            limit_bytes = body_limit_bytes(lengths, self.models.takes_media())
            self._server.limits = dataclasses.replace(self._server.limits, body_bytes=limit_bytes)
        if self._on_loaded is not None:
            self._on_loaded()

    async def close(self) -> None:
        """Close connections, models and timers; the runtime belongs to the caller."""
        self._requests.close()
        self._delay.stop()
        self._status.windows.stop()
        if self._ui is not None:
            self._ui.close()
        self._routing.close()
        # Before the models: a request that ends with its connection still frees its load.
        await self._server.close()
        await self._tasks.close()
        await self.models.close()


def _checked(router: RouterSettings) -> RouterSettings:
    """Return the settings with those of the policy file.

    Raises ConfigError now instead of with the first model.
    """
    router = with_policies(router)
    prefill_model(router)
    check_policies(router.policies)
    return router


def _limits(settings: FrontendSettings) -> HttpLimits:
    limit_mb = settings.body_limit_mb
    return HttpLimits(
        body_bytes=MAX_BODY_BYTES if limit_mb is None else limit_mb * _MIB,
        connections=settings.max_connections,
        header_timeout_s=settings.header_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
        backlog=settings.listen_backlog,
    )


def _error_body(path: str, status: int, message: str) -> bytes | None:
    """The error body of the API of ``path``; None for OpenAI's chat and our own routes."""
    return messages_error_body(path, status, message) or responses_error_body(path, status, message)
