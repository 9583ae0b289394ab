"""Options of a process that serves endpoints: status server, shutdown, health checks, traces."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import variable
from dynamo.config.runtime import NAMESPACE_RULE, is_namespace
from dynamo.errors import ConfigError

_NAMES = ("off", "error", "warn", "info", "debug", "trace")
LOG_LEVELS = {
    **dict(zip("012345", _NAMES, strict=True)),
    **dict(zip(_NAMES, _NAMES, strict=True)),
    "warning": "warn",
}
"""What ``DYN_LOG`` accepts as a level, in any case, and its name in Dynamo."""
_MODULE_MARKS = "_.:["


@dataclass(frozen=True, kw_only=True)
class TracingSettings:
    """tracing: OpenTelemetry spans"""

    enabled: bool = variable(
        False,
        "OTEL_EXPORT_ENABLED",
        help="export a span for each request over OTLP; needs dynamo-appliance[otel]",
    )
    protocol: str = variable(
        "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
        choices=("http/protobuf",),
        help="protocol of the collector; most take it on port 4318",
    )


@dataclass(frozen=True, kw_only=True)
class HealthCheckSettings:
    """health checks: small requests that a worker sends to its own idle endpoints"""

    enabled: bool = variable(
        False,
        "DYN_HEALTH_CHECK_ENABLED",
        help="send a health check to each endpoint that has a payload and is idle",
    )
    canary_wait_s: float = variable(
        10.0,
        "DYN_CANARY_WAIT_TIME",
        minimum=0.01,
        help="seconds without a response item after which an endpoint gets a health check",
    )
    request_timeout_s: float = variable(
        3.0,
        "DYN_HEALTH_CHECK_REQUEST_TIMEOUT",
        minimum=0.01,
        help="seconds the first response item of a health check may take",
    )


@dataclass(frozen=True, kw_only=True)
class SystemSettings:
    """system: status server and graceful shutdown"""

    port: int = variable(
        -1,
        "DYN_SYSTEM_PORT",
        minimum=-1,
        maximum=65535,
        help="port of /health, /live and /metrics; -1: off, 0: the system chooses",
    )
    host: str = variable(
        "127.0.0.1",
        "DYN_SYSTEM_HOST",
        help="address the status server listens on; 0.0.0.0 opens it to the network",
    )
    api_key_file: str | None = variable(
        None,
        help="file with the digests of API keys; the engine's routes (POST /engine/...) need an "
        "operator's key. Default: they can be called from this machine only",
    )
    health_path: str = variable("/health", "DYN_SYSTEM_HEALTH_PATH", help="path of readiness")
    live_path: str = variable("/live", "DYN_SYSTEM_LIVE_PATH", help="path of liveness")
    starting_health_status: str = variable(
        "notready",
        "DYN_SYSTEM_STARTING_HEALTH_STATUS",
        choices=("ready", "notready"),
        help="readiness as long as nothing is served",
    )
    use_endpoint_health_status: str = variable(
        "",
        "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS",
        help="JSON list (or comma separated names) of the endpoints that must be ready",
    )
    grace_period_s: float = variable(
        0.25,
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
        minimum=0,
        help="seconds between deregistering and rejecting requests",
    )
    shutdown_timeout_s: float = variable(
        900.0,
        "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        minimum=0,
        help="seconds that requests in flight may take to finish at shutdown",
    )
    inhibited_duration_s: float = variable(
        5.0,
        "DYN_RUNTIME_INHIBITED_DURATION_SECS",
        minimum=0,
        help="seconds an instance is avoided after a failed connection",
    )
    namespace_worker_suffix: str | None = variable(
        None, help="appended to the namespace of workers, after a hyphen"
    )

    def __post_init__(self) -> None:
        suffix = self.namespace_worker_suffix
        # As it is appended, behind the shortest namespace: it may begin with a hyphen.
        if suffix and not is_namespace(f"_-{suffix}"):
            raise ConfigError(f"DYN_NAMESPACE_WORKER_SUFFIX {NAMESPACE_RULE}, got {suffix!r}")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """logs"""

    level: str = variable(
        "info", "DYN_LOG", help="log level, with exceptions: info,dynamo.router=debug"
    )
    jsonl: bool = variable(False, "DYN_LOGGING_JSONL", help="write logs as JSON lines")

    def __post_init__(self) -> None:
        for part in self.level.split(","):
            module, equals, word = part.strip().rpartition("=")
            # A module by itself, such as `dynamo_runtime`, is valid in Dynamo, too.
            is_module = not equals and any(mark in word for mark in _MODULE_MARKS)
            if (equals or word) and word.lower() not in LOG_LEVELS and not is_module:
                raise ConfigError(
                    f"DYN_LOG={self.level!r}: {word!r} is no level; give one of "
                    f"{', '.join(LOG_LEVELS)}, or {module or 'module'}=LEVEL for a module"
                )
