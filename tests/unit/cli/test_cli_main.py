"""The ``dynamo`` command: verbs, help, and a conflicting distribution."""

from __future__ import annotations

import errno
import importlib
import io
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deployment import free_port

from dynamo import __version__
from dynamo.cli import disk
from dynamo.cli import main as cli
from dynamo.cli.completion import verb_groups
from dynamo.errors import ConfigError, InvalidArgument, Unavailable


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert cli.main(words) == 0
        shown = capsys.readouterr().out
        assert all(verb in shown for verb in cli.VERBS) and __version__ in shown


def test_an_unknown_verb_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["server"]) == 2
    assert "unknown verb 'server'; did you mean serve" in capsys.readouterr().err


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_every_verb_exists_and_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, function = cli.VERBS[verb].run.partition(":")
    assert callable(getattr(importlib.import_module(f"dynamo.cli.{module}"), function or "main"))
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    assert stop.value.code == 0 and f"usage: dynamo {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["profile", "graph.yaml"], "dynamo profile"),
        (["planner", "replay", "--help"], "dynamo planner"),
        (["bench", "--compare-routing"], "dynamo bench"),
    ],
)
def test_a_verb_of_the_lab_says_how_to_get_it(
    words: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("dynamo_lab")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).name != "lab"])
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == (
        f"{named}: this is a part of the lab, which is not installed: "
        "pip install 'dynamo-appliance[lab]'; in a checkout: pip install ./lab\n"
    )
    assert verb_groups("profile") == ()


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (ConfigError("bad flag"), 2, "dynamo list: bad flag"),
        (InvalidArgument("no such worker"), 2, "dynamo list: no such worker"),
        (Unavailable("it hangs"), 1, "dynamo list: it hangs"),
        (OSError(errno.ENOSPC, "No space left"), 1, "dynamo list: [Errno 28] No space left"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_verb_is_a_line_and_its_exit_status(
    error: BaseException,
    status: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(disk, "list_models", fail)
    assert cli.main(["list"]) == status
    assert capsys.readouterr().err.strip() == shown


def test_ctrl_d_at_the_question_of_rm_deletes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(question: str) -> str:
        raise EOFError

    model = SimpleNamespace(name="m", size_bytes=1, path=Path("m"))
    deleted: list[Any] = []
    monkeypatch.setattr(disk, "deletable", lambda name, documents: model)
    monkeypatch.setattr(disk, "delete", deleted.append)
    monkeypatch.setattr("builtins.input", end)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.main(["rm", "m"]) == 1
    assert "nothing was deleted" in capsys.readouterr().out and not deleted


def test_a_locale_of_ascii_alone_shows_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["--help"]) == 0
    print("Größe")
    out.flush()
    assert written.getvalue().endswith(b"Gr??e\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert f"dynamo-appliance {__version__} (commit " in capsys.readouterr().out


def test_python_m_dynamo_and_the_script_are_the_command() -> None:
    for command in ([sys.executable, "-m", "dynamo"], [Path(sys.executable).with_name("dynamo")]):
        done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0 and "usage: dynamo VERB" in done.stdout


@pytest.mark.parametrize("rival", ["ai-dynamo", "ai-dynamo-runtime"])
def test_the_original_in_the_same_environment_is_an_error(rival: str, tmp_path: Path) -> None:
    """Both distributions provide the package ``dynamo``; the message gives a remedy."""
    made = tmp_path / f"{rival.replace('-', '_')}-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {rival}\nVersion: 1.0\n")
    script = "import sys; from dynamo.cli.main import main; sys.exit(main(['version']))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {script}"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert f"{rival} is also installed in this environment" in done.stderr
    assert f"pip uninstall {rival}" in done.stderr


@pytest.mark.parametrize(
    ("module", "unused"),
    [
        ("dynamo.cli.serve", "circus tornado rich pynvml psutil jinja2 tokenizers numpy"),
        # It may take 60 ms of CPU, and the interpreter alone takes 25 of them.
        ("dynamo.cli.ps", "asyncio ctypes msgspec shutil ssl zmq"),
        ("dynamo.frontend.__main__", "circus tornado rich pynvml psutil yaml huggingface_hub"),
        ("dynamo.mocker.__main__", "jinja2 tokenizers numpy psutil yaml dynamo.config.router"),
        ("dynamo.attach.__main__", "jinja2 tokenizers numpy psutil yaml dynamo.config.router"),
        ("dynamo.planner.__main__", "circus tornado rich pynvml jinja2 tokenizers yaml scipy"),
    ],
)
def test_a_process_imports_nothing_that_it_does_not_use(module: str, unused: str) -> None:
    """It would cost start-up time, of each worker and each verb."""
    script = (
        f"import sys, {module}\n"
        f"sys.exit(', '.join(sorted(set({unused.split()!r}) & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    ["serve graph.yaml --dry-run", "--help", "--version", "ps --help", "__complete zsh ''"],
)
def test_a_reader_that_closes_early_is_not_an_error(words: str, tmp_path: Path) -> None:
    """``dynamo serve graph.yaml --dry-run | head -0``."""
    (tmp_path / "graph.yaml").write_text("W: {run: [sleep, 1]}\n")
    command = [sys.executable, "-m", "dynamo", *shlex.split(words)]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, env=buffered, cwd=tmp_path, timeout=30
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("streams", ["0", "1", "2", "0 1 2"])
def test_a_closed_standard_stream_is_not_an_error(streams: str) -> None:
    """As with ``dynamo version >&-``: a file opened later must not receive the output."""
    closing = " ".join(f"{number}>&-" for number in streams.split())
    command = f"exec {shlex.quote(sys.executable)} -m dynamo version {closing}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("dynamo-appliance" in done.stdout) is ("1" not in streams)


SCRIPT = ("-c", "import sys; from dynamo.__main__ import main; sys.exit(main())")


@pytest.mark.parametrize("command", [("-m", "dynamo"), SCRIPT], ids=["module", "script"])
@pytest.mark.parametrize("loaded", ["difflib", "dynamo.serve.graph.graph", "dynamo.config.serve"])
def test_ctrl_c_while_modules_load_shows_no_traceback(
    command: tuple[str, ...], loaded: str, tmp_path: Path
) -> None:
    """Of the modules of the command ``difflib`` is the first that Python has not loaded itself."""
    presses = (
        "import os, signal, sys\n"
        "class Press:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {loaded!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Press())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(presses)
    done = subprocess.run(
        [sys.executable, *command, "serve", "none.yaml"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_is_ignored_where_it_was_at_the_start() -> None:
    """As with ``nohup dynamo …``, or ``dynamo … &`` in a script."""
    ask = "import signal, dynamo.__main__; print(signal.getsignal(signal.SIGINT).name)"
    command = f"trap '' INT; exec {shlex.quote(sys.executable)} -c {shlex.quote(ask)}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30)
    assert done.stdout == "SIG_IGN\n", done.stderr


def test_an_unwritable_state_directory_is_a_one_line_error(tmp_path: Path) -> None:
    graph = tmp_path / "graph.yaml"
    graph.write_text("namespace: ns\nW: {run: [sleep, 1]}\n")
    (tmp_path / "state" / "ns" / "serve.lock").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "dynamo", "serve", str(graph)],
        env={**os.environ, "DYN_LOCAL_STATE_DIR": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("dynamo serve: cannot write") and "serve.lock" in line


@pytest.mark.parametrize(("given", "limit"), [({}, "3"), ({"DYN_MIGRATION_LIMIT": "0"}, "0")])
def test_the_frontends_of_a_graph_migrate_requests(
    tmp_path: Path, given: dict[str, str], limit: str
) -> None:
    graph = tmp_path / "graph.yaml"
    frontend = f"{{run: dynamo.frontend, http-port: {free_port()}}}"
    graph.write_text(f"namespace: ns\nFrontend: {frontend}\n")
    done = subprocess.run(
        [sys.executable, "-m", "dynamo", "serve", str(graph), "--dry-run"],
        env={**os.environ, "DYN_LOCAL_STATE_DIR": str(tmp_path / "state"), **given},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert f"DYN_MIGRATION_LIMIT={limit}\n" in done.stdout
