"""The files of a vLLM worker's model: what the engine loads, what the frontend reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.errors import ConfigError
from dynamo.vllm.arguments import find_model

MODEL = Path(__file__).resolve().parents[3] / "examples/model"


def test_a_directory_serves_both() -> None:
    weights, directory, name = find_model(str(MODEL), ["--max-model-len", "8"])
    assert (weights, directory.path, name) == (str(MODEL), MODEL, "model")


@pytest.mark.parametrize(
    "flags",
    [
        ["--tokenizer", str(MODEL)],
        [f"--tokenizer={MODEL}"],
        ["--tokenizer", "x", f"--tokenizer={MODEL}"],
    ],
)
def test_a_gguf_file_is_read_with_the_tokenizer_given(tmp_path: Path, flags: list[str]) -> None:
    path = tmp_path / "x.Q8_0.gguf"
    path.write_bytes(b"GGUF")
    weights, directory, name = find_model(str(path), flags)
    assert (weights, directory.path, name) == (str(path), MODEL, "x.Q8_0")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json beside it"):
        find_model(str(path), [])


def test_a_revision_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def resolve(source: str, **options: object) -> object:
        calls.append((source, options))
        raise ConfigError("stop")

    monkeypatch.setattr("dynamo.vllm.arguments.resolve_model", resolve)
    for flags in (["--revision", "v2"], ["--load_format=dummy"]):
        with pytest.raises(ConfigError):
            find_model("a/b", flags)
    assert calls == [
        ("a/b", {"weights": True, "revision": "v2"}),
        ("a/b", {"weights": False, "revision": None}),
    ]
