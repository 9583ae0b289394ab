"""Is the deployment ready? Asks the frontend's own /health and /v1/models, as a client would."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.errors import ConfigError

__all__ = [
    "FrontendAddress",
    "FrontendHealth",
    "address_of",
    "check_free",
    "wait_until_ready",
]

_PAUSE_S = 0.03
_ANSWER_TIMEOUT_S = 5.0
_ALL_WORKERS_WITHIN_S = 3.0


@dataclass(frozen=True)
class FrontendAddress:
    """Where a frontend listens, and where we reach it."""

    host: str
    port: int

    @property
    def reachable(self) -> str:
        """A host to connect to: loopback of the same family if it listens everywhere."""
        if not self.host:
            return "127.0.0.1"
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host  # a name
        if not address.is_unspecified:
            return self.host
        return "127.0.0.1" if address.version == 4 else "::1"

    @property
    def authority(self) -> str:
        """``host:port`` as in a URL."""
        host = f"[{self.reachable}]" if ":" in self.reachable else self.reachable
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """What a person on this machine types."""
        return f"http://{self.authority}"


@dataclass(frozen=True)
class FrontendHealth:
    """What a frontend said: the models, and how many ``generate`` instances serve them."""

    models: tuple[str, ...]
    instances: int


def address_of(options: Mapping[str, Any], env: Mapping[str, str]) -> FrontendAddress:
    """The frontend's address from its flags, its environment, its defaults.

    Raises ConfigError for a port that cannot be known beforehand.
    """
    host = _first(options, ("http-host", "http_host")) or env.get("DYN_HTTP_HOST") or "127.0.0.1"
    port = _first(options, ("http-port", "http_port"))
    number = str(env.get("DYN_HTTP_PORT") or 8000 if port is None else port)
    if not number.isdigit() or not 0 < int(number) < 65536:
        raise ConfigError(f"the frontend's http-port must be between 1 and 65535, got {number}")
    return FrontendAddress(str(host), int(number))


def _first(options: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((options[name] for name in names if options.get(name) is not None), None)


def check_free(address: FrontendAddress) -> None:
    """Raise ConfigError if no process of ours could listen on ``address`` now."""
    try:
        found = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"cannot resolve http-host {address.host!r}: {error.strerror}") from None
    for family, kind, protocol, _, where in found:
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(where)
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise ConfigError(f"cannot listen on {address.url}: {reason}") from None


async def wait_until_ready(
    address: FrontendAddress, workers: int, is_ours: Callable[[], bool] = lambda: True
) -> FrontendHealth:
    """Until the frontend is healthy and, with ``workers`` behind it, lists a model.

    ``is_ours`` distinguishes our frontend from another program on its port. Waits a few seconds
    more for the rest of the workers. Never gives up: cancel it.
    """
    loop = asyncio.get_running_loop()
    first_s: float | None = None
    while True:
        health = await ask(address)
        if health is not None and (health.models or not workers) and is_ours():
            first_s = loop.time() if first_s is None else first_s
            if health.instances >= workers or loop.time() - first_s > _ALL_WORKERS_WITHIN_S:
                return health
        # Another program's HTTP server has no event for "I am ready".
        await asyncio.sleep(_PAUSE_S)


async def ask(address: FrontendAddress) -> FrontendHealth | None:
    """One look; None while the frontend does not answer or is not healthy."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            status, health = await _get(address, "/health")
            _, models = await _get(address, "/v1/models") if status == 200 else (0, {})
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return None
    if status != 200 or not isinstance(health, dict) or not isinstance(models, dict):
        return None
    instances = health.get("instances") or ()
    return FrontendHealth(
        models=tuple(str(model.get("id")) for model in models.get("data") or ()),
        instances=sum(each.get("endpoint") == "generate" for each in instances),
    )


async def _get(address: FrontendAddress, path: str) -> tuple[int, Any]:
    reader, writer = await asyncio.open_connection(address.reachable, address.port)
    try:
        head = f"GET {path} HTTP/1.1\r\nHost: {address.authority}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        answer, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    words = answer.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise ValueError("no HTTP answer")
    if b"transfer-encoding: chunked" in answer.lower():
        body = _unchunk(body)
    return int(words[1]), json.loads(body)


def _unchunk(body: bytes) -> bytes:
    out = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size.split(b";")[0] or b"0", 16)
        if length == 0:
            return out
        out, body = out + body[:length], body[length + 2 :]
