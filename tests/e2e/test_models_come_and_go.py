"""`dynamo run MODEL` beside a running deployment, and `dynamo remove`, while clients are served."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from deployment import MODEL, free_port
from forked_kit import run_verb
from load_kit import some_requests, under_load
from serving import Serving

GRAPH = """
# The port of the hall.
Frontend: {{run: dynamo.frontend, http-port: {port}}}
# Small, for everyone
Worker:
  run: dynamo.mocker   # no GPU
  model-path: {model}
  model-name: tiny
  reply: random
  speedup-ratio: 2
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "dynamo", *words]


def dynamo(serving: Serving, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = {**serving.env, "DYN_NAMESPACE": serving.namespace, **env}
    return run_verb(*words, env=own)


def run(serving: Serving, name: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return dynamo(serving, "run", str(MODEL), "--engine", "mocker", "--name", name, *words, **env)


def start(serving: Serving, more: str = "", *flags: str) -> int:
    port = free_port()
    path = serving.graph(GRAPH.format(port=port, model=MODEL) + more)
    serving.start(path, *flags, wait="ready: http://127.0.0.1:.* model: tiny")
    return port


def models(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
        return [one["id"] for one in json.load(answer)["data"]]


def services(serving: Serving) -> set[str]:
    return {entry["service"] for entry in serving.document()["components"].values()}


def broken_engine(directory: Path, script: str) -> dict[str, str]:
    """Put a llama-server into a directory that does what ``script`` says; the PATH to find it."""
    directory.mkdir()
    program = directory / "llama-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF")
    return str(file)


def test_a_model_comes_and_goes_under_load(serving: Serving) -> None:
    port = start(serving)
    file = serving.tmp_path / "graph.yaml"
    before = file.read_text()
    with under_load(port) as load:
        for _ in range(2):
            added = run(serving, "second", "--workers", "2")
            assert added.returncode == 0, added.stderr
            assert f"({file})" in added.stderr and "ready: second" in added.stderr
            assert models(port) == ["tiny", "second"]
            text = file.read_text()
            assert text.startswith(before.rstrip("\n"))
            assert yaml.safe_load(text)["Worker2"] == yaml.safe_load(added.stdout)["Worker2"]
            assert services(serving) == {"Frontend", "Worker", "Worker2"}
            again = run(serving, "second")
            assert again.returncode == 2 and "is a model of namespace" in again.stderr
            with under_load(port, clients=2, model="second", tokens=None) as other:
                serving.until(lambda: other.answered > 4)
            removed = dynamo(serving, "remove", "second")
            assert removed.returncode == 0, removed.stderr
            assert f"removed Worker2 from {file}" in removed.stdout
            assert models(port) == ["tiny"] and services(serving) == {"Frontend", "Worker"}
            assert file.read_text() == before
        some_requests(serving, load, 10)
    gone = dynamo(serving, "remove", "second")
    assert gone.returncode == 2 and "no model 'second'" in gone.stderr and "tiny" in gone.stderr
    assert serving.stop() == 0
    serving.assert_clean()


def test_two_at_once_both_come(serving: Serving) -> None:
    """What the owner has changed in the file since is neither applied nor lost."""
    port = start(serving)
    file = serving.tmp_path / "graph.yaml"
    file.write_text(file.read_text().replace("speedup-ratio: 2", "speedup-ratio: 3"))
    (pid,) = serving.pids("Worker")
    own = {**serving.env, "DYN_NAMESPACE": serving.namespace}
    words = [command("run", str(MODEL), "--engine", "mocker", "--name", name) for name in "bc"]
    running = [subprocess.Popen(one, env=own, stderr=subprocess.PIPE) for one in words]
    for one in running:
        _, errors = one.communicate(timeout=60)
        assert one.returncode == 0, errors
    assert sorted(models(port)) == ["b", "c", "tiny"]
    found = yaml.safe_load(file.read_text())
    assert {found[name]["served-model-name"] for name in ("Worker2", "Worker3")} == {"b", "c"}
    assert found["Worker"]["speedup-ratio"] == 3 and serving.pids("Worker") == [pid]
    assert dynamo(serving, "reload").returncode == 0
    assert serving.pids("Worker") != [pid] and sorted(models(port)) == ["b", "c", "tiny"]
    assert serving.stop() == 0
    serving.assert_clean()


def test_models_of_run_have_a_file_while_they_run(serving: Serving) -> None:
    port, copy = free_port(), serving.state_dir / serving.namespace / "graph.yaml"
    serving.start(
        str(MODEL),
        *("--engine", "mocker", "--port", str(port), "--name", "one"),
        *("--namespace", serving.namespace),
        verb="run",
        wait="ready: .*model: one",
    )
    assert run(serving, "two").returncode == 0
    assert "two" in copy.read_text() and models(port) == ["one", "two"]
    copy.write_text(copy.read_text().replace("served-model-name: two", "served-model-name: 2"))
    assert dynamo(serving, "reload").returncode == 0
    assert models(port) == ["one", "2"]
    assert dynamo(serving, "remove", "2").returncode == 0
    assert dynamo(serving, "remove", "one").returncode == 0
    assert models(port) == []
    assert run(serving, "three").returncode == 0 and models(port) == ["three"]
    assert serving.stop(signal.SIGINT) == 0
    serving.assert_clean()


def test_several_models_are_served_at_once(serving: Serving, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in Path(MODEL).iterdir():
        (copy / file.name).symlink_to(file.resolve())
    port = free_port()
    words = ("--engine", "mocker", "--port", str(port), "--namespace", serving.namespace)
    serving.start(str(MODEL), str(copy), *words, verb="run", wait="ready: .*copy")
    assert sorted(models(port)) == ["copy", Path(MODEL).name]
    for wrong, problem in (
        (["--name", "x"], "--name would be for each of 2 models"),
        (["--", "--speedup-ratio", "2"], "words after -- would be for each"),
    ):
        done = dynamo(serving, "run", str(MODEL), str(copy), "--engine", "mocker", *wrong)
        assert done.returncode == 2 and problem in done.stderr
    assert serving.stop(signal.SIGINT) == 0
    serving.assert_clean()


def test_a_model_that_cannot_load_is_taken_back(serving: Serving, gguf: str) -> None:
    engine = broken_engine(serving.tmp_path / "bin", "echo out of memory; exit 1")
    serving.env["PATH"] = engine["PATH"]
    port = start(serving)
    file = serving.tmp_path / "graph.yaml"
    before = file.read_text()
    with under_load(port) as load:
        done = dynamo(serving, "run", gguf, "--engine", "llama.cpp")
        assert done.returncode == 1 and "removing it again" in done.stderr, done.stderr
        assert "out of memory" in done.stderr or "exit" in done.stderr, done.stderr
        some_requests(serving, load, 10)
    assert file.read_text() == before and models(port) == ["tiny"]
    assert services(serving) == {"Frontend", "Worker"}
    assert serving.stop() == 0
    serving.assert_clean()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_load_is_taken_back_or_goes_on(
    serving: Serving, gguf: str, signum: int
) -> None:
    """Ctrl-C removes the model; after kill -9 it is one of the graph, for `dynamo remove`."""
    engine = broken_engine(serving.tmp_path / "bin", "exec sleep 1000")
    serving.env["PATH"] = engine["PATH"]
    port = start(serving)
    file = serving.tmp_path / "graph.yaml"
    before = file.read_text()
    own = {**serving.env, "DYN_NAMESPACE": serving.namespace}
    words = command("run", gguf, "--engine", "llama.cpp")
    adding = subprocess.Popen(words, env=own, stderr=subprocess.PIPE, text=True)
    assert adding.stderr is not None
    while "loading" not in adding.stderr.readline():
        assert adding.poll() is None
    assert file.read_text() != before
    adding.send_signal(signum)
    adding.communicate(timeout=60)
    if signum == signal.SIGKILL:
        assert services(serving) == {"Frontend", "Worker", "Worker2"}
        assert dynamo(serving, "remove", "broken").returncode == 0
    else:
        assert adding.returncode == 130
    assert file.read_text() == before and services(serving) == {"Frontend", "Worker"}
    assert models(port) == ["tiny"] and serving.stop() == 0
    serving.assert_clean()


def test_a_model_without_a_gpu_changes_nothing(serving: Serving) -> None:
    more = "  ServiceArgs: {resources: {gpu: 1}}\n"
    start(serving, more, "--gpus", "1")
    file = serving.tmp_path / "graph.yaml"
    before, document = file.read_text(), serving.document()["components"]
    path = broken_engine(serving.tmp_path / "bin", "exit 1")
    gguf = serving.tmp_path / "big.gguf"
    gguf.write_bytes(b"GGUF")
    done = dynamo(
        serving, "run", str(gguf), "--engine", "llama.cpp", "--gpus-per-worker", "1", **path
    )
    assert done.returncode == 2 and f"{serving.namespace}_Worker" in done.stderr, done.stderr
    assert file.read_text() == before
    assert serving.document()["components"].keys() == document.keys()
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_file_that_cannot_be_changed_changes_nothing(serving: Serving) -> None:
    port = start(serving)
    file = serving.tmp_path / "graph.yaml"
    before = file.read_text()
    for text in (before + "\nWorker: [", None):  # its owner is in the middle of a line; it is gone
        file.unlink() if text is None else file.write_text(text)
        for done in (run(serving, "second"), dynamo(serving, "remove", "tiny")):
            assert done.returncode == 2 and "graph" in done.stderr, done.stderr
    assert models(port) == ["tiny"]
    # A disk that is full when the file is written: larger than the statefile, it meets the limit.
    large = before + f"# {'x' * 120_000}\n"
    file.write_text(large)
    assert dynamo(serving, "reload").returncode == 0
    unlimited = resource.prlimit(serving.arbiter_pid, resource.RLIMIT_FSIZE, (100_000, -1))
    for done in (run(serving, "second"), dynamo(serving, "remove", "tiny")):
        assert done.returncode == 1 and "nothing was changed" in done.stderr, done.stderr
    serving.until(lambda: models(port) == ["tiny"])
    assert file.read_text() == large and [one.name for one in file.parent.glob(".*")] == []
    resource.prlimit(serving.arbiter_pid, resource.RLIMIT_FSIZE, unlimited)
    assert run(serving, "second").returncode == 0 and "Worker2:" in file.read_text()
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_dry_run_shows_what_would_be_added(serving: Serving) -> None:
    port = start(serving)
    before = (serving.tmp_path / "graph.yaml").read_text()
    shown = run(serving, "second", "--dry-run")
    assert shown.returncode == 0 and "would be added" in shown.stderr
    assert "served-model-name: second" in shown.stdout
    assert (serving.tmp_path / "graph.yaml").read_text() == before and models(port) == ["tiny"]


def test_a_model_is_restarted_by_its_name(serving: Serving) -> None:
    start(serving, "  ServiceArgs: {workers: 2}\n")
    old = [serving.pids(name)[0] for name in ("Worker", "Worker_1")]
    done = dynamo(serving, "restart", "tiny")
    assert done.returncode == 0, done.stderr
    new = [serving.pids(name)[0] for name in ("Worker", "Worker_1")]
    assert not set(old) & set(new)
    wrong = dynamo(serving, "restart", "tinny")
    assert wrong.returncode == 2 and "no service or worker 'tinny'" in wrong.stderr
