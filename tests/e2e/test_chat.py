"""``dynamo chat`` in a real terminal (pty) and in a pipe, over real frontends with mockers."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from deployment import MODEL, Deployment, free_port
from serving import Serving

TIMEOUT_S = 20.0
ANSWER = r"\r\n\x1b\[\?2004l\r(?s:.){8}"
"""The end of a message, and the first characters of the answer to it."""


class Terminal:
    """A chat on a pty: keys in, the screen's text out."""

    def __init__(self, env: dict[str, str], *words: str) -> None:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynamo", "chat", *words],
            env={**env, "TERM": "xterm"},
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(side)
        self.raw = ""

    def wait_for(self, pattern: str) -> str:
        """Return what arrives up to ``pattern``, without escape sequences."""
        deadline = time.monotonic() + TIMEOUT_S
        while (found := re.search(pattern, self.raw)) is None:
            ready, _, _ = select.select([self._main], [], [], deadline - time.monotonic())
            assert ready, f"no {pattern!r} in {self.raw!r}"
            try:
                self.raw += os.read(self._main, 65536).decode()
            except OSError:  # the program has exited
                raise AssertionError(f"no {pattern!r} in {self.raw!r}") from None
        text, self.raw = self.raw[: found.end()], self.raw[found.end() :]
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", text)

    def prompt(self) -> str:
        """Wait until it takes input (bracketed paste is on); return the text before."""
        return self.wait_for(r"\x1b\[\?2004h\S*>\S* ")

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def interrupt(self, line: str) -> None:
        """Press Ctrl-C behind ``line``."""
        self.begin(line)
        self.type("\x03")

    def begin(self, line: str) -> None:
        """Type ``line`` and wait until the program sleeps: CPython's ``input`` sees a signal that
        comes between its last key and its ``select`` only at the next key."""
        self.type(line)
        self.wait_for(line)
        deadline = time.monotonic() + TIMEOUT_S
        while psutil.Process(self.process.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline, "it does not wait for a key"
            time.sleep(0.01)

    def echoes(self) -> bool:
        """Whether the terminal shows keys, as it did before."""
        return bool(termios.tcgetattr(self._main)[3] & termios.ECHO)

    def exit_status(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        finally:
            os.close(self._main)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def slow(deployment: Deployment) -> Iterator[Deployment]:
    """A worker of about 50 tokens a second, which answers with 2,000 tokens by default."""
    deployment.mocker("--speedup-ratio", "0.5")
    deployment.frontend()
    deployment.wait_for_workers(1)
    yield deployment


def test_a_conversation(shared_deployment: Deployment, tmp_path: Path) -> None:
    terminal = Terminal(
        shared_deployment.env,
        *("--url", shared_deployment.url, "--system", "Be brief", "--max-tokens", "20"),
    )
    try:
        assert "tiny at" in terminal.prompt()
        terminal.type("hello there\r")
        shown = terminal.wait_for(r"\[[\d,]+ tokens, .*?TTFT [\d,]+ ms[^]]*\]")
        assert "hello there" in shown
        terminal.prompt()
        terminal.type("\x1b[200~two\nlines\x1b[201~\r")  # as a terminal pastes
        terminal.wait_for(r"TTFT [\d,]+ ms")
        terminal.prompt()
        terminal.type("/stats\r")
        assert "2 answers" in terminal.wait_for(r"mean TTFT")
        terminal.prompt()
        file = tmp_path / "chat.json"
        terminal.type(f"/save {file}\r")
        terminal.wait_for("saved 4 messages")
        messages = json.loads(file.read_text())["messages"]
        assert [one["role"] for one in messages] == ["system", *("user", "assistant") * 2]
        assert messages[0]["content"] == "Be brief" and messages[3]["content"] == "two\nlines"
        assert messages[2]["content"]
        for keys, answer in (
            ("/save " + str(file), "exists"),
            ("/reset", "is empty"),
            ("/system -", "no system prompt"),
            ("/system Be kind", "system prompt: Be kind"),
            ("/model", r"\* tiny"),
            ("/model nope", "does not serve nope"),
            ("/nope", "unknown command"),
            ("/help", "/quit"),
        ):
            terminal.prompt()
            terminal.type(keys + "\r")
            terminal.wait_for(answer)
        terminal.prompt()
        terminal.type("/quit\r")
        assert terminal.exit_status() == 0
    finally:
        terminal.kill()
    history = shared_deployment.state_dir / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.read_text().splitlines()[0] == "hello there"


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(slow: Deployment) -> None:
    terminal = Terminal(slow.env, "--url", slow.url)
    try:
        terminal.prompt()
        terminal.type("talk\r")
        slow.until(lambda: slow.sample("dynamo_frontend_inflight_requests") == 1, "an answer")
        terminal.wait_for("talk" + ANSWER)
        terminal.type("\x03")
        terminal.wait_for("stopped; Ctrl-C again leaves")
        slow.until(lambda: slow.sample("dynamo_frontend_inflight_requests") == 0, "cancelled")
        terminal.prompt()
        terminal.interrupt("half")
        assert terminal.exit_status() == 0
    finally:
        terminal.kill()


def test_keys_during_an_answer_are_the_begin_of_the_next_line(slow: Deployment) -> None:
    terminal = Terminal(slow.env, "--url", slow.url, "--max-tokens", "100")
    try:
        terminal.prompt()
        terminal.type("talk\r")
        terminal.wait_for("talk" + ANSWER)
        terminal.type("ZQX")
        assert "ZQX" not in terminal.wait_for(r"\[100 tokens.*\]")
        terminal.prompt()
        terminal.wait_for("ZQX")
        terminal.type("\r")
        terminal.wait_for(r"\[100 tokens.*\]")
        terminal.prompt()
        terminal.type("again\r")
        terminal.wait_for("again" + ANSWER)
        terminal.process.terminate()
        assert terminal.process.wait(TIMEOUT_S) == 143 and terminal.echoes()
    finally:
        terminal.kill()
    assert "again" in history(slow.env).read_text().splitlines()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_at_the_prompt_restores_the_terminal_and_keeps_the_history(
    shared_deployment: Deployment, signum: int, status: int
) -> None:
    words = ("--url", shared_deployment.url, "--max-tokens", "2")
    terminal = Terminal(shared_deployment.env, *words)
    try:
        terminal.prompt()
        terminal.type(f"before {status}\r")
        terminal.prompt()
        terminal.begin("half a line")
        terminal.process.send_signal(signum)
        assert terminal.process.wait(TIMEOUT_S) == status and terminal.echoes()
    finally:
        terminal.kill()
    assert f"before {status}" in history(shared_deployment.env).read_text().splitlines()


def test_ctrl_c_at_the_prompt_asks_once(shared_deployment: Deployment) -> None:
    terminal = Terminal(shared_deployment.env, "--url", shared_deployment.url)
    try:
        terminal.prompt()
        terminal.interrupt("half a line")
        terminal.wait_for("Ctrl-C again or /quit leaves")
        terminal.prompt()
        terminal.type("\x04")
        assert terminal.exit_status() == 0
    finally:
        terminal.kill()


def history(env: dict[str, str]) -> Path:
    return Path(env["DYN_LOCAL_STATE_DIR"]) / "chat_history"


def ask(env: dict[str, str], text: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynamo", "chat", *words]
    return subprocess.run(
        command,
        env=env,
        input=text,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=60,
    )


def test_a_pipe_gets_the_answer_alone(shared_deployment: Deployment) -> None:
    done = ask(
        shared_deployment.env, "hi\n", "--url", shared_deployment.url + "/v1", "--max-tokens", "9"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() and "\x1b" not in done.stdout and "TTFT" not in done.stdout


def test_a_message_on_the_command_line(shared_deployment: Deployment) -> None:
    words = "hello there", "--url", shared_deployment.url, "--max-tokens", "9"
    done = ask(shared_deployment.env, "", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() and "\x1b" not in done.stdout


def test_errors_name_cause_and_remedy(shared_deployment: Deployment) -> None:
    url = ("--url", shared_deployment.url)
    for words, text, status, reason in (
        ((*url, "--model", "nope"), "hi", 2, "does not serve 'nope'; name one of: tiny"),
        (url, "", 2, "no message on stdin"),
        (url, "a\udcff", 2, "text"),
        (("--url", f"http://127.0.0.1:{free_port()}"), "hi", 1, "cannot connect"),
        (("--namespace", "none"), "hi", 2, "no frontend runs in namespace 'none'"),
    ):
        done = ask(shared_deployment.env, text, *words)
        assert (done.returncode, done.stdout) == (status, "") and reason in done.stderr


def test_it_finds_the_running_deployment(serving: Serving) -> None:
    port = free_port()
    graph = serving.graph(
        f"Frontend: {{run: dynamo.frontend, http-port: {port}}}\n"
        f"Worker: {{run: dynamo.mocker, model-path: {MODEL}, speedup-ratio: 0}}\n"
    )
    serving.start(graph, wait="ready: ")
    env = {**serving.env, "DYN_NAMESPACE": serving.namespace}
    done = ask(env, "hi", "--max-tokens", "5")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()
    assert serving.stop(signal.SIGINT) == 0
