"""The client of a load generator: a connection that times events, and what its answers say.

It parses only what a load generator needs, so that the client costs far less than the server.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import msgspec

from dynamo.bench.stats import Outcome
from dynamo.http.client import HttpClient, ResponseError, Target

_EVENT_STREAM = b"text/event-stream"
_LINE_LIMIT_BYTES = 16 << 20
_BODY_LIMIT_BYTES = 256 << 20
_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\r|\n")
_SHOWN_CHARS = 160


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class AnswerUsage(msgspec.Struct):
    """The figures of the endpoint."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    """The fields that carry output. Endpoints differ in their types."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class AnswerChunk(msgspec.Struct):
    """A complete answer or a chunk of a stream, chat or completions."""

    choices: list[_Choice] | None = None
    usage: AnswerUsage | None = None
    error: Any = None
    nvext: Any = None


_decode = msgspec.json.Decoder(AnswerChunk).decode


def read_chunk(outcome: Outcome, data: bytes) -> tuple[bool, bool]:
    """Read the data of one event; return whether it has output and whether the answer ends."""
    answer = _read(outcome, data)
    if answer is None:
        return False, False
    output = finished = False
    for choice in answer.choices or ():
        finished = finished or choice.finish_reason is not None
        delta = choice.delta
        if choice.text or (
            delta is not None
            and (
                delta.content
                or delta.reasoning_content
                or delta.reasoning
                or delta.tool_calls
                or delta.refusal
            )
        ):
            output = True
    return output, finished


def read_answer(outcome: Outcome, body: bytes) -> None:
    """Read the body of an answer that is not streamed."""
    answer = _read(outcome, body)
    if answer is not None and not answer.choices:
        outcome.error = f"the answer has no choices: {_shown(body)}"


def error_message(body: bytes, characters: int = _SHOWN_CHARS) -> str:
    """Return the message in the body of an error, else the start of the body."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return _shown(body)
    if isinstance(decoded, dict):
        message = _message(decoded.get("error"), characters) or decoded.get("message")
        if isinstance(message, str):
            return message[:characters]
    return _shown(body)


def refusal(status: int, body: bytes, characters: int = _SHOWN_CHARS) -> str:
    """Return the status and message of an error; for a 401 also how to give a key."""
    hint = "; give a key with --api-key or OPENAI_API_KEY" if status == 401 else ""
    return f"{status}: {error_message(body, characters)}{hint}"


def _read(outcome: Outcome, data: bytes) -> AnswerChunk | None:
    try:
        answer = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        outcome.error = f"not an OpenAI answer: {_shown(data)}"
        return None
    if answer.error is not None:
        outcome.error = f"in stream: {_message(answer.error) or _shown(data)}"
        return None
    if answer.usage is not None:
        outcome.prompt_tokens = answer.usage.prompt_tokens
        outcome.output_tokens = answer.usage.completion_tokens
        if answer.usage.prompt_tokens_details is not None:
            outcome.cached_tokens = answer.usage.prompt_tokens_details.cached_tokens
    ids = answer.nvext.get("worker_id") if isinstance(answer.nvext, dict) else None
    if isinstance(ids, dict):
        worker_ids = (ids.get(name) for name in ("decode_worker_id", "prefill_worker_id"))
        # A later chunk without ids does not erase them.
        outcome.worker_id = next(
            (worker_id for worker_id in worker_ids if isinstance(worker_id, int)), outcome.worker_id
        )
    return answer


def _message(error: object, characters: int = _SHOWN_CHARS) -> str:
    """Return the text of an ``error`` member: an object with a message, or a string."""
    message = error.get("message") if isinstance(error, dict) else error
    return message[:characters] if isinstance(message, str) else ""


def _shown(data: bytes) -> str:
    return repr(data[:_SHOWN_CHARS].decode("utf-8", "replace"))


class EventParser:
    """Bytes in, the data of each complete event out, however the bytes are split.

    Lines end with LF, CR LF or CR. An event without its empty line is never returned.
    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """

    def __init__(self) -> None:
        self._partial = b""
        self._after_cr = False
        self._at_start = True
        self._data: list[bytes] = []

    @property
    def pending_bytes(self) -> int:
        """Size of the unfinished line."""
        return len(self._partial)

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that ``received`` completes. O(received + open line)."""
        if self._after_cr and received:
            received = received.removeprefix(
                b"\n"
            )  # CR LF split over two reads: the CR already ended the line
            self._after_cr = False
        if not received:
            return []
        self._after_cr = received.endswith(b"\r")
        text = self._partial + received
        *lines, self._partial = _LINE_END.split(text) if b"\r" in text else text.split(b"\n")
        if lines and self._at_start:
            self._at_start = False
            lines[0] = lines[0].removeprefix(_BOM)
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")
        return events


class LoadConnection(HttpClient):
    """One request at a time; :meth:`measure` returns an Outcome, also for the server's errors."""

    def __init__(self, target: Target) -> None:
        super().__init__(_BODY_LIMIT_BYTES)
        self._target = target
        self._reset(Outcome(), stream=False)

    def _reset(self, outcome: Outcome, stream: bool) -> None:
        self._outcome = outcome
        self._stream = stream
        self._events = EventParser()
        self._ended = False
        self._last_token_s = 0.0

    async def open(self) -> None:
        """Connect. Raises OSError, or UnicodeError for an invalid host name."""
        await self.connect_to(self._target)

    async def measure(
        self,
        path: str,
        body: bytes,
        *,
        stream: bool,
        timeout_s: float,
        started_s: float | None = None,
    ) -> Outcome:
        """POST ``body`` and return what came of it.

        ``started_s`` is when its clock started, by default now.
        """
        self._reset(outcome := Outcome(), stream)
        outcome.sent_s = time.perf_counter()
        outcome.started_s = outcome.sent_s if started_s is None else started_s
        try:
            async with asyncio.timeout(timeout_s):
                await self.request(self._target.head("POST", path, len(body)) + body)
        except TimeoutError:
            outcome.error = "timeout"
            self.close()
        except ResponseError as error:
            outcome.error = outcome.error or str(error)
        outcome.finished_s = time.perf_counter()
        outcome.status = self.status
        if outcome.error is None:
            self._check(bytes(self.body))
        return outcome

    def _check(self, body: bytes) -> None:
        """Set the outcome's error if a complete response is not a complete answer."""
        outcome = self._outcome
        if outcome.status != 200:
            outcome.error = refusal(outcome.status, body)
        elif not self._stream:
            read_answer(outcome, body)
        elif not self._ended:
            outcome.error = "the stream ended without [DONE] or a finish_reason"
        elif outcome.first_token_s is None:
            outcome.error = "the stream carried no token"

    def on_headers_complete(self) -> None:
        """httptools: the head is complete."""
        super().on_headers_complete()
        if self._stream and self.status == 200 and self.content_type != _EVENT_STREAM:
            kind = self.content_type[:80].decode("latin-1") or "no content-type"
            self.fail(f"not an event stream: {kind}")

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the body."""
        if not (self._stream and self.status == 200):
            super().on_body(data)
        elif self.receiving:
            self._read_events(self._events.feed(data), time.perf_counter())
            if self._events.pending_bytes > _LINE_LIMIT_BYTES:
                self.fail("the answer is too large")

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
        outcome.pieces += tokens
        if outcome.first_token_s is None:
            outcome.first_token_s = self._last_token_s = now_s
            tokens -= 1
        # Tokens of one read arrived together: each gets an equal share of the gap before them.
        if tokens:
            outcome.gaps_s.extend([(now_s - self._last_token_s) / tokens] * tokens)
        self._last_token_s = now_s
