"""Both encoders give the ids of `tokenizers`."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_kit import memory_of
from text_kit import EXAMPLE, example_preprocessor, example_reference
from tokenizer_kit import write_llama_like, write_metaspace, write_model
from tokenizers import Tokenizer as Reference

from dynamo.errors import ConfigError
from dynamo.frontend.prompt.template import load_template
from dynamo.frontend.text import tokenizer as tokenizer_module
from dynamo.frontend.text import tokenizer_facts
from dynamo.frontend.text.pieces import read_tokenizer_file
from dynamo.frontend.text.segments import SegmentCache
from dynamo.frontend.text.tokenizer import (
    CacheStats,
    _encode_all,
    _EncoderThread,
    _FastEncoder,
    load_tokenizer,
)

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
    assert tokenizer.encoder.name == "fastokens"
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
    tokenizer = load_tokenizer(EXAMPLE, 1 << 20)  # not the encoder that other tests share
    assert tokenizer.encoder.stats() == CacheStats(0, 0, 0)
    tokenizer.encode("<|im_start|>one<|im_end|>")
    tokenizer.encode("<|im_start|>one<|im_end|>two")
    stats = tokenizer.encoder.stats()
    assert (stats.hits, stats.misses) == (1, 2)
    assert stats.size_bytes > 0


def test_unknown_pre_tokenizer_falls_back(tmp_path: Path) -> None:
    write_metaspace(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    reference = Reference.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encoder.name == "tokenizers"
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

    path = EXAMPLE / "tokenizer.json"
    parsed = read_tokenizer_file(path.read_bytes(), path)
    cache = SegmentCache.of(parsed, plain, 1200)
    assert cache is not None
    for text in prompts * 2:
        assert cache.encode(text) == plain(text)
        cache._check()


def test_segment_cache_is_not_used_where_segments_depend_on_each_other(tmp_path: Path) -> None:
    write_metaspace(tmp_path)
    path = tmp_path / "tokenizer.json"
    parsed = read_tokenizer_file(path.read_bytes(), path)
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


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja"])
def test_only_regular_files_are_read(tmp_path: Path, name: str) -> None:
    write_llama_like(tmp_path)
    path = tmp_path / name
    for replace in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        path.unlink(missing_ok=True)
        replace(path)
        with pytest.raises(ConfigError, match=rf"{name}.*(regular file|directory)"):
            load_tokenizer(tmp_path) and load_template(tmp_path)


@pytest.mark.parametrize(("name", "limit_mib"), [("tokenizer.json", 256), ("config.json", 16)])
def test_a_file_has_a_bound(tmp_path: Path, name: str, limit_mib: int) -> None:
    write_llama_like(tmp_path)
    with (tmp_path / name).open("r+b") as file:
        file.truncate((limit_mib << 20) + 1)
    with pytest.raises(ConfigError, match=rf"{name} .*larger than {limit_mib} MiB"):
        load_tokenizer(tmp_path)


def test_eos_from_each_file(tmp_path: Path) -> None:
    write_llama_like(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_tokenizer(tmp_path).eos_ids == [7, 8, 2]
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 9}}')
    assert load_tokenizer(tmp_path).eos_ids == [9, 2]


def scripted_model(directory: Path, number: int) -> None:
    """The example model with another content of tokenizer.json; token 4103 is its own."""
    parsed = json.loads((EXAMPLE / "tokenizer.json").read_text())
    parsed["added_tokens"].append(
        {**parsed["added_tokens"][0], "id": 4103, "content": f"<|{number}|>"}
    )
    write_model(directory, parsed)


def test_models_of_one_content_share_an_encoder(tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 1), ("c", 2)):
        scripted_model(tmp_path / name, number)
    (tmp_path / "b" / "config.json").write_text('{"eos_token_id": 7, "vocab_size": 9999}')
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(load_tokenizer, [tmp_path / name for name in "aabc"]))
    first, again, same, other = loaded
    assert first.encoder is again.encoder is same.encoder is not other.encoder
    assert first.pieces is same.pieces
    assert (first.eos_ids[0], same.eos_ids[0]) == (2, 7)
    assert (first.vocab_size, same.vocab_size) == (4104, 9999)
    encoder = weakref.ref(other.encoder)
    del loaded, other
    gc.collect()
    assert encoder() is None, "the encoder of a removed model stays in memory"


def test_every_further_four_contents_have_a_thread(tmp_path: Path) -> None:
    """`fastokens` would make merge tables for each text of a fifth in one thread."""
    loaded = []
    for number in range(9):
        scripted_model(tmp_path / str(number), 100 + number)
        loaded.append(load_tokenizer(tmp_path / str(number)))
    encoders = [tokenizer.encoder for tokenizer in loaded]
    threads = [encoder.thread for encoder in encoders if isinstance(encoder, _FastEncoder)]
    assert len(threads) == 9
    used = Counter(id(thread) for thread in threads if thread is not None)
    assert threads.count(None) <= 4
    assert len(used) >= 2
    assert max(used.values()) <= 4
    for number, tokenizer in enumerate(loaded):
        special = f"one <|{100 + number}|> two"
        assert tokenizer.encode(special).tolist().count(4103) == 1
        assert tokenizer.decode(tokenizer.encode(special), False) == special
        with pytest.raises(TypeError):
            tokenizer.encode(5)  # type: ignore[arg-type] # an error passes the thread


def test_a_panic_in_an_encoder_thread_reaches_its_caller() -> None:
    """A panic in Rust is no Exception; the event loop waits for the result without a limit."""
    encode = Mock(side_effect=[GeneratorExit("a panic"), (b"ids", b"")])
    texts: SimpleQueue[Any] = SimpleQueue()
    results: SimpleQueue[Any] = SimpleQueue()
    for call in ((encode, "a", False), (encode, "b", False), None):
        texts.put(call)
    _encode_all(texts, results)
    assert isinstance(results.get_nowait(), GeneratorExit)
    assert results.get_nowait() == b"ids"
    thread = _EncoderThread()
    with pytest.raises(GeneratorExit):
        thread.call(Mock(side_effect=GeneratorExit("a panic")), "a", False)


def test_a_reader_whose_output_is_broken_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sitecustomize that prints comes first on the reader's stdout."""
    monkeypatch.setattr(tokenizer_facts, "_INLINE_BYTES", 0)
    scripted_model(tmp_path / "a", 301)
    (tmp_path / "sitecustomize.py").write_text("print('hello from the site', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"tokenizer\.json was not read.*hello from the site"):
        load_tokenizer(tmp_path / "a")


def test_a_large_file_is_read_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_facts, "_INLINE_BYTES", 0)
    here = []
    for name in ("tokenizer_facts._facts", "tokenizer.reference_tokenizer"):
        monkeypatch.setattr(f"dynamo.frontend.text.{name}", lambda *_: here.append(1))
    scripted_model(tmp_path / "a", 300)
    tokenizer = load_tokenizer(tmp_path / "a")
    reference = Reference.from_file(str(tmp_path / "a" / "tokenizer.json"))
    assert here == []
    assert tokenizer.encoder.name == "fastokens"
    example = example_preprocessor().tokenizer
    assert tokenizer.pieces is not None and example.pieces is not None
    assert tokenizer.pieces.text == [*example.pieces.text, "<|300|>"]
    assert tokenizer.pieces.partial == example.pieces.partial
    for text in (tokenizer_facts.PROBE, "a <|300|> b", "", "x" * 300):
        ids = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.least_tokens(text) == example.least_tokens(text)
    (tmp_path / "a" / "tokenizer.json").write_text('{"model": {"type": "Odd", "vocab": {}}}')
    with pytest.raises(ConfigError, match="is not a tokenizer that"):
        load_tokenizer(tmp_path / "a")


def test_the_parts_of_tokens_are_kept_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_MAX_PARTS", 7)
    write_metaspace(tmp_path)
    for tokenizer in (load_tokenizer(EXAMPLE), load_tokenizer(tmp_path)):
        for token_id in [*range(20), 5, 5, 4096, -1, 10**6]:
            text, raw = tokenizer.token_parts(token_id)
            assert text == tokenizer.token_text(token_id)
            assert bytes(raw) == tokenizer.token_bytes(token_id)
        sizes = (len(tokenizer.token_parts(token_id)) for token_id in range(2000))
        assert memory_of(partial(sum, sizes)).left < 50_000, "some 200 bytes each"


def test_reading_a_tokenizer_imports_little() -> None:
    """It has a process of its own, which a request may wait for."""
    script = (
        "import sys, dynamo.frontend.text.tokenizer_facts\n"
        "sys.exit(sum(name.startswith('dynamo') for name in sys.modules) > 12)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == 0
