"""Measure the cost of sharing load with replicas: sent by one router, received by another.

4,096 tokens in blocks of 16, 16 workers; 16 requests a loop iteration, as under load. ``send``
encodes reservation, first token and end of one request into messages, ``receive`` decodes and
applies them. The socket's share is on the scale of bench_request_plane (about 10 µs a message,
shared by an iteration).

    python -m pytest benchmarks/micro/bench_sync.py --benchmark-enable
"""

from __future__ import annotations

from array import array
from itertools import count
from typing import Any

from dynamo.config.router import RouterSettings
from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.codec import encode
from dynamo.protocols.sync import SequenceBatch
from dynamo.router.kv import KvPicker
from dynamo.router.load.active import Reservation
from dynamo.router.prompt import HashedPrompt
from dynamo.router.sync.local import LocalRequests
from dynamo.router.sync.remote import RemoteReplicas
from dynamo.router.sync.replicas import PickerLoadSink, decode_message

BLOCK, BLOCKS, WORKERS, A_TURN = 16, 256, 16, 16


HASHES = [array("Q", range(at * BLOCKS, (at + 1) * BLOCKS)) for at in range(64)]


def life(own: LocalRequests, numbers: Any) -> list[bytes]:
    """A loop turn in which so many requests begin, answer and end."""
    for _ in range(A_TURN):
        number = next(numbers)
        hashes = HASHES[number % len(HASHES)]
        prompt = HashedPrompt(BLOCK * BLOCKS, BLOCKS, hashes, hashes, 0)
        reservation_id = Reservation(0, number % WORKERS, 0, BLOCK * BLOCKS, 0, 0.0)
        own.booked(str(number), reservation_id, prompt, BLOCK * BLOCKS)
        own.prefill_completed(str(number))
        own.freed(str(number))
    return [encode(batch) for batch in own.news()]


def test_send(benchmark: Any) -> None:
    own, numbers = LocalRequests(1, BLOCK, False, lambda: None), count()
    benchmark(life, own, numbers)
    benchmark.extra_info["us_a_request"] = benchmark.stats["mean"] * 1e6 / A_TURN


def test_receive(benchmark: Any) -> None:
    own, numbers = LocalRequests(1, BLOCK, False, lambda: None), count()
    picker = KvPicker(RouterSettings(mode="kv"), BLOCK, None)
    for worker in range(WORKERS):
        picker.add_worker(worker, RuntimeConfig())
    peers = RemoteReplicas(PickerLoadSink(picker), lambda router_id: None)
    peers.came(7)

    def hear(payloads: list[bytes]) -> None:
        for payload in payloads:
            message = decode_message(payload)
            assert isinstance(message, SequenceBatch)
            peers.hear(7, message)

    benchmark.pedantic(hear, setup=lambda: ((life(own, numbers),), {}), rounds=500)
    assert peers.gaps == 0 and len(picker.active) == 0
    benchmark.extra_info["us_a_request"] = benchmark.stats["mean"] * 1e6 / A_TURN
