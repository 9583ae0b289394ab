"""Server-sent events of a stream, spliced from parts that are serialised once.

Most chunks differ in their text alone: they are ``head + JSON string of the text + tail``, which is
four times faster than serialising an object. Only the first and the last chunk of a choice have
more parts.
"""

from __future__ import annotations

from typing import Any

import orjson

from dynamo.errors import DynamoError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

json_bytes = orjson.dumps
_NULL = b"null"
_ERROR_TYPES = {429: "rate_limit_error", 503: "service_unavailable"}
# Their texts are made for clients; those of other faults may name what is inside.
_VERBATIM = frozenset(
    ("overloaded", "no_instances", "unavailable", "migration_exhausted", "workers_lost")
)


def stream_head(kind: str, response_id: str, created: int, model: str) -> bytes:
    """What all chunks of a stream begin with, up to the array of choices.

    ``kind`` is the ``object`` field, ``created`` seconds since the epoch.
    """
    fields = {"id": response_id, "object": kind, "created": created, "model": model}
    return b"data: " + json_bytes(fields)[:-1] + b',"choices":['


class ChoiceChunks:
    """The chunks of one choice. ``head`` and ``tail`` enclose the text of most of them.

    ``usage`` is ``,"usage":null`` where the client asked for a usage chunk, else empty. ``started``
    is set by the first chunk, ``finished`` by the caller.
    """

    __slots__ = ("_index", "_usage", "finished", "head", "started", "tail")

    kind: str
    _text_open: bytes
    _text_close: bytes
    _first_open: bytes
    _empty_delta: bytes

    def __init__(self, stream_head: bytes, index: int, usage: bytes) -> None:
        self._index = stream_head + b'{"index":%d,' % index
        self.head = self._index + self._text_open
        self.set_usage(usage)
        self.started = False
        self.finished = False

    def set_usage(self, usage: bytes) -> None:
        """Set the member ``usage`` of the next chunks, with the comma before it."""
        self._usage = usage
        self.tail = self._text_close + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def chunk(
        self,
        text: str,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        members: bytes = b"",
        body: bytes = b"",
    ) -> bytes:
        """Any chunk; the first of a choice names the role.

        ``members`` are more of the choice, ``body`` of the chunk, each with a comma before it.
        """
        if not self.started:
            self.started = True
            opening = self._first_open + json_bytes(text) + self._text_close
        elif text:
            opening = self._text_open + json_bytes(text) + self._text_close
        else:
            opening = self._empty_delta
        return self._assemble(opening, logprobs, finish_reason, members, body)

    def _assemble(
        self,
        opening: bytes,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        members: bytes,
        body: bytes,
    ) -> bytes:
        return b"".join(
            (
                self._index,
                opening,
                b',"logprobs":',
                _NULL if logprobs is None else json_bytes(logprobs),
                b',"finish_reason":',
                _NULL if finish_reason is None else json_bytes(finish_reason),
                members,
                b"}]",
                self._usage,
                body,
                b"}\n\n",
            )
        )


class ChatChunks(ChoiceChunks):
    """Chunks of /v1/chat/completions."""

    __slots__ = ()
    kind = "chat.completion.chunk"
    _text_open = b'"delta":{"content":'
    _text_close = b"}"
    _first_open = b'"delta":{"role":"assistant","content":'
    _empty_delta = b'"delta":{}'


class MessageChunks(ChatChunks):
    """Chunks of /v1/chat/completions with reasoning and tool calls.

    ``reasoning_head`` is as ``head``, for a chunk that has reasoning alone.
    """

    __slots__ = ("reasoning_head",)

    def __init__(self, stream_head: bytes, index: int, usage: bytes) -> None:
        super().__init__(stream_head, index, usage)
        self.name_reasoning("reasoning_content")

    def name_reasoning(self, field: str) -> None:
        """Send reasoning in ``field``."""
        self.reasoning_head = self._index + b'"delta":{"%b":' % field.encode()

    def arguments_chunk(self, call: int, arguments: str) -> bytes:
        """A chunk with nothing but more arguments of tool call number ``call``."""
        opening = b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":' % call
        return b"".join((self._index, opening, json_bytes(arguments), b"}}]", self.tail))

    def message_chunk(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        members: bytes = b"",
        body: bytes = b"",
    ) -> bytes:
        """As :meth:`chunk`, for any ``delta``."""
        if not self.started:
            self.started = True
            # As in OpenAI's first chunk, content is null beside other members, and else a text.
            delta = {"role": "assistant", "content": None if delta else "", **delta}
        opening = b'"delta":' + json_bytes(delta)
        return self._assemble(opening, logprobs, finish_reason, members, body)


class CompletionChunks(ChoiceChunks):
    """Chunks of /v1/completions."""

    __slots__ = ()
    kind = "text_completion"
    _text_open = _first_open = b'"text":'
    _text_close = b""
    _empty_delta = b'"text":""'


def annotation(name: str, value: str) -> bytes:
    """An annotation that the client asked for: a named event with a comment."""
    return b"event: %b\n: %b\n\n" % (name.encode(), json_bytes(value))


def error_event(error: DynamoError) -> bytes:
    """The error object in a stream that has begun; ``[DONE]`` follows separately."""
    default = "invalid_request_error" if 400 <= error.status < 500 else "internal_server_error"
    kind = _ERROR_TYPES.get(error.status, default)
    body = {"message": public_message(error), "type": kind, "param": None, "code": error.status}
    return b"data: " + json_bytes({"error": body}) + b"\n\n"


def public_message(error: DynamoError) -> str:
    """The text for the client: its own faults word for word, ours in general terms."""
    if error.status < 500 or (error.code in _VERBATIM and error.message):
        return error.message
    return "Service temporarily unavailable" if error.status == 503 else "Internal server error"
