"""Completion of commands: every verb and option, values, and real shells."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import QUICKSTART, ROOT

from dynamo.cli import completion
from dynamo.cli.completion import subverbs, verb_groups
from dynamo.cli.main import VERBS, main
from dynamo.config.option import fields_of, load_known
from dynamo.config.option import load as real_load
from dynamo.config.parser import option_of

BIN = Path(sys.executable).parent
DOCUMENT = ROOT / "statefiles/two-workers.json"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with the statefile of a deployment."""
    (tmp_path / "dynamo.json").write_text(DOCUMENT.read_text())
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    return tmp_path


def complete(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The words that fish would offer for the last one of ``words``."""
    assert main(["__complete", "fish", *words]) == 0
    return [line.partition("\t")[0] for line in capsys.readouterr().out.splitlines()]


def complete_bash(capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    assert main(["__complete", "bash", line]) == 0
    return capsys.readouterr().out.splitlines()


class Loaded(BaseException):
    """The verb has called ``load``."""

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups


_LOADERS = ("dynamo.cli.", "dynamo.planner.", "dynamo_lab.cli.")


def loaded(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The groups that a verb loads."""

    def load(prog: str, description: str, groups: list[Any], *rest: Any, **more: Any) -> Any:
        raise Loaded(groups)

    name, _, function = VERBS[words[0]].run.partition(":")
    module = f"dynamo.cli.{name}"
    importlib.import_module(module)
    for name, one in list(sys.modules.items()):
        if name.startswith(_LOADERS) or name == "dynamo.config":
            for attribute, value in list(vars(one).items()):
                if value is real_load or value is load_known:
                    monkeypatch.setattr(one, attribute, load)
    with pytest.raises(Loaded) as found:
        getattr(sys.modules[module], function or "main")([*words[1:], "--help"])
    return found.value.groups


COMMANDS = [*([verb] for verb in VERBS), *(["planner", word] for word in subverbs("planner"))]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_table_of_options_is_true(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("dynamo.planner.__main__")
    importlib.import_module("dynamo_lab.cli.planner_replay")
    importlib.import_module("dynamo_lab.cli.profile")
    groups = loaded(words, monkeypatch)
    assert verb_groups(*words) == tuple(groups), f"complete the table: {words}"
    flags = {flag for g in groups for f in fields_of(g) for flag in option_of(f).flags}
    shown = complete(capsys, *words, "--")
    assert "--help" in shown and {f for f in flags if f.startswith("--")} <= {*shown, *_old(groups)}


def _old(groups: list[Any]) -> set[str]:
    """Flags that are not offered: deprecated ones."""
    options = [option_of(field) for group in groups for field in fields_of(group)]
    return {flag for option in options if option.deprecated for flag in option.flags}


def test_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(VERBS) <= set(complete(capsys, ""))
    assert complete(capsys, "relo") == ["reload"]
    assert complete(capsys, "planner", "") == ["explain", "replay", "set", "pause", "resume"]
    assert "--json" in complete(capsys, "planner", "explain", "--")


def test_values_of_options(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(capsys, "run", "--engine", "l") == ["llama.cpp"]
    assert complete(capsys, "run", "--engine=l") == ["--engine=llama.cpp"]
    assert complete_bash(capsys, "dynamo run --engine=l") == ["words", "llama.cpp"]
    assert complete(capsys, "state", "") == ["show", "repair"]
    assert complete(capsys, "ps", "--namespace", "") == ["dynamo"]
    assert complete(capsys, "run", "m", "--", "--x") == []
    assert complete(capsys, "nonsense", "") == []


def test_models_and_services_are_those_of_the_statefile(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = json.loads((state / "dynamo.json").read_text())["components"]
    values = completion._Values(())
    services = {entry["service"] for entry in entries.values()}
    assert set(values("services", "")) == services | entries.keys()
    assert complete(capsys, "route", "--model", "") == ["llama-3-8b"]
    (state / "dynamo.json").write_text("damaged")
    assert complete(capsys, "route", "--model", "") == []


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.yaml", "b.txt", ".hidden.yaml"):
        (tmp_path / name).write_text("")
    (tmp_path / "more").mkdir()
    assert complete(capsys, "serve", f"{tmp_path}/") == [f"{tmp_path}/a.yaml", f"{tmp_path}/more/"]
    assert complete(capsys, "route", "--prompt-file", f"{tmp_path}/b") == [f"{tmp_path}/b.txt"]
    assert complete_bash(capsys, f"dynamo serve {tmp_path}/a")[0] == "files"


def test_keys_of_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    found = complete(capsys, "serve", str(QUICKSTART), "--Worker.s")
    assert "--Worker.speedup-ratio=" in found and not any("Frontend" in word for word in found)
    assert "--Frontend.router-mode=" in complete(capsys, "serve", str(QUICKSTART), "--Front")


@pytest.mark.parametrize("line", ["dynamo serve 'open quo", "dynamo serve back\\", "dynamo", ""])
def test_unfinished_command_lines(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete_bash(capsys, line)[0] in ("words", "files")


def test_an_answer_imports_little() -> None:
    """It is given at each Tab: 0.06 to 0.09 s of CPU, most of them for imports."""
    words = "-m", "dynamo", "__complete", "fish", "serve", str(QUICKSTART), "--W"
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "--Worker." in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "msgspec" in imported
    assert not imported & {"asyncio", "circus", "logging", "numpy", "rich", "zmq"}
    assert len(imported) < 400


def test_no_shell_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert main(["completion"]) == 2 and "bash|zsh|fish" in capsys.readouterr().err
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert main(["completion"]) == 0 and "complete -F" in capsys.readouterr().out


class Terminal:
    """An interactive shell on a terminal."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.chdir(ROOT)
            os.execvpe(command[0], command, env)
        self.seen = ""

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.fd, text.encode())

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + 20
        while not re.search(pattern, self.seen):
            left_s = deadline - time.monotonic()
            assert left_s > 0 and select.select([self.fd], [], [], left_s)[0], repr(self.seen)
            self.seen += os.read(self.fd, 65536).decode(errors="replace")

    def close(self) -> None:
        os.close(self.fd)
        os.waitpid(self.pid, 0)


@pytest.fixture(params=["bash", "zsh"])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    """A shell that has read our script."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is missing")
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb", "HOME": "/"}
    start = 'eval "$(dynamo completion SHELL)"; PS1=READY-\n'.replace("SHELL", shell)
    if shell == "zsh":
        start = "autoload -Uz compinit; compinit -u -D\n" + start
    (tmp_path / ".zshrc").write_text(start)
    command = ["bash", "--noprofile", "--rcfile", str(tmp_path / ".zshrc"), "-i"]
    made = Terminal(
        command if shell == "bash" else ["zsh", "-i"], {**env, "ZDOTDIR": str(tmp_path)}
    )
    made.wait_for("READY-")
    yield made
    made.close()


def test_a_real_shell_completes(terminal: Terminal) -> None:
    for typed, wanted in (
        ("dynamo relo", "dynamo reload "),
        ("dynamo serve --grace", "dynamo serve --graceful-timeout "),
        ("dynamo serve examples/quicks", "dynamo serve examples/quickstart.yaml "),
        ("dynamo serve examples/mod", "dynamo serve examples/model/"),
        ("dynamo run --engine=oll", "dynamo run --engine=ollama "),
    ):
        terminal.type(f"{typed}\t")
        terminal.wait_for(re.escape(wanted[len(typed) :]))
        terminal.type("\x15")  # Ctrl-U: an empty line


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is missing")
def test_fish_completes() -> None:
    script = "dynamo completion fish | source; complete -C 'dynamo serve examples/quicks'"
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == "examples/quickstart.yaml", done.stderr
