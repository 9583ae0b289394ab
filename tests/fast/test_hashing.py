"""Hashing against published vectors, the xxhash package and its reference implementation."""

from __future__ import annotations

import random
from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from oracle import hashing as oracle

from dynamo._fast import hashing

ONE_TO_EIGHT = list(range(1, 9))
LENGTHS = [*range(300), 511, 512, 513, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 5000]
SEEDS = [0, 1, 1337, 0x1234_5678_9ABC_DEF0, 2**64 - 1]
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)
u64 = st.integers(0, 2**64 - 1)


def test_is_compiled() -> None:
    assert hashing.__file__ is not None and hashing.__file__.endswith(".so")


@pytest.mark.parametrize("seed", SEEDS)
def test_every_length_equals_the_xxhash_package(seed: int) -> None:
    data = random.Random(seed).randbytes(max(LENGTHS))
    for length in LENGTHS:
        expected = xxhash.xxh3_64_intdigest(data[:length], seed)
        assert hashing.xxh3_64(data[:length], seed) == expected, length
        assert oracle.xxh3_64(data[:length], seed) == expected, length


def test_unaligned_input() -> None:
    data = random.Random(5).randbytes(2100)
    for offset in range(1, 9):
        view = memoryview(data)[offset:]
        assert hashing.xxh3_64(view, 7) == xxhash.xxh3_64_intdigest(view.tobytes(), 7)


@pytest.mark.parametrize(
    ("prompt", "arguments", "expected"),
    [
        (range(1, 9), {}, [14643705804678351452, 16777012769546811212]),
        (range(1, 11), {}, [14643705804678351452, 16777012769546811212]),
        (range(9, 13), {}, [483935686894639516]),
        (range(13, 17), {}, [135165725823939817]),
        (range(1, 9), {"is_eagle": True}, [1914873892905420881]),
        (
            range(1, 9),
            {"mm_hashes": [[0xDEADBEEF]]},
            [15207512089340001072, 16777012769546811212],
        ),
        (
            range(1, 9),
            {"seed": hashing.seed_for("my-lora")},
            [15671544057904749233, 7919241211032067838],
        ),
        (
            range(1, 9),
            {"seed": hashing.seed_for(cache_namespace="ns1")},
            [6784473505686861528, 10836671426212506877],
        ),
        (range(1, 5), {"seed": hashing.seed_for("my-lora", "ns1")}, [8187777052900518599]),
        (
            range(91, 103),
            {},
            [1785965335803600570, 14386548241230890343, 12699502035523072446],
        ),
        (range(1, 4), {}, []),
    ],
)
def test_published_vectors(
    prompt: range, arguments: dict[str, object], expected: list[int]
) -> None:
    for form in (list(prompt), tuple(prompt), array("I", prompt)):
        assert hashing.block_hashes(form, 4, **arguments).tolist() == expected  # type: ignore[arg-type]
    assert oracle.block_hashes(list(prompt), 4, **arguments) == expected  # type: ignore[arg-type]


def test_published_sequence_vector() -> None:
    chained = hashing.sequence_hashes(hashing.block_hashes(list(range(91, 103)), 4))
    expected = [1785965335803600570, 11038709386155873680, 3314851464921140416]
    assert chained.tolist() == expected
    assert chained.typecode == "Q"


@given(
    tokens,
    st.integers(1, 70),
    u64,
    st.booleans(),
    st.none() | st.lists(st.none() | st.lists(u64, max_size=3), max_size=6),
)
def test_equals_the_reference(
    prompt: list[int],
    block_size: int,
    seed: int,
    is_eagle: bool,
    mm_hashes: list[list[int] | None] | None,
) -> None:
    expected = oracle.block_hashes(
        prompt, block_size, seed=seed, is_eagle=is_eagle, mm_hashes=mm_hashes
    )
    for form in (prompt, array("I", prompt)):
        found = hashing.block_hashes(
            form, block_size, seed=seed, is_eagle=is_eagle, mm_hashes=mm_hashes
        )
        assert found.tolist() == expected


