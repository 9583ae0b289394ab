"""The simulated engine behind a real socket: streams, rejection, cancellation, slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from until import until

from dynamo.errors import Disconnected, DynamoError, InvalidArgument, Overloaded
from dynamo.frontend.requests.migration import continued
from dynamo.mocker.arguments import engine_shape
from dynamo.mocker.blocks import CacheChange
from dynamo.mocker.engine import EngineRank, EngineShape, MockerMetrics
from dynamo.mocker.settings import MockerSettings
from dynamo.mocker.timing import Timing
from dynamo.mocker.worker import DEFAULT_MAX_TOKENS, MockerService
from dynamo.observability.metrics import Registry
from dynamo.protocols import codec
from dynamo.protocols.engine import (
    EngineOutput,
    PreprocessedRequest,
    Routing,
    SamplingOptions,
    StopConditions,
)
from dynamo.protocols.kv import BlocksStored, KvMetrics
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.client import RequestClient
from dynamo.runtime.requests.server import RequestServer

DECODE = codec.decoder(EngineOutput).decode
ENDPOINT = "test/backend/generate"


class Sink:
    """Collects one response; the first item sets ``first``, the end sets ``finished``."""

    def __init__(self) -> None:
        self.items: list[EngineOutput] = []
        self.error: DynamoError | None = None
        self.first = asyncio.Event()
        self.finished = asyncio.Event()

    def on_data(self, payload: bytes) -> None:
        self.items.append(DECODE(payload))
        self.first.set()

    def on_end(self) -> None:
        self.finished.set()

    def on_error(self, error: DynamoError) -> None:
        self.error = error
        self.finished.set()

    @property
    def tokens(self) -> list[int]:
        return [token for item in self.items for token in item.token_ids]


class Deployment:
    """A service, its ranks and a client that is connected to it."""

    def __init__(
        self, ranks: list[EngineRank], service: MockerService, client: RequestClient
    ) -> None:
        self.ranks = ranks
        self.service = service
        self.client = client
        self.address = ""
        self.changes: list[CacheChange] = []
        self.loads: list[KvMetrics] = []
        self.registry = Registry()

    def open(self, payload: bytes) -> tuple[Sink, Any]:
        sink = Sink()
        return sink, self.client.open(self.address, ENDPOINT, {}, payload, sink)

    def start(
        self, prompt: list[int], max_tokens: int | None = None, **more: Any
    ) -> tuple[Sink, Any]:
        conditions = StopConditions(max_tokens=max_tokens)
        request = PreprocessedRequest("m", codec.tokens(prompt), conditions, **more)
        return self.open(codec.encode(request))

    async def answer(self, *args: Any, **more: Any) -> Sink:
        sink, _ = self.start(*args, **more)
        await sink.finished.wait()
        return sink


@asynccontextmanager
async def deployment(
    path: Path, *, ranks: int = 1, reply: str = "random", speedup: float = 0,
    admission: int | None = None, **shape: Any,
) -> AsyncIterator[Deployment]:  # fmt: skip
    changes = {k: shape.pop(k) for k in ("max_model_len", "max_num_seqs") if k in shape}
    limits = replace(engine_shape(MockerSettings()).limits, **changes)
    size = {"blocks": 100, "block_size": 4, "prefix_caching": True, **shape}
    made = EngineShape(limits=limits, timing=Timing(speedup), **size)
    tasks, server, client = Tasks(), RequestServer(), RequestClient()
    here = Deployment([], None, client)  # type: ignore[arg-type]
    for number in range(ranks):
        metrics = MockerMetrics(here.registry, str(number), "m")
        here.ranks.append(
            EngineRank(
                number, made, metrics, tasks, lambda _, c: here.changes.extend(c), here.loads.append
            )
        )
    here.service = MockerService(here.ranks, AdmissionQueue(admission, 2, here.registry), reply)
    server.register(ENDPOINT, here.service.handle)
    here.address = await server.start(f"uds:{path}/s.sock")
    for rank in here.ranks:
        tasks.spawn(rank.run())
    try:
        yield here
    finally:
        await client.close()
        await tasks.close()
        await server.close()


async def test_tokens_stream_and_the_last_item_has_the_reason(tmp_path: Path) -> None:
    async with deployment(tmp_path) as here:
        sink = await here.answer(list(range(20)), 5)
        assert len(sink.tokens) == 5 and all(1000 <= t < 2000 for t in sink.tokens)
        assert [item.finish_reason for item in sink.items] == [None] * 4 + ["length"]
        usage = sink.items[-1].completion_usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 5, 25)
        again = await here.answer(list(range(20)), 1)
        usage = again.items[-1].completion_usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 16


async def test_an_output_has_as_many_tokens_as_asked_for(tmp_path: Path) -> None:
    """The first token alone, full outputs, and the rest with the reason; the same tokens."""
    seed = SamplingOptions(seed=7)
    async with deployment(tmp_path) as here:
        single = await here.answer([1], 18, sampling_options=seed)
    for size, sizes in ((2, [1, *[2] * 8, 1]), (7, [1, 7, 7, 3]), (16, [1, 16, 1])):
        async with deployment(tmp_path, stream_interval=size) as here:
            sink = await here.answer([1], 18, sampling_options=seed)
        assert [len(item.token_ids) for item in sink.items] == sizes
        assert sink.tokens == single.tokens
        assert [item.finish_reason for item in sink.items][-2:] == [None, "length"]


async def test_equal_seeds_give_equal_answers(tmp_path: Path) -> None:
    async with deployment(tmp_path) as here:
        one, two, other = [
            await here.answer([1], 30, sampling_options=SamplingOptions(seed=seed))
            for seed in (7, 7, 8)
        ]
        assert one.tokens == two.tokens != other.tokens


async def test_echo_returns_the_prompt(tmp_path: Path) -> None:
    async with deployment(tmp_path, reply="echo") as here:
        sink = await here.answer([5, 300, 70000, 8], 100)
        assert sink.tokens == [5, 300, 70000, 8]
        assert sink.items[-1].finish_reason == "stop"


@pytest.mark.parametrize("cut", range(1, 5))
async def test_an_echo_continues_after_a_migration(tmp_path: Path, cut: int) -> None:
    prompt, whole = [1, 2, 5, 6, 7, 8, 9, 2, 3], [5, 6, 7, 8, 9, 2]
    conditions = StopConditions(max_tokens=20, stop_token_ids_hidden=[2])
    request = PreprocessedRequest("m", codec.tokens(prompt), conditions)
    async with deployment(tmp_path, reply="echo") as here:
        moved = continued(request, codec.tokens(whole[:cut]), 1)
        for sent, expected in ((request, whole), (moved, whole[cut:])):
            sink, _ = here.open(codec.encode(sent))
            await sink.finished.wait()
            assert (sink.tokens, sink.items[-1].finish_reason) == (expected, "stop")


async def test_a_request_without_max_tokens_has_a_default(tmp_path: Path) -> None:
    async with deployment(tmp_path) as here:
        assert len((await here.answer([1, 2, 3])).tokens) == DEFAULT_MAX_TOKENS
    async with deployment(tmp_path, max_model_len=20) as here:
        assert len((await here.answer([1, 2, 3])).tokens) == 17


@pytest.mark.parametrize(
    ("prompt", "limit", "more", "says"),
    [
        (list(range(300)), 101, {}, r"prompt \(300 tokens\) plus max_tokens \(101\) .* lower"),
        ([], 5, {}, "token_ids is empty"),
        ([1], 5, {"extra_args": {"generated_tokens": 1}}, "generated_tokens must be from 0 to 0"),
        ([1], 0, {}, r"max_tokens must be >= 1, got 0"),
        ([1], 1, {"routing": Routing(dp_rank=3)}, "dp_rank 3 does not exist; this worker has 1"),
    ],
)
async def test_an_invalid_request_is_rejected(
    tmp_path: Path, prompt: list[int], limit: int, more: dict[str, Any], says: str
) -> None:
    async with deployment(tmp_path, reply="echo") as here:
        sink = await here.answer(prompt, limit, **more)
        assert isinstance(sink.error, InvalidArgument)
        with pytest.raises(InvalidArgument, match=says):
            raise sink.error
        assert here.service.admission.running == 0


async def test_another_payload_is_rejected(tmp_path: Path) -> None:
    async with deployment(tmp_path) as here:
        sink, _ = here.open(codec.encode({"model": "m", "token_ids": "text"}))
        await sink.finished.wait()
        assert isinstance(sink.error, InvalidArgument)


@pytest.mark.parametrize("kind", ["stop", "kill", "disconnect"])
async def test_cancellation_frees_the_blocks(tmp_path: Path, kind: str) -> None:
    async with deployment(tmp_path, speedup=1000) as here:
        sink, stream = here.start(list(range(20)), 300)
        await sink.first.wait()
        pool = here.ranks[0].pool
        assert pool.used
        if kind == "disconnect":
            here.client.connection(here.address).lose(Disconnected("lost"))
        else:
            getattr(stream, kind)()
        await until(lambda: not pool.used and not here.ranks[0].load)
        assert here.service.admission.running == 0
        if kind == "stop":
            await sink.finished.wait()
            assert sink.items[-1].finish_reason == "cancelled"
            assert sink.error is None


async def test_a_slow_reader_delays_only_its_own_response(tmp_path: Path) -> None:
    async with deployment(tmp_path) as here:
        slow, stream = here.start([1], 300)
        stream.pause()
        quick = await here.answer([2], 300)
        assert len(quick.tokens) == 300
        assert len(slow.tokens) < 10
        stream.resume()
        await slow.finished.wait()
        assert len(slow.tokens) == 300
        assert here.ranks[0].pool.used == 0


async def test_admission_rejects_and_starts_the_next(tmp_path: Path) -> None:
    async with deployment(tmp_path, admission=1) as here:
        running, stream = here.start([1], 300)
        stream.pause()
        waiting, _ = here.start([2], 3)
        cancelled, cancelled_stream = here.start([3], 3)
        await running.first.wait()
        rejected = await here.answer([4], 3)
        assert isinstance(rejected.error, Overloaded)
        cancelled_stream.stop()
        await cancelled.finished.wait()
        assert not cancelled.tokens and cancelled.error is None
        stream.kill()
        await waiting.finished.wait()
        assert len(waiting.tokens) == 3


async def test_each_rank_has_its_own_cache(tmp_path: Path) -> None:
    async with deployment(tmp_path, ranks=2) as here:
        prompt = list(range(20))
        for rank, cached in ((0, 0), (1, 0), (1, 16)):
            sink = await here.answer(prompt, 1, routing=Routing(dp_rank=rank))
            usage = sink.items[-1].completion_usage
            assert usage is not None and usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == cached


async def test_events_and_load_describe_the_state(tmp_path: Path) -> None:
    async with deployment(tmp_path) as here:
        await here.answer(list(range(20)), 1)
        await until(lambda: bool(here.loads) and here.loads[-1].num_requests_running == 0)
        assert here.loads[0].kv_total_blocks == 100
        assert here.loads[-1].kv_used_blocks == 0
        ((stored, _, _),) = here.changes
        assert isinstance(stored, BlocksStored) and len(stored.block_hashes) == 5 * 8
        text = here.registry.render().decode()
        assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 1' in text
        assert 'vllm:num_requests_running{engine="0",model_name="m"} 0' in text
