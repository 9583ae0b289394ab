"""What sharing load with replicas costs a request: told by one router, heard by another.

4,096 tokens in blocks of 16, 16 workers; 16 requests a loop turn, as under load. ``told`` counts
booking, first token and end of one request into messages, ``heard`` decodes and books them; the
socket's share is in bench_request_plane's scale (about 10 µs a message, shared by a turn).

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


def life(local: LocalRequests, numbers: Any) -> list[bytes]:
    """A loop turn in which so many requests begin, answer and end."""
    for _ in range(A_TURN):
        number = next(numbers)
        hashes = HASHES[number % len(HASHES)]
        prompt = HashedPrompt(BLOCK * BLOCKS, BLOCKS, hashes, hashes, 0)
        reservation_id = Reservation(0, number % WORKERS, 0, BLOCK * BLOCKS, 0, 0.0)
        local.booked(str(number), reservation_id, prompt, BLOCK * BLOCKS)
        local.prefill_completed(str(number))
        local.freed(str(number))
    return [encode(batch) for batch in local.take_pending()]


def test_told(benchmark: Any) -> None:
    local, numbers = LocalRequests(1, BLOCK, False, lambda: None), count()
    benchmark(life, local, numbers)
    benchmark.extra_info["us_a_request"] = benchmark.stats["mean"] * 1e6 / A_TURN


def test_heard(benchmark: Any) -> None:
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

    benchmark.pedantic(receive, setup=lambda: ((life(local, numbers),), {}), rounds=500)
    assert remote.gaps == 0 and len(picker.active) == 0
    benchmark.extra_info["us_a_request"] = benchmark.stats["mean"] * 1e6 / A_TURN
