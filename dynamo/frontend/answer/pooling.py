"""The answers of pooling models: a worker's vectors as the body of each API.

A score and the probabilities of classes are vectors of a few numbers. A body is made in pieces of
some milliseconds each.
"""

from __future__ import annotations

import base64
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import orjson

from dynamo.errors import DynamoError, EngineFailure
from dynamo.frontend.answer.generation import Usage
from dynamo.protocols import codec
from dynamo.protocols.engine import EmbeddingsEngineOutput, EngineOutput

_FLOAT32 = 4
_PIECE = 1 << 15
"""Numbers of a piece of a body: 3 ms."""
_CHARACTERS_PER_NUMBER = 32
"""Characters of a document that take as long as a number."""
_BASE64_BYTES = 3 << 16
"""Of a long vector that are encoded at once; a multiple of 3 needs no padding in between."""
_decode = codec.decoder(EmbeddingsEngineOutput).decode


class PoolingOrigin(NamedTuple):
    """The parts of a request that its answer needs."""

    model: str
    #: The number of vectors that the worker has to return.
    vectors: int
    prompt_tokens: int
    #: In the body as it is: an internal id needs no escaping.
    request_id: str = ""


class PoolingAnswer(ABC):
    """The vectors of one request; its own only choice."""

    __slots__ = ("_origin", "_output", "final_usage", "streams", "worker_id")

    def __init__(self, origin: PoolingOrigin) -> None:
        self.streams = False
        self.final_usage: Usage | None = None
        self.worker_id: dict[str, Any] | None = None
        self._origin = origin
        self._output: EmbeddingsEngineOutput | None = None

    @property
    def begun(self) -> bool:
        """Whether the vectors are there."""
        return self._output is not None

    @property
    def choices(self) -> Sequence[PoolingAnswer]:
        """Itself. Not an attribute: it would be a reference cycle."""
        return (self,)

    def receive(self, payload: bytes) -> None:
        """Add the worker's output. Raises EngineFailure: not one vector for each input."""
        try:
            output = _decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise EngineFailure(f"not an output of a pooling model: {error}") from None
        self._take(output)

    def _take(self, output: EmbeddingsEngineOutput) -> None:
        vectors, expected = output.embeddings, self._origin.vectors
        if self._output is not None or len(vectors) != expected:
            raise EngineFailure(f"expected one output with {expected} vectors, got {len(vectors)}")
        if any(isinstance(vector, bytes) and len(vector) % _FLOAT32 for vector in vectors):
            raise EngineFailure("a vector is not made of 4-byte numbers")
        if output.row_sizes and not (
            len(output.row_sizes) == expected
            and all(
                size > 0 and _size(vector) % size == 0
                for size, vector in zip(output.row_sizes, vectors, strict=True)
            )
        ):
            raise EngineFailure("the sizes of rows do not fit the vectors")
        self._output = output

    def push(self, output: EngineOutput, /) -> bool:
        """Refuse an output in tokens: the model's card announces vectors."""
        raise EngineFailure(f"expected vectors, got {len(output.token_ids)} tokens")

    def close(self) -> None:  # noqa: B027 - there is nothing to do
        """The worker has sent the last item."""

    def opening(self) -> bytes:
        """Return nothing: vectors are not streamed."""
        return b""

    def flush(self) -> bytes:
        """Return nothing: vectors are not streamed."""
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
        return sum(map(self._cost, range(len(self._vectors)))) <= 2 * _PIECE

    def unary(self) -> bytes:
        """Return the body. O(numbers)."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yield the body in pieces of some ``_PIECE`` numbers."""
        parts, numbers = [self._opening()], 0
        for position, index in enumerate(self._order()):
            if position:
                parts.append(b",")
            for text, cost in self._row(index):
                parts.append(text)
                numbers += cost
                if numbers >= _PIECE:
                    yield b"".join(parts)
                    parts, numbers = [], 0
        parts.append(self._closing())
        yield b"".join(parts)

    def usage(self) -> Usage:
        """Return the worker's count of tokens, else ours."""
        reported = 0 if self._output is None else self._output.prompt_tokens
        return Usage(reported or self._origin.prompt_tokens, 0, None)

    @property
    def _vectors(self) -> list[list[float] | bytes]:
        assert self._output is not None, "a request without an output has failed"
        return self._output.embeddings

    def _cost(self, index: int) -> int:
        """The time to write a row, in numbers that take as long."""
        return _size(self._vectors[index])

    def _order(self) -> Sequence[int]:
        """The rows of the body by their input."""
        return range(len(self._vectors))

    def _opening(self) -> bytes:
        """What precedes the rows."""
        head = f'{self._origin.request_id}","object":"list","created":{int(time.time())}'
        return f'{{"id":"{head},"data":['.encode()

    def _closing(self) -> bytes:
        """What follows the rows."""
        count = self.usage().prompt_tokens
        usage = b'"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (count, count)
        return b"".join((b'],"model":', orjson.dumps(self._origin.model), b",", usage))

    @abstractmethod
    def _row(self, index: int) -> Iterator[tuple[bytes, int]]:
        """Yield the parts of a row and the cost of each."""


