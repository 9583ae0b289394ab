"""A whole routing decision: hash, match, project, score, choose, book, free.

4,096 tokens in blocks of 16, 16 workers, an index of 100,000 blocks. Target: 60 µs.

    python -m pytest benchmarks/micro/bench_decision.py --benchmark-enable
"""

from __future__ import annotations

from array import array
from itertools import count
from random import Random
from typing import Any

import pytest

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.labels import RouterLabels
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.kv_metrics import DecisionMetrics

BLOCK, TOKENS, WORKERS, INDEXED = 16, 4096, 16, 100_000


def prompt(source: Random) -> array[int]:
    """Random token ids."""
    return array("I", [source.randrange(150_000) for _ in range(TOKENS)])


def box(cached: float, **given: Any) -> tuple[KvPicker, list[array[int]]]:
    """A router with a full index and running requests, and prompts to route; ``given`` are its
    settings.

    ``cached`` is the share of each prompt that four of the workers hold.
    """
    source = Random(1)
    settings = RouterSettings(mode="kv", **given)
    index = RadixTree()
    metrics = DecisionMetrics(Registry(), RouterLabels("ns", "backend"))
    picker = KvPicker(settings, BLOCK, index, metrics, source)
    for worker in range(WORKERS):
        picker.add_worker(worker, RuntimeConfig())
    prompts = [prompt(source) for _ in range(64)]
    for tokens in prompts:
        local = block_hashes(tokens, BLOCK)[: int(cached * TOKENS / BLOCK)]
        for worker in source.sample(range(WORKERS), 4) if local else ():
            index.store(index.slot(worker, 0), None, sequence_hashes(local), local)
    while index.blocks() < INDEXED:
        local = block_hashes(prompt(source), BLOCK)
        slot = index.slot(source.randrange(WORKERS), 0)
        index.store(slot, None, sequence_hashes(local), local)
    for number in range(WORKERS * 8):
        picker.pick(f"running {number}", prompt(source))
    return picker, prompts


def measure(benchmark: Any, picker: KvPicker, prompts: list[array[int]]) -> None:
    """Route the prompts in turn."""
    numbers = count()

    def decide() -> None:
        number = next(numbers)
        request_id = str(number)
        picker.pick(request_id, prompts[number % len(prompts)])
        picker.free(request_id)

    benchmark(decide)


@pytest.mark.parametrize("cost", ["blocks", "seconds"])
@pytest.mark.parametrize("cached", [0.0, 0.5, 1.0])
def test_decision(benchmark: Any, cached: float, cost: str) -> None:
    picker, prompts = box(cached, cost=cost)
    measure(benchmark, picker, prompts)


def test_decision_with_a_prefill_model(benchmark: Any) -> None:
    """As the first, every worker with prefills that fade."""
    picker, prompts = box(0.0, prefill_load_predictor=lambda tokens, cached: tokens * 1e-4)
    measure(benchmark, picker, prompts)


def test_decision_with_lower_tiers(benchmark: Any) -> None:
    """Half of each prompt on the device of four workers, all of it in their host memory and on
    their disks."""
    picker, prompts = box(0.5)
    index = picker.index
    assert index is not None
    for number, tokens in enumerate(prompts):
        local = block_hashes(tokens, BLOCK)
        for worker in range(number % 4, WORKERS, 4):
            for tier in (1, 2):
                index.store(index.slot(worker, 0, tier), None, sequence_hashes(local), local)
    measure(benchmark, picker, prompts)


def test_decision_while_outputs_are_tracked(benchmark: Any) -> None:
    """32 workers, 6,400 running requests with expected lengths, of which 200 fill a block between
    two decisions. Target: 100 µs."""
    settings = RouterSettings(mode="kv", track_output_blocks=True)
    source = Random(1)
    picker = KvPicker(settings, BLOCK, RadixTree(), None, source)
    for worker in range(32):
        picker.add_worker(worker, RuntimeConfig())
    routing = Routing(expected_output_tokens=10_000)
    prompts = [prompt(source)[:1024] for _ in range(64)]
    for number in range(6400):
        start = prompts[number % 64][: 16 * (number % 40)]
        picker.pick(str(number), start + prompt(source)[:256], routing=routing)
        picker.add_output_tokens(str(number), BLOCK)
    numbers = count()

    def generate() -> tuple[tuple[Any, ...], dict[str, Any]]:
        for _ in range(200):
            picker.add_output_tokens(str(source.randrange(6400)), BLOCK)
        return (), {}

    def decide() -> None:
        number = next(numbers)
        request_id = f"new {number}"
        picker.pick(request_id, prompts[number % 64], routing=routing)
        picker.free(request_id)

    benchmark.pedantic(decide, setup=generate, rounds=500)
