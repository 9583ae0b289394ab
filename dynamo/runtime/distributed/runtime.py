"""The runtime of one process: discovery, request plane, event plane, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import secrets
import warnings
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from dynamo.config import from_env
from dynamo.config.runtime import EVENT_PLANES, EtcdSettings, NatsSettings, RuntimeSettings
from dynamo.config.system import SystemSettings, TracingSettings
from dynamo.config.worker import EndpointSettings
from dynamo.errors import ConfigError, EngineShutdown, Unavailable
from dynamo.observability.metrics import Registry
from dynamo.runtime.discovery import Discovery, FileDiscovery, Lease, MemoryDiscovery
from dynamo.runtime.distributed.component import Endpoint, Namespace, parse_endpoint
from dynamo.runtime.endpoints.health import EngineRoute, StatusServer
from dynamo.runtime.endpoints.serving import Serving
from dynamo.runtime.events import EventPlane, EventPublisher, EventSubscriber
from dynamo.runtime.events.channels import OnPublisher, Publishers, Subscription
from dynamo.runtime.events.plane import OnEvent, OnGap
from dynamo.runtime.process.paths import release_sockets, socket_dirs, store_dir
from dynamo.runtime.process.sockets import StaleSockets
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import running_loop
from dynamo.runtime.requests import RequestClient, RequestServer
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.tls import RequestTls

if TYPE_CHECKING:
    from dynamo.observability.otel import OtelTracing

REGISTER_AGAIN_S = 5.0
"""When a registration is tried again for which there was no room on the disk."""
log = logging.getLogger(__name__)


class DistributedRuntime:
    """The services that a process needs to serve endpoints and to call others.

    ``DistributedRuntime(loop)`` reads the environment; ``settings`` may also be the name of a
    discovery backend, as in ``DistributedRuntime(loop, "file", "tcp")``. ``enable_nats``
    (deprecated) and ``response_plane`` have no effect: there is one response plane. Connections
    open on first use. The request plane ``nats`` is replaced by ``tcp``. Raises ConfigError, and
    ValueError for an ``event_plane`` that does not exist.

    Use it on one loop; end it with ``await close()``.
    """

    def __init__(  # noqa: PLR0913 - Dynamo's signature
        self,
        event_loop: asyncio.AbstractEventLoop | None = None,
        settings: RuntimeSettings | str | None = None,
        request_plane: str | None = None,
        enable_nats: bool | None = None,
        *,
        event_plane: str | None = None,
        response_plane: str | None = None,
        system: SystemSettings | None = None,
        discovery: Discovery | None = None,
        metrics: Registry | None = None,
    ) -> None:
        if enable_nats is not None:
            warn_enable_nats()
        self._event_loop = event_loop
        if not isinstance(settings, RuntimeSettings):
            settings = _settings(settings, request_plane, event_plane)
        self.settings = settings
        self.system = from_env(SystemSettings) if system is None else system
        # Also the id of the lease: positive, and a signed 64-bit integer in etcd.
        self.instance_id = secrets.randbits(62) + 1
        self.metrics = Registry() if metrics is None else metrics
        self.tasks = Tasks("runtime")
        self._tls = RequestTls(settings)
        self.requests = RequestClient(None, self.system.inhibited_duration_s, self._tls)
        self.discovery = discovery if discovery is not None else _discovery(settings)
        self.tracing = _tracing(self.instance_id)
        self.serving = Serving(
            settings, self.system, self.discovery, self.instance_id, self.metrics, self._tls
        )
        self.status = StatusServer(self.system, self.serving.health, self.metrics)
        self._nats = _nats(settings)
        self._publishers = Publishers(
            settings, self.discovery, self.serving.granted, self.instance_id, self._nats
        )
        self._closers: dict[Callable[[], None], None] = {}
        self._started = False
        self._closed = False

    @classmethod
    def detached(cls) -> DistributedRuntime:
        """Create a runtime from the environment (older API)."""
        return cls()

    @property
    def server(self) -> RequestServer:
        """The listener of this process."""
        return self.serving.server

    @functools.cached_property
    def admission(self) -> AdmissionQueue | None:
        """The limit on requests in handlers of ``serve_endpoint``; None: there is none."""
        settings = from_env(EndpointSettings)
        if settings.engine_request_limit is None:
            return None
        return AdmissionQueue(
            settings.engine_request_limit, settings.request_queue_limit, self.metrics
        )

    @property
    def lease(self) -> Lease | None:
        """The lease of this process, None before it is granted."""
        return self.serving.lease

    async def granted(self) -> Lease:
        """Return the lease of this process, granted on first use. EngineShutdown: it stops."""
        await self.start()
        return await self.serving.granted()

    async def start(self) -> None:
        """Open discovery and NATS. Called by every first use; idempotent. Raises ConfigError."""
        if not self._started:
            # Before the first await: a second caller must not open discovery again.
            self._started = True
            planes = (
                self.settings.discovery_backend,
                self.settings.request_plane,
                self.settings.event_plane,
            )
            if planes not in (("file", "uds", "zmq"), ("mem", "uds", "zmq")):
                log.info("discovery %s, requests over %s, events over %s", *planes)
            if self.settings.discovery_backend == "etcd" and self.settings.request_plane == "uds":
                log.warning(
                    "etcd discovery with UNIX sockets: workers on other boxes are unreachable; "
                    "set DYN_REQUEST_PLANE=tcp and DYN_TCP_RPC_HOST=0.0.0.0"
                )
            await self.discovery.start()
            if self._tls.watch is not None:
                follow = self._tls.follow(self.server.renew_certificate)
                self.tasks.spawn(follow, name="renewed certificates")
            if self._nats is not None:
                await self._nats.start()

    async def start_serving(self) -> Serving:
        """Open discovery and, if configured, the status server."""
        await self.start()
        await self.status.start()
        return self.serving

    def endpoint(self, path: str) -> Endpoint:
        """Return the endpoint ``[dyn://]ns.component.endpoint``. Raises ValueError."""
        return Endpoint(self, parse_endpoint(path))

    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop given to the constructor, else the running one, if any."""
        return self._event_loop or running_loop()

    def set_health_status(self, ready: bool) -> None:
        """Report the process as not ready; with ``ready``, as its endpoints are.

        Without a served endpoint only ``ready`` counts.
        """
        self.serving.health.set_process(ready)

    def system_status_server_url(self) -> str | None:
        """Return the URL of the status server; None while it does not listen."""
        return self.status.url

    def namespace(self, name: str) -> Namespace:
        """Return the namespace ``name``."""
        return Namespace(self, name)

    def register_engine_route(self, name: str, callback: EngineRoute) -> None:
        """Answer ``POST /engine/<name>`` of the status server with ``await callback(body)``."""
        self.status.routes[name.strip("/")] = callback

    async def publisher(self, namespace: str, component: str, topic: str) -> EventPublisher:
        """Return the publisher of this process on the topic; register it in discovery."""
        await self.start()
        return await self._publishers.get((namespace, component, topic))

    async def publish_when_possible(
        self, namespace: str, component: str, topic: str, use: Callable[[EventPublisher], None]
    ) -> None:
        """Call ``use`` with the publisher, as soon as it can be registered: now, or on a full disk
        later. For what requests do not depend on.

        Raises EngineShutdown when the process is shutting down.
        """
        try:
            use(await self.publisher(namespace, component, topic))
        except Unavailable as error:
            log.warning("%s; trying again in %g s", error.message, REGISTER_AGAIN_S)
            again = self._publish_later(namespace, component, topic, use)
            self.tasks.spawn(again, name=f"publisher of {topic}")

    async def _publish_later(self, *channel: Any) -> None:
        await asyncio.sleep(REGISTER_AGAIN_S)
        with contextlib.suppress(EngineShutdown):
            await self.publish_when_possible(*channel)

    def subscribe(
        self,
        namespace: str,
        component: str,
        topic: str,
        on_event: OnEvent,
        on_gap: OnGap | None = None,
        on_publisher: OnPublisher | None = None,
        over: Mapping[str, EventSubscriber] | None = None,
    ) -> Subscription:
        """Subscribe to every present and future publisher of the topic."""
        channel = (namespace, component, topic)
        subscription = Subscription(
            self.discovery,
            channel,
            on_event,
            on_gap,
            on_publisher,
            self._nats,
            over,
            on_end=self.off_close,
        )
        self.on_close(subscription.close)
        return subscription

    def on_close(self, close: Callable[[], None]) -> None:
        """Call ``close``, which is idempotent, when the runtime closes; the last added first."""
        self._closers[close] = None

    def off_close(self, close: Callable[[], None]) -> None:
        """Undo :meth:`on_close` for what is closed earlier; ignore the unknown.

        A process that runs for months opens and closes a client with each command to an engine.
        """
        self._closers.pop(close, None)

    def shutdown(self) -> None:
        """Start the shutdown: leave discovery, finish requests in flight. ``serve_endpoint``
        returns at its end. Idempotent, from any thread.

        After the end of the loop nothing can be served or revoked: the lease ends with the process.
        """
        loop = running_loop()
        if loop is None and self._event_loop is not None and self._event_loop.is_running():
            self._event_loop.call_soon_threadsafe(self.serving.begin_shutdown)
        elif loop is None:
            self.serving.abort()
        else:
            self.serving.begin_shutdown()

    async def close(self) -> None:
        """Shut down gracefully, then close everything. Idempotent. Cancelling this call aborts the
        streams, but still revokes the lease and closes everything."""
        if self._closed:
            return
        self._closed = True
        # Callbacks run in reverse: serving ends first, the directory of sockets is released last.
        async with AsyncExitStack() as rest:
            rest.callback(release_sockets, self.settings)
            for close in (self.tasks.close, self.status.close, self.discovery.close):
                rest.push_async_callback(close)
            if self._nats is not None:
                rest.push_async_callback(self._nats.close)
            rest.push_async_callback(self.requests.close)
            rest.callback(self._publishers.close)
            for closer in reversed(self._closers):
                rest.callback(closer)
            if self.tracing is not None:
                rest.push_async_callback(self.tracing.close)
            await self.serving.close()


def warn_enable_nats() -> None:
    """Warn about the deprecated argument ``enable_nats``."""
    warnings.warn(
        "enable_nats is deprecated and has no effect; for events over NATS set DYN_EVENT_PLANE",
        DeprecationWarning,
        stacklevel=3,
    )


def _settings(
    discovery: str | None, request_plane: str | None, event_plane: str | None
) -> RuntimeSettings:
    if isinstance(event_plane, str) and event_plane not in EVENT_PLANES:
        # A ValueError and not a ConfigError: what Dynamo raises here.
        names = ", ".join(f"'{name}'" for name in sorted(EVENT_PLANES))
        raise ValueError(f"Invalid event_plane value '{event_plane}'. Valid values: {names}")
    if request_plane == "nats":
        request_plane = _instead_of_nats()
    arguments: dict[str, Any] = {
        "discovery_backend": discovery,
        "request_plane": request_plane,
        "event_plane": event_plane,
    }
    # Older versions of Dynamo had a boolean "is_static" among the first arguments.
    chosen: dict[str, Any] = {
        name: value for name, value in arguments.items() if isinstance(value, str)
    }
    return from_env(RuntimeSettings, **chosen)


@functools.cache
def _instead_of_nats() -> str:
    """Return the request plane of programs that name NATS; log a warning once a process."""
    log.warning("this runtime has no request plane 'nats': requests are sent over tcp")
    return "tcp"


def _discovery(settings: RuntimeSettings) -> Discovery:
    if settings.discovery_backend == "mem":
        return MemoryDiscovery()
    if settings.discovery_backend == "etcd":
        module = import_extra("etcd", "dynamo.runtime.discovery.etcd.discovery")
        etcd: Discovery = module.EtcdDiscovery(from_env(EtcdSettings))
        return etcd
    return FileDiscovery(store_dir(settings), StaleSockets(lambda: socket_dirs(settings)))


def _nats(settings: RuntimeSettings) -> EventPlane | None:
    if settings.event_plane != "nats":
        return None
    module = import_extra("nats", "dynamo.runtime.events.nats.plane")
    plane: EventPlane = module.NatsPlane(from_env(NatsSettings, **settings.nats_tls))
    return plane


def _tracing(instance_id: int) -> OtelTracing | None:
    """Return what exports spans; None unless OTEL_EXPORT_ENABLED is set."""
    if not from_env(TracingSettings).enabled:
        return None
    module = import_extra("otel", "dynamo.observability.otel")
    tracing: OtelTracing = module.OtelTracing(instance_id)
    return tracing


def import_extra(name: str, module: str) -> Any:
    """Import ``module``, which needs the optional dependencies ``name``. Raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "dynamo":  # our own mistake, not a missing package
            raise
        raise ConfigError(
            f"{name} needs a package that is not installed ({missing or error}): "
            f"pip install 'dynamo-appliance[{name}]'"
        ) from error
