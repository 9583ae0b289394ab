"""The service of an embedding model over a scripted engine and a real socket."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from test_vllm_service import ENDPOINT, ScriptedEngine, Sink

from dynamo.errors import InvalidArgument
from dynamo.observability.metrics import Registry
from dynamo.protocols import codec
from dynamo.protocols.engine import EmbeddingsEngineOutput, PreprocessedEmbeddingRequest
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.client import RequestClient
from dynamo.runtime.requests.server import RequestServer
from dynamo.vllm.embeddings import EmbeddingService
from dynamo.vllm.engine import EngineStep

DECODE = codec.decoder(EmbeddingsEngineOutput).decode


class Tensor:
    """As much of a tensor as the service uses."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    def float(self) -> Tensor:
        return self

    contiguous = numpy = float

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

    def start(self, *inputs: list[int]) -> tuple[RawSink, Any]:
        sink = RawSink()
        request = PreprocessedEmbeddingRequest("m", [codec.tokens(each) for each in inputs])
        payload = codec.encode(request)
        return sink, self.client.open(self.address, ENDPOINT, {}, payload, sink)


@asynccontextmanager
async def deployed(path: Path) -> AsyncIterator[Embeddings]:
    engine, tasks = ScriptedEngine(), Tasks("test")
    admission = AdmissionQueue(1, 4, Registry())
    made, server = Embeddings(engine, admission), RequestServer()
    made.address = await server.start(f"uds://{path}/s.sock")
    server.register(ENDPOINT, EmbeddingService(engine, admission, tasks).handle)
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
