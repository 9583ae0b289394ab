"""Connections to etcd: endpoints, TLS and channel options."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from dynamo.config.etcd import EtcdSettings
from dynamo.errors import ConfigError

__all__ = ["credentials", "endpoints", "open_channel"]

_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    # A replaced channel must not share the dead connection of its predecessor.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # http_proxy is for the web; etcd may even be on this machine
)


def endpoints(settings: EtcdSettings) -> list[str]:
    """Return the members of the cluster. ConfigError: a bad endpoint, or half of a credential."""
    found = [part.strip() for part in settings.endpoints.split(",") if part.strip()]
    if not found:
        raise ConfigError("ETCD_ENDPOINTS is empty; give host:port")
    if (settings.username is None) != (settings.password is None):
        raise ConfigError("ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD go together")
    if (settings.client_cert is None) != (settings.client_key is None):
        raise ConfigError("ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY go together")
    for endpoint in found:
        _target(endpoint)
    return found


def open_channel(endpoint: str, chosen: Any) -> Any:
    """Open a channel with :func:`credentials`; it connects on first use."""
    target = _target(endpoint)
    if chosen is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    return grpc.aio.secure_channel(target, chosen, options=_OPTIONS)


def _target(endpoint: str) -> str:
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    try:
        port = parts.port or 2379
    except ValueError as error:
        raise ConfigError(f"ETCD_ENDPOINTS: {endpoint!r}: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError("ETCD_ENDPOINTS takes no user; set ETCD_AUTH_USERNAME and _PASSWORD")
    if not parts.hostname or parts.scheme not in ("", "http", "https"):
        raise ConfigError(f"ETCD_ENDPOINTS: {endpoint!r} is not host:port, http:// or https://")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}"


def credentials(settings: EtcdSettings, members: Iterable[str]) -> Any:
    """Return TLS credentials if a file is set or an endpoint begins with https, else None."""
    files = (settings.ca, settings.client_key, settings.client_cert)
    if not any(files) and not any(one.startswith("https://") for one in members):
        return None
    try:
        ca, key, cert = (Path(one).read_bytes() if one else None for one in files)
    except OSError as error:
        raise ConfigError(f"ETCD_AUTH_*: {error}") from error
    return grpc.ssl_channel_credentials(ca, key, cert)
