"""A dump of 200,000 blocks, from the bytes of the answer to the index, in steps of the loop.

The column that counts is ``longest_ms`` (extra info): for so long the loop is held at once.
Target: 25 ms.

    python -m pytest benchmarks/micro/bench_recovery.py --benchmark-enable --benchmark-verbose
"""

from __future__ import annotations

import time
from array import array
from random import Random
from typing import Any

import pytest

from dynamo._fast.radix import RadixTree
from dynamo.protocols import codec
from dynamo.protocols.kv import BlocksStored, KvEvent, KvQueryAnswer
from dynamo.router.caches.indexer import EventMetrics, Indexer, Recovery
from dynamo.router.connect import event_feed as recovery

BLOCKS = 200_000


class Counts(EventMetrics):
    """Counts nothing."""

    def __init__(self) -> None:
        pass

    def applied(self, event_type: str, status: str, count: int = 1) -> None:
        """Nothing."""

    def warning(self, kind: str, count: int = 1) -> None:
        """Nothing."""


def dump(chain: int) -> bytes:
    """An answer of ``BLOCKS`` blocks in chains of ``chain`` from the root."""
    source = Random(1)

    def column() -> bytes:
        return array("Q", [source.getrandbits(64) for _ in range(chain)]).tobytes()

    events = [KvEvent(n, BlocksStored(column(), column())) for n in range(BLOCKS // chain)]
    return codec.encode(KvQueryAnswer("tree_dump", events, 1))


@pytest.mark.parametrize("chain", [1, 8, 200])
def test_dump(benchmark: Any, chain: int) -> None:
    payload, longest = dump(chain), 0.0

    def take() -> None:
        nonlocal longest
        asked: list[Recovery] = []
        index = RadixTree()
        indexer = Indexer(index, asked.append, Counts())
        indexer.add(7, 0, index.slot(7, 0))
        at = time.perf_counter()
        answer = recovery._decode_answer(payload)
        events = map(recovery._decode_event, answer.events)
        for _ in indexer.recovery_steps(asked[0], answer.header(), events):
            now = time.perf_counter()
            longest, at = max(longest, now - at), now
        longest = max(longest, time.perf_counter() - at)
        assert index.blocks() == BLOCKS

    benchmark.pedantic(take, rounds=5)
    benchmark.extra_info["longest_ms"] = round(longest * 1e3, 2)
    print(f" longest step {longest * 1e3:.2f} ms ", end="")
