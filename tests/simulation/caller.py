"""A client of every API: reads its answers as events, and checks what the API promises of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import orjson
from call import FRONTEND, Call
from history import Event, Request
from logprobs import Entries
from pins import UNKNOWN_WORKER
from recording_client import Plan, RecordingClient

from dynamo.http.client import Target, request_head

__all__ = ["ADAPTER_ABSENT", "Caller"]

ADAPTER_ABSENT = "the adapter is not loaded"
_ID = re.compile("x-request-id: (\\S+)")
_RETRIED = (429, 503, 529)
"""Statuses of requests that may succeed a second later."""
_RETRY_AFTER_S = "1"
_PAUSES = 6
"""So often a slow reader pauses in a stream."""


class Message:
    """What a choice of an answer has, beside its content: reasoning, and calls of tools."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.calls: list[list[str]] = []


class Caller(RecordingClient):
    """One connection. ``problems`` are promises that the latest answer broke."""

    def __init__(self, target: Target, clock: Callable[[], float]) -> None:
        super().__init__(target, clock)
        self.call: Call | None = None
        self.model = ""
        self.slow_s = 0.0
        self.answer_id = ""
        self.problems: list[str] = []
        self.workers: dict[str, int] = {}
        """Those that the answer names."""
        self._messages: dict[int, Message] = defaultdict(Message)
        self._reader: Any = None
        self._pauses = 0
        self.is_paused = False
        """Whether a slow reader reads nothing now."""
        self._entries = Entries()
        self.headers: dict[str, str] = {}
        """Those of the answer."""

    def ask(self, call: Call | None, model: str, slow_s: float) -> None:
        """Make ``call`` the next request; None for one that needs no reader of its own."""
        self.call, self.model, self.slow_s = call, model, slow_s
        self.problems, self._messages, self._pauses = [], defaultdict(Message), 0
        self.headers, self.workers = {}, {}
        if self.is_paused and self._transport is not None:  # by the answer before
            self._resume(self._transport)
        self._entries = Entries()
        readers = {"responses": ResponseReader, "messages": MessageReader}
        self._reader = None
        if call is not None and call.api in readers:
            self._reader = readers[call.api](self)

    def _message(self, plan: Plan) -> bytes:
        call = self.call
        if call is None:
            return super()._message(plan)
        if call.api == "watch":
            loop = asyncio.get_running_loop()
            loop.call_later(0.5 + plan.cancel_after / 4, self._leave_watch, self.record)
        if call.message:
            message = call.message.replace(b"{model}", self.model.encode())
            if call.drip_s:
                self._drip(self.record, message[1:], call.drip_s)
            return message[:1] if call.drip_s else message
        body = call.sent if call.sent is not None else b""
        if call.method == "POST" and call.sent is None:
            fields = dict(plan.body)
            if not call.generates or call.prompts > 1:
                fields.pop("n", None)  # of the history: answers of a model
            body = orjson.dumps(fields) + b" " * call.pad
        path = call.target(self.model, self.answer_id)
        headers = [one for one in (call.headers + plan.headers).split("\r\n") if one]
        if call.method == "POST":
            headers += ["content-type: application/json", f"content-length: {len(body)}"]
        return request_head(call.method, path, "127.0.0.1", headers) + body

    def _drip(self, record: Request, rest: bytes, pause_s: float) -> None:
        """Send a byte now and then, as long as the answer is awaited."""

        def write() -> None:
            if record is self.record and self.receiving and self._transport is not None:
                self._transport.write(rest[:1])
                self._drip(record, rest[1:], pause_s)

        if rest:
            asyncio.get_running_loop().call_later(pause_s, write)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep it, too."""
        super().on_header(name, value)
        self.headers[name.decode().lower()] = value.decode(errors="replace")

    def _check_headers(self) -> None:
        """The answer has the id of its request alone; one that may be repeated says when."""
        record = self.record
        if record.ending != "complete" or not self.status:
            return
        given = _ID.search(self._plan.headers)
        wanted, found = given[1] if given else None, self.headers.get("x-request-id")
        generates = self.call is None or self.call.generates
        path = self.call.path if self.call is not None else ""
        if self.call is not None and self.call.message:
            wanted = None  # it was sent as it is
        own = wanted is None and path.startswith("/v1/messages")  # Anthropic's have one always
        posts = self.call is None or self.call.method == "POST"
        if found != wanted and not own and (generates or (posts and self.status >= 400)):
            self.problems.append(f"x-request-id {found!r} of a request with {wanted!r}")
        later = self.headers.get("retry-after")
        if generates and self.status in _RETRIED and later != _RETRY_AFTER_S:
            self.problems.append(f"retry-after {later!r} of an answer with {self.status}")
        if self.status < 429 and later is not None:
            self.problems.append(f"retry-after {later!r} of an answer with {self.status}")

        self._check_headed()

    def _check_headed(self) -> None:
        for line in self.call.headed if self.call is not None else ():
            name, _, value = line.lstrip("-").partition(": ")
            found = self.headers.get(name, "")
            if (value.lower() in found.lower()) == line.startswith("-"):
                self.problems.append(f"{name} is {found!r}, not {line!r}")

    # -- slow readers

    def on_body(self, data: bytes) -> None:
        """Read it, and then nothing for a while."""
        super().on_body(data)
        able = self.status == 200 and self._transport is not None
        if self.slow_s and self._pauses < _PAUSES and able:
            assert self._transport is not None
            self._pauses += 1
            self.is_paused = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(self.slow_s, self._resume, self._transport)

    def _leave_watch(self, record: Request) -> None:
        if record is self.record and self.receiving:
            self._leave()

    def _resume(self, transport: asyncio.Transport) -> None:
        self.is_paused = False
        if not transport.is_closing():
            transport.resume_reading()

    # -- events

    def add(self, kind: Any, text: str = "", usage: tuple[int, int] | None = None) -> None:
        """Record an event of an answer of one choice."""
        self._texts += kind == "text"
        self.record.events.append(Event(self._clock(), kind, text, 0, usage))

    def _read_event(self, event: bytes, now_s: float) -> None:
        if self._reader is None or event == b"[DONE]":
            if b'"worker_id"' in event:
                self.workers |= orjson.loads(event)["nvext"]["worker_id"]
            super()._read_event(event, now_s)
            return
        self._reader.event(orjson.loads(event))

    def _received(self, now_s: float, text: str, choice: dict[str, Any]) -> None:
        """Take reasoning and calls of a choice of chat, too."""
        part = choice.get("delta") or choice.get("message") or {}
        self._entries.add(choice, text or "")
        message = self._messages[choice["index"]]
        reasoning, calls = part.get("reasoning_content"), part.get("tool_calls") or ()
        message.reasoning += reasoning or ""
        for call in calls:
            function = call["function"]
            if "name" in function:
                if "delta" in choice and call["index"] != len(message.calls):
                    self.problems.append(f"call {call['index']} begins out of order")
                message.calls.append([function["name"], ""])
            message.calls[-1][1] += function["arguments"]
        if (reasoning or calls) and not text:  # it is a token, if not of the content
            self.record.events.append(Event(now_s, "text", "", choice["index"]))
        super()._received(now_s, text or "", choice)

    def reason(self, text: str) -> None:
        """Add to the reasoning of an answer of one choice."""
        self._messages[0].reasoning += text
        self.add("text")

    def begin_call(self, name: str) -> None:
        """Begin a call."""
        self._messages[0].calls.append([name, ""])
        self.add("text")

    def more_of_call(self, text: str) -> None:
        """Add to the arguments of the latest call."""
        self._messages[0].calls[-1][1] += text
        self.add("text")

    def _read_body(self, data: bytes) -> None:
        call = self.call
        if call is not None and call.adapter and self.status == 404:
            self.record.status = 503
            self.add("error", ADAPTER_ABSENT)
        elif call is None or (call.generates and self._reader is None):
            if self.status == 400 and UNKNOWN_WORKER.encode() in data:
                self.record.status = 503  # the judge decides whether it is true
            elif b'"worker_id"' in data and self.status == 200:
                self.workers |= orjson.loads(data)["nvext"]["worker_id"]
            super()._read_body(data)
        elif not call.generates:
            self._read_plain(call, data.decode(errors="replace"))
        elif self.status == 200:
            self._reader.body(orjson.loads(data))
        else:
            self.add("error", _error_of(data.decode(errors="replace")))

    def _read_plain(self, call: Call, text: str) -> None:
        """Check the answer of a call that no model serves; then it is as one that is complete."""
        listing = call.method == "GET" and call.needs != FRONTEND
        says = call.says.replace("{model}", self.model)
        if self.status == call.status and says in text.replace(" ", "") + text:
            self.record.status = 200
            self.add("finish", "")
            self.add("usage", usage=(call.expected.prompt_tokens, 0))
        elif self.status == 503 or (listing and self.status in (200, 404)):
            self.record.status = 503
            self.add("error", f"has no worker: {text}" if listing else _error_of(text))
        else:
            what = f"{call.status} with {says!r}" if says else str(call.status)
            self.problems.append(f"{call.name}: {self.status} {text[:300]} instead of {what}")

    # -- the end

    def check(self) -> list[str]:
        """Return what is wrong with the answer that has ended."""
        call, record = self.call, self.record
        self._check_headers()
        if call is None or call.prompts == 1:
            self.problems += self._entries.check(record, self._plan.body)
        if call is None or not call.generates or record.status != 200:
            return self.problems
        cut = call.case is not None and call.case.format == "cut"
        failed = any(event.kind == "error" for event in record.events)
        whole = record.ending == "complete" and not failed
        if self._reader is not None and whole:
            self._reader.end()
        if call.case is not None:
            self._check_case(call, whole and not cut)
        elif any(one.reasoning or one.calls for one in self._messages.values()):
            self.problems.append("reasoning or calls in an answer without them")
        return self.problems

    def _check_case(self, call: Call, whole: bool) -> None:
        """Reasoning and calls are those of the case, as far as they came."""
        case, message = call.case, self._messages[0]
        assert case is not None
        wanted = [list(one) for one in case.calls]
        found = message.calls
        reasoning = case.reasoning or ""
        if whole:
            same = [one[0] for one in found] == [one[0] for one in wanted] and all(
                _equal(one[1], other[1]) for one, other in zip(found, wanted, strict=True)
            )
            good = same and message.reasoning == reasoning
        else:
            good = reasoning.startswith(message.reasoning) and len(found) <= len(wanted)
            if self.record.stream and good:
                good = all(
                    one[0] == other[0] and other[1].startswith(one[1])
                    for one, other in zip(found, wanted, strict=False)
                )
        if not good:
            self.problems.append(
                f"reasoning {message.reasoning!r} and calls {found} instead of {reasoning!r} and "
                f"{wanted}"
            )


def _error_of(text: str) -> str:
    """Return the message of an error, of whichever API."""
    try:
        body = json.loads(text)
        return str(body.get("message") or body["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text or "nothing"


def _equal(text: str, other: str) -> bool:
    """Whether both are the same arguments; those of Messages are JSON written again."""
    try:
        return bool(text == other or json.loads(text) == json.loads(other))
    except ValueError:
        return text == json.dumps({"INVALID_JSON": other}, separators=(",", ":"))


class ResponseReader:
    """The events of /v1/responses: numbered, items in order, each text once whole and once in
    parts."""

    _ENDS = ("response.completed", "response.incomplete", "response.failed")

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._text = ""
        self._open = False
        self._ended = False
        self._streamed = False

    def event(self, event: dict[str, Any]) -> None:
        """Take one event."""
        kind, caller = event["type"], self._caller
        self._streamed = True
        if kind == "error":  # before the request reached its model
            caller.add("error", event["message"])
            return
        if event["sequence_number"] != self._number or self._ended:
            self._wrong(f"{kind} has number {event['sequence_number']}, after {self._number}")
        opening = ("response.created", "response.in_progress")
        if (kind in opening) != (self._number < 2) or (self._number < 2 and
                                                        kind != opening[self._number]):  # fmt: skip
            self._wrong(f"{kind} is event {self._number}")
        self._number += 1
        if kind in self._ENDS:
            self._end(event["response"])
        elif kind == "response.output_item.added":
            self._begin(event)
        elif kind.endswith(".delta"):
            self._delta(kind, event)
        elif kind == "response.output_item.done":
            self._done(event)
        elif kind.endswith(("text.done", "arguments.done")):
            text = event["text"] if "text" in event else event["arguments"]
            if text != self._text:
                self._wrong(f"{kind} has {text!r} after deltas of {self._text!r}")

    def body(self, body: dict[str, Any]) -> None:
        """Take an answer that is not streamed."""
        for item in body["output"]:
            self._take(item)
        self._end(body)

    def end(self) -> None:
        """The answer is complete."""
        if not self._ended:
            self._wrong("no event ended the response")

    def _wrong(self, what: str) -> None:
        self._caller.problems.append(f"responses: {what}")

    def _begin(self, event: dict[str, Any]) -> None:
        if self._open or event["output_index"] != len(self._items):
            self._wrong(f"item {event['output_index']} begins after {len(self._items)}")
        self._open, self._text = True, ""
        if event["item"]["type"] == "function_call":
            self._caller.begin_call(event["item"]["name"])

    def _delta(self, kind: str, event: dict[str, Any]) -> None:
        if not self._open or event["output_index"] != len(self._items):
            self._wrong(f"{kind} of item {event['output_index']}, which is not open")
        text = event["delta"]
        self._text += text
        if kind == "response.output_text.delta":
            self._caller.add("text", text)
        elif "reasoning" in kind:
            self._caller.reason(text)
        else:
            self._caller.more_of_call(text)

    def _done(self, event: dict[str, Any]) -> None:
        if not self._open or _text_of(event["item"]) != self._text:
            self._wrong(f"item {event['item']} after deltas of {self._text!r}")
        self._open = False
        self._items.append(event["item"])

    def _take(self, item: dict[str, Any]) -> None:
        if item["type"] == "message":
            self._caller.add("text", _text_of(item))
        elif item["type"] == "reasoning":
            self._caller.reason(_text_of(item))
        else:
            self._caller.begin_call(item["name"])
            self._caller.more_of_call(_text_of(item))

    def _end(self, response: dict[str, Any]) -> None:
        self._ended = True
        caller = self._caller
        caller.answer_id = response["id"]
        if response["status"] == "failed":
            caller.add("error", response["error"]["message"])
            return
        if self._streamed and response["output"] != self._items:
            self._wrong(f"it ends with {response['output']} after items {self._items}")
        called = any(item["type"] == "function_call" for item in response["output"])
        reason = "tool_calls" if called else "stop"
        if response["status"] == "incomplete":
            reason = {"max_output_tokens": "length"}[response["incomplete_details"]["reason"]]
        caller.add("finish", reason)
        usage = response["usage"]
        caller.add("usage", usage=(usage["input_tokens"], usage["output_tokens"]))


def _text_of(item: dict[str, Any]) -> str:
    """Return the text of an output item."""
    if item["type"] == "function_call":
        return str(item["arguments"])
    parts = item.get("content") or item.get("summary") or ()
    return "".join(part["text"] for part in parts)


class MessageReader:
    """The events of /v1/messages: blocks one after the other, then the reason and the stop."""

    _REASONS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}  # noqa: RUF012

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._blocks = 0
        self._kind = ""
        self._begun = False
        self._stopped = ""

    def event(self, event: dict[str, Any]) -> None:
        """Take one event."""
        kind, caller = event["type"], self._caller
        if self._stopped == "message_stop":
            self._wrong(f"{kind} after message_stop")
        if kind == "error":
            caller.add("error", event["error"]["message"])
            caller.add("done")  # nothing follows
        elif kind == "message_start":
            if self._begun:
                self._wrong("two starts")
            self._begun = True
        elif kind == "message_delta":
            if self._kind or self._stopped:
                self._wrong(f"{kind} while a block of {self._kind!r} is open")
            self._stopped = kind
            self._end(event["delta"]["stop_reason"], event["usage"])
        elif kind == "message_stop":
            if self._stopped != "message_delta":
                self._wrong("message_stop before message_delta")
            self._stopped = kind
            caller.add("done")
        elif kind.startswith("content_block"):
            self._block(kind, event)

    def body(self, body: dict[str, Any]) -> None:
        """Take an answer that is not streamed."""
        for block in body["content"]:
            if block["type"] == "text":
                self._caller.add("text", block["text"])
            elif block["type"] == "thinking":
                self._caller.reason(block["thinking"])
            else:
                self._caller.begin_call(block["name"])
                text = json.dumps(block["input"], separators=(",", ":"), ensure_ascii=False)
                self._caller.more_of_call(text)
        self._end(body["stop_reason"], body["usage"])

    def end(self) -> None:
        """The answer is complete."""
        if self._caller.record.stream and self._stopped != "message_stop":
            self._wrong("no message_stop")

    def _wrong(self, what: str) -> None:
        self._caller.problems.append(f"messages: {what}")

    def _block(self, kind: str, event: dict[str, Any]) -> None:
        caller = self._caller
        if event["index"] != self._blocks or not self._begun or self._stopped:
            self._wrong(f"{kind} of block {event['index']} in block {self._blocks}")
        if kind == "content_block_start":
            if self._kind:
                self._wrong("a block begins in another one")
            self._kind = event["content_block"]["type"]
            if self._kind == "tool_use":
                caller.begin_call(event["content_block"]["name"])
        elif kind == "content_block_stop":
            self._kind = ""
            self._blocks += 1
        else:
            self._delta(event["delta"])

    def _delta(self, delta: dict[str, Any]) -> None:
        caller, kind = self._caller, delta["type"]
        wanted = {"text_delta": "text", "input_json_delta": "tool_use"}.get(kind, "thinking")
        if self._kind != wanted:
            self._wrong(f"{kind} in a block of {self._kind!r}")
        if kind == "text_delta":
            caller.add("text", delta["text"])
        elif kind == "thinking_delta":
            caller.reason(delta["thinking"])
        elif kind == "input_json_delta" and caller:
            caller.more_of_call(delta["partial_json"])

    def _end(self, reason: str, usage: dict[str, Any]) -> None:
        self._caller.add("finish", self._REASONS.get(reason, reason))
        given = usage["input_tokens"] + usage["cache_read_input_tokens"]
        self._caller.add("usage", usage=(given, usage["output_tokens"]))
