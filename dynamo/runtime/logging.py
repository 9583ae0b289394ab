"""``configure_dynamo_logging`` at the path from which workers written for Dynamo import it."""

from __future__ import annotations

from dynamo.config import from_env
from dynamo.config.system import LogSettings
from dynamo.observability.logs import setup_logging

__all__ = ["configure_dynamo_logging"]


def configure_dynamo_logging(service_name: str | None = None, worker_id: int | None = None) -> None:
    """Log to stderr as configured in the environment (``DYN_LOG``, ``DYN_LOGGING_JSONL``)."""
    settings = from_env(LogSettings)
    setup_logging(service_name or "worker", settings.level, settings.jsonl)
