"""The address of a frontend, from its flags and its environment."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.errors import ConfigError


@dataclass(frozen=True)
class FrontendAddress:
    """The address that a frontend listens on, and the one to reach it at."""

    host: str
    port: int
    tls: bool = False

    @property
    def reachable(self) -> str:
        """The host to connect to: loopback of the same family for a wildcard address."""
        if not self.host:
            return "127.0.0.1"
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host  # a host name
        if not address.is_unspecified:
            return self.host
        return "127.0.0.1" if address.version == 4 else "::1"

    @property
    def authority(self) -> str:
        """``host:port`` as in a URL: an IPv6 address has brackets."""
        host = f"[{self.reachable}]" if ":" in self.reachable else self.reachable
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL for a user on this machine."""
        return f"{'https' if self.tls else 'http'}://{self.authority}"


def frontend_address(options: Mapping[str, Any], env: Mapping[str, str]) -> FrontendAddress:
    """Return the frontend's address from its flags over its environment over its defaults.

    Raises ConfigError for a port that is not fixed in advance, such as 0.
    """
    host = _first(options, ("http-host", "http_host")) or env.get("DYN_HTTP_HOST") or "127.0.0.1"
    port = _first(options, ("http-port", "http_port"))
    number = str(env.get("DYN_HTTP_PORT") or 8000 if port is None else port)
    if not number.isdigit() or not 0 < int(number) < 65536:
        raise ConfigError(f"the frontend's http-port must be between 1 and 65535, got {number}")
    tls = _first(options, ("tls-cert-path", "tls_cert_path")) or env.get("DYN_TLS_CERT_PATH")
    return FrontendAddress(str(host), int(number), bool(tls))


def _first(options: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((options[name] for name in names if options.get(name) is not None), None)
