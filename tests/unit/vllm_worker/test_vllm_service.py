"""The service over a scripted engine and a real socket: items, ends, cancellation, slow readers."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import msgspec
import pytest
from until import until

from dynamo.errors import DynamoError, InvalidArgument, Overloaded
from dynamo.observability.metrics import Registry
from dynamo.protocols import codec
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest, Routing, StopConditions
from dynamo.protocols.pooling import PoolingFacts
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.client import RequestClient
from dynamo.runtime.requests.server import RequestServer
from dynamo.runtime.requests.stream import ServerStream
from dynamo.vllm.engine import EngineInfo, EngineStep, OutputSink, StepStats
from dynamo.vllm.plain_tokens import PlainTokens, StepDecoder
from dynamo.vllm.service import VllmService

DECODE = codec.decoder(EngineOutput).decode
ENDPOINT = "test/backend/generate"
INFO = EngineInfo(
    driver="scripted",
    version="0",
    block_size=16,
    blocks=10,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    context_length=100,
    data_parallel_size=2,
)


@dataclass
class Array:
    """As much of a numpy array as the worker uses."""

    rows: list[Any]

    def tolist(self) -> list[Any]:
        return self.rows


@dataclass
class Stats:
    num_cached_tokens: int


class ScriptedEngine:
    """Records requests; the test sends their steps."""

    def __init__(self) -> None:
        self.info = INFO
        self.on_stats: StepStats | None = None
        self.sinks: dict[str, OutputSink] = {}
        self.requests: list[PreprocessedRequest] = []
        self.ranks: list[int | None] = []
        self.aborted: list[str] = []
        self.stopped_by_client = 0
        self.refusal: DynamoError | None = None
        self.plain = PlainTokens()
        self.changed = asyncio.Event()

    def submit(self, request: PreprocessedRequest, sink: OutputSink, dp_rank: int | None) -> str:
        if self.refusal is not None:
            raise self.refusal
        number = f"r{len(self.sinks)}"
        self.sinks[number] = sink
        self.requests.append(request)
        self.ranks.append(dp_rank)
        self.changed.set()
        return number

    def pass_tokens(
        self, request_id: str, stream: ServerStream, on_full: Callable[[], None]
    ) -> None:
        self.plain.add(request_id, stream, on_full)

    def stop_passing(self, request_id: str) -> int:
        return self.plain.remove(request_id)[0]

    def abort(self, request_id: str, stopped: bool = False) -> None:
        self.aborted.append(request_id)
        self.stopped_by_client += stopped
        self.changed.set()

    async def started(self, count: int) -> None:
        await self._until(lambda: len(self.sinks) == count)

    async def stopped(self, count: int) -> None:
        await self._until(lambda: len(self.aborted) == count)

    async def _until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def progress(self) -> tuple[int, int]:
        return len(self.sinks) - len(self.aborted), 0

    def metrics(self) -> str:
        return ""

    async def run(self) -> None: ...
    async def close(self) -> None: ...
    async def sleep(self, level: int = 1) -> None: ...
    async def wake_up(self, tags: Sequence[str] | None = None) -> None: ...
    async def reload_weights(self, path: str | None = None) -> None: ...
    async def pause(self, keeps: bool, clears: bool) -> None: ...
    async def resume(self) -> None: ...
    async def profile(self, starts: bool, prefix: str | None) -> None: ...

    async def is_sleeping(self) -> bool:
        return False

    async def load_lora(self, name: str, path: str, version: str) -> object: ...

    def use_lora(self, name: str, weights: object | None) -> frozenset[str]:
        return frozenset()

    def any_running(self, requests: frozenset[str]) -> bool:
        return False

    async def remove_lora(self, weights: object) -> None: ...

    async def pooling_facts(self) -> PoolingFacts:
        return PoolingFacts()

    async def reset_prefix_cache(self) -> bool:
        return True


class Sink:
    """Collects one response."""

    def __init__(self) -> None:
        self.items: list[EngineOutput] = []
        self.error: DynamoError | None = None
        self.finished = asyncio.Event()
        self.arrived = asyncio.Event()

    def on_data(self, payload: bytes) -> None:
        self.items.append(DECODE(payload))
        self.arrived.set()

    def on_end(self) -> None:
        self.finished.set()

    def on_error(self, error: DynamoError) -> None:
        self.error = error
        self.finished.set()

    async def end(self) -> None:
        async with asyncio.timeout(10):
            await self.finished.wait()


class Deployment:
    """A service over a scripted engine, and a client that is connected to it."""

    def __init__(self, service: VllmService, engine: ScriptedEngine, client: RequestClient) -> None:
        self.service = service
        self.engine = engine
        self.client = client
        self.address = ""

    def start(self, prompt: Sequence[int] = (1, 2, 3), **more: Any) -> tuple[Sink, Any]:
        request = PreprocessedRequest(
            "m", codec.tokens(prompt), StopConditions(max_tokens=9), **more
        )
        sink = Sink()
        payload = codec.encode(request)
        return sink, self.client.open(self.address, ENDPOINT, {}, payload, sink)


@asynccontextmanager
async def deployed(
    path: Path, limits: tuple[int | None, int] = (None, 16), prefill_only: bool = False
) -> AsyncIterator[Deployment]:
    engine, tasks = ScriptedEngine(), Tasks("test")
    admission = AdmissionQueue(*limits, Registry())
    service = VllmService(engine, admission, tasks, prefill_only)
    server, client = RequestServer(), RequestClient()
    made = Deployment(service, engine, client)
    made.address = await server.start(f"uds://{path}/s.sock")
    server.register(ENDPOINT, service.handle)
    try:
        yield made
    finally:
        await client.close()
        await server.close()
        await tasks.close()


async def test_tokens_usage_and_the_end(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        sink, _ = made.start()
        await made.engine.started(1)
        steps = made.engine.sinks["r0"]
        steps.on_output(EngineStep([7], prefill_stats=Stats(2)))
        steps.on_output(EngineStep([70_000]))
        steps.on_output(EngineStep([8, 9], finish_reason="length"))
        await sink.end()
        assert [item.token_ids for item in sink.items] == [[7], [70_000], [8, 9]]
        first, last = sink.items[0], sink.items[-1]
        assert first.completion_usage is not None, "the frontend may end the answer itself"
        assert first.completion_usage.prompt_tokens == 3
        assert first.completion_usage.prompt_tokens_details is not None
        assert first.completion_usage.prompt_tokens_details.cached_tokens == 2
        assert last.finish_reason == "length"
        assert last.completion_usage is not None
        assert last.completion_usage.prompt_tokens == 3
        assert last.completion_usage.completion_tokens == 4
        assert last.completion_usage.prompt_tokens_details is not None
        assert last.completion_usage.prompt_tokens_details.cached_tokens == 2
        assert made.service.admission.running == 0


def step_message(tokens: dict[str, int]) -> bytes:
    """Encode an engine's step with one plain token for each request."""
    rows = [[request_id, [token], *[None] * 10, 0] for request_id, token in tokens.items()]
    return msgspec.msgpack.encode([0, rows, None, 1.5])


