"""`dynamo init`: the questions, their defaults, and a graph that `dynamo serve` accepts."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import MODEL

from dynamo.cli import init
from dynamo.cli import main as cli
from dynamo.cli.serve import main as serve
from dynamo.serve.gpus.gpus import Gpu
from dynamo.setup.new_graph import cached_model, uninstalled

GIB = 1 << 30


class Answers:
    """Answers to questions, in order; the rest take their defaults."""

    def __init__(self, *texts: str) -> None:
        self.left = list(texts)
        self.asked: list[str] = []

    def __call__(self, question: str) -> str:
        self.asked.append(question)
        return self.left.pop(0) if self.left else ""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory on a machine without GPUs and without downloaded models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(init, "probe_gpus", lambda: ())
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, *texts: str) -> Answers:
    answers = Answers(*texts)
    monkeypatch.setattr("builtins.input", answers)
    return answers


def graph(name: str = "graph.yaml") -> Any:
    """The written graph, which `dynamo serve` accepts."""
    assert serve([name, "--dry-run", "--gpus", "8"]) == 0
    return yaml.safe_load(Path(name).read_text())


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index=n, name="H100", memory_bytes=80 * GIB) for n in range(count))


def main(words: list[str]) -> int:
    return cli.main(["init", *words])


def test_four_questions_make_a_graph(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = answer(monkeypatch, str(MODEL), "mocker", "2", "local")
    assert main([]) == 0
    assert len(answers.asked) == 4
    shown = capsys.readouterr().out
    assert "wrote graph.yaml" in shown and "dynamo serve graph.yaml" in shown
    found = graph()
    assert found["Frontend"]["http-host"] == "127.0.0.1"
    assert found["Worker"]["run"] == "dynamo.mocker"
    assert found["Worker"]["ServiceArgs"]["workers"] == 2


def test_wrong_answers_are_explained_and_asked_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("/no/such", str(MODEL), "ollama", "mocker", "0", "3x9", "1", "everyone", "local")
    answers = answer(monkeypatch, *words)
    assert main([]) == 0
    assert len(answers.asked) == 9
    shown = capsys.readouterr().out
    for problem in ("no model '/no/such'", "ollama cannot serve", "a number of workers such as 2"):
        assert problem in shown
    assert "3 workers with 9 GPUs need 27, not 0" in shown and "one of local, keys, open" in shown


def test_keys_are_made_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(MODEL), "--engine", "mocker", "--yes", "--access", "keys"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    key = next(line.strip() for line in shown.splitlines() if line.startswith("  dyn-"))
    assert stat.S_IMODE((here / "keys.txt").stat().st_mode) == 0o600
    assert key not in (here / "keys.txt").read_text()
    found = graph()["Frontend"]
    assert found["http-host"] == "0.0.0.0" and found["api-key-file"] == "keys.txt"
    assert found["ui"] is True and "colleague: dynamo key add NAME --api-key-file" in shown
    before = (here / "keys.txt").read_text()
    assert main([*words, "--write", "other.yaml", "--no-ui"]) == 0
    assert (here / "keys.txt").read_text() == before and "dyn-" not in capsys.readouterr().out
    assert graph("other.yaml")["Frontend"]["ui"] is False


def test_a_file_is_never_replaced_unasked(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "graph.yaml").write_text("mine")
    words = [str(MODEL), "--engine", "mocker", "--access", "open"]
    assert main([*words, "--yes"]) == 2 and "graph.yaml is kept" in capsys.readouterr().err
    answer(monkeypatch, "")
    assert main(words) == 2
    assert (here / "graph.yaml").read_text() == "mine"
    answer(monkeypatch, "yes")
    assert main(words) == 0 and graph()["Frontend"]["http-host"] == "0.0.0.0"


def test_without_answers_nothing_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert main([]) == 2 and "give --yes" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_the_defaults_follow_gpus_and_weights(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "probe_gpus", lambda: gpus(8))
    monkeypatch.setattr(init, "find_engines", lambda: (uninstalled("vllm"),))
    assert main(["Qwen/Qwen3-0.6B", "--yes"]) == 0
    found = graph()["Worker"]
    assert found["ServiceArgs"]["workers"] == 8 and "tensor-parallel-size" not in found
    monkeypatch.setattr(init, "weights_bytes", lambda model: 140 * GIB)
    assert main(["Qwen/Qwen3-0.6B", "--yes", "--write", "large.yaml"]) == 0
    found = graph("large.yaml")["Worker"]
    assert found["ServiceArgs"]["workers"] == 2 and found["tensor-parallel-size"] == 4


def test_an_engine_to_be_installed_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(init, "find_engines", tuple)
    (here / "x.gguf").write_bytes(b"GGUF")
    assert main([str(here / "x.gguf"), "--yes"]) == 0
    assert "first install llama.cpp: https://" in capsys.readouterr().out
    assert graph()["Worker"]["exec"].startswith("llama-server -m /")


def test_the_downloaded_model_is_the_default(here: Path) -> None:
    assert cached_model() is None
    for name in ("models--Qwen--Qwen3-0.6B", "models--org--a--b"):
        directory = here / "cache/hub" / name / "snapshots/0123"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
    os.utime(directory / "config.json", (1, 1))
    assert cached_model() == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(("secret", "mode"), [("--api-key ${env.K}", 0o600), ("", 0o644)])
def test_a_converted_graph_with_secrets_is_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str, mode: int
) -> None:
    monkeypatch.setenv("K", "sk-1")
    (tmp_path / "swap.yaml").write_text(
        f"models: {{a: {{cmd: '{sys.executable} --port ${{PORT}} {secret}'}}}}"
    )
    path = tmp_path / "made.yaml"
    umask = os.umask(0o022)
    try:
        words = ["init", "--from", str(tmp_path / "swap.yaml"), "--write", str(path), "--yes"]
        assert cli.main(words) == 0
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == mode
