"""Scoring and active load alone: 16 slots, a 4k-token prompt of 256 blocks.

python -m pytest benchmarks/micro/bench_scoring.py --benchmark-enable
"""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest
from oracle import scoring as reference
from oracle.sequences import ActiveSequences as ReferenceSequences

from dynamo._fast.scoring import Weights, choose, costs
from dynamo._fast.sequences import ActiveSequences

SLOTS, BLOCKS = 16, 256
SOURCE = Random(1)
HASHES = array("Q", [SOURCE.getrandbits(64) for _ in range(BLOCKS)])


def columns() -> tuple[array[int], ...]:
    """Prefill, decode and overlap of every slot."""
    prefill = array("q", [SOURCE.randrange(50_000) for _ in range(SLOTS)])
    decode = array("q", [SOURCE.randrange(2_000) for _ in range(SLOTS)])
    return prefill, decode, array("I", [SOURCE.randrange(BLOCKS) for _ in range(SLOTS)])


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_score_and_choose(benchmark: Any, temperature: float) -> None:
    prefill, decode, device = columns()
    out, slots, weights = array("d", bytes(8 * SLOTS)), array("I", range(SLOTS)), Weights(16)

    def decide() -> int:
        costs(weights, 4096, slots, prefill, decode, out, device)
        return choose(out, SLOTS, temperature, 0.5)

    benchmark(decide)


def test_score_and_choose_reference(benchmark: Any) -> None:
    prefill, decode, device = columns()
    rows = zip(prefill, decode, device, strict=True)
    loads = [reference.Load(*row) for row in rows]
    benchmark(
        lambda: reference.choose(reference.costs(reference.Weights(16), 4096, loads), 0.0, 0.5)
    )


def held(made: Any) -> Any:
    """Eight other requests of the same length on every slot, one of them with this prefix."""
    for slot in range(SLOTS):
        made.book(slot, HASHES, 0, 100)
        for _ in range(7):
            other = array("Q", [SOURCE.getrandbits(64) for _ in range(BLOCKS)])
            made.book(slot, other, 0, 100)
    return made


def test_project(benchmark: Any) -> None:
    active = held(ActiveSequences())
    prefill, decode = array("q", bytes(8 * SLOTS)), array("q", bytes(8 * SLOTS))
    benchmark(lambda: active.project_into(HASHES, 0, prefill, decode))


def test_project_reference(benchmark: Any) -> None:
    active = held(ReferenceSequences())
    benchmark(lambda: active.project(HASHES, 0, SLOTS))


def test_book_and_release(benchmark: Any) -> None:
    active = held(ActiveSequences())
    fresh = array("Q", [SOURCE.getrandbits(64) for _ in range(BLOCKS)])
    benchmark(lambda: active.release(active.book(3, fresh, 0, 4096)))
