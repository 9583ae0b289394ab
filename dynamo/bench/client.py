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
from urllib.parse import urlsplit

import httptools
import orjson

from dynamo.bench.stats import Outcome
from dynamo.errors import ConfigError

__all__ = ["Connection", "Target", "parse_url"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    tls: bool
    prefix: str = ""
    api_key: str | None = None

    def head(self, method: str, path: str, size_bytes: int) -> bytes:
        """Request line and headers of one request with a JSON body of ``size_bytes``."""
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"host: {self.host}:{self.port}",
            "accept: */*",
        ]
        if size_bytes:
            lines += ["content-type: application/json", f"content-length: {size_bytes}"]
        if self.api_key:
            lines.append(f"authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def parse_url(url: str, api_key: str | None = None) -> Target:
    """The target of ``http(s)://host[:port][/prefix]``; a trailing /v1 is dropped."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url must look like http://host:port, got {url!r}")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, parts.port or (443 if tls else 80), tls, prefix, api_key)


class Connection(asyncio.Protocol):
    """One request at a time; ``request`` fills an Outcome and never raises for a server's fault."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._outcome = Outcome()
        self._body = bytearray()
        self._stream = False
        self._last_token_s = 0.0
        self._keep_alive = True

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on this connection."""
        return self._transport is not None and self._keep_alive and not self._transport.is_closing()

    async def open(self) -> None:
        """Connect. Raises OSError."""
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
        self, method: str, path: str, body: bytes, *, stream: bool, timeout_s: float
    ) -> tuple[Outcome, bytes]:
        """Send one request; returns what it came to and the body (empty for a stream)."""
        self._outcome = outcome = Outcome()
        self._body = bytearray()
        self._stream = stream
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        outcome.started_s = time.perf_counter()
        assert self._transport is not None
        self._transport.write(self._target.head(method, path, len(body)) + body)
        try:
            async with asyncio.timeout(timeout_s):
                await self._done
        except TimeoutError:
            outcome.error = "timeout"
            self.close()
        outcome.finished_s = time.perf_counter()
        text = bytes(self._body)
        if outcome.error is None and outcome.status != 200:
            outcome.error = f"{outcome.status}: {_reason(text)}"
        elif outcome.error is None and not stream:
            _read_usage(outcome, text)
        return outcome, text

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes in."""
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: gone."""
        self._transport = None
        self._fail("disconnected")

    def on_status(self, status: bytes) -> None:
        """httptools: status line seen."""
        self._outcome.status = self._parser.get_status_code()

    def on_headers_complete(self) -> None:
        """httptools: headers seen."""
        self._outcome.status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the body."""
        self._body += data
        if self._stream and self._outcome.status == 200:
            self._read_events(time.perf_counter())

    def on_message_complete(self) -> None:
        """httptools: the response is whole."""
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._outcome.error = reason
            self._done.set_result(None)

    def _read_events(self, now_s: float) -> None:
        end = self._body.rfind(b"\n\n")
        if end < 0:
            return
        events = bytes(self._body[:end]).split(b"\n\n")
        del self._body[: end + 2]
        outcome, tokens = self._outcome, 0
        for event in events:
            if not event.startswith(b"data: ") or event == b"data: [DONE]":
                continue
            if b'"usage":{' in event or b'"error":' in event or b'"nvext":{' in event:
                _read_usage(outcome, event[6:])
            tokens += _carries_token(event)
        if tokens:
            if outcome.first_token_s is None:
                outcome.first_token_s = now_s
                tokens -= 1
            if tokens:
                gap_s = (now_s - (self._last_token_s or now_s)) / tokens
                outcome.gaps_s.extend([gap_s] * tokens)
            self._last_token_s = now_s
        if outcome.first_token_s == now_s:
            self._last_token_s = now_s


def _carries_token(event: bytes) -> bool:
    start = event.find(b'"content":"')
    if start >= 0:
        return event[start + 11 : start + 12] != b'"'
    return b'"text":"' in event and b'"text":""' not in event


def _read_usage(outcome: Outcome, text: bytes) -> None:
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        outcome.error = "the answer is not JSON"
        return
    if isinstance(body.get("error"), dict):
        outcome.error = f"in stream: {body['error'].get('message', '')}"
        return
    usage = body.get("usage")
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens") or 0
        outcome.output_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        outcome.cached_tokens = details.get("cached_tokens")
    ids = (body.get("nvext") or {}).get("worker_id")
    if isinstance(ids, dict):
        outcome.worker_id = ids.get("decode_worker_id") or ids.get("prefill_worker_id")


def _reason(text: bytes) -> str:
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text[:80].decode("utf-8", "replace")
    error = body.get("error") if isinstance(body, dict) else None
    source = error if isinstance(error, dict) else body
    return str(source.get("message", "")) if isinstance(source, dict) else ""
