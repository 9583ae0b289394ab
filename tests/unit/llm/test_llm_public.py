"""Small pieces of the public API: enumerations, runtime config, errors, hashes."""

from __future__ import annotations

import msgspec
import pytest

from dynamo.llm.exceptions import HttpError
from dynamo.llm.prefix_index import compute_block_hash_for_seq
from dynamo.llm.types import ModelInput, ModelRuntimeConfig, ModelType, WorkerType


def test_flags_combine_as_in_the_card() -> None:
    assert str(ModelType.Chat | ModelType.Completions) == "Chat | Completions"
    assert str(ModelType.Prefill) == "Prefill"
    assert str(ModelType.Empty) == ""
    assert (str(ModelInput.Tokens), str(WorkerType.Aggregated)) == ("Tokens", "Aggregated")


def test_runtime_config_stores_engine_data() -> None:
    config = ModelRuntimeConfig()
    config.total_kv_blocks = 100
    config.set_engine_specific("mode", '{"a": 1}')
    config.set_disaggregated_endpoint("host", 99)
    assert config.get_engine_specific("mode") == '{"a": 1}'
    assert config.get_engine_specific("other") is None
    assert msgspec.to_builtins(config) == {
        "total_kv_blocks": 100,
        "runtime_data": {"mode": {"a": 1}},
        "bootstrap_host": "host",
        "bootstrap_port": 99,
    }
    assert ModelRuntimeConfig().runtime_data == {}
    with pytest.raises(ValueError):
        config.set_engine_specific("mode", "{")


def test_empty_values_of_a_runtime_config_are_values() -> None:
    config = ModelRuntimeConfig()
    for text in ("0", "false", "{}", "[]"):
        config.set_engine_specific("empty", text)
        assert config.get_engine_specific("empty") == text
    config.set_engine_specific("empty", '""')
    assert config.get_engine_specific("empty") == ""
    with pytest.raises(ValueError, match=r"kv_transfer_enforcement must be one of .*, got ''"):
        config.kv_transfer_enforcement = ""


@pytest.mark.parametrize(("code", "message"), [(600, "x"), (-1, "x"), ("400", "x"), (400, b"x")])
def test_http_errors_are_checked(code: object, message: object) -> None:
    with pytest.raises(ValueError):
        HttpError(code, message)  # type: ignore[arg-type]


def test_a_long_message_is_cut() -> None:
    error = HttpError(422, "x" * 9000)
    assert error.code == 422 and len(error.message) == 8192 and error.message.endswith("x...")


def test_block_hashes_of_a_prompt() -> None:
    tokens = list(range(1, 9))
    plain = [14643705804678351452, 16777012769546811212]
    assert compute_block_hash_for_seq(tokens, 4) == plain
    infos = [{"mm_objects": [{"mm_hash": 0xDEADBEEF, "offsets": [[0, 2]]}]}, None]
    assert compute_block_hash_for_seq(tokens, 4, infos) == [15207512089340001072, plain[1]]
    assert compute_block_hash_for_seq(tokens, 4, lora_name="my-lora")[0] == 15671544057904749233
    assert compute_block_hash_for_seq(tokens, 4, is_eagle=True) == [1914873892905420881]
    with pytest.raises(ValueError, match="kv_block_size cannot be 0"):
        compute_block_hash_for_seq(tokens, 0)
