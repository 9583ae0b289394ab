"""The answer to a Responses request: output items and their events.

A new kind of delta closes the open item and opens the next one: reasoning, message, a tool call.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from typing import Any

import orjson

from dynamo.errors import DynamoError
from dynamo.frontend.answer.events import CountingChoice, EventStream
from dynamo.frontend.answer.sse import DONE, json_bytes, public_message
from dynamo.frontend.apis.responses.input_items import INPUT, OfferedTools
from dynamo.frontend.apis.responses.prompt import ResponseChatRequest
from dynamo.frontend.formats.message import AnswerDelta, ToolCallPart
from dynamo.frontend.formats.scan import well_formed
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.requests.errors import error_object
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.http import openai_error
from dynamo.protocols.openai import GenerationRequest

_EVENT = ("code", "message", "param")
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class _OpenItem:
    """The item that grows. ``head`` begins its delta events; without one it has none."""

    __slots__ = ("head", "index", "item", "kind", "logprobs", "texts")

    def __init__(self, kind: str, index: int, item: dict[str, Any]) -> None:
        self.kind = kind
        self.index = index
        self.item = item
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.head = b""

    @property
    def address(self) -> dict[str, Any]:
        return {"item_id": self.item["id"], "output_index": self.index}


_MESSAGE, _REASONING, _SUMMARY, _CALL, _CUSTOM = "message", "reasoning", "summary", "call", "custom"
_DELTAS = {
    _MESSAGE: "response.output_text",
    _REASONING: "response.reasoning_text",
    _SUMMARY: "response.reasoning_summary_text",
    _CALL: "response.function_call_arguments",
    _CUSTOM: "response.custom_tool_call_input",
}
_PARTS = {_MESSAGE: "response.content_part", _REASONING: "response.content_part",
          _SUMMARY: "response.reasoning_summary_part"}  # fmt: skip


class OutputItems:
    """``items`` are those that are complete. Ids of items end with ``id_tail``.

    Events have a ``sequence_number`` from 0. Without ``streams`` there are none: :meth:`add` and
    :meth:`close` return nothing, and :meth:`event` is not called.
    """

    def __init__(
        self, id_tail: str, tools: OfferedTools, *, summarizes: bool, streams: bool
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._id_tail = id_tail
        self._tools = tools
        self._reasoning = _SUMMARY if summarizes else _REASONING
        self._streams = streams
        self._sequence = 0
        self._open: _OpenItem | None = None

    def event(self, name: str, members: dict[str, Any]) -> bytes:
        """The next event."""
        data = {"type": name, "sequence_number": self._sequence, **members}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), json_bytes(data))

    def add(self, delta: AnswerDelta, logprobs: list[dict[str, Any]] | None) -> bytes:
        """Add a delta, with the log probabilities of its content; return its events."""
        events, calls = b"", delta.calls
        if calls and calls[0].name is None:  # more of the open call
            events, calls = self._add_call(calls[0]), calls[1:]
        if delta.reasoning is not None:
            events += self._add_text(self._reasoning, delta.reasoning, None)
        if delta.content is not None:
            events += self._add_text(_MESSAGE, delta.content, logprobs)
        for part in calls:
            events += self._add_call(part)
        return events

    def close(self, status: str) -> bytes:
        """Complete the open item, which has ``status`` then; return its events."""
        current, self._open = self._open, None
        if current is None:
            return b""
        kind, address, item = current.kind, current.address, current.item
        text = "".join(current.texts)
        if "status" in item:
            item["status"] = status
        self.items.append(item)
        done = _done(current, text)
        if not self._streams:
            return b""
        events = b""
        if kind == _CUSTOM:  # its input is part of JSON text, known at the end
            events += self.event(f"{_DELTAS[kind]}.delta", {**address, "delta": item[INPUT]})
        events += self.event(f"{_DELTAS[kind]}.done", {**address, **done})
        if kind in _PARTS:
            number, part = _part(current, text)
            events += self.event(f"{_PARTS[kind]}.done", {**address, **number, "part": part})
        members = {"output_index": current.index, "item": item}
        return events + self.event("response.output_item.done", members)

    def _add_text(self, kind: str, text: str, logprobs: list[dict[str, Any]] | None) -> bytes:
        current, events = self._open, b""
        if current is None or current.kind != kind:
            events = self.close("completed") + self._begin(kind, self._text_item(kind))
            current = self._open
            assert current is not None
        current.texts.append(text)
        if not self._streams:
            current.logprobs += logprobs or ()
            return b""
        if logprobs:
            current.logprobs += logprobs
            members = {**current.address, "content_index": 0, "delta": text, "logprobs": logprobs}
            return events + self.event(f"{_DELTAS[kind]}.delta", members)
        return events + self._delta(current, text)

    def _add_call(self, part: ToolCallPart) -> bytes:
        events = b""
        if part.name is not None:
            kind = _CUSTOM if part.name in self._tools.custom else _CALL
            events = self.close("completed") + self._begin(kind, self._call_item(kind, part))
        current, text = self._open, "".join(part.arguments)
        if current is None or current.kind not in (_CALL, _CUSTOM) or not text:
            return events
        current.texts.append(text)
        if current.kind == _CUSTOM or not self._streams:
            return events
        return events + self._delta(current, text)

    def _delta(self, current: _OpenItem, text: str) -> bytes:
        """An event with nothing but more text: most of them."""
        number = self._sequence
        self._sequence += 1
        return b'%b%d,"delta":%b}\n\n' % (current.head, number, json_bytes(text))

    def _begin(self, kind: str, item: dict[str, Any]) -> bytes:
        current = self._open = _OpenItem(kind, len(self.items), item)
        if not self._streams:
            return b""
        members = {"output_index": current.index, "item": item}
        events = self.event("response.output_item.added", members)
        number: dict[str, Any] = {}
        if kind in _PARTS:
            number, part = _part(current, "")
            members = {**current.address, **number, "part": part}
            events += self.event(f"{_PARTS[kind]}.added", members)
        name = f"{_DELTAS[kind]}.delta"
        fixed = {"type": name, **current.address, **number}
        if kind == _MESSAGE:
            fixed["logprobs"] = []
        # Open at its end: each delta adds its number and its text.
        head = json_bytes(fixed)[:-1]
        current.head = b'event: %b\ndata: %b,"sequence_number":' % (name.encode(), head)
        return events

    def _text_item(self, kind: str) -> dict[str, Any]:
        if kind == _MESSAGE:
            return {
                "id": self._id("msg"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        item: dict[str, Any] = {"id": self._id("rs"), "type": "reasoning", "summary": []}
        if kind == _REASONING:
            item["content"] = []
        return {**item, "status": "in_progress"}

    def _call_item(self, kind: str, part: ToolCallPart) -> dict[str, Any]:
        assert part.name is not None
        namespace, name = self._tools.members.get(part.name, (None, part.name))
        if kind == _CUSTOM:
            item = {"id": self._id("ctc"), "type": "custom_tool_call", INPUT: ""}
        else:
            item = {"id": self._id("fc"), "type": "function_call", "arguments": ""}
            item["status"] = "in_progress"
        item |= {"call_id": part.id or "", "name": name}
        return item if namespace is None else {**item, "namespace": namespace}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._id_tail}{len(self.items):x}"


def _done(current: _OpenItem, text: str) -> dict[str, Any]:
    """Complete the item's text; return the members of the event that says so."""
    kind, item = current.kind, current.item
    if kind == _CALL:
        item["arguments"] = text
        return {"arguments": text, "name": item["name"]}
    if kind == _CUSTOM:
        item[INPUT] = _custom_input(text)
        return {INPUT: item[INPUT]}
    number, part = _part(current, text)
    if kind == _MESSAGE:
        item["content"] = [part]
        return {**number, "text": text, "logprobs": current.logprobs}
    item["summary" if kind == _SUMMARY else "content"] = [part]
    return {**number, "text": text}


