"""The answer to POST /v1/messages: Anthropic's events, or one message, and its errors.

A message is a list of blocks: thinking, text, tool_use. Events open one block at a time.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from dynamo.errors import DynamoError, Overloaded
from dynamo.frontend.answer.events import EventStream, named_event
from dynamo.frontend.answer.sse import json_bytes, public_message
from dynamo.frontend.apis.messages.prompt import MessagesChatRequest, ThreadUnsupported
from dynamo.frontend.formats.message import AnswerDelta, ToolCallPart
from dynamo.frontend.formats.scan import json_object
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.openai import GenerationRequest

_SIGNATURE = "dynamo"
"""Of a thinking block. Anthropic signs them to check what clients send back; here all are taken."""

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_TOO_LONG = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, [^\d]*(\d+) tokens"
)
"""A prompt that is too long. Agents compact the conversation when they read Anthropic's text."""
_TEXT_HEAD = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
    b'"delta":{"type":"%b_delta","%b":'
)
_TEXT_END = b"}}\n\n"
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def error_message(status: int, message: str) -> bytes:
    """The body of an error response."""
    return orjson.dumps(_error(status, message))


def error_object(status: int, error: DynamoError) -> dict[str, Any]:
    """The same of ``error``, also for an event."""
    body = _error(status, _in_its_words(public_message(error)))
    if isinstance(error, Overloaded):
        # Whatever status the operator has chosen for it.
        body["error"]["type"] = "overloaded_error"
    if isinstance(error, ThreadUnsupported):
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        body["error"]["details"] = details
    return body


def _in_its_words(message: str) -> str:
    match = _TOO_LONG.match(message)
    if match is None:
        return message
    return f"prompt is too long: {match[2]} tokens > {match[1]} maximum"


def _error(status: int, message: str) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


class MessagesStream(EventStream):
    """One message. ``_block`` is the type of the open block, ``_index`` its number; ``_text_head``
    is what precedes the text of its deltas, which are most of the events."""

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
        super().__init__(
            request, prepared, tokenizer, response_id, created, force_usage=force_usage
        )
        assert isinstance(request, MessagesChatRequest)
        self._hides_thinking = request.hides_thinking
        limit = prepared.requests[0].stop_conditions.max_tokens
        allowed = request.max_tokens
        # The context ends before the number of tokens that the client allows.
        self._cut_by_context = limit is not None and allowed is not None and limit < allowed
        self._block = ""
        self._index = -1
        self._text_head = b""

    def opening(self) -> bytes:
        """The event that begins the message, and a ping, as from Anthropic."""
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = self._usage()
        start = named_event("message_start", {"type": "message_start", "message": message})
        return start + named_event("ping", {"type": "ping"})

    def _events(self, delta: AnswerDelta) -> bytes:
        events: list[bytes] = []
        calls = delta.calls
        if calls and calls[0].name is None:  # more of the open block precedes all else
            events.append(self._arguments(calls[0]))
            calls = calls[1:]
        if delta.reasoning:
            self._open(events, "thinking", {"thinking": "", "signature": ""})
            if not self._hides_thinking:
                events.append(self._text_head + json_bytes(delta.reasoning) + _TEXT_END)
        if delta.content:
            self._open(events, "text", {"text": ""})
            events.append(self._text_head + json_bytes(delta.content) + _TEXT_END)
        for call in calls:
            # Two calls in a row are two blocks of one kind, which _open would join.
            self._close(events)
            self._open(events, "tool_use", {"id": call.id, "name": call.name, "input": {}})
            events.append(self._arguments(call))
        return b"".join(events)

    def _last_events(self) -> bytes:
        events: list[bytes] = []
        self._close(events)
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        events.append(named_event("message_delta", delta))
        events.append(named_event("message_stop", {"type": "message_stop"}))
        return b"".join(events)

    def _body(self, deltas: list[AnswerDelta]) -> bytes:
        blocks: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.reasoning:
                thought = "" if self._hides_thinking else delta.reasoning
                blocks.append({"type": "thinking", "thinking": thought, "signature": _SIGNATURE})
            if delta.content:
                blocks.append({"type": "text", "text": delta.content})
            blocks += map(_tool_use, delta.calls)
        head = self._head()
        return json_bytes({**head, "content": blocks, **self._stop(), "usage": self._usage()})

    def _failed(self, error: DynamoError) -> bytes:
        return named_event("error", error_object(error.status, error))

    # --- private

    def _open(self, events: list[bytes], kind: str, empty: dict[str, Any]) -> None:
        """Begin a block of ``kind``, unless one is open."""
        if self._block == kind:
            return
        self._close(events)
        self._block = kind
        self._index += 1
        block = {"type": kind, **empty}
        data = {"type": "content_block_start", "index": self._index, "content_block": block}
        events.append(named_event("content_block_start", data))
        if kind != "tool_use":
            field = kind.encode()
            self._text_head = _TEXT_HEAD % (self._index, field, field)

    def _close(self, events: list[bytes]) -> None:
        """End the open block, if there is one."""
        if not self._block:
            return
        if self._block == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": _SIGNATURE}))
        data = {"type": "content_block_stop", "index": self._index}
        events.append(named_event("content_block_stop", data))
        self._block = ""

    def _arguments(self, call: ToolCallPart) -> bytes:
        text = "".join(call.arguments)
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        data = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named_event("content_block_delta", data)

    def _head(self) -> dict[str, Any]:
        name = self._model
        return {"id": self._response_id, "type": "message", "role": "assistant", "model": name}

    def _stop(self) -> dict[str, str | None]:
        """The reason of the end, and the stop sequence found, if any."""
        sequence = self.choices[0].stop_reason
        reason = self._finish_reason
        if reason == "stop" and isinstance(sequence, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        stop_reason = _STOP_REASONS.get(reason or "", "end_turn")
        if reason == "stop" and self._called:  # of the function that the request names
            stop_reason = "tool_use"
        if reason == "length" and self._cut_by_context:
            stop_reason = "model_context_window_exceeded"
        return {"stop_reason": stop_reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """The counts so far. Cached tokens are no part of ``input_tokens``; what a request adds to
        a cache is not known."""
        counts = self.usage()
        cached = counts.cached_tokens or 0
        return {
            "input_tokens": max(counts.prompt_tokens - cached, 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._reasoning_tokens},
        }


def _tool_use(call: ToolCallPart) -> dict[str, Any]:
    text = "".join(call.arguments)
    arguments = json_object(text or "{}")
    if arguments is None:  # cut by max_tokens; the member is the one that Anthropic names
        arguments = json_bytes({"INVALID_JSON": text})
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": orjson.Fragment(arguments),
    }
