"""Both encoders give the ids of `tokenizers`."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_kit import EXAMPLE, example_preprocessor, example_reference
from tokenizer_kit import write_llama_like, write_metaspace, write_model
from tokenizers import Tokenizer as Reference

from dynamo.errors import ConfigError
from dynamo.frontend.prompt.segments import SegmentCache
from dynamo.frontend.prompt.tokenizer import CacheStats, load_tokenizer
from dynamo.frontend.prompt.tokenizer_file import read_tokenizer_file

pieces = st.one_of(
    st.text(),
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<|im_", "<think>", " ", "\n\n", "é", "😀", "a"]
    ),
)
texts = st.lists(pieces, max_size=8).map("".join)


@given(texts)
@settings(deadline=None)
def test_fast_path_is_exact(text: str) -> None:
    tokenizer = example_preprocessor().tokenizer
    assert tokenizer._encoder.name == "fastokens"
    ids = tokenizer.encode(text)
    assert ids.typecode == "I"
    assert ids.tolist() == example_reference().encode(text, add_special_tokens=False).ids
    skip_none = example_reference().decode(ids.tolist(), skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == skip_none
    assert tokenizer.decode(ids) == example_reference().decode(ids.tolist())


def test_example_model_has_what_the_mocker_needs() -> None:
    tokenizer = example_preprocessor().tokenizer
    assert tokenizer.eos_ids == [4098, 4096]
    assert tokenizer.special_ids == {4096, 4097, 4098}
    assert tokenizer.vocab_size == 4103
    words = [tokenizer.decode([each]) for each in range(1000, 2000)]
    assert all(word and "\ufffd" not in word for word in words)
    assert example_preprocessor().context_length == 131072


def test_counters_count_only_requests() -> None:
    tokenizer = load_tokenizer(EXAMPLE)
    assert tokenizer.cache_stats() == CacheStats(0, 0, 0)
    tokenizer.encode("<|im_start|>one<|im_end|>")
    tokenizer.encode("<|im_start|>one<|im_end|>two")
    stats = tokenizer.cache_stats()
    assert (stats.hits, stats.misses) == (1, 2)
    assert stats.size_bytes > 0


def test_unknown_pre_tokenizer_falls_back(tmp_path: Path) -> None:
    write_metaspace(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    reference = Reference.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer._encoder.name == "tokenizers"
    assert tokenizer.pieces is None
    assert tokenizer.eos_ids == [2]
    for text in ("hello world", " a", "<s>hello world</s>  many words", "", "Grüße"):
        expected = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == array("I", expected)
        assert tokenizer.decode(expected) == reference.decode(expected)


def test_byte_fallback_models_are_read(tmp_path: Path) -> None:
    write_llama_like(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    reference = Reference.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hello world", "<s>hello 😀 world</s>", "x", "naïve"):
        expected = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == expected
        assert tokenizer.decode(expected) == reference.decode(expected)


def bos_model(directory: Path) -> None:
    parsed = json.loads((EXAMPLE / "tokenizer.json").read_text())
    parsed["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [4096], "tokens": ["<|endoftext|>"]}
        },
    }
    parsed["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    write_model(directory, parsed)


def test_special_tokens_are_added_on_request_and_nothing_is_cut(tmp_path: Path) -> None:
    bos_model(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    plain = tokenizer.encode("one two three four five")
    assert len(plain) > 3
    assert tokenizer.encode("one two three four five", True) == array("I", [4096]) + plain


@given(st.lists(texts, max_size=6))
@settings(deadline=None)
def test_segment_cache_is_exact_and_bounded(prompts: list[str]) -> None:
    reference = example_reference()

    def plain(text: str) -> array[int]:
        return array("I", reference.encode(text, add_special_tokens=False).ids)

    parsed = read_tokenizer_file(EXAMPLE / "tokenizer.json")
    cache = SegmentCache.of(parsed, plain, 1200)
    assert cache is not None
    for text in prompts * 2:
        assert cache.encode(text) == plain(text)
        cache._check()


def test_segment_cache_is_not_used_where_segments_depend_on_each_other(tmp_path: Path) -> None:
    write_metaspace(tmp_path)
    parsed = read_tokenizer_file(tmp_path / "tokenizer.json")
    parsed.pre_tokenizer = {"type": "Metaspace", "prepend_scheme": "first"}
    assert SegmentCache.of(parsed, lambda text: array("I"), 1000) is None
    parsed.pre_tokenizer = {"type": "Sequence", "pretokenizers": [parsed.pre_tokenizer]}
    assert SegmentCache.of(parsed, lambda text: array("I"), 1000) is None


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("tokenizer.json", None, "does not exist; a model directory needs tokenizer.json"),
        ("tokenizer.json", "{", "is not a tokenizer file"),
        ("tokenizer.json", '{"model": {"type": "Odd", "vocab": {}}}', "is not a tokenizer that"),
        ("config.json", "[1]", "is not a JSON object"),
        ("tokenizer_config.json", "{", "is not a JSON object"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / name) in caught.value.message
    assert text in caught.value.message


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere' is not a local directory"):
        load_tokenizer(tmp_path / "nowhere")


def test_eos_from_each_file(tmp_path: Path) -> None:
    write_llama_like(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_tokenizer(tmp_path).eos_ids == [7, 8, 2]
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 9}}')
    assert load_tokenizer(tmp_path).eos_ids == [9, 2]
