from array import array
from collections.abc import Iterable, Sequence

from typing_extensions import Buffer

__all__ = ["BLOCK_SEED", "block_hashes", "seed_for", "sequence_hashes", "xxh3_64"]

BLOCK_SEED: int

def xxh3_64(data: Buffer, seed: int = 0) -> int: ...
def seed_for(lora_name: str | None = None, cache_namespace: str | None = None) -> int: ...
def block_hashes(
    tokens: Buffer | Iterable[int],
    block_size: int,
    *,
    seed: int = 1337,
    is_eagle: bool = False,
    mm_hashes: Iterable[Sequence[int] | None] | None = None,
) -> array[int]: ...
def sequence_hashes(block_hashes: Buffer) -> array[int]: ...
