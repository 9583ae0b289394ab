"""The request handler of an embedding model: an engine request for each input, one output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dynamo.errors import DynamoError, EngineFailure, InvalidArgument
from dynamo.protocols import codec
from dynamo.protocols.engine import (
    EmbeddingsEngineOutput,
    PreprocessedEmbeddingRequest,
    PreprocessedRequest,
)
from dynamo.runtime.requests.context import CancelKind
from dynamo.runtime.requests.stream import ServerStream
from dynamo.vllm.engine import Engine, EngineStep, OutputSink
from dynamo.vllm.service import VllmService

_decode = codec.decoder(PreprocessedEmbeddingRequest).decode
_DONE = ("stop", "length")


class EmbeddingService(VllmService):
    """A push handler over one engine that pools."""

    def handle(self, stream: ServerStream, payload: bytes) -> None:
        """Answer one ``PreprocessedEmbeddingRequest``; an error ends the stream."""
        try:
            request = _decode(payload)
            self.admission.enter(stream, lambda: self._embed(stream, request))
        except msgspec.MsgspecError as error:
            stream.error(InvalidArgument(f"not a request for embeddings: {error}"))
        except DynamoError as error:
            stream.error(error)

    def _embed(self, stream: ServerStream, request: PreprocessedEmbeddingRequest) -> None:
        response = _EmbeddingResponse(stream, self.engine, len(request.token_ids), self._released)
        # Before start(): a refused input ends the response there, and _end() takes this back.
        stream.context.on_cancel(response.cancel)
        response.start(request)

    def _released(self) -> None:
        self.admission.release()


class _EmbeddingResponse:
    """Collects the vectors of ``count`` inputs; sends them when all are there."""

    def __init__(
        self, stream: ServerStream, engine: Engine, count: int, on_done: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._engine = engine
        self._on_done = on_done
        self._vectors: list[list[float] | bytes] = [b""] * count
        self._running: dict[int, str | None] = {}
        self._missing = count
        self._tokens = 0
        self._ended = False

    def start(self, request: PreprocessedEmbeddingRequest) -> None:
        """Submit the inputs. O(tokens)."""
        options = None if request.dimensions is None else {"dimensions": request.dimensions}
        self._tokens = sum(map(len, request.token_ids))
        rank = None
        if request.routing is not None and self._engine.info.data_parallel_size > 1:
            rank = request.routing.dp_rank
        if not request.token_ids:
            self.fail(InvalidArgument("'token_ids' has no inputs"))
        for index, ids in enumerate(request.token_ids):
            if self._ended:
                return
            single = PreprocessedRequest(
                request.model, ids, routing=request.routing, extra_args=options
            )
            try:
                self._running[index] = self._engine.submit(single, _Input(self, index), rank)
            except DynamoError as error:
                self.fail(error)

    def add(self, index: int, vector: bytes) -> None:
        """Add the vector of an input; the last one ends the response."""
        self._running.pop(index, None)
        self._vectors[index] = vector
        self._missing -= 1
        if self._missing or self._ended:
            return
        output = EmbeddingsEngineOutput(self._vectors, self._tokens, self._tokens)
        self._stream.send(codec.encode(output))
        self._end()
        self._stream.end()

    def fail(self, error: DynamoError) -> None:
        """End the response with ``error``; the other inputs are not computed."""
        if not self._ended:
            self._end()
            self._stream.error(error)

    def cancel(self, kind: CancelKind) -> None:
        """Stop the inputs that are computed: the client is gone."""
        if not self._ended:
            self._end()
            self._stream.end()

    def _end(self) -> None:
        self._ended = True
        self._stream.context.off_cancel(self.cancel)
        for number in self._running.values():
            if number is not None:
                self._engine.abort(number)
        self._running.clear()
        self._on_done()


class _Input(OutputSink):
    """One input of a response."""

    def __init__(self, response: _EmbeddingResponse, index: int) -> None:
        self._response = response
        self._index = index

    def on_output(self, output: EngineStep) -> None:
        """Add the vector; a prompt in several chunks has outputs without one before it."""
        if output.finish_reason is None:
            return
        if str(output.finish_reason) in _DONE and output.pooling_output is not None:
            self._response.add(self._index, _float32(output.pooling_output))
        else:
            self._response.fail(EngineFailure("the engine failed to compute an embedding"))

    def on_rejected(self, error: DynamoError) -> None:
        """End the response: the engine did not accept the input."""
        self._response.fail(error)


def _float32(tensor: Any) -> bytes:
    # NumPy has no bfloat16, the type of most models.
    return bytes(tensor.float().contiguous().numpy().tobytes())
