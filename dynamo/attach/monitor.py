"""Follows a server while the worker serves: its health decides about routing, its load is sent."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import orjson

from dynamo.attach.describe import ServerDescription, ServerLoading, describe
from dynamo.attach.load import json_load, prometheus_load
from dynamo.attach.probe import ServerProbe, ServerUnreachable
from dynamo.errors import EngineShutdown
from dynamo.protocols.load import KvMetrics

__all__ = ["ServerListener", "ServerMonitor"]

_SLOW_ANSWERS = 2
_ANY_SERVER_INTERVAL_S = 10.0
log = logging.getLogger(__name__)


class ServerListener(Protocol):
    """Receives what the monitor finds."""

    async def server_up(self, description: ServerDescription) -> None:
        """The server answers again, maybe with other models."""

    async def server_down(self) -> None:
        """The server does not answer, or is not healthy."""

    def server_load(self, states: list[KvMetrics]) -> None:
        """The load of its ranks; empty if it does not report it."""


class ServerMonitor:
    """Polls the server of ``probe`` every ``interval_s`` until cancelled.

    A refused or broken connection and a status from 500 on mean down at once; a missing answer
    means down the second time in a row, because a busy server is slow too. So a server that hangs
    is down within the poll interval and two timeouts of the probe.
    """

    def __init__(
        self,
        probe: ServerProbe,
        description: ServerDescription,
        listener: ServerListener,
        interval_s: float,
        profile_name: str,
    ) -> None:
        self.is_up = True
        self._probe = probe
        self._description = description
        self._listener = listener
        self._interval_s = interval_s
        self._profile_name = profile_name
        self._wake = asyncio.Event()
        self._slow = 0
        self._reports_load = True

    def check_now(self) -> None:
        """Poll at once: a request could not reach the server. No effect while it is down."""
        if self.is_up:
            self._wake.set()

    async def run(self) -> None:
        """Poll until cancelled, or until the worker is shutting down."""
        while True:
            try:
                await self._poll()
            except EngineShutdown as error:
                log.debug("no further polls: %s", error)
                return
            if self.is_up and self._slow:
                continue
            try:
                async with asyncio.timeout(self._interval()):
                    await self._wake.wait()
            except TimeoutError:
                continue
            finally:
                self._wake.clear()

    def _interval(self) -> float:
        # Any server may be one on the internet, with limits on requests.
        if self._description.profile.name == "openai":
            return max(self._interval_s, _ANY_SERVER_INTERVAL_S)
        return self._interval_s

    async def _poll(self) -> None:
        try:
            if self.is_up:
                await self._check_health()
                await self._read_load()
            else:
                await self._ask_again()
        except ServerUnreachable as error:
            await self._on_failure(error)
        else:
            self._slow = 0

    async def _check_health(self) -> None:
        path = self._description.profile.health_path
        status, _ = await self._probe.get(path)
        if status >= 500:
            raise ServerLoading(f"{path} answers {status}")

    async def _read_load(self) -> None:
        profile = self._description.profile
        states: list[KvMetrics] = []
        if profile.load_path is not None and self._reports_load:
            status, page = await self._probe.get(profile.load_path)
            self._reports_load = status == 200
            if self._reports_load:
                states = self._parse(page)
            else:
                log.warning(
                    "%s%s answers %d, so only requests of this worker count as load: %s",
                    self._probe.target.url,
                    profile.load_path,
                    status,
                    profile.load_hint,
                )
        self._listener.server_load(states)

    def _parse(self, page: bytes) -> list[KvMetrics]:
        names = self._description.profile.load_names
        if names is not None:
            return prometheus_load(page, names, self._description.capacity.total_blocks)
        try:
            return json_load(orjson.loads(page))
        except orjson.JSONDecodeError:
            return []

    async def _ask_again(self) -> None:
        self._description = await describe(self._probe, self._profile_name)
        self.is_up = self._reports_load = True
        log.info("%s answers again: its models get requests", self._probe.target.url)
        await self._listener.server_up(self._description)

    async def _on_failure(self, error: ServerUnreachable) -> None:
        if not self.is_up:
            log.debug("%s: %s", self._probe.target.url, error)
            return
        self._slow += 1
        if error.slow and self._slow < _SLOW_ANSWERS:
            log.warning("%s: %s (%d)", self._probe.target.url, error, self._slow)
            return
        self.is_up = False
        log.error(
            "%s is down (%s): no requests until it answers again", self._probe.target.url, error
        )
        await self._listener.server_down()
