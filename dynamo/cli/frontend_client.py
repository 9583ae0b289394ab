"""Requests of verbs to a running frontend, with errors that name the remedy."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPException
from typing import TypeVar

import msgspec

from dynamo.bench.answers import error_message
from dynamo.cli.frontend_url import find_url
from dynamo.config.frontend_client import FrontendClientSettings
from dynamo.errors import ConfigError, DynamoError, Unavailable
from dynamo.http.tls import client_context

__all__ = ["ask", "fetch"]

_SHOWN = 500
_T = TypeVar("_T")


def ask(
    settings: FrontendClientSettings, path: str, kind: type[_T], body: bytes | None = None
) -> _T:
    """GET ``path``, or POST ``body`` there; return the answer, which is a ``kind``."""
    answer = fetch(settings, path, body)
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise DynamoError(f"{find_url(settings)} is not a Dynamo frontend") from None


def fetch(settings: FrontendClientSettings, path: str, body: bytes | None = None) -> bytes:
    """As :func:`ask`; return the bytes. Raises ConfigError, Unavailable, DynamoError."""
    base = find_url(settings)
    url = base.rstrip("/").removesuffix("/v1") + path
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must look like http://host:port, got {base!r}")
    headers = {"content-type": "application/json"}
    if settings.api_key:
        headers["authorization"] = f"Bearer {settings.api_key}"
    request = urllib.request.Request(url, body, headers)
    tls = client_context(settings.tls_ca_cert_path) if url.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=settings.timeout_s, context=tls) as response:
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        with error:
            message = error_message(error.read(), _SHOWN)
        raise DynamoError(f"{url} answered {error.code}: {message}") from None
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Unavailable(f"can't reach {url}: {reason}; name a frontend with --url") from None
