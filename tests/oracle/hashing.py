"""XXH3-64 and the block hashes over it in plain Python: slow, readable, the last word."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

__all__ = ["BLOCK_SEED", "block_hashes", "seed_for", "sequence_hashes", "xxh3_64"]

BLOCK_SEED = 1337

U64 = (1 << 64) - 1
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
PRIME64_3, PRIME64_4, PRIME64_5 = 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1, PRIME_MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
STRIPE_BYTES = 64
CHUNK_STRIPES = 16

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def seed_for(lora_name: str | None = None, cache_namespace: str | None = None) -> int:
    seed = BLOCK_SEED
    if lora_name:
        seed += xxh3_64(lora_name.encode(), 0)
    if cache_namespace:
        seed += xxh3_64(cache_namespace.encode(), 1)
    return seed & U64


def block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    seed: int = BLOCK_SEED,
    is_eagle: bool = False,
    mm_hashes: Sequence[Sequence[int] | None] | None = None,
) -> list[int]:
    window = block_size + is_eagle
    hashes = []
    for block, start in enumerate(range(0, len(tokens) - window + 1, block_size)):
        objects = mm_hashes[block] if mm_hashes and block < len(mm_hashes) else None
        payload = struct.pack(f"<{window}I", *tokens[start : start + window])
        payload += b"".join(struct.pack("<Q", mm_hash) for mm_hash in sorted(objects or ()))
        hashes.append(xxh3_64(payload, seed))
    return hashes


def sequence_hashes(hashes: Sequence[int]) -> list[int]:
    chained: list[int] = []
    for block_hash in hashes:
        word = block_hash & U64
        if chained:
            word = xxh3_64(struct.pack("<QQ", chained[-1], word), BLOCK_SEED)
        chained.append(word)
    return chained


def xxh3_64(data: bytes, seed: int = 0) -> int:
    size = len(data)
    if size > 240:
        return _long(data, seed)
    if size > 128:
        return _129_to_240(data, seed)
    if size > 16:
        return _17_to_128(data, seed)
    if size > 8:
        return _9_to_16(data, seed)
    if size >= 4:
        return _4_to_8(data, seed)
    return _0_to_3(data, seed)


def _0_to_3(data: bytes, seed: int) -> int:
    size = len(data)
    if size == 0:
        return _avalanche_xxh64(seed ^ _u64(SECRET, 56) ^ _u64(SECRET, 64))
    combined = data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8
    return _avalanche_xxh64(combined ^ ((_u32(SECRET, 0) ^ _u32(SECRET, 4)) + seed & U64))


def _4_to_8(data: bytes, seed: int) -> int:
    size = len(data)
    swapped = int.from_bytes((seed & 0xFFFFFFFF).to_bytes(4, "little"), "big") << 32
    flip = (_u64(SECRET, 8) ^ _u64(SECRET, 16)) - (seed ^ swapped) & U64
    mixed = (_u32(data, size - 4) + (_u32(data, 0) << 32)) ^ flip
    mixed ^= _rotate(mixed, 49) ^ _rotate(mixed, 24)
    mixed = mixed * PRIME_MX2 & U64
    mixed ^= (mixed >> 35) + size
    mixed = mixed * PRIME_MX2 & U64
    return mixed ^ mixed >> 28


def _9_to_16(data: bytes, seed: int) -> int:
    size = len(data)
    low = _u64(data, 0) ^ ((_u64(SECRET, 24) ^ _u64(SECRET, 32)) + seed & U64)
    high = _u64(data, size - 8) ^ ((_u64(SECRET, 40) ^ _u64(SECRET, 48)) - seed & U64)
    swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
    return _avalanche(size + swapped + high + _fold(low, high))


def _17_to_128(data: bytes, seed: int) -> int:
    size = len(data)
    pairs = (size - 1) // 32 + 1
    total = size * PRIME64_1
    for i in range(pairs):
        total += _mix16(data, 16 * i, 32 * i, seed)
        total += _mix16(data, size - 16 * (i + 1), 32 * i + 16, seed)
    return _avalanche(total)


def _129_to_240(data: bytes, seed: int) -> int:
    size = len(data)
    total = size * PRIME64_1 + sum(_mix16(data, 16 * i, 16 * i, seed) for i in range(8))
    total = _avalanche(total)
    total += sum(_mix16(data, 16 * i, 16 * (i - 8) + 3, seed) for i in range(8, size // 16))
    total += _mix16(data, size - 16, 136 - 17, seed)
    return _avalanche(total)


def _long(data: bytes, seed: int) -> int:
    size = len(data)
    secret = b"".join(
        struct.pack("<QQ", _u64(SECRET, at) + seed & U64, _u64(SECRET, at + 8) - seed & U64)
        for at in range(0, len(SECRET), 16)
    )
    lanes = [
        *(PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3),
        *(PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1),
    ]
    for number, at in enumerate(range(0, size - STRIPE_BYTES, STRIPE_BYTES)):
        in_chunk = number % CHUNK_STRIPES
        if number and in_chunk == 0:
            lanes = _scramble(lanes, secret)
        lanes = _accumulate(lanes, data, at, secret, 8 * in_chunk)
    # A whole number of chunks plus 1 to 64 bytes: the chunk is scrambled before the last stripe.
    if (size - 1) % (CHUNK_STRIPES * STRIPE_BYTES) < STRIPE_BYTES:
        lanes = _scramble(lanes, secret)
    lanes = _accumulate(lanes, data, size - STRIPE_BYTES, secret, len(secret) - STRIPE_BYTES - 7)
    total = size * PRIME64_1
    for i in range(0, 8, 2):
        low, high = _u64(secret, 11 + 8 * i), _u64(secret, 19 + 8 * i)
        total += _fold(lanes[i] ^ low, lanes[i + 1] ^ high)
    return _avalanche(total)


def _accumulate(lanes: list[int], data: bytes, at: int, secret: bytes, offset: int) -> list[int]:
    values = list(_words(data, at))
    keys = [value ^ key for value, key in zip(values, _words(secret, offset), strict=True)]
    return [
        lanes[i] + values[i ^ 1] + (keys[i] & 0xFFFFFFFF) * (keys[i] >> 32) & U64 for i in range(8)
    ]


def _scramble(lanes: list[int], secret: bytes) -> list[int]:
    keys = _words(secret, len(secret) - STRIPE_BYTES)
    return [
        (lane ^ lane >> 47 ^ key) * PRIME32_1 & U64 for lane, key in zip(lanes, keys, strict=True)
    ]


def _mix16(data: bytes, at: int, offset: int, seed: int) -> int:
    low = _u64(data, at) ^ (_u64(SECRET, offset) + seed & U64)
    high = _u64(data, at + 8) ^ (_u64(SECRET, offset + 8) - seed & U64)
    return _fold(low, high)


def _fold(left: int, right: int) -> int:
    product = left * right
    return (product & U64) ^ (product >> 64)


def _avalanche(mixed: int) -> int:
    mixed &= U64
    mixed = (mixed ^ mixed >> 37) * PRIME_MX1 & U64
    return mixed ^ mixed >> 32


def _avalanche_xxh64(mixed: int) -> int:
    mixed = (mixed ^ mixed >> 33) * PRIME64_2 & U64
    mixed = (mixed ^ mixed >> 29) * PRIME64_3 & U64
    return mixed ^ mixed >> 32


def _rotate(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & U64


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _u64(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def _words(data: bytes, at: int) -> Iterator[int]:
    return iter(struct.unpack_from("<8Q", data, at))
