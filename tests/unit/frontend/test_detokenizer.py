"""Streamed text is the text of all ids at once, and no piece ends inside a character."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_kit import example_preprocessor, example_reference
from tokenizer_kit import write_llama_like, write_metaspace
from tokenizers import Tokenizer as Reference

from dynamo.frontend.text.detokenizer import (
    PrefixDetokenizer,
    TableDetokenizer,
    make_detokenizer,
)
from dynamo.frontend.text.tokenizer import Tokenizer, load_tokenizer

FAMILIES: dict[str, Callable[[Path], None]] = {
    "llama": write_llama_like,
    "gemma": functools.partial(write_llama_like, strip=False),
    "metaspace": write_metaspace,
    "metaspace-bytes": functools.partial(write_metaspace, byte_fallback=True),
}
BYTE_FALLBACK = ["llama", "gemma", "metaspace-bytes"]
cuts = st.lists(st.integers(1, 20), min_size=1, max_size=8)
WORDS = st.sampled_from(["hello", " world", " ", "  ", "😀", "é", "你好", "<s>", "</s>", "x", " a"])


@functools.cache
def other_model(family: str) -> tuple[Tokenizer, Reference]:
    with tempfile.TemporaryDirectory(prefix="detokenizer-") as directory:
        FAMILIES[family](Path(directory))
        return load_tokenizer(directory), Reference.from_file(f"{directory}/tokenizer.json")


def byte_ids(reference: Reference, text: str) -> list[int]:
    """``text`` in byte tokens alone, as for characters that no token has."""
    found = [reference.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    return [one for one in found if one is not None]


@st.composite
def fallback_ids(draw: st.DrawFn, reference: Reference) -> list[int]:
    """Any tokens, among them whole characters in byte tokens."""
    vocab = reference.get_vocab()
    words = st.sampled_from([each for name, each in vocab.items() if not name.startswith("<0x")])
    characters = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
    parts = st.one_of(
        words.map(lambda each: [each]), characters.map(lambda each: byte_ids(reference, each))
    )
    return [each for part in draw(st.lists(parts, max_size=16)) for each in part]


def stream(
    detokenizer: TableDetokenizer | PrefixDetokenizer, ids: list[int], sizes: list[int]
) -> list[str]:
    texts, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        texts.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return texts


def without_broken_end(decode: Callable[[list[int]], str], ids: list[int]) -> str:
    """The text of the longest prefix that does not end in a broken character."""
    for end in range(len(ids), 0, -1):
        text = decode(ids[:end])
        if not text.endswith("\ufffd"):
            return text
    return ""


@given(st.lists(st.integers(0, 4102), max_size=30), cuts, st.booleans())
@settings(deadline=None)
def test_any_ids_cut_in_any_way(ids: list[int], sizes: list[int], skip: bool) -> None:
    tokenizer = example_preprocessor().tokenizer
    texts = stream(make_detokenizer(tokenizer, skip), ids, sizes)
    reference = example_reference()
    assert "".join(texts) == without_broken_end(lambda each: reference.decode(each, skip), ids)


@given(st.text(), cuts)
@settings(deadline=None)
def test_whole_text_never_shows_a_broken_character(text: str, sizes: list[int]) -> None:
    text = text.replace("\ufffd", "")
    tokenizer = example_preprocessor().tokenizer
    ids = tokenizer.encode(text).tolist()
    texts = stream(make_detokenizer(tokenizer, False), ids, sizes)
    assert not any("\ufffd" in each for each in texts)
    assert "".join(texts) == tokenizer.decode(ids, False)


@pytest.mark.parametrize("family", FAMILIES)
@given(words=st.lists(WORDS, max_size=12), sizes=cuts, skip=st.booleans())
@settings(deadline=None)
def test_other_families(family: str, words: list[str], sizes: list[int], skip: bool) -> None:
    tokenizer, reference = other_model(family)
    ids = tokenizer.encode("".join(words)).tolist()
    detokenizer = make_detokenizer(tokenizer, skip)
    kind = PrefixDetokenizer if family.startswith("metaspace") else TableDetokenizer
    assert isinstance(detokenizer, kind)
    assert "".join(stream(detokenizer, ids, sizes)) == reference.decode(ids, skip)


@pytest.mark.parametrize("family", BYTE_FALLBACK)
@given(data=st.data(), sizes=cuts, skip=st.booleans())
@settings(deadline=None)
def test_characters_in_byte_tokens(
    family: str, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    tokenizer, reference = other_model(family)
    ids = data.draw(fallback_ids(reference))
    text = reference.decode(ids, skip)
    assert tokenizer.decode(ids, skip) == text
    assert "".join(stream(make_detokenizer(tokenizer, skip), ids, sizes)) == text


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), sizes=cuts, skip=st.booleans())
@settings(deadline=None)
def test_any_cutting_of_any_ids_gives_one_text(
    family: str, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    tokenizer, reference = other_model(family)
    last = reference.get_vocab_size() + 2  # ids without a token too
    ids = data.draw(st.lists(st.one_of(st.integers(0, last), st.integers(3, 258)), max_size=40))
    text = "".join(stream(make_detokenizer(tokenizer, skip), ids, sizes))
    assert text == "".join(stream(make_detokenizer(tokenizer, skip), ids, [1]))
    if tokenizer.pieces is not None:
        assert text == without_broken_end(lambda each: tokenizer.decode(each, skip), ids)


def test_a_broken_character_costs_its_own_bytes_only() -> None:
    tokenizer, reference = other_model("llama")
    ids = byte_ids(reference, "good 你")[:-1]
    assert tokenizer.decode(ids) == "good \ufffd"
    assert stream(make_detokenizer(tokenizer), ids, [3]) == ["goo", "d ", ""]
    assert stream(make_detokenizer(tokenizer), [*ids, *ids], [9]) == ["good \ufffdgo", "od "]
    assert tokenizer.token_text(reference.token_to_id("▁")) == " "  # type: ignore[arg-type]


def test_a_character_in_three_tokens_is_held_back() -> None:
    tokenizer = example_preprocessor().tokenizer
    ids = tokenizer.encode("☃").tolist()
    assert len(ids) == 3
    detokenizer = make_detokenizer(tokenizer)
    assert [detokenizer.push([each]) for each in ids] == ["", "", "☃"]
    detokenizer = make_detokenizer(tokenizer)
    assert [detokenizer.push(ids[:2]), detokenizer.push([71])] == ["", "\ufffdh"]
    assert detokenizer.push(ids[:1]) == ""


def test_unknown_ids_have_no_text() -> None:
    detokenizer = make_detokenizer(example_preprocessor().tokenizer)
    assert detokenizer.push([999_999]) == ""
    assert detokenizer.push([71, 999_999, 72]) == "hi"
    assert detokenizer.push([]) == ""


def test_prefix_window_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _ = other_model("metaspace-bytes")
    ids = tokenizer.encode("hello world this is a test " * 50).tolist()
    decode = Mock(side_effect=tokenizer.decode)
    monkeypatch.setattr(tokenizer, "decode", decode)
    PrefixDetokenizer(tokenizer, False).push(ids)
    assert max(len(call.args[0]) for call in decode.call_args_list) < 20
    broken = tokenizer.encode("é").tolist()[:1] * 60
    assert "".join(stream(PrefixDetokenizer(tokenizer, False), broken, [1])) != ""


def test_table_agrees_on_long_random_streams() -> None:
    tokenizer = example_preprocessor().tokenizer
    rng = random.Random(7)
    for _ in range(20):
        ids = [rng.choice((rng.randrange(256), rng.randrange(4103))) for _ in range(500)]
        texts = stream(make_detokenizer(tokenizer), ids, [rng.randint(1, 5) for _ in range(9)])
        assert "".join(texts) == without_broken_end(example_reference().decode, ids)
