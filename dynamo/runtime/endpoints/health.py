"""The readiness of this process, from the state of its endpoints."""

from __future__ import annotations

import json
import time
from typing import Any

from dynamo.config.system import SystemSettings
from dynamo.errors import ConfigError

__all__ = ["SystemHealth"]


class SystemHealth:
    """Readiness by endpoint name.

    Ready means that all required endpoints are ready; with none required, that at least one is
    served and all served ones are ready.
    """

    def __init__(self, settings: SystemSettings) -> None:
        self._required = _names(settings.use_endpoint_health_status)
        self._starts_ready = settings.starting_health_status == "ready"
        self._ready: dict[str, bool] = {}
        self._process_ready = True
        self._stopping = False
        self._started = time.monotonic()

    @property
    def uptime_s(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._started

    def set(self, endpoint: str, ready: bool) -> None:
        """Set whether the endpoint accepts requests."""
        self._ready[endpoint] = ready

    def set_process(self, ready: bool) -> None:
        """Set the readiness of the process itself: not ready overrides every endpoint."""
        self._process_ready = self._starts_ready = ready

    def forget(self, endpoint: str) -> None:
        """Remove an endpoint that is no longer served."""
        self._ready.pop(endpoint, None)

    def stop(self) -> None:
        """Report not ready from now on: the process is shutting down."""
        self._stopping = True
        self._ready = dict.fromkeys(self._ready, False)

    def is_ready(self) -> bool:
        """Return the readiness that the health path reports."""
        if self._stopping or not self._process_ready:
            return False
        if self._required:
            return all(self._ready.get(name, False) for name in self._required)
        if not self._ready:
            return self._starts_ready
        return all(self._ready.values())

    def report(self) -> dict[str, Any]:
        """Return the JSON body of the health path."""
        uptime_ns = int(self.uptime_s * 1e9)
        return {
            "status": _status(self.is_ready()),
            "uptime": {"secs": uptime_ns // 10**9, "nanos": uptime_ns % 10**9},
            "endpoints": {name: _status(ready) for name, ready in sorted(self._ready.items())},
        }


def _status(ready: bool) -> str:
    return "ready" if ready else "notready"


def _names(text: str) -> tuple[str, ...]:
    if not text.strip().startswith("["):
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise ConfigError(
        f"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS must be a JSON list of names, got {text!r}"
    )
