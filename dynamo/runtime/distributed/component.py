"""Endpoints by name (namespace, component, endpoint), and serving them with traces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.config.option import from_env
from dynamo.config.system import HealthCheckSettings
from dynamo.errors import Cancelled, DynamoError, InvalidArgument
from dynamo.observability.metrics import Registry
from dynamo.observability.tracing import OpenSpan
from dynamo.runtime.endpoints.client import Client
from dynamo.runtime.endpoints.health import Canary, CheckedEndpoint
from dynamo.runtime.endpoints.instances import Availability
from dynamo.runtime.endpoints.serving import EndpointPath
from dynamo.runtime.requests import EndpointStats, PushHandler, ServerStream, generator_handler
from dynamo.runtime.requests.admission import MetricsLabels

if TYPE_CHECKING:
    from dynamo.observability.otel import OtelTracing
    from dynamo.runtime.distributed.runtime import DistributedRuntime

_SCHEME = "dyn://"
_NAME = "handle_payload"


def traced(handler: PushHandler, tracing: OtelTracing) -> PushHandler:
    """Return ``handler`` with a span for each request that belongs to a trace.

    The request's context has the span as its parent.
    """

    def handle(stream: ServerStream, payload: bytes) -> None:
        if "traceparent" in stream.headers:
            span = tracing.start(_NAME, stream.headers, time.monotonic())
            attributes = {
                "dynamo.endpoint": stream.endpoint,
                "dynamo.request_id": stream.headers.get("request-id", ""),
            }
            stream.headers = {**stream.headers, **span.headers}
            stream.on_finished = _Ending(span, attributes)
        handler(stream, payload)

    return handle


class _Ending:
    """Ends the span with the stream."""

    __slots__ = ("_attributes", "_span")

    def __init__(self, span: OpenSpan, attributes: dict[str, str]) -> None:
        self._span = span
        self._attributes = attributes

    def __call__(self, error: DynamoError | None) -> None:
        failed = error is not None and not isinstance(error, Cancelled)
        self._span.end(
            time.monotonic(), self._attributes, f"{error.code}: {error}" if failed and error else ""
        )


class BadEndpointPath(InvalidArgument, ValueError):
    """The text is not the path of an endpoint."""


def parse_endpoint(text: str) -> EndpointPath:
    """Parse ``ns.component.endpoint``, with or without ``dyn://``. Raises BadEndpointPath.

    The namespace may have parts with slashes between them, as in ``examples/pipeline``.
    """
    parts = text.removeprefix(_SCHEME).split(".")
    if len(parts) != 3 or not _is_path(parts):
        raise BadEndpointPath(
            f"Invalid endpoint path '{text}'. Expected format: 'namespace.component.endpoint' "
            "or 'dyn://namespace.component.endpoint'"
        )
    return parts[0], parts[1], parts[2]


class Namespace:
    """The first part of a path."""

    def __init__(self, runtime: DistributedRuntime, name: str) -> None:
        self.name = name
        self._runtime = runtime

    def component(self, name: str) -> Component:
        """Return a component in this namespace."""
        return Component(self._runtime, self.name, name)


class Component:
    """The first two parts of a path."""

    def __init__(self, runtime: DistributedRuntime, namespace: str, name: str) -> None:
        self.namespace = namespace
        self.name = name
        self._runtime = runtime

    async def create_service(self) -> None:
        """Do nothing; kept for workers written for older versions."""

    def endpoint(self, name: str) -> Endpoint:
        """Return an endpoint of this component."""
        return Endpoint(self._runtime, (self.namespace, self.name, name))


class Endpoint:
    """An endpoint to serve in this process or to call. Raises BadEndpointPath."""

    def __init__(self, runtime: DistributedRuntime, path: EndpointPath) -> None:
        if not _is_path(path):
            parse_endpoint(".".join(path))
        self.runtime = runtime
        self.path = path

    @property
    def namespace(self) -> str:
        """The first part."""
        return self.path[0]

    @property
    def component(self) -> str:
        """The second part."""
        return self.path[1]

    @property
    def name(self) -> str:
        """The third part."""
        return self.path[2]

    @property
    def metrics(self) -> Registry:
        """The metrics of this process."""
        return self.runtime.metrics

    async def first_token_source(self, worker_type: Any) -> None:
        """Return None: routers see the first token in the response stream."""

    def connection_id(self) -> int:
        """Return the instance id of this process."""
        return self.runtime.instance_id

    async def serve_endpoint(
        self,
        handler: Callable[..., Any],
        graceful_shutdown: bool = True,
        metrics_labels: MetricsLabels | None = None,
        health_check_payload: dict[str, Any] | None = None,
    ) -> None:
        """Serve ``async def handler(request[, context])``, an async generator of plain values.

        Returns after a shutdown (revoked lease, ``shutdown()`` or signal) when the streams in
        flight have ended. ``graceful_shutdown=False`` aborts them instead. Cancelling this call
        removes the endpoint and aborts its streams. ``metrics_labels`` are added to those of the
        endpoint's metrics. ValueError: served already, or an invalid label. All endpoints of the
        process share the limit of ``DYN_ENGINE_REQUEST_LIMIT``, if it is set.
        ``health_check_payload`` is the request of its health checks, which
        ``DYN_HEALTH_CHECK_ENABLED`` turns on (:class:`Canary`).
        """
        push = generator_handler(handler, self.runtime.tasks, self.runtime.admission)
        await self.serve_push(push, graceful_shutdown, metrics_labels, health_check_payload)

    async def serve_push(
        self,
        handler: PushHandler,
        graceful_shutdown: bool = True,
        metrics_labels: MetricsLabels | None = None,
        health_check_payload: dict[str, Any] | None = None,
    ) -> None:
        """:meth:`serve_endpoint` for a handler of encoded payloads, called from the read."""
        serving = await self.runtime.start_serving()
        if self.runtime.tracing is not None:
            handler = traced(handler, self.runtime.tracing)
        stats = await serving.add(self.path, handler, graceful_shutdown, metrics_labels or ())
        checks = self._start_checks(stats, health_check_payload)
        try:
            await serving.stopped.wait()
            await serving.remove(self.path)
        except BaseException:
            await serving.remove(self.path, abort=True)
            raise
        finally:
            if checks is not None:
                checks.cancel()

    def _start_checks(
        self, stats: EndpointStats, payload: dict[str, Any] | None
    ) -> asyncio.Task[None] | None:
        settings = from_env(HealthCheckSettings)
        if payload is None or not settings.enabled:
            return None
        checked = CheckedEndpoint(self.runtime.serving, self.runtime.requests, self.path, stats)
        canary = Canary(settings, checked, payload, self.runtime.metrics)
        return self.runtime.tasks.spawn(canary.run(), name=f"health checks of {self}")

    def client(self, router_mode: Any = None) -> Client:
        """Return a client that follows the instances of this endpoint.

        Await it to know the existing instances; its calls wait for them, too. ``router_mode`` is
        accepted for compatibility; the caller chooses with each call.
        """
        runtime, path = self.runtime, "/".join(self.path)
        client = Client(
            path,
            runtime.discovery,
            runtime.requests,
            Availability(path, runtime.metrics, runtime.system.inhibited_duration_s),
            runtime.tasks,
            runtime.start,
            on_end=runtime.off_close,
        )
        runtime.on_close(client.close)
        return client

    async def unregister_endpoint_instance(self, asleep: bool = False, waits: bool = True) -> None:
        """Remove the instance from discovery; clients that have its address may still call it.

        ``asleep``: it rejects their new requests until it is registered again, so that they send
        these elsewhere, and returns when those in flight have ended, or with ``waits`` false at
        once. An engine that sleeps would keep them until it wakes.
        """
        await self.runtime.serving.withdraw(self.path, asleep, waits)

    async def register_endpoint_instance(self) -> None:
        """Register the instance, served or not yet; again after
        :meth:`unregister_endpoint_instance`, or after a handler raised EngineShutdown, which
        unregisters it."""
        serving = await self.runtime.start_serving()
        await serving.publish(self.path)

    async def set_health(self, problem: str, stalled: bool = False) -> None:
        """Have clients avoid this instance because of ``problem``; "": no longer.

        ``stalled``: they also move its running requests to other instances.
        """
        await self.runtime.serving.set_health(self.path, problem, stalled)

    def __str__(self) -> str:
        return ".".join(self.path)


def _is_path(parts: Sequence[str]) -> bool:
    return all(map(_is_name, (*parts[0].split("/"), *parts[1:])))


def _is_name(text: str) -> bool:
    return bool(text) and not any(mark in text for mark in "./\0") and text.isprintable()