async def test_a_prompt_with_images_has_the_length_that_the_engine_found(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        sink, _ = made.start()
        await made.engine.started(1)
        (engine_sink,) = made.engine.sinks.values()
        engine_sink.on_images(20, [codec.tokens([7, 8])])
        engine_sink.on_output(EngineStep([5], prefill_stats=Stats(0)))
        engine_sink.on_output(EngineStep([6], "length"))
        await sink.end()
        assert sink.items[0].extra_args == {"mm_expansions": [codec.tokens([7, 8])]}
        assert sink.items[-1].extra_args is None
        assert sink.items[-1].completion_usage is not None
        assert sink.items[-1].completion_usage.prompt_tokens == 20


async def test_plain_tokens_of_a_step_go_to_their_streams(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        sinks = [made.start()[0], made.start()[0]]
        await made.engine.started(2)
        plain, steps = made.engine.plain, made.engine.sinks
        assert plain.pass_on(step_message({"r0": 1})) == step_message({"r0": 1})  # not yet
        for number in ("r0", "r1"):
            steps[number].on_output(EngineStep([7], prefill_stats=Stats(0)))
        for token in (1, 300, 70_000):
            rest = plain.pass_on(step_message({"r0": token, "r1": 5, "unknown": 6}))
            assert rest == step_message({"unknown": 6})
        for number in ("r0", "r1"):
            steps[number].on_output(EngineStep([8], "length"))
        for sink, middle in zip(sinks, ([[1], [300], [70_000]], [[5]] * 3), strict=True):
            await sink.end()
            assert [item.token_ids for item in sink.items] == [[7], *middle, [8]]
            assert sink.items[-1].completion_usage is not None
            assert sink.items[-1].completion_usage.completion_tokens == 5
        assert plain.count == 6
        assert plain.pass_on(step_message({"r0": 1})) == step_message({"r0": 1})


class CoreOutput(msgspec.Struct, array_like=True):
    """As much of vLLM's EngineCoreOutput as the driver uses."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None
    kv_transfer_params: Any = None
    prefill_stats: Any = None


class CoreOutputs(msgspec.Struct, array_like=True):
    """vLLM's EngineCoreOutputs."""

    engine_index: int
    outputs: list[CoreOutput] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: Any = None


@dataclass
class Frame:
    bytes: bytes


class CoreDecoder:
    """vLLM's decoder."""

    def decode(self, frames: bytes | Sequence[Frame]) -> CoreOutputs:
        message = frames if isinstance(frames, bytes) else frames[0].bytes
        return msgspec.msgpack.decode(message, type=CoreOutputs)


def core_steps(
    answers: dict[str, list[int]], dice: random.Random
) -> Iterator[tuple[CoreOutputs, bool]]:
    """The messages of an engine: 1 to 16 tokens for some requests each; whether it has tensors."""
    left, begun = {name: list(ids) for name, ids in answers.items()}, set()
    while left:
        outputs = []
        for name in [one for one in left if dice.random() < 0.7]:
            count = dice.choice((1, 1, 1, 2, 3, 16))
            taken, left[name] = left[name][:count], left[name][count:]
            output = CoreOutput(name, taken)
            if name not in begun or dice.random() < 0.05:  # the first, or after a preemption
                begun.add(name)
                output.prefill_stats = 1
            if not left[name]:
                output.finish_reason = "length"
                del left[name]
            outputs.append(output)
        yield CoreOutputs(0, outputs), dice.random() < 0.1


@pytest.mark.parametrize("seed", range(8))
async def test_tokens_stay_in_order_whatever_waits(tmp_path: Path, seed: int) -> None:
    """Several messages are decoded before their reader has its turn."""
    dice = random.Random(seed)
    async with deployed(tmp_path) as made:
        sinks = [made.start()[0] for _ in range(6)]
        await made.engine.started(6)
        answers = {name: [dice.randrange(100_000) for _ in range(90)] for name in made.engine.sinks}
        plain, waiting = made.engine.plain, deque[CoreOutputs]()
        decoder, passed, counted = StepDecoder(CoreDecoder(), plain), 0, 0

        def read() -> None:
            nonlocal counted
            outputs = waiting.popleft()
            plain.read += 1
            counted += plain.counts.popleft()
            counted += sum(len(output.new_token_ids) for output in outputs.outputs)
            for output in outputs.outputs:
                output.prefill_stats = output.prefill_stats and Stats(0)
                made.engine.sinks[output.request_id].on_output(cast(Any, output))

        for message, has_tensors in core_steps(answers, dice):
            frame = Frame(msgspec.msgpack.encode(message))
            rest = decoder.decode([frame, frame] if has_tensors else [frame])
            passed += len(rest.outputs) < len(message.outputs)
            if rest.outputs:
                waiting.append(rest)
            while waiting and dice.random() < 0.5:
                read()
        while waiting:
            read()
        for sink, ids in zip(sinks, answers.values(), strict=True):
            await sink.end()
            assert [token for item in sink.items for token in item.token_ids] == ids
            assert sink.items[-1].completion_usage is not None
            assert sink.items[-1].completion_usage.completion_tokens == len(ids)
        assert passed > 5, "plain tokens take the short way"
        assert counted + plain.count == sum(map(len, answers.values())) and not plain.counts


async def test_a_message_has_its_own_count_of_plain_tokens() -> None:
    gaps: list[Any] = []
    plain = PlainTokens(lambda rank, passed: gaps.append((rank, passed)))
    decoder = StepDecoder(CoreDecoder(), plain)
    stream: Any = MagicMock(spec=ServerStream)
    connection = MagicMock(above_high_water=False, closed=False)
    stream.route.return_value = (connection, 1, MagicMock())
    plain.add("a", stream, lambda: None, 1.0)
    one = [["a", [5], *[None] * 10]]
    # With statistics, with another output, with neither (it has no reader), and an engine's answer.
    for outputs, stats, time_s, utility in (
        (one * 2, {"x": 1}, 1.5, None),
        ([*one, ["b", [1, 2]]], None, 1.75, None),
        (one, None, 2.0, None),
        ([], None, 2.25, [1]),
        ([], {"x": 1}, 2.25, None),
    ):
        frame = Frame(msgspec.msgpack.encode([3, outputs, stats, time_s, utility]))
        decoder.decode([frame])
    assert list(plain.counts) == [2, 1, 1]
    assert gaps == [(3, [(0.5, 1), (0.0, 1)]), (3, [(0.25, 1)]), (3, [(0.25, 1)])]
    assert plain.remove("a") == (4, 2.0)


async def test_a_paused_stream_gets_its_plain_tokens_later(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        sink, stream = made.start()
        await made.engine.started(1)
        steps = made.engine.sinks["r0"]
        steps.on_output(EngineStep([7], prefill_stats=Stats(0)))
        stream.pause()
        message = step_message({"r0": 1})
        await until(lambda: made.engine.plain.pass_on(message) == message)
        passed = made.engine.plain.count
        steps.on_output(EngineStep([9]))
        stream.resume()
        await until(lambda: bool(sink.items) and sink.items[-1].token_ids == [9])
        steps.on_output(EngineStep([8], "length"))
        await sink.end()
        expected = [[7], *[[1]] * passed, [9], [8]]
        assert [item.token_ids for item in sink.items] == expected
        assert sink.items[-1].completion_usage is not None
        assert sink.items[-1].completion_usage.completion_tokens == passed + 3


async def test_a_kill_stops_plain_tokens(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        _, stream = made.start()
        await made.engine.started(1)
        made.engine.sinks["r0"].on_output(EngineStep([7], prefill_stats=Stats(0)))
        stream.kill()
        await made.engine.stopped(1)
        message = step_message({"r0": 1})
        assert made.engine.plain.pass_on(message) == message
        assert made.engine.plain.count == 0


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected"),
    [
        ("stop", None, "eos"),
        ("stop", 5, "stop"),
        ("abort", None, "cancelled"),
        ("repetition", None, "repetition"),
        ("error", None, "error: the engine failed to compute the request"),
    ],
)
async def test_finish_reasons(
    tmp_path: Path, reason: str, stop_reason: int | None, expected: str
) -> None:
    async with deployed(tmp_path) as made:
        sink, _ = made.start()
        await made.engine.started(1)
        made.engine.sinks["r0"].on_output(EngineStep([5], reason, stop_reason))
        await sink.end()
        assert sink.items[-1].finish_reason == expected
        assert sink.items[-1].stop_reason == stop_reason


async def test_log_probabilities_of_output_and_prompt(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        sink, _ = made.start()
        await made.engine.started(1)
        steps = made.engine.sinks["r0"]
        # A prompt in two parts: the tensors of the first have no token yet.
        steps.on_output(
            EngineStep(
                [], new_prompt_logprobs_tensors=(Array([[2, 9]]), Array([[-3.0, -1.0]]), Array([4]))
            )
        )
        steps.on_output(
            EngineStep(
                [7],
                new_logprobs=(Array([[7, 7, 8]]), Array([[-1.0, -1.0, -2.0]])),
                new_prompt_logprobs_tensors=(Array([[3, 3]]), Array([[-1.0, -1.0]]), Array([1])),
            )
        )
        steps.on_output(EngineStep([8], "length", new_logprobs=(Array([[8]]), Array([[-0.5]]))))
        await sink.end()
        first, last = sink.items
        assert first.log_probs == [-1.0]
        assert first.top_logprobs == [
            [
                {"rank": 1, "token_id": 7, "logprob": -1.0},
                {"rank": 2, "token_id": 8, "logprob": -2.0},
            ]
        ]
        assert first.extra_args == {
            "prompt_logprobs": [
                None,
                [
                    {"rank": 4, "token_id": 2, "logprob": -3.0},
                    {"rank": 1, "token_id": 9, "logprob": -1.0},
                ],
                [
                    {"rank": 1, "token_id": 3, "logprob": -1.0},
                    {"rank": 1, "token_id": 3, "logprob": -1.0},
                ],
            ]
        }
        assert (last.log_probs, last.top_logprobs) == ([-0.5], None)


async def test_a_kill_aborts_in_the_engine(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        _, stream = made.start()
        await made.engine.started(1)
        stream.kill()
        await made.engine.stopped(1)
        assert made.engine.aborted == ["r0"] and not made.engine.stopped_by_client
        made.engine.sinks["r0"].on_output(EngineStep([1]))  # a step that was on its way: dropped
        assert made.service.admission.running == 0


async def test_a_stop_ends_the_stream_with_the_usage(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        sink, stream = made.start()
        await made.engine.started(1)
        made.engine.sinks["r0"].on_output(EngineStep([7], prefill_stats=Stats(0)))
        stream.stop()
        await sink.end()
        assert made.engine.aborted == ["r0"] and made.engine.stopped_by_client == 1
        assert sink.items[-1].finish_reason == "cancelled"
        assert sink.items[-1].completion_usage is not None


async def test_a_refusal_of_the_engine_is_the_clients_error(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        made.engine.refusal = InvalidArgument("top_p must be in (0, 1], got 2")
        sink, _ = made.start()
        await sink.end()
        assert isinstance(sink.error, InvalidArgument)
        assert sink.error.message == "top_p must be in (0, 1], got 2"
        assert made.service.admission.running == 0


async def test_a_late_refusal_frees_the_slot(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        sink, _ = made.start()
        await made.engine.started(1)
        made.engine.sinks["r0"].on_rejected(InvalidArgument("invalid grammar"))
        await sink.end()
        assert isinstance(sink.error, InvalidArgument)
        assert made.service.admission.running == 0


async def test_requests_beyond_the_limits(tmp_path: Path) -> None:
    async with deployed(tmp_path, limits=(1, 1)) as made:
        made.start()
        await made.engine.started(1)
        queued, waiting = made.start()
        refused, _ = made.start()
        await refused.end()
        assert isinstance(refused.error, Overloaded)
        waiting.kill()  # withdrawn from the queue: never submitted
        await until(lambda: made.service.admission.waiting == 0)
        third, _ = made.start()
        made.engine.sinks["r0"].on_output(EngineStep([1], "length"))
        await made.engine.started(2)
        made.engine.sinks["r1"].on_output(EngineStep([2], "length"))
        await third.end()
        assert queued.items == []


async def test_ranks(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        made.start(routing=Routing(dp_rank=1))
        made.start()
        await made.engine.started(2)
        assert made.engine.ranks == [1, None]
        sink, _ = made.start(routing=Routing(dp_rank=2))
        await sink.end()
        assert sink.error is not None
        assert sink.error.message == "routing.dp_rank 2 does not exist; this worker has 2"


async def test_a_prefill_returns_the_parameters_of_its_transfer(tmp_path: Path) -> None:
    async with deployed(tmp_path, prefill_only=True) as made:
        sink, _ = made.start()
        await made.engine.started(1)
        params = {"remote_block_ids": [3]}
        made.engine.sinks["r0"].on_output(EngineStep([1], "length", kv_transfer_params=params))
        await sink.end()
        assert sink.items[-1].disaggregated_params == {"kv_transfer_params": params}


async def test_output_of_a_client_that_does_not_read_is_held(tmp_path: Path) -> None:
    async with deployed(tmp_path) as made:
        sink, stream = made.start()
        await made.engine.started(1)
        steps = made.engine.sinks["r0"]
        steps.on_output(EngineStep([1], prefill_stats=Stats(0)))
        stream.pause()
        other, _ = made.start()  # after the pause on the same connection
        await made.engine.started(2)
        for token_id in range(2, 40):
            steps.on_output(EngineStep([token_id]))
        steps.on_output(EngineStep([40], "length"))
        made.engine.sinks["r1"].on_output(EngineStep([1], "length"))
        await other.end()
        assert len(sink.items) <= 2, "one item may leave before the worker sees that it is paused"
        assert not sink.finished.is_set()
        stream.resume()
        await sink.end()
        assert [item.token_ids for item in sink.items] == [[n] for n in range(1, 41)]
