"""A client of one request at a time that records all it receives, and leaves when it planned to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import orjson
from history import Answer, Event, Request

from dynamo.bench.client import EventParser
from dynamo.http.client import HttpClient, ResponseError, Target

__all__ = ["CANCEL_STAGES", "Plan", "RecordingClient"]

CANCEL_STAGES = ("head", "queued", "first token", "mid-stream", "before done")
"""When a client leaves: in the middle of its own request; at once after it; at the first token;
after some tokens; at the finish reason, before [DONE]."""

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_BODY_LIMIT_BYTES = 64 << 20


class Plan(NamedTuple):
    """A request to send. ``cancel_after`` is the number of texts before a mid-stream cancel.

    ``session`` is sent in the header of Dynamo's sessions; ``headers`` are sent as they are, each
    with its line end.
    """

    id: str
    api: str
    body: dict[str, Any]
    expected: Answer
    cancel: str = ""
    cancel_after: int = 0
    session: str = ""
    headers: str = ""

    @property
    def stream(self) -> bool:
        """Whether the answer comes as server-sent events."""
        return bool(self.body.get("stream"))


class RecordingClient(HttpClient):
    """One connection; ``clock`` gives the times of the history."""

    def __init__(self, target: Target, clock: Callable[[], float]) -> None:
        super().__init__(_BODY_LIMIT_BYTES)
        self._target = target
        self._clock = clock
        self._cancelled = False

    async def perform(self, plan: Plan, timeout_s: float) -> Request:
        """Send the request and return its history."""
        self._plan = plan
        self._parser_of_events = EventParser()
        self._cancelled = False
        self._texts = 0
        record = self.record = Request(
            plan.id,
            plan.api,
            plan.stream,
            plan.body.get("n", 1),
            plan.expected,
            started_s=self._clock(),
            cancel=plan.cancel,
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(plan, record)
        except TimeoutError:
            record.ending = "timeout"
            self.close()
        record.ended_s = self._clock()
        return record

    async def _exchange(self, plan: Plan, record: Request) -> None:
        if not self.usable:
            try:
                await self.connect(self._target.host, self._target.port)
            except OSError:
                record.ending = "refused"
                return
        message = self._message(plan)
        if plan.cancel in ("head", "queued"):
            await self._leave_early(plan, message)
            record.ending = "cancelled"
            return
        try:
            await self.request(message)
        except ResponseError:
            record.ending = "cancelled" if self._cancelled else "closed"
            record.status = self.status
            return
        record.status = self.status
        # What it left may have been in the buffer already, up to the end.
        record.ending = "cancelled" if self._cancelled else "complete"
        if self.status != 200 or not plan.stream:
            self._read_body(bytes(self.body))

    def _message(self, plan: Plan) -> bytes:
        """Return head and body of the request."""
        body = orjson.dumps(plan.body)
        head = self._target.head("POST", PATHS[plan.api], len(body))
        if plan.session:
            head = head[:-2] + f"x-dynamo-session-id: {plan.session}\r\n\r\n".encode()
        if plan.headers:
            head = head[:-2] + f"{plan.headers}\r\n".encode()
        return head + body

    async def _leave_early(self, plan: Plan, message: bytes) -> None:
        assert self._transport is not None
        cut = len(message) * 3 // 10 if plan.cancel == "head" else len(message)
        with suppress(ResponseError):
            self.start(message[:cut], lambda _failure: None)
        await asyncio.sleep(plan.cancel_after / 100)
        self._leave()

    def _leave(self) -> None:
        """Close with a reset half of the time, as a client that crashes does."""
        self._cancelled = True
        if self._transport is not None:
            if self._plan.cancel_after % 2:
                self._transport.abort()
            else:
                self._transport.close()

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the body."""
        if self._cancelled:
            return
        if self.status != 200 or not self._plan.stream:
            super().on_body(data)
            return
        now_s = self._clock()
        for event in self._parser_of_events.feed(data):
            self._read_event(event, now_s)
            if self._wants_to_leave():
                self._leave()
                return

    def _wants_to_leave(self) -> bool:
        last = self.record.events[-1].kind if self.record.events else ""
        stage = self._plan.cancel
        if stage == "first token":
            return self._texts >= 1
        if stage == "mid-stream":
            return self._texts >= self._plan.cancel_after
        return stage == "before done" and last in ("finish", "usage")

    def _read_event(self, event: bytes, now_s: float) -> None:
        events = self.record.events
        if event == b"[DONE]":
            events.append(Event(now_s, "done"))
            return
        chunk = orjson.loads(event)
        if "error" in chunk:
            events.append(Event(now_s, "error", chunk["error"]["message"]))
            return
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            self._received(now_s, text or "", choice)
        if chunk.get("usage"):
            events.append(Event(now_s, "usage", usage=_usage(chunk)))

    def _read_body(self, data: bytes) -> None:
        now_s = self._clock()
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError:
            self.record.events.append(Event(now_s, "error", data[:200].decode(errors="replace")))
            return
        if self.status != 200:
            text = body.get("message") or str(body.get("error", ""))
            self.record.events.append(Event(now_s, "error", text))
            return
        for choice in body["choices"]:
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            self._received(now_s, text, choice)
        self.record.events.append(Event(now_s, "usage", usage=_usage(body)))

    def _received(self, now_s: float, text: str, choice: dict[str, Any]) -> None:
        index = choice["index"]
        if text:
            self._texts += 1
            self.record.events.append(Event(now_s, "text", text, index))
        if choice.get("finish_reason"):
            self.record.events.append(Event(now_s, "finish", choice["finish_reason"], index))


def _usage(body: dict[str, Any]) -> tuple[int, int]:
    usage = body["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]
