from array import array
from collections.abc import Sequence

from typing_extensions import Buffer

BLOCK_SEED: int

def xxh3_64(data: Buffer, seed: int = 0) -> int: ...
def seed_for(lora_name: str | None = None, cache_namespace: str | None = None) -> int: ...
def block_hashes(
    tokens: Buffer | Sequence[int],
    block_size: int,
    *,
    seed: int = ...,
    is_eagle: bool = False,
    mm_hashes: Sequence[Sequence[int]] | None = None,
) -> array[int]: ...
def sequence_hashes(block_hashes: Buffer) -> array[int]: ...
