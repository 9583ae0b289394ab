"""The answer of a worker that yields OpenAI chunks (``Text`` models): as a stream, or as one body.

Deltas of a choice are joined: texts and lists of log probabilities are appended, tool calls are
merged by their index, and the last value of everything else counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from dynamo.errors import DynamoError, EngineFailure
from dynamo.frontend.answer.generation import Usage
from dynamo.frontend.answer.sse import DONE, error_event
from dynamo.frontend.apis.relay.http_answer import usage_of
from dynamo.protocols import codec
from dynamo.protocols.engine import EngineOutput

_BODY_OBJECTS = {"chat.completion.chunk": "chat.completion"}


class ChunkFold:
    """Add each chunk, then take :meth:`body`. An item without ``choices`` replaces the body."""

    __slots__ = ("_body", "_choices")

    def __init__(self) -> None:
        self._body: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        """Join a chunk to those before it. O(its size)."""
        choices = chunk.get("choices")
        body = self._body
        for name, value in chunk.items():
            # The first chunk gives id, created and model; a later one may give what it lacks.
            newer = name == "usage" and value is not None
            if newer or (name != "choices" and body.get(name) is None):
                body[name] = value
        if not isinstance(choices, list):
            return
        for choice in choices:
            if isinstance(choice, dict):
                index = choice.get("index", 0)
                joined = self._choices.setdefault(index, {"index": index})
                _join_choice(joined, choice)

    def body(self) -> dict[str, Any]:
        """The whole response."""
        body = dict(self._body)
        kind = body.get("object")
        if isinstance(kind, str):
            body["object"] = _BODY_OBJECTS.get(kind, kind)
        if self._choices:
            body["choices"] = [self._choices[index] for index in sorted(self._choices)]
        return body


def _join_choice(joined: dict[str, Any], choice: dict[str, Any]) -> None:
    for name, value in choice.items():
        if name == "delta" and isinstance(value, dict):
            message = joined.setdefault("message", {"role": "assistant", "content": None})
            _join_delta(message, value)
        elif name == "text" and isinstance(value, str):
            joined["text"] = joined.get("text", "") + value
        elif name == "logprobs":
            joined["logprobs"] = _join_logprobs(joined.get("logprobs"), value)
        elif value is not None or name not in joined:
            joined[name] = value


def _join_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if value is None:
            continue
        if name == "tool_calls" and isinstance(value, list):
            _join_tool_calls(message.setdefault("tool_calls", []), value)
        elif name != "role" and isinstance(value, str):
            message[name] = (message.get(name) or "") + value
        else:
            message[name] = value


def _join_tool_calls(joined: list[dict[str, Any]], calls: list[Any]) -> None:
    """Join the parts of calls; ``index`` is the place of a call, and only chunks have it."""
    for call in calls:
        if not isinstance(call, dict):
            continue
        # A gap would need empty calls in between: an index behind the end appends.
        index = call.get("index", len(joined))
        if not isinstance(index, int) or not 0 <= index <= len(joined):
            index = len(joined)
        if index == len(joined):
            joined.append({"function": {"name": "", "arguments": ""}})
        target = joined[index]
        for name, value in call.items():
            if name == "function" and isinstance(value, dict):
                _join_function(target["function"], value)
            elif name != "index" and value is not None:
                target[name] = value


def _join_function(function: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name == "arguments" and isinstance(value, str):
            function["arguments"] += value
        elif value is not None:
            function[name] = value


def _join_logprobs(joined: Any, part: Any) -> Any:
    if not isinstance(joined, dict) or not isinstance(part, dict):
        return joined if part is None else part
    for name, value in part.items():
        if isinstance(value, list) and isinstance(joined.get(name), list):
            joined[name] = joined[name] + value
        elif value is not None:
            joined[name] = value
    return joined


class TextAnswer:
    """Server-sent events of the chunks if it ``streams``, else one body joined from them.

    Its own choice: the worker numbers the choices in its chunks.
    """

    __slots__ = (
        "_fold",
        "_parts",
        "_tokens",
        "_usage",
        "begun",
        "final_usage",
        "streams",
        "worker_id",
    )

    def __init__(self, streams: bool) -> None:
        self.streams = streams
        self.begun = False
        self.final_usage: Usage | None = None
        self.worker_id: dict[str, Any] | None = None
        self._fold = ChunkFold()
        self._parts: list[bytes] = []
        self._tokens = 0
        self._usage: Usage | None = None

    @property
    def choices(self) -> Sequence[TextAnswer]:
        """Itself. Not an attribute: it would be a reference cycle."""
        return (self,)

    def receive(self, payload: bytes) -> int:
        """Add a chunk; return 1 if it has a choice, which is taken for a token, else 0.

        Raises EngineFailure for an item that is not a JSON object.
        """
        self.begun = True
        chunk = _decode(payload)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage = usage_of(usage)
        if self.streams:
            self._parts.append(b"data: %b\n\n" % _json(chunk))
        else:
            self._fold.add(chunk)
        count = 1 if chunk.get("choices") else 0
        self._tokens += count
        return count

    def push(self, output: EngineOutput, /) -> bool:
        """Refuse an output in tokens: the model's card announces chunks."""
        raise EngineFailure(f"expected an OpenAI chunk, got {output!r}")

    def close(self) -> None:
        """The last chunk has arrived. Raises EngineFailure for values that JSON does not have."""
        if not self.streams:
            self._parts.append(_json(self._fold.body()))

    def opening(self) -> bytes:
        """Nothing precedes the chunks."""
        return b""

    def flush(self) -> bytes:
        """The events of the chunks since the last time."""
        events = b"".join(self._parts)
        self._parts.clear()
        return events

    def end(self) -> bytes:
        """The events that are left, and ``[DONE]``."""
        return self.flush() + DONE

    def error(self, error: DynamoError, /) -> bytes:
        """The events that are left, the error object, ``[DONE]``."""
        return self.flush() + error_event(error) + DONE

    def unary(self) -> bytes:
        """All chunks as one body, after :meth:`close`."""
        return b"".join(self._parts)

    def usage(self) -> Usage:
        """What the worker reported, else the chunks as output tokens."""
        if self.final_usage is None:
            self.final_usage = self._usage or Usage(0, self._tokens, None)
        return self.final_usage


def _decode(payload: bytes) -> dict[str, Any]:
    try:
        chunk = codec.plain_decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise EngineFailure(f"not MessagePack: {error}") from None
    if not isinstance(chunk, dict):
        kind = type(chunk).__name__
        raise EngineFailure(f"the worker of a Text model yields OpenAI chunks (dict), got {kind}")
    return chunk


def _json(value: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise EngineFailure(f"a chunk has a value that JSON does not have: {error}") from None
