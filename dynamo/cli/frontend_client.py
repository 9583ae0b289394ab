"""Requests of verbs to a running frontend, with errors that name the remedy.

They connect to the frontend itself: ``http_proxy`` and its like have no effect.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TypeVar

import msgspec

from dynamo.bench.answers import error_message
from dynamo.cli.frontend_url import find_target
from dynamo.config.frontend_client import FrontendClientSettings
from dynamo.errors import DynamoError, Unavailable
from dynamo.http.client import HttpClient, ResponseError, cause
from dynamo.http.target import Target
from dynamo.http.tls import client_context

__all__ = ["ask", "call", "connect"]

_SHOWN = 500
_BODY_BYTES = 64 << 20
_T = TypeVar("_T")


def ask(settings: FrontendClientSettings, path: str, kind: type[_T], body: bytes = b"") -> _T:
    """GET ``path``, or POST ``body`` there; return the answer, which is a ``kind``.

    Raises ConfigError, Unavailable, DynamoError.
    """
    target = find_target(settings)
    url = target.url + path
    method = "POST" if body else "GET"
    try:
        answer = asyncio.run(call(target, method, path, body, settings.timeout_s))
    except (OSError, UnicodeError, ResponseError) as error:
        raise Unavailable(
            f"can't reach {url}: {cause(error)}; start a deployment with dynamo serve, or name a "
            "frontend with --url"
        ) from None
    if answer.status != 200:
        message = error_message(bytes(answer.body), _SHOWN)
        raise DynamoError(f"{url} answered {answer.status}: {message}")
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise DynamoError(f"{target.url} is not a Dynamo frontend") from None


async def call(  # noqa: PLR0913 - a request has five parts
    target: Target,
    method: str,
    path: str,
    body: bytes,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> HttpClient:
    """Send one request; return the client, which is closed and has the status and the body.

    ``tls`` replaces the context of ``target``. Raises OSError or UnicodeError if it cannot connect
    or takes longer than ``timeout_s``, ResponseError if the answer is not HTTP or not complete.
    """
    client = HttpClient(_BODY_BYTES)
    try:
        async with asyncio.timeout(timeout_s):
            await connect(client, target, tls)
            await client.request(target.head(method, path, len(body)) + body)
    finally:
        client.close()
    return client


async def connect(client: HttpClient, target: Target, tls: ssl.SSLContext | None = None) -> None:
    """Connect ``client`` to ``target`` itself. Raises OSError, UnicodeError."""
    context = (tls or client_context(target.ca_path)) if target.tls else None
    await client.connect(target.host, target.port, context)