class EmbeddingsAnswer(PoolingAnswer):
    """The body of /v1/embeddings."""

    __slots__ = ("_as_base64",)

    def __init__(self, origin: PoolingOrigin, as_base64: bool) -> None:
        super().__init__(origin)
        self._as_base64 = as_base64

    def _opening(self) -> bytes:
        return b'{"object":"list","data":['

    def _row(self, index: int) -> Iterator[tuple[bytes, int]]:
        vector = self._vectors[index]
        text = orjson.dumps((_base64 if self._as_base64 else _numbers)(vector))
        head = b'{"object":"embedding","index":%d,"embedding":' % index
        yield b"".join((head, text, b"}")), _size(vector)


class VectorsAnswer(PoolingAnswer):
    """The body of /pooling: a vector for each input, or one for each of its tokens."""

    __slots__ = ("_as_base64",)

    def __init__(self, origin: PoolingOrigin, as_base64: bool) -> None:
        super().__init__(origin)
        self._as_base64 = as_base64

    def _row(self, index: int) -> Iterator[tuple[bytes, int]]:
        vector = self._vectors[index]
        yield b'{"index":%d,"object":"pooling","data":' % index, 1
        if self._as_base64:
            yield from _base64_parts(vector)
        else:
            assert self._output is not None, "a request without an output has failed"
            sizes = self._output.row_sizes
            yield from (
                _matrix_parts(vector, sizes[index])
                if sizes
                else ((orjson.dumps(_numbers(vector)), _size(vector)),)
            )
        yield b"}", 0


class ClassifyAnswer(PoolingAnswer):
    """The body of /classify: the probabilities of the classes, and the name of the likeliest."""

    __slots__ = ("_labels",)

    def __init__(self, origin: PoolingOrigin, labels: Sequence[str]) -> None:
        super().__init__(origin)
        self._labels = labels

    def _row(self, index: int) -> Iterator[tuple[bytes, int]]:
        numbers, labels = _numbers(self._vectors[index]), self._labels
        best = max(range(len(numbers)), key=numbers.__getitem__, default=0)
        label = labels[best] if best < len(labels) else None
        row = {"index": index, "label": label, "probs": numbers, "num_classes": len(numbers)}
        yield orjson.dumps(row), len(numbers)


class ScoreAnswer(PoolingAnswer):
    """The body of /v1/score."""

    __slots__ = ()

    def _take(self, output: EmbeddingsEngineOutput) -> None:
        if any(_size(vector) != 1 for vector in output.embeddings):
            raise EngineFailure("expected one score for each pair of texts")
        super()._take(output)

    def _score(self, index: int) -> float:
        return _numbers(self._vectors[index])[0]

    def _row(self, index: int) -> Iterator[tuple[bytes, int]]:
        yield orjson.dumps({"index": index, "object": "score", "score": self._score(index)}), 1


class RerankAnswer(ScoreAnswer):
    """The body of /v1/rerank: the best ``top_n`` documents, the best first."""

    __slots__ = ("_documents", "_ranked", "_top_n")

    def __init__(self, origin: PoolingOrigin, documents: Sequence[str] | None, top_n: int) -> None:
        """``documents`` are returned with their scores, unless they are None."""
        super().__init__(origin)
        self._documents = documents
        self._top_n = top_n
        self._ranked: Sequence[int] = ()

    def _take(self, output: EmbeddingsEngineOutput) -> None:
        super()._take(output)
        scores = [self._score(index) for index in range(len(self._vectors))]
        # Equal scores stay in the order of the documents.
        ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        self._ranked = ranked[: self._top_n] if self._top_n else ranked

    def _order(self) -> Sequence[int]:
        return self._ranked

    def _cost(self, index: int) -> int:
        size = 0 if self._documents is None else len(self._documents[index])
        return 1 + size // _CHARACTERS_PER_NUMBER

    def _opening(self) -> bytes:
        return f'{{"id":"{self._origin.request_id}","results":['.encode()

    def _row(self, index: int) -> Iterator[tuple[bytes, int]]:
        row: dict[str, Any] = {"index": index, "relevance_score": self._score(index)}
        if self._documents is not None:
            row["document"] = {"text": self._documents[index]}
        yield orjson.dumps(row), self._cost(index)


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
        super().__init__(PoolingOrigin(model, 0, 0), False)

    def expect(self, inputs: int, as_base64: bool) -> None:
        """Set what the request asks for, once it is parsed."""
        self._origin, self._as_base64 = self._origin._replace(vectors=inputs), as_base64

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


def _raw(vector: list[float] | bytes) -> bytes:
    return array("f", vector).tobytes() if isinstance(vector, list) else vector


def _base64(vector: list[float] | bytes) -> str:
    return base64.b64encode(_raw(vector)).decode()


def _base64_parts(vector: list[float] | bytes) -> Iterator[tuple[bytes, int]]:
    raw = memoryview(_raw(vector))
    yield b'"', 0
    for begin in range(0, len(raw), _BASE64_BYTES):
        part = raw[begin : begin + _BASE64_BYTES]
        yield base64.b64encode(part), len(part) // _FLOAT32
    yield b'"', 0


def _matrix_parts(vector: list[float] | bytes, row_size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the rows of a matrix, several at a time."""
    numbers = array("f", vector) if isinstance(vector, list) else array("f")
    if isinstance(vector, bytes):
        numbers.frombytes(vector)
    step = row_size * max(1, _PIECE // row_size)
    yield b"[", 0
    for begin in range(0, len(numbers), step):
        part = numbers[begin : begin + step].tolist()
        rows = [part[at : at + row_size] for at in range(0, len(part), row_size)]
        # Without the brackets of this part's list: it is one list for the client.
        yield (b"," if begin else b"") + orjson.dumps(rows)[1:-1], len(part)
    yield b"]", 0
