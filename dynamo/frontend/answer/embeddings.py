"""The answer to POST /v1/embeddings: the worker's vectors as one OpenAI body."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import orjson

from dynamo.errors import DynamoError, EngineFailure
from dynamo.frontend.answer.generation import Usage
from dynamo.protocols import codec
from dynamo.protocols.engine import EmbeddingsEngineOutput, EngineOutput

_FLOAT32 = 4
_PIECE = 1 << 15
"""Numbers of a piece of a body: 3 ms."""
_decode = codec.decoder(EmbeddingsEngineOutput).decode


class EmbeddingsAnswer:
    """The vectors of ``inputs`` inputs with ``prompt_tokens`` tokens; its own only choice."""

    __slots__ = (
        "_as_base64", "_inputs", "_model", "_output", "_prompt_tokens", "final_usage",
        "streams", "worker_id",
    )  # fmt: skip

    def __init__(self, model: str, inputs: int, prompt_tokens: int, as_base64: bool) -> None:
        self.streams = False
        self.final_usage: Usage | None = None
        self.worker_id: dict[str, Any] | None = None
        self._model = model
        self._inputs = inputs
        self._prompt_tokens = prompt_tokens
        self._as_base64 = as_base64
        self._output: EmbeddingsEngineOutput | None = None

    @property
    def begun(self) -> bool:
        """Whether the vectors are there."""
        return self._output is not None

    @property
    def choices(self) -> Sequence[EmbeddingsAnswer]:
        """Itself. Not an attribute: it would be a reference cycle."""
        return (self,)

    def receive(self, payload: bytes) -> None:
        """Add the worker's output. Raises EngineFailure: not one vector for each input."""
        try:
            output = _decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise EngineFailure(f"not an output of an embedding model: {error}") from None
        self._take(output)

    def _take(self, output: EmbeddingsEngineOutput) -> None:
        if self._output is not None or len(output.embeddings) != self._inputs:
            raise EngineFailure(
                f"expected one output with {self._inputs} embeddings, got {len(output.embeddings)}"
            )
        if any(
            isinstance(vector, bytes) and len(vector) % _FLOAT32 for vector in output.embeddings
        ):
            raise EngineFailure("an embedding is not made of 4-byte numbers")
        self._output = output

    def push(self, output: EngineOutput, /) -> bool:
        """Refuse an output in tokens: the model's card announces embeddings."""
        raise EngineFailure(f"expected embeddings, got {len(output.token_ids)} tokens")

    def close(self) -> None:
        """The worker has sent the last item."""

    def opening(self) -> bytes:
        """Return nothing: embeddings are not streamed."""
        return b""

    def flush(self) -> bytes:
        """Return nothing: embeddings are not streamed."""
        return b""

    def end(self) -> bytes:
        """Return the body."""
        return self.unary()

    def error(self, error: DynamoError, /) -> bytes:
        """Return nothing: an error has a status."""
        return b""

    @property
    def is_short(self) -> bool:
        """Whether the body takes a few milliseconds to make."""
        output = self._output
        assert output is not None, "a request without an output has failed"
        return sum(map(_size, output.embeddings)) <= 2 * _PIECE

    def unary(self) -> bytes:
        """Return the body. O(numbers)."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yield the body in pieces of some ``_PIECE`` numbers."""
        output = self._output
        assert output is not None, "a request without an output has failed"
        convert = _base64 if self._as_base64 else _numbers
        parts, numbers = [b'{"object":"list","data":['], 0
        for index, vector in enumerate(output.embeddings):
            text = orjson.dumps(convert(vector))
            comma = b"," if index else b""
            parts.append(b'%b{"object":"embedding","index":%d,"embedding":' % (comma, index))
            parts += (text, b"}")
            numbers += _size(vector)
            if numbers >= _PIECE:
                yield b"".join(parts)
                parts, numbers = [], 0
        count = self.usage().prompt_tokens
        usage = b'"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (count, count)
        parts += (b'],"model":', orjson.dumps(self._model), b",", usage)
        yield b"".join(parts)

    def usage(self) -> Usage:
        """Return the worker's count of tokens, else ours."""
        reported = 0 if self._output is None else self._output.prompt_tokens
        return Usage(reported or self._prompt_tokens, 0, None)


class _Vector(msgspec.Struct):
    """One element of the list in an OpenAI body: numbers, or base64 of their bytes."""

    embedding: list[float] | str


class _Usage(msgspec.Struct):
    """The counts of an OpenAI body."""

    prompt_tokens: int = 0
    total_tokens: int = 0


class _Body(msgspec.Struct):
    """An OpenAI body of embeddings."""

    data: list[_Vector]
    usage: _Usage | None = None


_decode_body = codec.decoder(_Body).decode


class BodyEmbeddingsAnswer(EmbeddingsAnswer):
    """The vectors of a worker that yields an OpenAI body, in the encoding of the request."""

    __slots__ = ()

    def __init__(self, model: str) -> None:
        super().__init__(model, 0, 0, False)

    def expect(self, inputs: int, as_base64: bool) -> None:
        """Set what the request asks for, once it is parsed."""
        self._inputs, self._as_base64 = inputs, as_base64

    def receive(self, payload: bytes) -> None:
        """Add the worker's body. Raises EngineFailure: not one vector for each input."""
        try:
            body = _decode_body(payload)
            vectors = [
                base64.b64decode(item.embedding, validate=True)
                if isinstance(item.embedding, str)
                else item.embedding
                for item in body.data
            ]
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise EngineFailure(f"not an OpenAI body of embeddings: {error}") from None
        usage = body.usage or _Usage()
        self._take(EmbeddingsEngineOutput(vectors, max(usage.prompt_tokens, 0)))


def _size(vector: list[float] | bytes) -> int:
    return len(vector) if isinstance(vector, list) else len(vector) // _FLOAT32


def _numbers(vector: list[float] | bytes) -> list[float]:
    if isinstance(vector, list):
        return vector
    numbers = array("f")
    numbers.frombytes(vector)
    return numbers.tolist()


def _base64(vector: list[float] | bytes) -> str:
    raw = array("f", vector).tobytes() if isinstance(vector, list) else vector
    return base64.b64encode(raw).decode()
