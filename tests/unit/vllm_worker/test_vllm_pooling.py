"""The service of a pooling model over a scripted engine and a real socket."""

from __future__ import annotations

import asyncio
import math
import operator
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_vllm_service import ENDPOINT, ScriptedEngine, Sink

from dynamo.errors import InvalidArgument
from dynamo.observability.metrics import Registry
from dynamo.protocols import codec
from dynamo.protocols.engine import EmbeddingsEngineOutput, PreprocessedEmbeddingRequest
from dynamo.protocols.pooling import PoolingFacts
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.client import RequestClient
from dynamo.runtime.requests.server import RequestServer
from dynamo.vllm.engine import EngineStep
from dynamo.vllm.pooling import PoolingService

EMBED = PoolingFacts()
DECODE = codec.decoder(EmbeddingsEngineOutput).decode


class Tensor:
    """As much of a tensor as the service uses."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    def float(self) -> Tensor:
        return self

    contiguous = numpy = float

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.numbers) // 2, 2)

    def numel(self) -> int:
        return len(self.numbers)

    def norm(self) -> Tensor:
        return Tensor(math.hypot(*self.numbers))

    def clamp(self, min: Any) -> Tensor:
        return Tensor(max(self.numbers[0], min))

    def dot(self, other: Tensor) -> Tensor:
        return Tensor(sum(map(operator.mul, self.numbers, other.numbers)))

    def __mul__(self, other: Tensor) -> Tensor:
        return Tensor(self.numbers[0] * other.numbers[0])

    def __truediv__(self, other: Tensor) -> Tensor:
        return Tensor(self.numbers[0] / other.numbers[0])

    def tobytes(self) -> bytes:
        return struct.pack(f"<{len(self.numbers)}f", *self.numbers)


class RawSink(Sink):
    """Collects the payloads."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads: list[bytes] = []

    def on_data(self, payload: bytes) -> None:
        self.payloads.append(payload)


class Embeddings:
    """A service over a scripted engine, and a client that is connected to it."""

    def __init__(self, engine: ScriptedEngine, admission: AdmissionQueue) -> None:
        self.engine = engine
        self.admission = admission
        self.client = RequestClient()
        self.address = ""

    def start(self, *inputs: list[int], **fields: Any) -> tuple[RawSink, Any]:
        sink = RawSink()
        ids = [codec.tokens(each) for each in inputs]
        request = PreprocessedEmbeddingRequest("m", ids, **fields)
        payload = codec.encode(request)
        return sink, self.client.open(self.address, ENDPOINT, {}, payload, sink)


@asynccontextmanager
async def deployed(path: Path, facts: PoolingFacts = EMBED) -> AsyncIterator[Embeddings]:
    engine, tasks = ScriptedEngine(), Tasks("test")
    admission = AdmissionQueue(1, 4, Registry())
    made, server = Embeddings(engine, admission), RequestServer()
    made.address = await server.start(f"uds://{path}/s.sock")
    server.register(ENDPOINT, PoolingService(engine, admission, tasks, facts).handle)
    try:
        yield made
    finally:
        await made.client.close()
        await server.close()
        await tasks.close()


async def test_vectors_come_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        sink, _ = made.start([1, 2], [3])
        await made.engine.started(2)
        made.engine.sinks["r1"].on_output(EngineStep([]))  # a part of a long prompt
        made.engine.sinks["r1"].on_output(EngineStep([], "stop", pooling_output=Tensor(0.25)))
        made.engine.sinks["r0"].on_output(EngineStep([], "length", pooling_output=Tensor(1, -2)))
        await sink.end()
        (payload,) = sink.payloads
        expected = EmbeddingsEngineOutput(
            [struct.pack("<2f", 1, -2), struct.pack("<f", 0.25)], 3, 3
        )
        assert DECODE(payload) == expected
        assert made.admission.running == 0 and made.engine.aborted == []


async def test_a_failed_input_ends_all(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        sink, _ = made.start([1], [2], [3])
        await made.engine.started(3)
        made.engine.sinks["r1"].on_output(EngineStep([], "error"))
        await sink.end()
        assert "failed to compute" in str(sink.error) and sink.payloads == []
        assert sorted(made.engine.aborted) == ["r0", "r1", "r2"]
        assert made.admission.running == 0


async def test_a_refused_input_and_no_input(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        made.engine.refusal = InvalidArgument("no such dimensions")
        sink, _ = made.start([1], [2])
        await sink.end()
        assert "no such dimensions" in str(sink.error)
        made.engine.refusal = None
        empty, _ = made.start()
        await empty.end()
        assert "has no inputs" in str(empty.error)
        assert made.admission.running == 0


async def test_a_client_that_leaves_stops_the_engine(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        _, stream = made.start([1], [2])
        await made.engine.started(2)
        stream.kill()
        await made.engine.stopped(2)
        async with asyncio.timeout(10):
            while made.admission.running:  # noqa: ASYNC110 - one loop iteration at a time
                await asyncio.sleep(0)


BOTH = PoolingFacts(scoring="bi-encoder")


def output(made: Embeddings, number: int, *numbers: float) -> None:
    step = EngineStep([], "stop", pooling_output=Tensor(*numbers))
    made.engine.sinks[f"r{number}"].on_output(step)


async def scores(sink: RawSink) -> list[float]:
    await sink.end()
    (payload,) = sink.payloads
    vectors: list[Any] = DECODE(payload).embeddings
    return [struct.unpack("<f", vector)[0] for vector in vectors]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
async def test_one_text_is_compared_with_all_others(tmp_path: Path, order: list[int]) -> None:
    vectors = [(1.0, 0.0), (2.0, 0.0), (0.0, 3.0)]
    async with deployed(tmp_path, BOTH) as made:
        sink, _ = made.start([1], [2], [3], queries=1)
        await made.engine.started(3)
        for number in order:
            output(made, number, *vectors[number])
        assert await scores(sink) == [1.0, 0.0]
        assert made.admission.running == 0


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 1, 0, 3]])
async def test_texts_are_compared_in_pairs(tmp_path: Path, order: list[int]) -> None:
    vectors = [(1.0, 0.0), (0.0, 1.0), (0.0, 2.0), (0.0, 5.0)]
    async with deployed(tmp_path, BOTH) as made:
        sink, _ = made.start([1], [2], [3], [4], queries=2)
        await made.engine.started(4)
        for number in order:
            output(made, number, *vectors[number])
        assert await scores(sink) == [0.0, 1.0]


