"""The request handler of a pooling model: an engine request for each input, one output.

Of inputs that are scored, the vectors of the first texts are kept until the others are compared
with them; only the scores are sent.
"""

from __future__ import annotations

import asyncio
import time
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
from dynamo.protocols.pooling import COMPARED, PoolingFacts
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.context import CancelKind
from dynamo.runtime.requests.stream import ServerStream
from dynamo.vllm.engine import Engine, EngineStep, OutputSink
from dynamo.vllm.service import VllmService

_decode = codec.decoder(PreprocessedEmbeddingRequest).decode
_DONE = ("stop", "length")
_EMBED = "embed"
_TOKEN_TASKS = ("token_embed", "token_classify")
_TURN_S = 0.005
_MAX_PRODUCTS = 1 << 22
"""Of late interaction: tokens of the one text times those of the other; 20 ms on the loop."""
_TYPES = "compressed_token_type_ids"
"""vLLM's name of where the tokens of the second text begin."""
_MIN_NORM = 1e-8
_FLOAT32 = 4
_MAX_KEPT_BYTES = 256 << 20
_MAX_BYTES = 24 << 20
"""Of all vectors of a response, which is one message of at most 32 MiB by default."""


class PoolingService(VllmService):
    """A push handler over one engine that pools; ``facts`` are those of its model."""

    def __init__(
        self, engine: Engine, admission: AdmissionQueue, tasks: Tasks, facts: PoolingFacts
    ) -> None:
        super().__init__(engine, admission, tasks)
        self._facts = facts

    def handle(self, stream: ServerStream, payload: bytes) -> None:
        """Answer one ``PreprocessedEmbeddingRequest``; an error ends the stream."""
        try:
            request = _decode(payload)
            self._check(request)
            self.admission.enter(stream, lambda: self._pool(stream, request))
        except msgspec.MsgspecError as error:
            stream.error(InvalidArgument(f"not a request for a pooling model: {error}"))
        except DynamoError as error:
            stream.error(error)

    def _pool(self, stream: ServerStream, request: PreprocessedEmbeddingRequest) -> None:
        response = _PoolingResponse(stream, self.engine, request, self._facts, self._released)
        # Before start(): a refused input ends the response there, and _end() takes this back.
        stream.context.on_cancel(response.cancel)
        response.start()

    def _check(self, request: PreprocessedEmbeddingRequest) -> None:
        """Refuse what the model does not compute, and counts that do not fit. InvalidArgument."""
        task, facts = request.task or _EMBED, self._facts
        if task != facts.task:
            raise InvalidArgument(f"the model computes {facts.task!r}, not {task!r}")
        queries, inputs = request.queries, len(request.token_ids)
        if queries and facts.scoring not in COMPARED.values():
            raise InvalidArgument("the model compares no vectors: 'queries' must be 0")
        if queries < 0 or (queries and inputs - queries not in (queries, inputs - 1)):
            raise InvalidArgument(f"{queries} queries do not fit {inputs} inputs")
        if request.type_one_at is not None and len(request.type_one_at) != inputs:
            raise InvalidArgument("'type_one_at' must have one number for each input")

    def _released(self) -> None:
        self.admission.release()


