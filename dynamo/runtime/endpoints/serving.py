"""The serving side of one process: its lease, listener, instances and shutdown.

A signal, ``shutdown()`` and a revoked lease all cause the same shutdown: revoke the lease, accept
requests for a short grace period, because clients may not have seen the change yet, then reject new
ones, let streams finish or abort them at the deadline, and set ``stopped``.
"""

from __future__ import annotations

import asyncio
import functools
import logging

import msgspec

from dynamo.config.option import environ
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.errors import EngineDied, EngineShutdown
from dynamo.observability.logs import counted
from dynamo.observability.metrics import Registry, gauge
from dynamo.protocols.control import INSTANCES, EndpointRecord, instance_key
from dynamo.runtime.discovery import Discovery, Lease
from dynamo.runtime.endpoints.health import SystemHealth
from dynamo.runtime.process.paths import socket_path
from dynamo.runtime.process.sockets import advertised_host, bracketed, request_socket_name
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests import EndpointStats, PushHandler, RequestServer
from dynamo.runtime.requests.admission import (
    MetricsLabels,
    endpoint_stats,
    export_dropped_lines,
    export_pool,
)
from dynamo.runtime.requests.tls import RequestTls

EndpointPath = tuple[str, str, str]
"""(namespace, component, endpoint)."""

_UPTIME = gauge("dynamo_component_uptime_seconds", "Seconds since start", "worker_id")
log = logging.getLogger(__name__)


