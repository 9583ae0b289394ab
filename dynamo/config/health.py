"""Options of a worker's health checks of its own endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["HealthCheckSettings"]


@dataclass(frozen=True, kw_only=True)
class HealthCheckSettings:
    """health checks: small requests that a worker sends to its own idle endpoints"""

    enabled: bool = option(
        False,
        env="DYN_HEALTH_CHECK_ENABLED",
        help="send a health check to each endpoint that has a payload and is idle",
    )
    canary_wait_s: float = option(
        10.0,
        env="DYN_CANARY_WAIT_TIME",
        minimum=0.01,
        help="seconds without a response item after which an endpoint gets a health check",
    )
    request_timeout_s: float = option(
        3.0,
        env="DYN_HEALTH_CHECK_REQUEST_TIMEOUT",
        minimum=0.01,
        help="seconds the first response item of a health check may take",
    )
