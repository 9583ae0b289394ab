"""Server-sent events by splicing: what never changes in a stream is written once. Spec 5.4, 5.8.

A chunk is ``head + JSON string of the new text + tail``; only the first and the last of a choice
are put together from more parts.
"""

from __future__ import annotations

from typing import Any

import orjson

from dynamo.errors import DynamoError

__all__ = [
    "DONE",
    "KEEP_ALIVE",
    "ChatShape",
    "ChunkTemplate",
    "CompletionShape",
    "Shape",
    "annotation",
    "error_event",
    "json_bytes",
    "public_message",
]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

json_bytes = orjson.dumps
_NULL = b"null"
_ERROR_TYPES = {
    400: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
_VERBATIM_503 = frozenset(("overloaded", "no_instances", "unavailable"))


class ChunkTemplate:
    """The fields that all chunks, or the unary body, of one answer share.

    Both end where the array of choices begins.
    """

    __slots__ = ("_created", "_id", "_model", "_shape")

    def __init__(self, shape: type[Shape], response_id: str, created: int, model: str) -> None:
        self._shape = shape
        self._id = response_id
        self._created = created
        self._model = model

    def chunk(self) -> bytes:
        """The beginning of every chunk."""
        return b"data: " + self._open(self._shape.chunk_object)

    def body(self) -> bytes:
        """The beginning of the unary body."""
        return self._open(self._shape.body_object)

    def _open(self, kind: bytes) -> bytes:
        return b'{"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            json_bytes(self._id),
            kind,
            self._created,
            json_bytes(self._model),
        )


class Shape:
    """How the chunks of one choice look. ``head`` and ``tail`` enclose the text of most chunks.

    ``usage`` is ``,"usage":null`` where the client asked for a usage chunk, else empty.
    """

    chunk_object: bytes
    body_object: bytes
    __slots__ = ("_first", "_index", "_usage", "head", "tail")

    _text_open: bytes
    _text_close: bytes
    _first_open: bytes
    _empty_delta: bytes

    def __init__(self, envelope: ChunkTemplate, index: int, usage: bytes) -> None:
        self._index = envelope.chunk() + b'{"index":%d,' % index
        self._usage = usage
        self.head = self._index + self._text_open
        self.tail = self._text_close + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._first = True

    def delta(self, text: str) -> bytes:
        """A chunk in the middle of a choice: new text and nothing else."""
        return self.head + json_bytes(text) + self.tail

    def chunk(
        self,
        text: str,
        logprobs: bytes | None = None,
        finish_reason: str | None = None,
        nvext: dict[str, Any] | None = None,
    ) -> bytes:
        """Any chunk; the first of a choice names the role."""
        if self._first:
            self._first = False
            opening = self._first_open + json_bytes(text) + self._text_close
        elif text:
            opening = self._text_open + json_bytes(text) + self._text_close
        else:
            opening = self._empty_delta
        return b"".join(
            (
                self._index,
                opening,
                b',"logprobs":',
                logprobs or _NULL,
                b',"finish_reason":',
                _NULL if finish_reason is None else json_bytes(finish_reason),
                b"}]",
                self._usage,
                b"" if nvext is None else b',"nvext":' + json_bytes(nvext),
                b"}\n\n",
            )
        )

    @classmethod
    def whole(
        cls, index: int, text: str, logprobs: bytes | None, finish_reason: str | None
    ) -> bytes:
        """One element of ``choices`` in a unary body."""
        raise NotImplementedError


class ChatShape(Shape):
    """Chunks of /v1/chat/completions."""

    __slots__ = ()
    chunk_object = b'"chat.completion.chunk"'
    body_object = b'"chat.completion"'
    _text_open = b'"delta":{"content":'
    _text_close = b"}"
    _first_open = b'"delta":{"role":"assistant","content":'
    _empty_delta = b'"delta":{}'

    @classmethod
    def whole(
        cls, index: int, text: str, logprobs: bytes | None, finish_reason: str | None
    ) -> bytes:
        """One element of ``choices`` with its ``message``."""
        return (
            b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null},'
            b'"logprobs":%b,"finish_reason":%b}'
            % (index, json_bytes(text), logprobs or _NULL, json_bytes(finish_reason))
        )


class CompletionShape(Shape):
    """Chunks of /v1/completions."""

    __slots__ = ()
    chunk_object = body_object = b'"text_completion"'
    _text_open = _first_open = b'"text":'
    _text_close = b""
    _empty_delta = b'"text":""'

    @classmethod
    def whole(
        cls, index: int, text: str, logprobs: bytes | None, finish_reason: str | None
    ) -> bytes:
        """One element of ``choices`` with its ``text``."""
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            index,
            json_bytes(text),
            logprobs or _NULL,
            json_bytes(finish_reason),
        )


def annotation(name: str, value: str) -> bytes:
    """An annotation that the client asked for: a named event with a comment. Spec 5.6."""
    return b"event: %b\n: %b\n\n" % (name.encode(), json_bytes(value))


def error_event(error: DynamoError) -> bytes:
    """The error object in a stream that has begun; ``[DONE]`` follows separately. Spec 5.4."""
    kind = _ERROR_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if 400 <= error.status < 500 else "internal_server_error"
    body = {"message": public_message(error), "type": kind, "code": error.status}
    return b"data: " + json_bytes({"error": body}) + b"\n\n"


def public_message(error: DynamoError) -> str:
    """What a client may read: its own faults word for word, ours in general terms. Spec 5.4."""
    if error.status < 500 or (error.code in _VERBATIM_503 and error.message):
        return error.message
    return "Service temporarily unavailable" if error.status == 503 else "Internal server error"