@pytest.mark.parametrize("block_size", [4, 5, 8, 16, 32, 64, 128, 512])
def test_long_prompts_in_every_block_size(block_size: int) -> None:
    prompt = array("I", (random.Random(block_size).getrandbits(32) for _ in range(1500)))
    found = hashing.block_hashes(prompt, block_size).tolist()
    raw = prompt.tobytes()
    size = block_size * 4
    starts = range(0, len(raw) - size + 1, size)
    assert found == [xxhash.xxh3_64_intdigest(raw[at : at + size], 1337) for at in starts]


@given(st.lists(u64, max_size=20))
def test_sequence_hashes_equal_the_reference(hashes: list[int]) -> None:
    expected = oracle.sequence_hashes(hashes)
    column = array("Q", hashes)
    assert hashing.sequence_hashes(column).tolist() == expected
    assert hashing.sequence_hashes(column.tobytes()).tolist() == expected
    assert hashing.sequence_hashes(memoryview(b"x" + column.tobytes())[1:]).tolist() == expected
    signed = array("q", column.tobytes())
    assert hashing.sequence_hashes(signed).tolist() == expected


@given(st.none() | st.text(), st.none() | st.text())
def test_seeds_equal_the_reference(lora_name: str | None, cache_namespace: str | None) -> None:
    expected = oracle.seed_for(lora_name, cache_namespace)
    assert hashing.seed_for(lora_name, cache_namespace) == expected


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="kv_block_size cannot be 0"):
        hashing.block_hashes([1], 0)
    with pytest.raises(ValueError, match="kv_block_size cannot be -4"):
        hashing.block_hashes([1], -4)


def test_huge_block_size_hashes_nothing() -> None:
    assert hashing.block_hashes([1, 2, 3], 2**62).tolist() == []
    assert hashing.block_hashes([1, 2, 3], 2**62, is_eagle=True).tolist() == []


@pytest.mark.parametrize("bad", [-1, 2**32, -(2**70), 2**70])
def test_a_token_out_of_range_is_named(bad: int) -> None:
    with pytest.raises(ValueError, match=f"token 2 must be in 0..4294967295, got {bad}"):
        hashing.block_hashes([1, 2**32 - 1, bad, 4], 4)


def test_a_token_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        hashing.block_hashes([1, 2.0], 2)  # type: ignore[list-item]


def test_integer_like_tokens_and_iterables() -> None:
    class Seven:
        def __index__(self) -> int:
            return 7

    prompt = [True, Seven(), 3, 4]
    expected = hashing.block_hashes([1, 7, 3, 4], 4).tolist()
    assert hashing.block_hashes(prompt, 4).tolist() == expected  # type: ignore[arg-type]
    assert hashing.block_hashes(iter([1, 7, 3, 4]), 4).tolist() == expected


def test_a_list_that_shrinks_while_it_is_read() -> None:
    class Clears:
        def __index__(self) -> int:
            prompt.clear()
            return 5

    prompt: list[object] = [1, Clears(), 3, 4]
    expected = hashing.block_hashes([1, 5, 3, 4], 4).tolist()
    assert hashing.block_hashes(prompt, 4).tolist() == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("code", ["i", "f", "Q", "B", "H"])
def test_other_buffers_are_refused(code: str) -> None:
    with pytest.raises(TypeError, match="unsigned 32-bit"):
        hashing.block_hashes(array(code, [1, 2, 3, 4]), 4)


def test_ragged_columns_are_refused() -> None:
    with pytest.raises(BufferError):
        hashing.block_hashes(memoryview(array("I", range(8)))[::2], 2)
    with pytest.raises(ValueError, match="7 bytes"):
        hashing.sequence_hashes(b"1234567")
    with pytest.raises(TypeError, match="64-bit"):
        hashing.sequence_hashes(array("I", [1, 2]))


@pytest.mark.parametrize("bad", [-1, 2**64])
def test_a_multimodal_hash_out_of_range_is_named(bad: int) -> None:
    with pytest.raises(ValueError, match=r"mm_hashes\[1\]"):
        hashing.block_hashes(ONE_TO_EIGHT, 4, mm_hashes=[None, [bad]])
