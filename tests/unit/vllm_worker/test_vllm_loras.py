"""The forms of --lora-modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.errors import ConfigError
from dynamo.vllm.arguments import parse, parse_loras


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


def test_both_forms(adapter: Path) -> None:
    given = [f"a={adapter}", json.dumps({"name": "b", "path": str(adapter)})]
    assert parse_loras(given, "m") == {"a": str(adapter), "b": str(adapter)}


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        (["a"], "must be NAME=DIRECTORY"),
        (["=x"], "must be NAME=DIRECTORY"),
        (["{"], "--lora-modules"),
        (['{"name": "a"}'], "path"),
        (["m=ADAPTER"], "the name 'm' is used twice"),
        (["a=ADAPTER", "a=ADAPTER"], "the name 'a' is used twice"),
        (["a=/nowhere"], "has no adapter_config.json"),
    ],
)
def test_faults(modules: list[str], text: str, adapter: Path) -> None:
    given = [each.replace("ADAPTER", str(adapter)) for each in modules]
    with pytest.raises(ConfigError, match=text):
        parse_loras(given, "m")


def test_one_flag_takes_several_and_may_be_repeated() -> None:
    flags = ["--lora-modules", "a=x", "b=y", "--lora-modules", "c=z", "--max-model-len", "9"]
    found = parse(["--model", "m", *flags])
    assert found.vllm.lora_modules == ("a=x", "b=y", "c=z")
    assert found.engine_argv == ("--max-model-len", "9")