def _part(current: _OpenItem, text: str) -> tuple[dict[str, int], dict[str, Any]]:
    """The place of the only part of an item, and the part with ``text``."""
    if current.kind == _SUMMARY:
        return {"summary_index": 0}, {"type": "summary_text", "text": text}
    if current.kind == _REASONING:
        return {"content_index": 0}, {"type": "reasoning_text", "text": text}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": current.logprobs}
    return {"content_index": 0}, part


def _custom_input(arguments: str) -> str:
    """The free text in the arguments of a custom tool; all of them if the model wrote no JSON."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    value = parsed.get(INPUT) if isinstance(parsed, dict) else None
    return well_formed(value) if isinstance(value, str) else arguments


class ResponsesStream(EventStream):
    """Items of one choice. A response that is complete, or cut by a limit, is stored.

    Where no API keys are needed, a client may read and delete each response whose id it has. So a
    secret is part of the id: those of requests count up, clients may choose them, operators see
    them.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        tokenizer: Tokenizer,
        response_id: str,
        created: int,
        *,
        force_usage: bool = False,
    ) -> None:
        response_id = f"{response_id}-{secrets.token_hex(16)}"
        super().__init__(
            request, prepared, tokenizer, response_id, created, force_usage=force_usage
        )
        assert isinstance(request, ResponseChatRequest)
        origin = self._origin = request.origin
        self._output = OutputItems(
            secrets.token_hex(12),
            origin.tools,
            summarizes=origin.summarizes,
            streams=bool(request.stream),
        )
        self._logprobs: deque[list[dict[str, Any]] | None] = deque()

    def opening(self) -> bytes:
        """The events before the first delta."""
        members = {"response": self._response("in_progress")}
        event = self._output.event
        return event("response.created", members) + event("response.in_progress", members)

    def _events(self, delta: AnswerDelta) -> bytes:
        return self._output.add(delta, self._logprobs.popleft() if self._logprobs else None)

    def _take(self) -> list[AnswerDelta]:
        deltas, choice = super()._take(), self.choices[0]
        if choice.logprobs is None:
            return deltas
        if isinstance(choice, CountingChoice):
            entries = choice.content_logprobs(len(deltas))
        else:
            # The first delta takes all; the others of this output have none.
            entries = [(choice.logprobs.drain() or {}).get("content") or [] for _ in deltas]
        self._logprobs.extend(list(map(_logprob, delta_entries)) for delta_entries in entries)
        return deltas

    def _last_events(self) -> bytes:
        status = self._status
        events = self._output.close(status)
        response = orjson.Fragment(self._final(status))
        return events + self._output.event(f"response.{status}", {"response": response}) + DONE

    def _body(self, deltas: list[AnswerDelta]) -> bytes:
        for delta in deltas:
            self._events(delta)
        status = self._status
        self._output.close(status)
        return self._final(status)

    def _failed(self, error: DynamoError) -> bytes:
        # Now final, or the response would have no usage.
        self.final_usage = self.usage()
        events = self._output.close("incomplete")
        response = self._response("failed")
        response["error"] = {"code": _failure_code(error), "message": public_message(error)}
        return events + self._output.event("response.failed", {"response": response}) + DONE

    @property
    def _status(self) -> str:
        finished = self._finish_reason in ("stop", "tool_calls")
        return "completed" if finished else "incomplete"

    def _final(self, status: str) -> bytes:
        """The response as JSON; store it."""
        response = self._response(status)
        response["completed_at"] = int(time.time())
        reason = _INCOMPLETE.get(self._finish_reason or "")
        if status == "incomplete" and reason is not None:
            response["incomplete_details"] = {"reason": reason}
        if self._extra:
            nvext = self._nvext(self.choices[0], first=True, last=True)
            if nvext is not None:
                response["nvext"] = nvext
        body = json_bytes(response)
        origin = self._origin
        if origin.keep is not None:
            origin.keep(origin, self._response_id, body, self._output.items)
        return body

    def _response(self, status: str) -> dict[str, Any]:
        """The response object, with the items so far."""
        done = self.final_usage is not None
        return {
            "id": self._response_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **self._origin.echo,
            "model": self._model,
            "output": self._output.items,
            "usage": self._usage_json() if done else None,
        }

    def _usage_json(self) -> orjson.Fragment:
        """The ``usage`` object. Formatted here: a sum of counts may exceed orjson's 64 bits."""
        usage = self.usage()
        cached, reasoning = usage.cached_tokens or 0, self._reasoning_tokens
        inputs, outputs = usage.prompt_tokens, usage.completion_tokens
        text = (
            b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":0},'
            b'"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":%d},"total_tokens":%d}'
        )
        return orjson.Fragment(text % (inputs, cached, outputs, reasoning, inputs + outputs))


def response_error(status: int, error: DynamoError) -> bytes:
    """The body of an error response."""
    return json_bytes({"error": error_object(status, error)})


def plain_response_error(status: int, message: str) -> bytes:
    """The body of an error that the HTTP layer responds with."""
    code = "invalid_api_key" if status == 401 else None
    return json_bytes({"error": openai_error(status, message, code=code)})


def response_error_event(error: DynamoError) -> bytes:
    """The rest of a stream that began before the request reached its model."""
    members = error_object(error.status, error)
    data = {"type": "error", "sequence_number": 0, **{name: members[name] for name in _EVENT}}
    return b"event: error\ndata: %b\n\n" % json_bytes(data) + DONE


def _failure_code(error: DynamoError) -> str:
    """A code of ``response.error`` that the official clients accept."""
    if error.status < 500:
        return "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
    return "server_error"


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of a chat, without the places that have no meaning here."""
    alternatives = [_token(alternative) for alternative in entry["top_logprobs"]]
    return {**_token(entry), "top_logprobs": alternatives}


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "bytes": entry["bytes"] or [], "logprob": entry["logprob"]}
