"""`dynamo run MODEL`: one argument to a served model, and nothing left after Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import yaml
from deployment import MODEL, free_port
from forked_kit import run_verb
from serving import ROOT, Serving

SERVER = ROOT / "tests/engines/upstream_server.py"


def dynamo(serving: Serving, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_verb("run", *words, env={**serving.env, **env})


def fake_engine(directory: Path, name: str, *command: str) -> dict[str, str]:
    """Put the program ``name`` into a directory; the PATH that finds it first."""
    directory.mkdir()
    program = directory / name
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


def chat(port: int, model: str, prompt: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def test_a_directory_is_served_until_ctrl_c(serving: Serving) -> None:
    port = free_port()
    serving.start(
        str(MODEL),
        *("--engine", "mocker", "--port", str(port), "--name", "mine"),
        *("--namespace", serving.namespace, "--", "--speedup-ratio", "10"),
        verb="run",
        wait=f"ready: http://127.0.0.1:{port}/v1 .*model: mine",
    )
    assert "run: dynamo.mocker" in serving.text() and "speedup-ratio: 10" in serving.text()
    assert "data: [DONE]" in chat(port, "mine", "Hello, box!")
    words = (str(MODEL), "--engine", "mocker", "--name", "Other/B", "--port", str(port))
    apart = dynamo(serving, *words[:-1], "8", "--namespace", serving.namespace)
    assert apart.returncode == 2 and f"listens at http://127.0.0.1:{port}" in apart.stderr
    assert "of its own: dynamo run" in apart.stderr and apart.stdout == ""
    same_port = dynamo(serving, *words, "--dry-run")
    text = r"Address already in use, process \d+ listens there; .* with --host or --port, such as"
    assert re.search(text, same_port.stderr)
    assert serving.stop(signal.SIGINT) == 0
    serving.assert_clean()


def test_the_server_of_an_installed_engine_is_started_and_ended(serving: Serving) -> None:
    """A program that answers as llama-server does, with the port that it gets."""
    file = serving.tmp_path / "tiny.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    script = serving.tmp_path / "server.py"
    script.write_text(
        "import os, sys\n"
        "port = sys.argv[sys.argv.index('--port') + 1]\n"
        f"os.execv(sys.executable, [sys.executable, {str(SERVER)!r}, port, 'llama.cpp', 'x'])\n"
    )
    path = fake_engine(serving.tmp_path / "bin", "llama-server", sys.executable, str(script))
    port = free_port()
    serving.start(
        str(file),
        *("--port", str(port), "--namespace", serving.namespace),
        verb="run",
        wait=r"ready: .*model: tiny\.Q8_0",
        **path,
    )
    assert "profile: llama.cpp" in serving.text()
    assert chat(port, "tiny.Q8_0", "hi")
    assert serving.stop(signal.SIGINT) == 0
    serving.assert_clean()


def test_a_written_graph_is_the_same_for_dynamo_serve(serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    words = (str(MODEL), "--engine", "mocker", "--workers", "2", "--namespace", serving.namespace)
    printed = dynamo(serving, *words, "--dry-run")
    assert printed.returncode == 0, printed.stderr
    written = dynamo(serving, *words, "--write", str(path))
    assert written.returncode == 0 and f"dynamo serve {path}" in written.stdout
    assert path.read_text() == printed.stdout
    assert yaml.safe_load(printed.stdout)["Worker"]["ServiceArgs"]["workers"] == 2
    again = dynamo(serving, *words, "--write", str(path))
    assert again.returncode == 2 and f"{path} exists" in again.stderr
    shown = run_verb("serve", str(path), "--dry-run", env=serving.env)
    assert shown.returncode == 0 and f"{serving.namespace}_Worker_1" in shown.stdout


def test_wrong_arguments_start_nothing(serving: Serving) -> None:
    for words, problem in (
        ((), "no model given; try: dynamo run"),
        ((str(MODEL), "--engine", "mocker", "--", "--speedup-ratoi", "1"), "did you mean speedup"),
        (("/no/such",), "no model '/no/such'"),
    ):
        done = dynamo(serving, *words, DYN_NAMESPACE=serving.namespace)
        assert done.returncode == 2 and problem in done.stderr, done.stderr
    assert serving.leftovers() == []


def test_a_checkout_in_the_working_directory_is_not_imported(serving: Serving) -> None:
    """`pip install .` leaves a source tree that lacks the compiled modules."""
    package = serving.tmp_path / "dynamo"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the copy beside the graph')")
    graph = serving.tmp_path / "graph.yaml"
    words = (str(MODEL), "--engine", "mocker", "--namespace", serving.namespace)
    assert dynamo(serving, *words, "--port", str(free_port()), "--write", str(graph)).stdout
    serving.start(graph, wait="ready: ")
    assert serving.stop() == 0
    assert "the copy beside the graph" not in serving.text()
