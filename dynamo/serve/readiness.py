"""Readiness of a deployment: poll /health of its frontend, which needs no API key."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from dynamo.errors import ConfigError
from dynamo.http.client import HttpClient, ResponseError, Target, call
from dynamo.http.tls import unverified_context
from dynamo.serve.graph.facts import FrontendAddress
from dynamo.serve.graph.watchers import WatcherSpec

_PORTS_TRIED = 50
_POLL_INTERVAL_S = 0.03
_RESPONSE_TIMEOUT_S = 5.0
_RESPONSE_LIMIT_BYTES = 16 << 20
_ALL_WORKERS_WITHIN_S = 3.0


@dataclass(frozen=True)
class FrontendHealth:
    """The models of a frontend by name, and how many ``generate`` instances serve them."""

    models: tuple[str, ...]
    instances: int


def check_free(address: FrontendAddress) -> None:
    """Raise ConfigError if a process of this user cannot listen on ``address`` now."""
    try:
        addresses = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"cannot resolve http-host {address.host!r}: {error.strerror}") from None
    for family, kind, protocol, _, where in addresses:
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            # As FrontendListener binds: old connections in TIME_WAIT are no conflict.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # The host "::" takes IPv4, too. For others an IPv4 listener on the same port is no
                # conflict: it has its own row in ``addresses``.
                dual_stack = bool(address.host) and where[0] == "::"
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual_stack)
            try:
                probe.bind(where)
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise ConfigError(f"cannot listen on {address.url}: {reason}") from None


def check_port(spec: WatcherSpec, flag: str = "") -> None:
    """Raise ConfigError, which names a free port, if the frontend ``spec`` cannot listen there.

    ``flag`` is that of the command for the port; without it, that of the graph is named.
    """
    address = spec.address
    if address is None:
        return
    try:
        check_free(address)
    except ConfigError as error:
        port = free_port(address)
        name = flag or f"--{spec.service}.http-port"
        host = "--host" if flag else f"--{spec.service}.http-host"
        pid = _listener(address.port)
        raise ConfigError(
            f"{spec.name}: {error.message}"
            + (f", process {pid} listens there" if pid else "")
            + f"; choose another address with {host} or {name}"
            + (f", such as {name}={port}" if port else "")
        ) from None


def _listener(port: int) -> int:
    """Return the process that listens on ``port``; 0 if that is not known."""
    import psutil  # only here: `dynamo serve` without an occupied port needs none

    with contextlib.suppress(psutil.Error, OSError):
        for conn in psutil.net_connections("tcp"):
            if conn.status == psutil.CONN_LISTEN and conn.laddr and conn.laddr.port == port:
                return conn.pid or 0
    return 0


def free_port(address: FrontendAddress) -> int:
    """Return a free port above that of ``address`` on its host; 0 if none of the next ones is."""
    for port in range(address.port + 1, min(address.port + _PORTS_TRIED, 65536)):
        with contextlib.suppress(ConfigError):
            check_free(FrontendAddress(address.host, port))
            return port
    return 0


async def wait_until_ready(
    address: FrontendAddress,
    expected: Callable[[], int],
    is_ours: Callable[[], bool] = lambda: True,
    missing: Callable[[], Collection[str]] = tuple,
    on_partial: Callable[[FrontendHealth, Collection[str]], None] = lambda health, names: None,
    models: Callable[[], Collection[str]] = tuple,
) -> FrontendHealth:
    """Return once the frontend is healthy and lists ``models()``, a model with any workers.

    ``is_ours`` distinguishes our frontend from another program on its port. ``missing()`` names the
    workers whose models are not registered yet: waits for all of them, and calls ``on_partial``
    once if others serve already. Waits for further workers a few seconds. Has no deadline.
    """
    loop = asyncio.get_running_loop()
    first_s: float | None = None
    complete_s: float | None = None
    reported = False
    while True:
        health = await probe(address)
        if health is not None and (health.models or not expected()) and is_ours():
            now_s = loop.time()
            first_s = now_s if first_s is None else first_s
            names = missing()
            # The frontend sees the last worker a moment after it is registered.
            complete_s = now_s if names or complete_s is None else complete_s
            overdue = now_s - complete_s > _ALL_WORKERS_WITHIN_S
            listed = health.instances >= expected() and set(health.models).issuperset(models())
            if not names and (overdue or listed):
                return health
            if names and not reported and now_s - first_s > _ALL_WORKERS_WITHIN_S:
                reported = True
                on_partial(health, names)
        # HTTP offers no event for "ready", so this polls.
        await asyncio.sleep(_POLL_INTERVAL_S)


async def ask(
    address: FrontendAddress, path: str, limit_bytes: int, timeout_s: float
) -> HttpClient:
    """GET ``path``, which needs no key, of a frontend of this machine; see ``http.client.call``."""
    target = Target(address.reachable, address.port, address.tls)
    return await call(target, "GET", path, limit_bytes, timeout_s, tls=unverified_context())


async def probe(address: FrontendAddress) -> FrontendHealth | None:
    """Probe the frontend once; None while it does not answer or is not healthy."""
    try:
        answer = await ask(address, "/health", _RESPONSE_LIMIT_BYTES, _RESPONSE_TIMEOUT_S)
        if answer.status != 200:
            return None
        health = msgspec.json.decode(answer.body, type=_Health)
    except (OSError, TimeoutError, ResponseError, ValueError, RecursionError):
        return None
    return FrontendHealth(
        models=tuple(sorted(health.models)),
        instances=sum(instance.endpoint == "generate" for instance in health.instances),
    )


class _HealthRow(msgspec.Struct):
    endpoint: str | None = None


class _Health(msgspec.Struct):
    """The body of /health."""

    instances: list[_HealthRow] = []
    models: list[str] = []
