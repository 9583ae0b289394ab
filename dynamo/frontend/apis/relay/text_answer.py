"""The answer of a worker that takes the OpenAI body and yields OpenAI chunks (``Text`` models)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from dynamo.errors import DynamoError, EngineFailure
from dynamo.frontend.answer.chunk_fold import ChunkFold
from dynamo.frontend.answer.generation import Usage
from dynamo.frontend.answer.relayed_usage import usage_of
from dynamo.frontend.answer.sse import DONE, error_event
from dynamo.protocols import codec
from dynamo.protocols.engine import EngineOutput

__all__ = ["TextAnswer"]


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
