"""Text in pieces is the text of all ids at once, and no piece ends inside a character."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_kit import example_preprocessor, example_reference, write_llama_like, write_metaspace

from dynamo.frontend.answer.detokenizer import Detokenizer, PrefixDetokenizer, make_detokenizer
from dynamo.frontend.prompt.tokenizer import Tokenizer, load_tokenizer

cuts = st.lists(st.integers(1, 4), min_size=1, max_size=8)
WORDS = st.sampled_from(["hello", " world", " ", "  ", "😀", "é", "你好", "<s>", "</s>", "x", " a"])


@functools.cache
def other_model(family: str) -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="detokenizer-") as directory:
        {"llama": write_llama_like, "metaspace": write_metaspace}[family](Path(directory))
        return load_tokenizer(directory)


def stream(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    texts, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        texts.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    texts.append(detokenizer.finish())
    return texts


@given(st.lists(st.integers(0, 4102), max_size=30), cuts, st.booleans())
@settings(deadline=None)
def test_any_ids_cut_in_any_way(ids: list[int], sizes: list[int], skip: bool) -> None:
    tokenizer = example_preprocessor().tokenizer
    texts = stream(make_detokenizer(tokenizer, skip), ids, sizes)
    assert "".join(texts) == example_reference().decode(ids, skip_special_tokens=skip)


@given(st.text(), cuts)
@settings(deadline=None)
def test_whole_text_never_shows_a_broken_character(text: str, sizes: list[int]) -> None:
    text = text.replace("\ufffd", "")
    tokenizer = example_preprocessor().tokenizer
    ids = tokenizer.encode(text).tolist()
    texts = stream(make_detokenizer(tokenizer, False), ids, sizes)
    assert not any("\ufffd" in each for each in texts)
    assert "".join(texts) == tokenizer.decode(ids, False)


@pytest.mark.parametrize("family", ["llama", "metaspace"])
@given(words=st.lists(WORDS, max_size=12), sizes=cuts, skip=st.booleans())
@settings(deadline=None)
def test_other_families(family: str, words: list[str], sizes: list[int], skip: bool) -> None:
    tokenizer = other_model(family)
    ids = tokenizer.encode("".join(words)).tolist()
    detokenizer = make_detokenizer(tokenizer, skip)
    assert isinstance(detokenizer, PrefixDetokenizer)
    assert "".join(stream(detokenizer, ids, sizes)) == tokenizer.decode(ids, skip)


def test_a_character_in_three_tokens_is_held_back() -> None:
    tokenizer = example_preprocessor().tokenizer
    ids = tokenizer.encode("☃").tolist()
    assert len(ids) == 3
    detokenizer = make_detokenizer(tokenizer)
    assert [detokenizer.push([each]) for each in ids] == ["", "", "☃"]
    assert detokenizer.finish() == ""
    detokenizer = make_detokenizer(tokenizer)
    assert [detokenizer.push(ids[:2]), detokenizer.push([71])] == ["", "\ufffdh"]
    assert detokenizer.push(ids[:1]) == ""
    assert (detokenizer.finish(), detokenizer.finish()) == ("\ufffd", "")


def test_unknown_ids_are_nothing() -> None:
    detokenizer = make_detokenizer(example_preprocessor().tokenizer)
    assert detokenizer.push([999_999]) == ""
    assert detokenizer.push([71, 999_999, 72]) == "hi"
    assert detokenizer.push([]) == ""


def test_prefix_window_stays_small() -> None:
    tokenizer = other_model("llama")
    ids = tokenizer.encode("hello world this is a test " * 50).tolist()
    detokenizer = PrefixDetokenizer(tokenizer)
    for each in ids:
        detokenizer.push([each])
        assert len(detokenizer._ids) < 20
    broken = tokenizer.encode("é").tolist()[:1] * 60
    assert "".join(stream(PrefixDetokenizer(tokenizer), broken, [1])) != ""


def test_table_agrees_on_long_random_streams() -> None:
    tokenizer = example_preprocessor().tokenizer
    rng = random.Random(7)
    for _ in range(20):
        ids = [rng.choice((rng.randrange(256), rng.randrange(4103))) for _ in range(500)]
        texts = stream(make_detokenizer(tokenizer), ids, [rng.randint(1, 5) for _ in range(9)])
        assert "".join(texts) == example_reference().decode(ids)
