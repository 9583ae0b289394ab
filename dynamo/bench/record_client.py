"""The client of ``GET /v1/record``: passes each record to a trace file, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from dynamo.bench.answers import error_message
from dynamo.errors import CannotConnect, DynamoError
from dynamo.http.client import HttpClient
from dynamo.http.target import Target
from dynamo.http.tls import client_context
from dynamo.protocols.record import RecordedRequest, RecordingCount, RecordingLine

__all__ = ["RecordClient", "RecordTotals"]

_LINE_BYTES = 16 << 20
_ERROR_BODY_BYTES = 1 << 20
_CONNECT_S = 10.0
_COUNT_S = 3.0
_decode = msgspec.json.Decoder(RecordingLine).decode


@dataclass(slots=True)
class RecordTotals:
    """What has been recorded; the last two are the frontend's, at its latest count."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    lost: int = 0
    running: int = 0


class RecordClient(HttpClient):
    """Calls ``add`` with each record, at most ``limit`` times.

    ``stopped`` is set at the limit, by :meth:`stop`, and when the stream has ended; ``failure`` is
    why it ended by itself.
    """

    def __init__(
        self,
        target: Target,
        add: Callable[[RecordedRequest], None],
        limit: int | None = None,
    ) -> None:
        super().__init__(_ERROR_BODY_BYTES)
        self._target = target
        self._add = add
        self._limit = limit
        self._pending = b""
        self.totals = RecordTotals()
        self.stopped = asyncio.Event()
        self.failure: DynamoError | None = None
        self._counted = asyncio.Event()

    async def open(self, model: str | None) -> None:
        """Connect and begin to record. Raises CannotConnect with a remedy."""
        target = self._target
        context = client_context(target.ca_path) if target.tls else None
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self.connect(target.host, target.port, context)
        except (OSError, UnicodeError) as error:  # TimeoutError is one
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise CannotConnect(
                f"cannot connect to {target.authority} ({reason or 'timeout'}); start the "
                "deployment, or name its frontend with --url"
            ) from None
        query = "" if model is None else f"?model={quote(model, safe='')}"
        self.start(target.head("GET", f"/v1/record{query}", 0), self._ended)

    def stop(self) -> None:
        """Record nothing more. The second time, end at once."""
        if self.stopped.is_set():
            self._counted.set()
        self.stopped.set()

    async def last_count(self) -> None:
        """Wait for the count of the requests that are running when the recording stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COUNT_S):
                await self._counted.wait()

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the stream, or of an error."""
        if self.status != 200:
            super().on_body(data)
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        try:
            for line in lines:
                self._take(_decode(line))
        except msgspec.MsgspecError as error:
            self._fail(DynamoError(f"not a record of {self._target.url}: {error}"))
        except DynamoError as error:
            self._fail(error)
        if len(self._pending) > _LINE_BYTES:
            self._fail(DynamoError("a record is too large"))

    def _take(self, line: RecordedRequest | RecordingCount) -> None:
        totals = self.totals
        if isinstance(line, RecordingCount):
            totals.lost, totals.running = line.lost, line.running
            if self.stopped.is_set():
                self._counted.set()
            return
        if self.stopped.is_set():
            return
        self._add(line)
        totals.requests += 1
        totals.prompt_tokens += line.input_length
        totals.output_tokens += line.output_length
        if totals.requests == self._limit:
            self.stop()

    def _fail(self, error: DynamoError) -> None:
        self.failure = self.failure or error
        self._counted.set()
        self.stop()

    def _ended(self, reason: str | None) -> None:
        """The stream has ended, which only the frontend's end or an error does."""
        self._counted.set()
        if not self.stopped.is_set():
            if self.status not in (0, 200):
                text = error_message(bytes(self.body))
                reason = f"{self._target.url} answered {self.status}: {text}"
            else:
                reason = f"the frontend ended the recording: {reason or 'it stops'}"
            self._fail(DynamoError(reason))
