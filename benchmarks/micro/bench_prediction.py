"""A whole routing decision without KV events beside one with them: what predicting costs.

Blocks of 16, 16 workers, prompts that were routed before. ``events`` looks only; ``ttl`` and
``lru`` also store the prompt where it goes and forget something older. Target: 60 µs, 4k tokens.

    python -m pytest benchmarks/micro/bench_prediction.py --benchmark-enable
"""

from __future__ import annotations

from array import array
from itertools import count
from random import Random
from typing import Any

import pytest

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo.config.router import RouterSettings
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker

BLOCK, WORKERS, PROMPTS = 16, 16, 96


def box(mode: str, tokens: int) -> tuple[KvPicker, list[Any]]:
    """A router whose index is as full as it gets, and prompts, a third of each shared by all."""
    source = Random(1)
    predicts = mode != "events"
    settings = RouterSettings(
        mode="kv",
        kv_events=not predicts,
        approximate_cache_policy=mode if predicts else "ttl",
        max_tree_size=PROMPTS * tokens // BLOCK // 2,
    )
    index = make_index(settings)
    picker = KvPicker(settings, BLOCK, index, None, source)
    assert index is not None
    for worker in range(WORKERS):
        picker.add_worker(worker, RuntimeConfig(total_kv_blocks=settings.max_tree_size // WORKERS))
    shared = source.choices(range(150_000), k=tokens // 3)
    rest = tokens - len(shared)
    prompts = [array("I", shared + source.choices(range(150_000), k=rest)) for _ in range(PROMPTS)]
    for number, prompt in enumerate(prompts):
        if not predicts:
            local = block_hashes(prompt, BLOCK)
            index.store(index.slot(number % WORKERS, 0), None, sequence_hashes(local), local)
    return picker, prompts


@pytest.mark.parametrize("mode", ["events", "ttl", "lru"])
@pytest.mark.parametrize("tokens", [4096, 22_528])
def test_prediction(benchmark: Any, mode: str, tokens: int) -> None:
    picker, prompts = box(mode, tokens)
    numbers = count()

    def decide() -> None:
        number = next(numbers)
        request_id = str(number)
        picker.pick(request_id, prompts[number % PROMPTS])
        picker.mark_prefill_complete(request_id)
        picker.free(request_id)

    for _ in range(2 * PROMPTS):
        decide()
    benchmark(decide)