async def test_a_vector_for_each_token_has_its_size(tmp_path: Path) -> None:
    async with deployed(tmp_path, PoolingFacts(task="token_embed")) as made:
        sink, _ = made.start([1, 2], task="token_embed")
        await made.engine.started(1)
        output(made, 0, 1, 2, 3, 4)
        await sink.end()
        (payload,) = sink.payloads
        assert DECODE(payload).row_sizes == [2]


async def test_vectors_that_are_too_large_together_end_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.vllm.pooling._MAX_BYTES", 12)
    async with deployed(tmp_path) as made:
        sink, _ = made.start([1], [2], [3])
        await made.engine.started(3)
        output(made, 0, 1, 2)
        output(made, 1, 1, 2)
        await sink.end()
        assert "send fewer" in str(sink.error) and sink.payloads == []
        assert "r2" in made.engine.aborted and made.admission.running == 0


@pytest.mark.parametrize(
    ("facts", "fields", "text"),
    [
        (BOTH, {"task": "classify"}, "computes 'embed', not 'classify'"),
        (PoolingFacts(task="classify"), {}, "computes 'classify', not 'embed'"),
        (PoolingFacts(), {"queries": 1}, "compares no vectors"),
        (BOTH, {"queries": 3}, "3 queries do not fit 3 inputs"),
        (BOTH, {"queries": -1}, "do not fit"),
        (BOTH, {"type_one_at": [1]}, "'type_one_at'"),
    ],
)
async def test_a_request_for_another_model(
    tmp_path: Path, facts: PoolingFacts, fields: dict[str, Any], text: str
) -> None:
    async with deployed(tmp_path, facts) as made:
        sink, _ = made.start([1], [2], [3], **fields)
        await sink.end()
        assert text in str(sink.error) and made.admission.running == 0


async def test_the_engine_gets_what_the_client_asks_for(tmp_path: Path) -> None:
    async with deployed(tmp_path, PoolingFacts(task="classify", scoring="cross-encoder")) as made:
        more = {"task": "classify", "type_one_at": [2, 1], "use_activation": False}
        made.start([1, 2, 3], [4, 5], **more)
        await made.engine.started(2)
        options = [request.extra_args or {} for request in made.engine.requests]
        assert [each["extra_kwargs"]["compressed_token_type_ids"] for each in options] == [2, 1]
        assert {each["use_activation"] for each in options} == {False}


async def test_many_inputs_take_several_turns_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.vllm.pooling._TURN_S", -1)
    async with deployed(tmp_path) as made:
        sink, stream = made.start(*[[number + 1] for number in range(50)])
        await made.engine.started(1)
        submitted = len(made.engine.requests)
        assert submitted < 50
        await made.engine.started(50)
        assert [request.token_ids[0] for request in made.engine.requests] == list(range(1, 51))
        for number in range(50):
            output(made, number, float(number))
        assert await scores(sink) == list(range(50))
        _, stream = made.start(*[[1]] * 50)
        await made.engine.started(51)
        stream.kill()
        async with asyncio.timeout(10):
            while made.admission.running:  # noqa: ASYNC110 - one loop iteration at a time
                await asyncio.sleep(0)
        for _ in range(60):
            await asyncio.sleep(0)
        # None is submitted after the client has gone, and none of the submitted runs on.
        assert len(made.engine.requests) - 50 == len(made.engine.aborted) < 50


async def test_vectors_that_wait_to_be_compared_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.vllm.pooling._MAX_KEPT_BYTES", 24)
    async with deployed(tmp_path, BOTH) as made:
        sink, _ = made.start([1], [2], [3], [4], [5], [6], [7], [8], queries=4)
        await made.engine.started(8)
        for number in (0, 4, 1, 5, 2, 3, 6, 7):  # two at a time, of three that are allowed
            output(made, number, 1, 0)
        assert await scores(sink) == [1.0] * 4
        sink, _ = made.start([1], [2], [3], [4], [5], [6], [7], [8], queries=4)
        await made.engine.started(16)
        for number in range(4):
            output(made, 8 + number, 1, 0)
        await sink.end()
        assert "wait to be compared" in str(sink.error) and made.admission.running == 0
