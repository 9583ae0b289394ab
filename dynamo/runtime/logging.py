"""Logging at the path from which workers written for Dynamo import it."""

from __future__ import annotations

import logging

from dynamo.config import environ, from_env
from dynamo.config.system import LogSettings
from dynamo.observability.logs import setup_logging

__all__ = [
    "configure_dynamo_logging",
    "configure_sglang_logging",
    "configure_vllm_logging",
    "get_bool_env_var",
    "log_message",
]

_LEVELS = {"trace": 5, "debug": 10, "info": 20, "warn": 30, "warning": 30, "error": 40}
log = logging.getLogger(__name__)


def configure_dynamo_logging(service_name: str | None = None, worker_id: int | None = None) -> None:
    """Log to stderr as configured in the environment (``DYN_LOG``, ``DYN_LOGGING_JSONL``)."""
    settings = from_env(LogSettings)
    setup_logging(service_name or "worker", settings.level, settings.jsonl)


def configure_vllm_logging(dyn_level: int) -> None:
    """Send vLLM's log records to the handlers of this process, from ``dyn_level`` on."""
    _adopt("vllm", dyn_level)


def configure_sglang_logging(dyn_level: int) -> None:
    """Send SGLang's log records to the handlers of this process, from ``dyn_level`` on."""
    _adopt("sglang", dyn_level)


def log_message(level: str, message: str, module: str, file: str, line: int) -> None:
    """Log ``message`` for ``module`` as coming from that line of a file."""
    number = _LEVELS.get(level.lower(), logging.INFO)
    logger = logging.getLogger(module)
    if logger.isEnabledFor(number):
        logger.handle(logger.makeRecord(module, number, file, line, message, (), None))


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Return whether the variable is ``true`` or ``1``; with a warning False for unknown values."""
    value = (environ().get(name) or default).lower()
    if value not in ("true", "1", "false", "0"):
        log.warning("%s=%s is not true, false, 1 or 0: false is assumed", name, value)
    return value in ("true", "1")


def _adopt(name: str, level: int) -> None:
    engine = logging.getLogger(name)
    engine.handlers.clear()
    engine.propagate = True
    engine.setLevel(level)
