"""Hashing a 16k-token prompt, from a list and from an array, beside the xxhash package.

python -m pytest benchmarks/micro/bench_hashing.py --benchmark-enable
"""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest
import xxhash

from dynamo._fast.hashing import BLOCK_SEED, block_hashes, sequence_hashes, xxh3_64

TOKENS = 16_384
SOURCE = Random(1)
PROMPT = [SOURCE.randrange(150_000) for _ in range(TOKENS)]
PACKED = array("I", PROMPT)
BLOCK_SIZES = [16, 32, 64, 128, 512]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_from_a_list(benchmark: Any, block_size: int) -> None:
    assert len(benchmark(block_hashes, PROMPT, block_size)) == TOKENS // block_size


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_from_an_array(benchmark: Any, block_size: int) -> None:
    assert len(benchmark(block_hashes, PACKED, block_size)) == TOKENS // block_size


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_by_the_xxhash_package(benchmark: Any, block_size: int) -> None:
    raw, size = memoryview(PACKED).cast("B"), block_size * 4
    digest = xxhash.xxh3_64_intdigest

    def hash_all() -> list[int]:
        return [digest(raw[at : at + size], BLOCK_SEED) for at in range(0, len(raw), size)]

    assert benchmark(hash_all) == block_hashes(PACKED, block_size).tolist()


def test_sequence_of_1024_blocks(benchmark: Any) -> None:
    hashes = block_hashes(PACKED, 16)
    assert len(benchmark(sequence_hashes, hashes)) == len(hashes)


@pytest.mark.parametrize("digest", [xxh3_64, xxhash.xxh3_64_intdigest], ids=["own", "xxhash"])
def test_64_kilobytes_at_once(benchmark: Any, digest: Any) -> None:
    raw = PACKED.tobytes()
    assert benchmark(digest, raw, 0) == xxhash.xxh3_64_intdigest(raw, 0)