class _PoolingResponse:
    """Collects the vectors of the inputs of ``request``; sends them when all are there."""

    def __init__(
        self,
        stream: ServerStream,
        engine: Engine,
        request: PreprocessedEmbeddingRequest,
        facts: PoolingFacts,
        on_done: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._engine = engine
        self._request = request
        self._task = facts.task
        self._on_done = on_done
        count = len(request.token_ids)
        compare = _cosine if facts.task == _EMBED else _max_similarity
        self._scores = _Scores(request.queries, compare) if request.queries else None
        self._vectors: list[list[float] | bytes] = [b""] * (count - request.queries)
        has_rows = facts.task in _TOKEN_TASKS and not request.queries
        self._row_sizes = [0] * count if has_rows else []
        self._running: dict[int, str | None] = {}
        self._missing = count
        self._size_bytes = 0
        self._tokens = sum(map(len, request.token_ids))
        self._ended = False

    def start(self, begin: int = 0) -> None:
        """Submit the inputs from number ``begin`` on, some milliseconds of them in a turn of the
        loop: two thousand take 0.2 s. O(tokens)."""
        request, rank = self._request, None
        if request.routing is not None and self._engine.info.data_parallel_size > 1:
            rank = request.routing.dp_rank
        if not request.token_ids:
            self.fail(InvalidArgument("'token_ids' has no inputs"))
        until_s = time.monotonic() + _TURN_S
        for index in range(begin, len(request.token_ids)):
            if self._ended:
                return
            if index > begin and time.monotonic() > until_s:
                asyncio.get_running_loop().call_soon(self.start, index)
                return
            single = PreprocessedRequest(
                request.model,
                request.token_ids[index],
                routing=request.routing,
                extra_args=self._options(index),
            )
            try:
                self._running[index] = self._engine.submit(single, _Input(self, index), rank)
            except DynamoError as error:
                self.fail(error)

    def add(self, index: int, tensor: Any) -> None:
        """Add the vector of an input; the last one ends the response."""
        self._running.pop(index, None)
        self._missing -= 1
        if self._ended:
            return
        if self._scores is not None:
            try:
                for pair, score in self._scores.add(index, tensor):
                    self._vectors[pair] = score
            except DynamoError as error:
                self.fail(error)
                return
        else:
            vector = self._vectors[index] = _float32(tensor)
            self._size_bytes += len(vector)
            if self._row_sizes:
                self._row_sizes[index] = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        if self._size_bytes > _MAX_BYTES:
            self.fail(
                InvalidArgument(
                    f"the vectors of the inputs have more than {_MAX_BYTES >> 20} MiB; send fewer "
                    "or shorter inputs in a request"
                )
            )
        elif not self._missing:
            counts = self._tokens, self._tokens
            output = EmbeddingsEngineOutput(self._vectors, *counts, self._row_sizes)
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

    def _options(self, index: int) -> dict[str, Any]:
        """The fields of vLLM's parameters for an input."""
        request = self._request
        options: dict[str, Any] = {"task": self._task}
        if request.dimensions is not None:
            options["dimensions"] = request.dimensions
        if request.use_activation is not None:
            options["use_activation"] = request.use_activation
        if request.type_one_at is not None:
            options["extra_kwargs"] = {_TYPES: request.type_one_at[index]}
        return options

    def _end(self) -> None:
        self._ended = True
        self._stream.context.off_cancel(self.cancel)
        for number in self._running.values():
            if number is not None:
                self._engine.abort(number)
        self._running.clear()
        self._on_done()


class _Scores:
    """Compares vectors as they arrive: the first ``queries`` with the others, one with all of them
    or each with one. A vector is kept until it has been compared, at most 256 MiB of them."""

    def __init__(self, queries: int, compare: Callable[[Any, Any], bytes]) -> None:
        self._queries = queries
        self._compare = compare
        self._kept: dict[int, Any] = {}
        self._kept_bytes = 0

    def add(self, index: int, tensor: Any) -> list[tuple[int, bytes]]:
        """Return the pairs that are complete now: their numbers and scores. InvalidArgument."""
        queries = self._queries
        if queries == 1:
            return self._with_one(index, tensor)
        pair = index % queries
        other = index - queries if index >= queries else index + queries
        if other not in self._kept:
            self._keep(index, tensor)
            return []
        other_tensor = self._pop(other)
        texts = (tensor, other_tensor) if index < queries else (other_tensor, tensor)
        return [(pair, self._compare(*texts))]

    def _with_one(self, index: int, tensor: Any) -> list[tuple[int, bytes]]:
        """As :meth:`add` where the first text, number 0, is compared with all others."""
        if index == 0:
            waiting = list(self._kept)
            self._keep(0, tensor)
            return [(number - 1, self._compare(tensor, self._pop(number))) for number in waiting]
        if 0 not in self._kept:
            self._keep(index, tensor)
            return []
        return [(index - 1, self._compare(self._kept[0], tensor))]

    def _keep(self, index: int, tensor: Any) -> None:
        self._kept[index] = tensor
        self._kept_bytes += tensor.numel() * _FLOAT32
        if self._kept_bytes > _MAX_KEPT_BYTES:
            raise InvalidArgument(
                f"the vectors that wait to be compared have more than {_MAX_KEPT_BYTES >> 20} MiB; "
                "send fewer or shorter texts in a request"
            )

    def _pop(self, index: int) -> Any:
        tensor = self._kept.pop(index)
        self._kept_bytes -= tensor.numel() * _FLOAT32
        return tensor


class _Input(OutputSink):
    """One input of a response."""

    def __init__(self, response: _PoolingResponse, index: int) -> None:
        self._response = response
        self._index = index

    def on_output(self, output: EngineStep) -> None:
        """Add the vector; a prompt in several chunks has outputs without one before it."""
        if output.finish_reason is None:
            return
        if str(output.finish_reason) in _DONE and output.pooling_output is not None:
            self._response.add(self._index, output.pooling_output)
        else:
            self._response.fail(EngineFailure("the engine failed to compute an input"))

    def on_rejected(self, error: DynamoError) -> None:
        """End the response: the engine did not accept the input."""
        self._response.fail(error)


def _float32(tensor: Any) -> bytes:
    # NumPy has no bfloat16, the type of most models.
    return bytes(tensor.float().contiguous().numpy().tobytes())


def _cosine(first: Any, second: Any) -> bytes:
    """The cosine similarity of two vectors; 20 µs. The least length is vLLM's, for zeros."""
    first, second = first.float(), second.float()
    lengths = first.norm().clamp(min=_MIN_NORM) * second.norm().clamp(min=_MIN_NORM)
    return _float32(first.dot(second) / lengths)


def _max_similarity(first: Any, second: Any) -> bytes:
    """The sum over the first text's tokens of their best product with a token of the second.

    Raises InvalidArgument for texts whose products would hold the loop too long.
    """
    if first.shape[0] * second.shape[0] > _MAX_PRODUCTS:
        raise InvalidArgument(
            f"texts of {first.shape[0]} and {second.shape[0]} tokens are not scored: their product "
            f"must be at most {_MAX_PRODUCTS}; cut them by 'truncate_prompt_tokens'"
        )
    return _float32((first.float() @ second.float().T).amax(dim=-1).sum())
