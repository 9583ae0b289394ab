"""Health checks of an endpoint by its own process: a small request on the normal path.

They find an engine that hangs although the process lives: the request plane's pings are answered
by the process, a health check by the engine.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from dynamo.config.health import HealthCheckSettings
from dynamo.errors import DynamoError
from dynamo.health_check import HEALTH_CHECK_KEY
from dynamo.observability.metrics import Registry, counter
from dynamo.protocols import codec
from dynamo.runtime.requests import ClientStream, EndpointStats, StreamSink

__all__ = ["Canary", "CheckedEndpoint"]

_POLLS_PER_WAIT = 4
_LONGEST_POLL_S = 1.0
_CHECKS = counter(
    "dynamo_component_health_checks_total",
    "Health checks that the worker sent to its endpoint",
    "dynamo_component dynamo_endpoint dynamo_namespace result",
)
log = logging.getLogger(__name__)


class CheckedEndpoint(Protocol):
    """The endpoint that a :class:`Canary` checks."""

    path: tuple[str, str, str]
    stats: EndpointStats

    def is_registered(self) -> bool:
        """Return whether clients may send requests; an endpoint that sleeps is not checked."""

    def open(self, payload: bytes, sink: StreamSink) -> ClientStream:
        """Send a request as clients do."""

    async def set_health(self, problem: str) -> None:
        """Report the endpoint as unhealthy; "": as healthy again."""


class Canary:
    """Checks ``endpoint`` whenever it sent no response item for a while.

    Any response item or end is healthy, and so is an error below status 500: the endpoint
    handled the request. A request that runs at that time is not touched, however long it takes: an
    unhealthy endpoint is healthy again with its next response item.
    """

    def __init__(
        self,
        settings: HealthCheckSettings,
        endpoint: CheckedEndpoint,
        payload: dict[str, Any],
        metrics: Registry,
    ) -> None:
        self.problem = ""
        self._settings = settings
        self._endpoint = endpoint
        self._payload = codec.encode({**payload, HEALTH_CHECK_KEY: True})
        self._checks = metrics.family(_CHECKS)
        self._poll_s = min(settings.canary_wait_s / _POLLS_PER_WAIT, _LONGEST_POLL_S)

    async def run(self) -> None:
        """Check until cancelled."""
        endpoint, wait_s = self._endpoint, self._settings.canary_wait_s
        sent = endpoint.stats.response_bytes.value
        idle_s = 0.0
        while True:
            await asyncio.sleep(self._poll_s)
            idle_s += self._poll_s
            before, sent = sent, endpoint.stats.response_bytes.value
            if sent != before:
                idle_s = 0.0
                await self._report("")
            elif idle_s >= wait_s and endpoint.is_registered():
                idle_s = 0.0
                await self._report(await self._check())

    async def _check(self) -> str:
        """Send one health check; return why it failed, or ""."""
        sink = FirstAnswer()
        stream = self._endpoint.open(self._payload, sink)
        timeout_s = self._settings.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                problem = await sink.found
        except TimeoutError:
            problem = f"no answer to a health check within {timeout_s:g} s"
        finally:
            stream.kill()
        namespace, component, endpoint = self._endpoint.path
        self._checks[component, endpoint, namespace, "failed" if problem else "ok"].value += 1
        return problem

    async def _report(self, problem: str) -> None:
        """Report a change; one that discovery does not accept is reported with the next check."""
        if bool(problem) == bool(self.problem):
            return
        name = ".".join(self._endpoint.path)
        if problem:
            log.error("%s is unhealthy: %s", name, problem)
        else:
            log.info("%s is healthy again", name)
        try:
            await self._endpoint.set_health(problem)
        except DynamoError as error:
            log.warning("%s: its health cannot be reported: %s", name, error)
        else:
            self.problem = problem


class FirstAnswer:
    """A sink whose ``found`` is the problem in the first answer, "" for none."""

    def __init__(self) -> None:
        self.found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_data(self, payload: bytes) -> None:
        """A response item is healthy."""
        self._find("")

    def on_end(self) -> None:
        """An empty response is healthy."""
        self._find("")

    def on_error(self, error: DynamoError) -> None:
        """An error is healthy if it is the caller's."""
        self._find("" if error.status < 500 else f"a health check failed: {error.message}")

    def _find(self, problem: str) -> None:
        if not self.found.done():
            self.found.set_result(problem)
