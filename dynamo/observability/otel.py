"""Spans over OTLP with the official SDK, which needs the extra ``otel``.

The SDK has a queue of 2,048 spans (OTEL_BSP_MAX_QUEUE_SIZE) and a thread that sends them. A dead
collector costs spans, nothing else; it is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dynamo.observability.tracing import OpenSpan, trace_context

log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_SERVICE = "dynamo"
_propagator = TraceContextTextMapPropagator()


class OtelTracing:
    """Starts spans and exports them. ``instance_id`` is that of the process."""

    def __init__(self, instance_id: int) -> None:
        # Its own messages come with every batch; _ReportingExporter logs the first of them.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = _ReportingExporter()
        self._provider = TracerProvider(resource=_resource(instance_id), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("dynamo")

    def start(self, name: str, headers: Mapping[str, str], begun_s: float) -> _OtelSpan:
        """Start a span below the one in ``headers``, or the first of a new trace."""
        parent = _propagator.extract(trace_context(headers))
        return _OtelSpan(self._tracer, name, parent, begun_s)

    async def close(self) -> None:
        """Export what is left, for two seconds at most."""
        # A thread of our own: the loop's executor would be joined at exit, for as long as a
        # collector that does not answer takes.
        stopper = threading.Thread(target=self._stop, name="otel stop", daemon=True)
        stopper.start()
        await asyncio.get_running_loop().run_in_executor(None, stopper.join, _CLOSE_S)

    def _stop(self) -> None:
        if not self._exporter.failing:
            self._provider.force_flush(int(_CLOSE_S * 1e3))
        self._exporter.shutdown()  # first: the processor's own would wait for a dead collector
        self._provider.shutdown()


class _OtelSpan(OpenSpan):
    def __init__(
        self, tracer: trace.Tracer, name: str, parent: trace.Context, begun_s: float
    ) -> None:
        self._tracer = tracer
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        kind = trace.SpanKind.SERVER
        self._span = tracer.start_span(name, parent, kind, start_time=self._ns(begun_s))
        self.recording = self._span.is_recording()  # else the sampler left it out
        self._context = trace.set_span_in_context(self._span)
        self.headers: dict[str, str] = {}
        _propagator.inject(self.headers, self._context)

    def child(self, name: str, begun_s: float, ended_s: float) -> None:
        step = self._tracer.start_span(name, self._context, start_time=self._ns(begun_s))
        step.end(self._ns(ended_s))

    def end(
        self, ended_s: float, attributes: Mapping[str, str | int | float], error: str = ""
    ) -> None:
        span = self._span
        span.set_attributes(attributes)
        if error:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(self._ns(ended_s))

    def _ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset_ns


class _ReportingExporter:
    """Sends spans to the collector; logs when it stops answering and when it answers again."""

    def __init__(self) -> None:
        self._inner = OTLPSpanExporter()
        self.failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; called by the SDK's thread."""
        failed = self._inner.export(spans) is not SpanExportResult.SUCCESS
        if failed and not self.failing:
            log.warning(
                "the OTLP collector %s takes no spans; they are dropped until it does",
                getattr(self._inner, "_endpoint", ""),
            )
        elif self.failing and not failed:
            log.info("the OTLP collector takes spans again")
        self.failing = failed
        return SpanExportResult.FAILURE if failed else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Interrupt a batch that is being sent again."""
        self._inner.shutdown()


def _resource(instance_id: int) -> Resource:
    """The resource that OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES describe."""
    resource = Resource.create({"service.instance.id": f"{instance_id:x}"})
    name = str(resource.attributes.get("service.name", ""))
    if name.startswith("unknown_service"):  # the SDK's default
        resource = resource.merge(Resource({"service.name": _SERVICE}))
    return resource
