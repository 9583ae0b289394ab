"""A model directory: what it must hold, what is read from it, what changes its checksum."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.errors import InvalidArgument
from dynamo.llm.model_card import ModelDirectory, slug_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (path / "tokenizer.json").write_text("{}")
    return path


def test_what_is_missing_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"'org/model' is not a local directory; download"):
        ModelDirectory("org/model")
    (model / "tokenizer.json").unlink()
    with pytest.raises(InvalidArgument, match=r"has no tokenizer\.json"):
        ModelDirectory(str(model))
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"config\.json can't be read as JSON"):
        ModelDirectory(str(model))


def test_context_length_comes_from_the_config(model: Path) -> None:
    assert ModelDirectory(str(model)).context_length() == 4096
    (model / "config.json").write_text('{"text_config": {"max_position_embeddings": 77}}')
    assert ModelDirectory(str(model)).context_length() == 77
    (model / "config.json").write_text("{}")
    assert ModelDirectory(str(model)).context_length() is None
    (model / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert ModelDirectory(str(model)).context_length() is None
    (model / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert ModelDirectory(str(model)).context_length() == 512


def test_the_checksum_follows_the_content_not_the_place(model: Path, tmp_path: Path) -> None:
    first = ModelDirectory(str(model)).checksum("Chat", 64)
    moved = model.rename(tmp_path / "moved")
    assert ModelDirectory(str(moved)).checksum("Chat", 64) == first
    assert ModelDirectory(str(moved)).checksum("Chat", 32) != first
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    assert ModelDirectory(str(moved)).checksum("Chat", 64) != first


def test_slugs() -> None:
    assert slug_of("Qwen/Qwen3-0.6B") == "qwen_qwen3-0_6b"
