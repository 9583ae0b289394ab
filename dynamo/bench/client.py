"""One keep-alive connection that measures: bytes out, server-sent events in, times noted.

Only what a load generator needs of HTTP/1.1, over httptools, so that the client's own cost stays
far below the server's.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import httptools

from dynamo.bench.answers import read_answer, read_chunk, refusal
from dynamo.bench.events import EventParser
from dynamo.bench.stats import Outcome
from dynamo.errors import ConfigError

__all__ = ["LoadConnection", "Target", "parse_url"]

_EVENT_STREAM = b"text/event-stream"
_LINE_MAX_BYTES = 16 << 20
_BODY_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    tls: bool
    prefix: str = ""
    api_key: str | None = None

    @property
    def authority(self) -> str:
        """``host:port`` as in a URL: an IPv6 address has brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def head(self, method: str, path: str, size_bytes: int) -> bytes:
        """Request line and headers of one request with a JSON body of ``size_bytes``."""
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"host: {self.authority}",
            "accept: */*",
        ]
        if size_bytes:
            lines += ["content-type: application/json", f"content-length: {size_bytes}"]
        if self.api_key:
            lines.append(f"authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def parse_url(url: str, api_key: str | None = None) -> Target:
    """The target of ``http(s)://host[:port][/prefix]``; a trailing /v1 is dropped.

    Raises ConfigError if it is anything else, or if the key cannot be a header.
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
    prefix = quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%:@!$&'()*+,;=~")
    return Target(parts.hostname, port or (443 if tls else 80), tls, prefix, api_key)


class LoadConnection(asyncio.Protocol):
    """One request at a time; ``request`` fills an Outcome and never raises for a server's fault."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._keep_alive = True
        self._reset(Outcome(), stream=False)

    def _reset(self, outcome: Outcome, stream: bool) -> None:
        self._outcome = outcome
        self._stream = stream
        self._events = EventParser()
        self._body = bytearray()
        self._content_type = b""
        self._until_close = True
        self._ended = False
        self._last_token_s = 0.0

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on this connection."""
        return self._transport is not None and self._keep_alive and not self._transport.is_closing()

    async def open(self) -> None:
        """Connect. Raises OSError, or UnicodeError for a name that is none."""
        context = ssl.create_default_context() if self._target.tls else None
        loop = asyncio.get_running_loop()
        await loop.create_connection(
            lambda: self, self._target.host, self._target.port, ssl=context
        )

    def close(self) -> None:
        """Drop the connection; a request in flight counts as disconnected."""
        if self._transport is not None:
            self._transport.close()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        stream: bool,
        timeout_s: float,
        started_s: float | None = None,
    ) -> tuple[Outcome, bytes]:
        """Send one request; returns what it came to and the body (empty for a stream).

        ``started_s`` is when its clock started, by default now.
        """
        self._reset(outcome := Outcome(), stream)
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        outcome.sent_s = time.perf_counter()
        outcome.started_s = outcome.sent_s if started_s is None else started_s
        if self._transport is None:
            self._fail("disconnected")
        else:
            self._transport.write(self._target.head(method, path, len(body)) + body)
        try:
            async with asyncio.timeout(timeout_s):
                await self._done
        except TimeoutError:
            outcome.error = "timeout"
            self.close()
        outcome.finished_s = time.perf_counter()
        text = bytes(self._body)
        if outcome.error is None:
            self._judge(text)
        return outcome, text

    def _judge(self, text: bytes) -> None:
        """Name what is wrong with a response that arrived."""
        outcome = self._outcome
        if outcome.status != 200:
            outcome.error = f"{outcome.status}: {refusal(text)}"
        elif not self._stream:
            read_answer(outcome, text)
        elif not self._ended:
            outcome.error = "the stream ended without [DONE] or a finish_reason"
        elif outcome.first_token_s is None:
            outcome.error = "the stream carried no token"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes in."""
        if self._done is None or self._done.done():
            self.close()  # nothing was asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")
            self.close()
        except httptools.HttpParserUpgrade:
            self._fail("the server changed to another protocol")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: gone."""
        self._transport = None
        if exc is None and self._until_close and self._outcome.status:
            self._complete()
        else:
            self._fail("disconnected")

    def on_message_begin(self) -> None:
        """httptools: a response begins; a second one was not asked for."""
        if self._done is not None and self._done.done():
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        lower = name.lower()
        if lower == b"content-type":
            self._content_type = value.split(b";")[0].strip().lower()
        elif lower in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        """httptools: headers seen."""
        if self._done is None or self._done.done():
            return
        self._outcome.status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()
        if self._stream and self._outcome.status == 200 and self._content_type != _EVENT_STREAM:
            kind = self._content_type[:80].decode("latin-1") or "no content-type"
            self._fail(f"not an event stream: {kind}")
            self.close()

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the body."""
        if self._done is None or self._done.done():
            return
        if self._stream and self._outcome.status == 200:
            self._read_events(self._events.feed(data), time.perf_counter())
            too_large = self._events.pending_bytes > _LINE_MAX_BYTES
        else:
            self._body += data
            too_large = len(self._body) > _BODY_MAX_BYTES
        if too_large:
            self._fail("the answer is too large")
            self.close()

    def on_message_complete(self) -> None:
        """httptools: the response is whole."""
        if self._outcome.status >= 200:  # else an interim response
            self._complete()

    def _complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._outcome.error = self._outcome.error or reason
            self._done.set_result(None)

    def _read_events(self, events: list[bytes], now_s: float) -> None:
        outcome, tokens = self._outcome, 0
        for event in events:
            if event == b"[DONE]":
                self._ended = True
            elif event and outcome.error is None:
                carries_token, finished = read_chunk(outcome, event)
                tokens += carries_token
                self._ended = self._ended or finished
        if not tokens:
            return
        if outcome.first_token_s is None:
            outcome.first_token_s = self._last_token_s = now_s
            tokens -= 1
        if tokens:
            outcome.gaps_s.extend([(now_s - self._last_token_s) / tokens] * tokens)
        self._last_token_s = now_s
