"""A model directory: what it says of its model, the same for worker and frontend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, InvalidArgument
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.llm import ModelInput, ModelType, register_model
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.register import slug_of
from dynamo.protocols.control import ModelCard, decode_card
from dynamo.runtime import DistributedRuntime

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/model"
LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (path / "tokenizer.json").write_bytes((EXAMPLE / "tokenizer.json").read_bytes())
    return path


def test_a_snapshot_of_the_hugging_face_cache_has_its_id_as_name(tmp_path: Path) -> None:
    path = tmp_path / "models--acme--tiny--v2" / "snapshots" / "0123"
    path.mkdir(parents=True)
    assert ModelDirectory(path).name == "acme/tiny--v2"


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "~nosuchuser/model", "x/" * 3000])
def test_a_path_that_no_file_can_have(model: Path, path: str) -> None:
    """The path of a worker's card may be anything."""
    with pytest.raises(ConfigError, match="is not a local directory") as raised:
        ModelDirectory(path)
    assert len(raised.value.message) < 1000
    with pytest.raises(ConfigError, match="cannot be read") as raised:
        ModelDirectory(model).chat_templates(path)
    assert len(raised.value.message) < 1000


def test_missing_files_are_named(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"'org/model' is not a local directory; give the worker"):
        ModelDirectory("org/model")
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; download the model again"):
        ModelDirectory(model).require_worker_files()


@pytest.mark.parametrize("text", ["", '{"version": "1.0", "model": {"vocab"', '{"version": "1.0"}'])
def test_a_tokenizer_that_is_cut(model: Path, text: str) -> None:
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer: .*; copy it again"):
        ModelDirectory(model).require_worker_files()
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object.*copy it again"):
        ModelDirectory(model)


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "expected"),
    [
        ({"max_position_embeddings": 4096, "n_ctx": 77}, {}, 4096),
        ({"n_positions": 1024, "n_ctx": 512}, {}, 1024),
        ({"n_ctx": 1024}, {"model_max_length": 512}, 1024),
        ({"max_seq_len": 2048}, {}, 2048),
        ({"max_sequence_length": 2048}, {}, 2048),
        ({"seq_length": 8192}, {}, 8192),
        ({"model_max_length": 4096.0}, {}, 4096),
        ({"text_config": {"max_position_embeddings": 77}}, {}, 77),
        ({"max_position_embeddings": 9, "text_config": {"max_position_embeddings": 77}}, {}, 77),
        ({"max_position_embeddings": 9, "text_config": {"max_position_embeddings": None}}, {}, 9),
        ({"llm_config": {"n_positions": 77}}, {}, 77),
        ({"max_position_embeddings": -1, "n_ctx": 77}, {}, 77),
        ({}, {}, None),
        ({}, {"model_max_length": 512}, 512),
        ({}, {"model_max_length": 1e30}, None),
        ({}, {"model_max_length": int(1e30)}, None),
    ],
)
async def test_context_length_is_the_same_for_worker_and_frontend(
    model: Path,
    tmp_path: Path,
    config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    expected: int | None,
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert ModelDirectory(model).context_length == expected
    assert (await registered(model, tmp_path)).context_length == expected, "the worker"
    card = ModelCard("m", "m", str(model), "ns", "comp", "generate", 1)
    assert Preprocessor(card).context_length == expected, "the frontend"


async def test_a_context_length_that_is_no_number_is_named(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text('{"n_positions": "many"}')
    says = r"config\.json: n_positions is 'many'; it must be a number of tokens: correct it"
    with pytest.raises(ConfigError, match=says):
        _ = ModelDirectory(model).context_length
    with pytest.raises(InvalidArgument, match=says):
        await registered(model, tmp_path)
    assert (await registered(model, tmp_path, context_length=64)).context_length == 64


def test_eos_ids_come_from_the_first_file_that_has_them(model: Path) -> None:
    (model / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": 6}}')
    assert ModelDirectory(model).eos_ids == [5]
    (model / "config.json").write_text('{"text_config": {"eos_token_id": [6, 7]}}')
    assert ModelDirectory(model).eos_ids == [6, 7]
    (model / "generation_config.json").write_text('{"eos_token_id": [8]}')
    assert ModelDirectory(model).eos_ids == [8]


def test_special_tokens_are_strings_or_objects_with_content(model: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    (model / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert ModelDirectory(model).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA_8B, 131_072),
        ({**LLAMA_8B, "torch_dtype": "float32"}, 262_144),
        ({**LLAMA_8B, "head_dim": 64}, 65_536),
        ({"text_config": {**LLAMA_8B, "num_hidden_layers": 16}}, 65_536),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, 512),
        ({}, None),
    ],
)
def test_kv_bytes_of_a_token(model: Path, config: dict[str, Any], expected: int | None) -> None:
    (model / "config.json").write_text(json.dumps(config))
    assert ModelDirectory(model).kv_bytes_per_token() == expected


def test_the_checksum_follows_the_content_not_the_place(model: Path, tmp_path: Path) -> None:
    first = ModelDirectory(model).checksum("Chat", 64)
    moved = model.rename(tmp_path / "moved")
    assert ModelDirectory(moved).checksum("Chat", 64) == first
    assert ModelDirectory(moved).checksum("Chat", 32) != first
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    assert ModelDirectory(moved).checksum("Chat", 64) != first


def test_slugs() -> None:
    assert slug_of("Qwen/Qwen3-0.6B") == "qwen_qwen3-0_6b"


async def registered(model: Path, tmp_path: Path, context_length: int | None = None) -> ModelCard:
    """The card that a worker of ``model`` registers."""
    settings = RuntimeSettings(discovery_backend="mem", state_dir=str(tmp_path))
    runtime = DistributedRuntime(None, settings)
    endpoint = runtime.endpoint("ns.comp.generate")
    try:
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            str(model),
            "m",
            context_length=context_length,
        )
        (value,) = (await runtime.discovery.list("v1/mdc/")).values()
        return decode_card(value)
    finally:
        await runtime.close()
