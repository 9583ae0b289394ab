"""Options of OpenTelemetry traces. The SDK reads the other OTEL_* variables itself."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["TracingSettings"]


@dataclass(frozen=True, kw_only=True)
class TracingSettings:
    """tracing: OpenTelemetry spans"""

    enabled: bool = option(
        False,
        env="OTEL_EXPORT_ENABLED",
        help="export a span for each request over OTLP; needs dynamo-appliance[otel]",
    )
    protocol: str = option(
        "http/protobuf",
        env=("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
        choices=("http/protobuf",),
        help="protocol of the collector; most take it on port 4318",
    )
