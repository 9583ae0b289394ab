"""The address of an HTTP server that this process calls."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from dynamo.errors import ConfigError
from dynamo.http.client import request_head
from dynamo.http.tls import client_context

__all__ = ["Target", "parse_url"]


@dataclass(frozen=True, slots=True)
class Target:
    """A server of the OpenAI API; ``prefix`` is the path before ``/v1``.

    With ``tls``, its certificate is verified with the authorities of ``ca_path``, by default the
    system's.
    """

    host: str
    port: int
    tls: bool
    prefix: str = ""
    api_key: str | None = None
    ca_path: str | None = None

    @property
    def authority(self) -> str:
        """``host:port`` as in a URL: an IPv6 address has brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL, without the key."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    def head(self, method: str, path: str, size_bytes: int) -> bytes:
        """Return the head of a request with a JSON body of ``size_bytes``."""
        headers = ["accept: */*"]
        if size_bytes:
            headers += ["content-type: application/json", f"content-length: {size_bytes}"]
        if self.api_key:
            headers.append(f"authorization: Bearer {self.api_key}")
        return request_head(method, self.prefix + path, self.authority, headers)


def parse_url(url: str, api_key: str | None = None, ca_path: str | None = None) -> Target:
    """Return the target of ``http(s)://host[:port][/prefix]``; a trailing /v1 is dropped.

    Raises ConfigError for any other URL, if the key is not a valid header value, or if ``ca_path``
    has no certificate.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"--url must look like http://host:port, got {url!r}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key (OPENAI_API_KEY) must be printable ASCII, without a line end")
    tls = parts.scheme == "https"
    if tls and ca_path is not None:
        client_context(ca_path)
    prefix = quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%:@!$&'()*+,;=~")
    return Target(parts.hostname, port or (443 if tls else 80), tls, prefix, api_key, ca_path)
