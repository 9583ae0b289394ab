"""Recording the bodies of requests and answers, for an operator who asks for it.

Off unless a client of ``GET /v1/record?content=true`` is connected. It ends by itself after a time
and a number of bytes. What looks like a key or a password is replaced before it is kept or sent
(:mod:`dynamo.frontend.requests.redaction`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from dynamo.frontend.requests.redaction import cleaned_answer, cleaned_body
from dynamo.http import Exchange
from dynamo.protocols.status import RecordedContent, RecordingEnd

if TYPE_CHECKING:
    from dynamo.frontend.requests.request import ActiveRequest

log = logging.getLogger(__name__)
MIB = 1 << 20
BODY_BYTES = MIB // 2
"""Of one body or answer."""
_OPEN_BYTES = 64 * MIB
_WAITING_BYTES = 16 * MIB
_SHOWN_BYTES = 16 * MIB
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")


class HeldBytes:
    """The bytes of all copies that are in memory."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class ContentCopy:
    """The body of a request, and its response as it is sent: head, framing and all.

    A response that has begun before has neither head nor beginning. ``held`` are the bytes of all
    copies, of which this one is a part as long as anything refers to it.
    """

    __slots__ = ("_held", "body", "cut", "response", "size_bytes")

    def __init__(self, body: bytes, held: HeldBytes) -> None:
        self.body = body
        self.response: list[bytes] = []
        self.size_bytes = 0
        self.cut = False
        self._held = held
        held.count += len(body)

    def __del__(self) -> None:
        # Copies are dropped in many places: with their request, unread, or with the connection.
        self._held.count -= len(self.body) + self.size_bytes

    def add(self, data: bytes) -> None:
        """Keep a piece of the response, up to the limits of one and of all."""
        if self.size_bytes + len(data) > BODY_BYTES or self._held.count > _OPEN_BYTES:
            self.cut = True
        if not self.cut:
            self.response.append(data)
            self.size_bytes += len(data)
            self._held.count += len(data)


class ContentRecording:
    """Records requests of ``model``, or of all, that arrive from now on, to ``exchange``.

    It is over after ``limit_bytes``, and at ``until_s`` (monotonic seconds). The newest 16 MiB are
    kept for :meth:`find`, until it is over.
    """

    def __init__(
        self, exchange: Exchange, model: str | None, limit_bytes: int, until_s: float
    ) -> None:
        self._exchange = exchange
        self._model = model
        self._limit_bytes = limit_bytes
        self._begun_s = time.monotonic()
        self._until_s = until_s
        self._held = HeldBytes()
        self._waiting: deque[tuple[ContentCopy, RecordedContent]] = deque()
        self._waiting_bytes = self._sent_bytes = self._shown_bytes = 0
        self._shown: dict[str, bytes] = {}
        self._wake = asyncio.Event()
        self.recorded = self.lost = 0

    def begin(self, exchange: Exchange) -> None:
        """Copy the body of a request, and from now on its response.

        Nothing of it if the bodies of running requests exceed 64 MiB.
        """
        if len(exchange.body) <= BODY_BYTES and self._held.count <= _OPEN_BYTES:
            copy = ContentCopy(exchange.body, self._held)
            exchange.copy_to(copy, copy.add)

    def ended(self, request: ActiveRequest) -> None:
        """Take a request that has ended; its text is cleaned in :meth:`send`."""
        name, exchange = request.model.name, request.exchange
        if self._model not in (None, name) or exchange.received_at < self._begun_s:
            return
        copy = exchange.copied
        if not isinstance(copy, ContentCopy) or self._waiting_bytes > _WAITING_BYTES:
            self.lost += 1
            return
        figures = request.metrics
        content = RecordedContent(
            request_id=request.info.request_id,
            model=name,
            path=exchange.path,
            received_at_s=round(time.time() - (time.monotonic() - exchange.received_at), 3),
            duration_s=figures.ended_s - exchange.received_at,
            outcome=figures.outcome,
            body="",
        )
        self._waiting.append((copy, content))
        self._waiting_bytes += len(copy.body) + copy.size_bytes
        self._wake.set()

    async def send(self) -> str:
        """Send what ends, until the recording is over; return why it is."""
        thread = ThreadPoolExecutor(1, "record")
        try:
            return await self._send(thread)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    async def _send(self, thread: ThreadPoolExecutor) -> str:
        while True:
            self._wake.clear()
            while self._waiting and time.monotonic() < self._until_s:
                line = await self._next_line(thread)
                if self._sent_bytes + len(line) > self._limit_bytes:
                    return f"{self._limit_bytes >> 20} MiB are recorded"
                # A reader that is too slow loses records: nothing waits for it or piles up.
                if self._exchange.above_high_water:
                    self.lost += 1
                    continue
                self._sent_bytes += len(line)
                self.recorded += 1
                self._exchange.write(line)
            try:
                async with asyncio.timeout(self._until_s - time.monotonic()):
                    await self._wake.wait()
            except TimeoutError:
                return "its time is over"

    def find(self, request_id: str) -> bytes | None:
        """Return the JSON of a :class:`RecordedContent` that was sent lately."""
        return self._shown.get(request_id)

    async def _next_line(self, thread: ThreadPoolExecutor) -> bytes:
        """Clean one record in ``thread``."""
        copy, content = self._waiting.popleft()
        self._waiting_bytes -= len(copy.body) + copy.size_bytes
        # In a thread: each text is searched for secrets.
        loop = asyncio.get_running_loop()
        encoded = await loop.run_in_executor(thread, _cleaned_record, copy, content)
        self._keep(content.request_id, encoded)
        return encoded + b"\n"

    def _keep(self, request_id: str, encoded: bytes) -> None:
        self._shown_bytes += len(encoded) - len(self._shown.pop(request_id, b""))
        self._shown[request_id] = encoded
        # A dict keeps the order in which its keys came: the first one is the oldest.
        while self._shown_bytes > _SHOWN_BYTES:
            self._shown_bytes -= len(self._shown.pop(next(iter(self._shown))))


def ending(reason: str) -> bytes:
    """Return the last line of a recording that ends by itself."""
    return msgspec.json.encode(RecordingEnd(reason=reason)) + b"\n"


def _cleaned_record(copy: ContentCopy, content: RecordedContent) -> bytes:
    """Return the JSON of ``content`` with what was copied, without secrets."""
    note = (
        f"the end of the response is missing: it is longer than {BODY_BYTES >> 10} KiB, or "
        f"running requests had more than {_OPEN_BYTES >> 20} MiB"
    )
    content = msgspec.structs.replace(
        content,
        body=cleaned_body(copy.body),
        response=cleaned_answer(response_body(b"".join(copy.response))),
        note=note if copy.cut else "",
    )
    return msgspec.json.encode(content)


def response_body(raw: bytes) -> bytes:
    """Return the body of a response that this server sent, as far as it is there. O(n).

    Without a head, which a part of the response that is not there had, it is what follows.
    """
    position, chunked = 0, _CHUNK.match(raw) is not None
    if raw.startswith(b"HTTP/"):
        head, end, _ = raw.partition(b"\r\n\r\n")
        position = len(head) + len(end)
        chunked = b"transfer-encoding: chunked" in head.lower()
    if not chunked:
        return raw[position:]
    pieces = []
    while chunk := _CHUNK.match(raw, position):
        start, count = chunk.end(), int(chunk[1], 16)
        pieces.append(raw[start : start + count])
        position = start + count + 2
        if not count:
            break
    return b"".join(pieces)