class Serving:
    """The serving side of one process. Opens nothing before the first lease or endpoint."""

    def __init__(
        self,
        settings: RuntimeSettings,
        system: SystemSettings,
        discovery: Discovery,
        instance_id: int,
        metrics: Registry,
        tls: RequestTls | None = None,
    ) -> None:
        self.server = RequestServer(None, tls)
        self.health = SystemHealth(system)
        self.lease: Lease | None = None
        self.stopped = asyncio.Event()
        self.device_type = settings.device_type or _visible_device()
        self._settings = settings
        self._system = system
        self._discovery = discovery
        self._instance_id = instance_id
        self._metrics = metrics
        self._tasks = Tasks("serving")
        self._lock = asyncio.Lock()
        self._shutting_down = False
        self._transport: dict[str, str] | None = None
        self._served: set[EndpointPath] = set()
        self._published: set[EndpointPath] = set()
        self._unhealthy: dict[EndpointPath, tuple[str, bool]] = {}
        metrics.child(_UPTIME, f"{instance_id:x}").function = lambda: self.health.uptime_s
        export_dropped_lines(metrics)

    def set_engine_device(self, device_type: str) -> None:
        """Set the kind of device that the engine reports, before its endpoint is served."""
        if self._settings.device_type is None:
            self.device_type = device_type

    def is_serving(self) -> bool:
        """Return whether any endpoint is served."""
        return bool(self._served)

    async def granted(self) -> Lease:
        """Return the lease of this process, granted on first use. EngineShutdown: it stops."""
        async with self._lock:
            if self._shutting_down:
                raise EngineShutdown("this process is shutting down")
            if self.lease is None:
                self.lease = await self._discovery.grant(
                    self._settings.lease_ttl_s, self._instance_id
                )
                self._tasks.spawn(self._watch_lease(self.lease), name="lease")
            return self.lease

    async def add(
        self,
        path: EndpointPath,
        handler: PushHandler,
        graceful: bool,
        metrics_labels: MetricsLabels = (),
    ) -> EndpointStats:
        """Serve ``path`` and register this process as an instance; return its metrics.

        ``metrics_labels`` are added to their labels. ValueError: ``path`` is served already, or a
        label is invalid.
        """
        stats = endpoint_stats(self._metrics, path, self._instance_id, metrics_labels)
        await self.granted()
        await self._listen()
        # Before the record: a client may call as soon as it sees that.
        self.server.register(
            "/".join(path),
            handler,
            stats=stats,
            graceful_shutdown=graceful,
            on_engine_shutdown=functools.partial(self._engine_shut_down, path),
        )
        self._served.add(path)
        try:
            await self.publish(path)
        except BaseException:
            self._forget(path)
            raise
        return stats

    async def publish(self, path: EndpointPath) -> None:
        """Register the instance of an endpoint in discovery."""
        lease = await self.granted()
        await self._listen()
        # Before the write: an engine that shuts down during it withdraws the record.
        self._published.add(path)
        self.server.set_asleep("/".join(path), False)
        await self._put_record(path, lease)
        log.info("Successfully registered %s as instance %x", "/".join(path), self._instance_id)

    def is_published(self, path: EndpointPath) -> bool:
        """Return whether the instance is registered."""
        return path in self._published

    def address(self) -> str:
        """Return the address of the listener, for requests of this process to itself."""
        assert self._transport is not None, "an endpoint is served"
        [(kind, where)] = self._transport.items()
        return f"{kind}:{where}"

    async def set_health(self, path: EndpointPath, problem: str, stalled: bool = False) -> None:
        """Have clients avoid the instance because of ``problem``; "": no longer.

        ``stalled``: its engine has stopped computing, so they also move its running requests.
        """
        self._unhealthy[path] = problem, stalled
        if path in self._published and self.lease is not None and not self._shutting_down:
            await self._put_record(path, self.lease)

    async def _put_record(self, path: EndpointPath, lease: Lease) -> None:
        problem, stalled = self._unhealthy.get(path, ("", False))
        record = EndpointRecord(
            namespace=path[0],
            component=path[1],
            endpoint=path[2],
            instance_id=self._instance_id,
            lease_id=lease.id,
            transport=self._transport or {},
            device_type=self.device_type,
            unhealthy=problem or msgspec.UNSET,
            stalled=bool(problem and stalled) or msgspec.UNSET,
        )
        await self._discovery.put(self._key(path), msgspec.json.encode(record), lease.id)
        self.health.set(path[2], not problem)

    async def withdraw(self, path: EndpointPath, asleep: bool = False, waits: bool = True) -> None:
        """Remove the instance from discovery; clients that have the address may still call it.

        Not while it is ``asleep``: then it rejects new requests until it is published again; return
        when those in flight have ended, or with ``waits`` false at once.
        """
        self.health.set(path[2], False)
        self._published.discard(path)
        await self._discovery.delete(self._key(path))
        # Published again while the record was deleted: the engine is awake.
        if asleep and path not in self._published:
            self.server.set_asleep("/".join(path), True)
            if waits:
                await self.server.all_ended("/".join(path))

    async def remove(self, path: EndpointPath, abort: bool = False) -> None:
        """Stop serving ``path``: withdraw it, let its streams finish or ``abort`` them. Idempotent.

        Cancelling this call aborts the streams and still removes the endpoint.
        """
        if path not in self._served:
            return
        self._served.discard(path)
        try:
            await self.withdraw(path)
            if not abort:
                await self.server.drain(self._system.shutdown_timeout_s, "/".join(path))
        finally:
            self.server.abort("/".join(path))
            self._forget(path)

    def begin_shutdown(self) -> None:
        """Start the shutdown; it sets ``stopped`` at its end. Idempotent."""
        if not self._shutting_down:
            self._shutting_down = True
            self.health.stop()
            self._tasks.spawn(self._shut_down(), name="shutdown")

    async def close(self) -> None:
        """Shut down, wait for it, close the listener. Cancelling this call aborts the streams."""
        self.begin_shutdown()
        try:
            await self.stopped.wait()
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            await self.server.close()
            await self._tasks.close()

    def abort(self, engine_failure: type[EngineDied] | None = None) -> None:
        """Stop waiting for streams; :meth:`close` aborts them.

        Those of an engine that died end at once, with ``engine_failure``: the end of its processes
        takes seconds, in which other workers can continue the requests.
        """
        self._shutting_down = True
        if engine_failure is not None:
            self.server.engine_failure = engine_failure
            self.server.abort_all()
            if self.lease is not None:  # no client may choose this worker until it has exited
                self._tasks.spawn(self.lease.revoke(), name="revoke the lease")
        for path in tuple(self._served):
            self._forget(path)
        self.stopped.set()

    async def _shut_down(self) -> None:
        try:
            # Under the lock: a lease that is being granted is revoked, too.
            async with self._lock:
                lease = self.lease
            if lease is not None:
                await lease.revoke()  # first, so that clients stop choosing this worker
            if self._served:
                await asyncio.sleep(self._system.grace_period_s)
                aborted = await self.server.drain(self._system.shutdown_timeout_s)
                if aborted:
                    were = counted(aborted, "request was", "requests were")
                    log.warning("%s aborted at shutdown", were)
        finally:
            for path in tuple(self._served):
                self._forget(path)
            self.stopped.set()

    async def _watch_lease(self, lease: Lease) -> None:
        await lease.lost.wait()
        if not self._shutting_down:
            log.info("lease %x was revoked: finishing requests in flight, then exiting", lease.id)
            self.begin_shutdown()

    async def _listen(self) -> None:
        async with self._lock:
            # Under the lock: of several endpoints that are served at once, one listens.
            if self._transport is not None:
                return
            export_pool(self._metrics, self.server)
            settings = self._settings
            if settings.request_plane == "uds":
                path = socket_path(settings, request_socket_name(self._instance_id))
                await self.server.start(f"uds:{path}")
                self._transport = {"uds": path}
                return
            host = settings.tcp_rpc_host
            address = await self.server.start(f"tcp:{bracketed(host)}:{settings.tcp_rpc_port}")
            port = address.rpartition(":")[2]
            self._transport = {"tcp": f"{bracketed(advertised_host(host, settings))}:{port}"}

    def _engine_shut_down(self, path: EndpointPath) -> None:
        """Withdraw the instance: it serves nothing until it is published again."""
        if path in self._published and not self._shutting_down:
            self._published.discard(path)
            name, instance_id = "/".join(path), self._instance_id
            log.error(
                "%s: the engine shut down; instance %x is withdrawn until it registers again",
                name,
                instance_id,
            )
            self._tasks.spawn(self.withdraw(path), name=f"withdraw {name}")

    def _forget(self, path: EndpointPath) -> None:
        self._served.discard(path)
        self._published.discard(path)
        self._unhealthy.pop(path, None)
        self.server.unregister("/".join(path))
        self.health.forget(path[2])

    def _key(self, path: EndpointPath) -> str:
        return INSTANCES + instance_key(*path, self._instance_id)


def _visible_device() -> str:
    """``cuda`` if CUDA_VISIBLE_DEVICES names a GPU: CUDA ignores all from an invalid one on."""
    first = environ().get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    return "cuda" if first and first != "-1" else "cpu"
