"""Forward-pass metrics from an engine, or a worker, to a subscriber; over a real event plane."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import zmq
from until import until

from dynamo.config.runtime import RuntimeSettings
from dynamo.llm import (
    FpmDirectPublisher,
    FpmEventRelay,
    FpmEventSubscriber,
    ModelInput,
    ModelType,
    forward_pass,
    register_model,
    unregister_model,
)
from dynamo.protocols import codec
from dynamo.protocols.kv import ForwardPass, QueuedRequests, ScheduledRequests
from dynamo.runtime import DistributedRuntime, Endpoint

MODEL = Path(__file__).resolve().parents[3] / "examples/model"
_decode = codec.decoder(ForwardPass).decode
PASS = {
    "scheduled_num_prefill_requests": 1,
    "scheduled_sum_prefill_tokens": 20,
    "scheduled_sum_prefill_kv_tokens": 4,
    "scheduled_num_decode_requests": 2,
    "scheduled_sum_decode_kv_tokens": 50,
    "queued_num_prefill_requests": 3,
    "queued_sum_prefill_tokens": 30,
    "queued_num_decode_requests": 1,
    "queued_sum_decode_kv_tokens": 9,
    "wall_time_secs": 0.25,
}


@pytest.fixture
async def endpoints(tmp_path: Path) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    """The same endpoint in two processes: the worker's, and that of a subscriber."""
    settings = RuntimeSettings(state_dir=str(tmp_path))
    runtimes = [DistributedRuntime(None, settings) for _ in range(2)]
    one, other = (runtime.endpoint("ns.backend.generate") for runtime in runtimes)
    yield one, other
    for runtime in runtimes:
        await runtime.close()


async def test_a_worker_publishes_its_passes(
    endpoints: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_pass, "HEARTBEAT_S", 0.05)
    worker, other = endpoints
    name = str(worker.connection_id())
    publisher = FpmDirectPublisher(worker, name, dp_size=2)
    subscriber = FpmEventSubscriber(other)
    subscriber.start_tracking()
    with pytest.raises(RuntimeError, match="after start_tracking"):
        subscriber.recv()
    with pytest.raises(ValueError, match="dp_rank must be from 0 to 1, got 2"):
        publisher.publish(dp_rank=2, **PASS)  # type: ignore[arg-type]
    found: list[ForwardPass] = []

    def seen() -> bool:
        publisher.publish(dp_rank=1, **PASS)  # type: ignore[arg-type]
        newest = subscriber.get_recent_stats().get((name, 1))
        found.extend([] if newest is None else [_decode(newest)])
        return bool(found and found[-1].wall_time)

    await until(seen)
    assert found[-1].scheduled_requests == ScheduledRequests(1, 20, 0.0, 4, 2, 50)
    assert found[-1].queued_requests == QueuedRequests(3, 30, 0.0, 1, 9)
    assert found[-1].counter_id > 1
    await until(lambda: not _decode(subscriber.get_recent_stats()[name, 1]).wall_time)
    await asyncio.to_thread(partial(publisher.publish, dp_rank=0, **PASS))  # type: ignore[arg-type]
    await register_model(ModelInput.Tokens, ModelType.Chat, worker, str(MODEL), "m")
    await until(subscriber.get_model_cards)
    assert set(subscriber.get_model_cards()) == {name}
    publisher.shutdown()
    publisher.shutdown()
    names = set(subscriber.get_recent_stats())
    register = partial(register_model, ModelInput.Tokens, ModelType.Chat, worker, str(MODEL))
    await register(lora_name="a", base_model_path=str(MODEL))
    await until(lambda: '"a"' in subscriber.get_model_cards()[name])
    await unregister_model(worker, lora_name="a")
    await until(lambda: '"a"' not in subscriber.get_model_cards()[name])
    assert set(subscriber.get_recent_stats()) == names  # the worker is still there
    await unregister_model(worker)
    await until(lambda: not subscriber.get_recent_stats())
    subscriber.shutdown()


async def test_the_messages_of_an_engine_are_relayed(
    endpoints: tuple[Endpoint, Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    worker, other = endpoints
    engine: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    relay = FpmEventRelay(worker, f"tcp://127.0.0.1:{port}")
    subscriber = FpmEventSubscriber(other)
    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        subscriber.recv()
    waiting = asyncio.ensure_future(asyncio.to_thread(subscriber.recv))
    payload = codec.encode(ForwardPass(worker_id="7", wall_time=0.5))

    def received() -> bool:
        engine.send_multipart([b"", b"too few"])
        engine.send_multipart([b"", struct.pack(">Q", 1), payload])
        return waiting.done()

    try:
        await until(received)
        assert waiting.result() == payload
        assert caplog.text.count("dropped forward-pass metrics of 2 frames") == 1
        with pytest.raises(RuntimeError, match="after recv"):
            subscriber.start_tracking()
        relay.shutdown()
        subscriber.shutdown()
        while await asyncio.to_thread(subscriber.recv) is not None:
            pass
    finally:
        engine.close(0)


async def test_a_reader_that_is_too_slow_loses_the_oldest(
    endpoints: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_pass, "KEPT_MESSAGES", 2)
    subscriber = FpmEventSubscriber(endpoints[1])
    for number in range(5):
        subscriber._keep(1, number, bytes([number]))
    assert [await asyncio.to_thread(subscriber.recv) for _ in range(2)] == [b"\3", b"\4"]
    subscriber.shutdown()
    assert await asyncio.to_thread(subscriber.recv) is None
