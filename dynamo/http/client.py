"""An HTTP/1.1 client over httptools: one keep-alive connection, one request at a time.

The address of an HTTP server that this process calls.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import httptools

from dynamo.errors import ConfigError
from dynamo.http.tls import client_context

OnComplete = Callable[[str | None], object]
"""Called once per request: with None after a complete response, else with the reason."""


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


class ResponseError(Exception):
    """The response is missing, incomplete, too large or not HTTP."""


def cause(error: Exception) -> str:
    """Return why a connection or a response failed, as the system describes it.

    asyncio's own text of a refused connection is "Connect call failed", with the address.
    """
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.errno is None and "Errno 111" in str(error):
        return os.strerror(errno.ECONNREFUSED)  # every address of the name refused
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or "timeout"


def remedy(error: Exception, otherwise: str) -> str:
    """Return what to do about ``error`` of a connection; ``otherwise`` if nothing listens there."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "name the file with its certificate, or its authority's, with --tls-ca-cert-path"
    if isinstance(error, TimeoutError):  # a process listens there
        return "see why it does not answer with dynamo ps, or name another endpoint with --url"
    return otherwise


def request_head(method: str, path: str, authority: str, headers: Iterable[str] = ()) -> bytes:
    """Return request line and headers. Every argument must be free of line ends."""
    lines = (f"{method} {path} HTTP/1.1", f"host: {authority}", *headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def call(
    target: Target,
    method: str,
    path: str,
    limit_bytes: int,
    timeout_s: float,
    body: bytes = b"",
    tls: ssl.SSLContext | None = None,
) -> HttpClient:
    """Send one request over a new connection; the closed client holds status and body.

    ``tls`` replaces the context of ``target``. Raises OSError or UnicodeError if it cannot connect
    or takes longer than ``timeout_s``, ResponseError if the answer is not HTTP or not complete.
    """
    client = HttpClient(limit_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            await client.connect_to(target, tls)
            await client.request(target.head(method, path, len(body)) + body)
    finally:
        client.close()
    return client


class HttpClient(asyncio.Protocol):
    """A connection of at most one request in flight, with a body of at most ``limit_bytes``.

    ``status``, ``content_type`` and ``body`` are those of the latest response. A subclass reads a
    body while it arrives by overriding :meth:`on_body`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.status = 0
        self.content_type = b""
        self.body = bytearray()
        self._limit_bytes = limit_bytes
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._on_complete: OnComplete | None = None
        self._keep_alive = True
        self._until_close = True

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on this connection."""
        return self._transport is not None and self._keep_alive and not self._transport.is_closing()

    @property
    def receiving(self) -> bool:
        """Whether a request is in flight: bytes that arrive otherwise were not requested."""
        return self._on_complete is not None

    async def connect(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        """Connect. Raises OSError, or UnicodeError for an invalid host name.

        ``server_name`` is that of the certificate, if ``host`` is an address.
        """
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, host, port, ssl=tls, server_hostname=server_name)

    async def connect_to(self, target: Target, tls: ssl.SSLContext | None = None) -> None:
        """Connect to ``target``; ``tls`` replaces its context. Raises OSError, UnicodeError."""
        context = (tls or client_context(target.ca_path)) if target.tls else None
        await self.connect(target.host, target.port, context)

    def close(self) -> None:
        """Close the connection; a request in flight fails as disconnected."""
        if self._transport is not None:
            self._transport.close()

    async def request(self, message: bytes) -> None:
        """Send ``message``, head and body, and return when the response is complete.

        Raises ResponseError. After a cancellation the connection must be closed.
        """
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        def complete(failure: str | None) -> None:
            if not done.done():  # not cancelled
                done.set_result(failure)

        self.start(message, complete)
        failure = await done
        if failure is not None:
            raise ResponseError(failure)

    def start(self, message: bytes, on_complete: OnComplete) -> None:
        """Send ``message`` and return at once. Raises ResponseError: disconnected."""
        self.status, self.content_type, self.body = 0, b"", bytearray()
        self._until_close = True
        if self._transport is None:
            raise ResponseError("disconnected")
        self._parser = httptools.HttpResponseParser(self)
        self._on_complete = on_complete
        self._transport.write(message)

    def fail(self, reason: str) -> None:
        """End the request in flight with a ResponseError, and close the connection."""
        self._complete(reason)
        self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes arrived."""
        # Unasked bytes would be taken for the response to the next request.
        if not self.receiving:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"not HTTP: {error}")
        except httptools.HttpParserUpgrade:
            self.fail("the server changed to another protocol")

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: disconnected."""
        self._transport = self._parser = None  # the parser refers to this client, too
        # A response without a length ends with the connection (RFC 9112, 6.3).
        complete = exc is None and self._until_close and self.status
        self._complete(None if complete else "disconnected")

    def on_message_begin(self) -> None:
        """httptools: a response begins; a second one was not requested."""
        if not self.receiving:
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        lower = name.lower()
        if lower == b"content-type":
            self.content_type = value.split(b";")[0].strip().lower()
        elif lower in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        """httptools: the head is complete."""
        if self.receiving:
            self.status = self._parser.get_status_code()
            self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the body."""
        if self.receiving:
            self.body += data
            if len(self.body) > self._limit_bytes:
                self.fail("the answer is too large")

    def on_message_complete(self) -> None:
        """httptools: the response is complete."""
        if self.status >= 200:  # lower ones are interim: the response follows
            self._complete()

    def _complete(self, failure: str | None = None) -> None:
        # Cleared first: the callback may send the next request on this connection.
        on_complete, self._on_complete = self._on_complete, None
        if on_complete is not None:
            on_complete(failure)
