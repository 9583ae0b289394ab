"""Cost per request of sharing load with a replica: sent by one router, received by another.

4,096 tokens in blocks of 16, 16 workers; 16 requests a loop iteration, as under load. ``send``
encodes reservation, first token and end of a request, ``receive`` decodes and applies them; the
socket costs about 10 µs a message, shared by the requests of an iteration.

    python -m pytest benchmarks/micro/bench_sync.py --benchmark-enable
"""

from __future__ import annotations

from array import array
from itertools import count
from typing import Any

from dynamo.config.router import RouterSettings
from dynamo.protocols.codec import encode
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.caches.prompt import HashedPrompt
from dynamo.router.connect.replicas import PickerLoadSink, decode_message
from dynamo.router.load.active_load import Reservation
from dynamo.router.load.replica_loads import LocalRequests, RemoteReplicas, SequenceBatch
from dynamo.router.modes.kv import KvPicker

BLOCK, BLOCKS, WORKERS, PER_ITERATION = 16, 256, 16, 16


HASHES = [array("Q", range(at * BLOCKS, (at + 1) * BLOCKS)) for at in range(64)]


def serve(local: LocalRequests, numbers: Any) -> list[bytes]:
    """Start, answer and end the requests of one loop iteration."""
    for _ in range(PER_ITERATION):
        number = next(numbers)
        hashes = HASHES[number % len(HASHES)]
        prompt = HashedPrompt(BLOCK * BLOCKS, BLOCKS, hashes, hashes, hashes)
        reservation = Reservation(0, number % WORKERS, 0, BLOCK * BLOCKS, 0, 0.0)
        local.booked(str(number), reservation, prompt, BLOCK * BLOCKS)
        local.prefill_completed(str(number))
        local.freed(str(number))
    return [encode(batch) for batch in local.take_pending()]


def test_send(benchmark: Any) -> None:
    local, numbers = LocalRequests(1, BLOCK, False, lambda: None), count()
    benchmark(serve, local, numbers)
    benchmark.extra_info["us_a_request"] = benchmark.stats["mean"] * 1e6 / PER_ITERATION


def test_receive(benchmark: Any) -> None:
    local, numbers = LocalRequests(1, BLOCK, False, lambda: None), count()
    picker = KvPicker(RouterSettings(mode="kv"), BLOCK, None)
    for worker in range(WORKERS):
        picker.add_worker(worker, RuntimeConfig())
    remote = RemoteReplicas(PickerLoadSink(picker), lambda router_id: None)
    remote.add_publisher(7)

    def receive(payloads: list[bytes]) -> None:
        for payload in payloads:
            message = decode_message(payload)
            assert isinstance(message, SequenceBatch)
            remote.receive(7, message)

    benchmark.pedantic(receive, setup=lambda: ((serve(local, numbers),), {}), rounds=500)
    assert remote.gaps == 0 and len(picker.active) == 0
    benchmark.extra_info["us_a_request"] = benchmark.stats["mean"] * 1e6 / PER_ITERATION
