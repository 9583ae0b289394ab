"""The quickstart graph: frontend, two mockers, a client; and the same under circusd."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from deployment import free_port
from serving import CIRCUSCTL, ROOT, Serving

QUICKSTART = ROOT / "examples/quickstart.yaml"


def start(serving: Serving, *flags: str) -> int:
    """The quickstart on a free port."""
    port = free_port()
    own = ("--namespace", serving.namespace, f"--Frontend.http-port={port}")
    serving.start(QUICKSTART, *own, *flags, wait="ready: http://127.0.0.1:.* model: tiny")
    return port


@contextlib.contextmanager
def chat(port: int, stream: bool = False, **more: Any) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    messages = [{"role": "user", "content": "Count to ten, please. " * 20}]
    body = {"model": "tiny", "messages": messages, "stream": stream, **more}
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        with connection.getresponse() as answer:
            yield answer
    finally:
        connection.close()


def test_start_chat_kill_and_stop(serving: Serving) -> None:
    port = start(serving)
    assert re_workers(serving.lines[-1]) == 2
    with chat(port) as answer:
        assert answer.status == 200
        content = json.loads(answer.read())["choices"][0]["message"]["content"]
        assert content.strip() == "Count to ten, please. " * 19 + "Count to ten, please."
    (old,) = serving.wait_for_pids("Worker_1")
    os.kill(old, signal.SIGKILL)
    serving.wait_for_pids("Worker_1", unlike=old)
    for _ in range(5):  # the other worker answers
        assert answers(port)
    serving.wait_for("Worker_1 .*serving tiny")
    assert serving.stop(signal.SIGINT) == 0
    serving.assert_clean()


def re_workers(line: str) -> int:
    return int(line.split("workers: ")[1].split()[0])


def test_ctrl_c_lets_streams_finish(serving: Serving) -> None:
    """An answer in flight is complete, and the workers outlive the frontend."""
    port = start(serving, "--Worker.speedup-ratio=1", "--Worker.reply=random")
    with chat(port, stream=True, max_tokens=120) as answer:
        first = answer.read(64)
        stopper = threading.Thread(target=serving.stop, args=(signal.SIGINT,))
        stopper.start()
        rest = answer.read()
    stopper.join()
    events = (first + rest).decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "length"
    serving.assert_clean()


@pytest.mark.parametrize("victim", ["Frontend", "Worker", "arbiter", "guard"])
def test_kill_9_of_each_process(serving: Serving, victim: str) -> None:
    port = start(serving)
    if victim == "guard":
        os.kill(serving.pid, signal.SIGKILL)
    elif victim == "arbiter":
        os.kill(serving.arbiter_pid, signal.SIGKILL)
    else:
        (old,) = serving.wait_for_pids(victim)
        os.kill(old, signal.SIGKILL)
        serving.wait_for_pids(victim, unlike=old)
        serving.until(lambda: answers(port))
        assert serving.stop() == 0
    serving.assert_clean()


def answers(port: int) -> bool:
    try:
        with chat(port) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


def test_a_program_that_rejects_its_flags_is_given_up(serving: Serving) -> None:
    rejects = "import sys; print('unrecognized arguments:', *sys.argv[1:], flush=True); sys.exit(2)"
    path = serving.graph(
        f"Frontend: {{run: dynamo.frontend, http-port: {free_port()}}}\n"
        f"Worker: {{run: [python, -c, {json.dumps(rejects)}], speedup: 3}}\n"
    )
    serving.start(path, wait="")
    assert serving.wait() == 1
    assert "unrecognized arguments: --speedup 3" in serving.text()
    assert "no worker is left; stopping" in serving.text()
    serving.assert_clean()


def processes(parent: int) -> dict[str, list[str]]:
    """Map each child of ``parent`` to its command, without the interpreter."""
    found = {}
    for child in psutil.Process(parent).children():
        words = child.cmdline()
        assert Path(f"/proc/{child.pid}/exe").samefile(sys.executable)
        found[str(child.pid)] = words[1:]
    return found


def test_circusd_runs_the_same_processes(serving: Serving, tmp_path: Path) -> None:
    """Plain circusd with circus.ini, beside `dynamo serve`: the same names and commands."""
    serving.namespace = "dynamo"
    port = start(serving)
    names = sorted(serving.circusctl("status").split("\n"))
    ours = processes(serving.arbiter_pid)
    where = {str(Path(psutil.Process(int(pid)).cwd())) for pid in ours}
    assert serving.stop() == 0

    checkout = tmp_path / "checkout"  # circus puts its sockets into the working directory
    checkout.mkdir()
    (checkout / "examples").symlink_to(ROOT / "examples")
    text = (ROOT / "circus.ini").read_text()
    (checkout / "circus.ini").write_text(text.replace("--http-port 8000", f"--http-port {port}"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (tmp_path / "circusd.log").open("wb") as log:
        circusd = subprocess.Popen(
            [CIRCUSCTL.with_name("circusd"), "circus.ini"],
            cwd=checkout,
            env={**serving.env, "PATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 30
        while not answers(port):
            assert time.monotonic() < deadline, (tmp_path / "circusd.log").read_text()
            time.sleep(0.05)
        command = [str(CIRCUSCTL), "--endpoint", "ipc://circus.sock", "status"]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=30)
        assert sorted(done.stdout.strip().split("\n")) == names
        theirs = processes(circusd.pid)
        assert sorted(theirs.values()) == sorted(ours.values())
        assert {str(Path(psutil.Process(int(pid)).cwd())) for pid in theirs} == where
        assert (checkout / "circus.sock").stat().st_mode & 0o077 == 0
        quit_ = subprocess.run([*command[:3], "quit"], cwd=checkout, timeout=30)
        assert quit_.returncode == 0 and circusd.wait(30) == 0
    finally:
        if circusd.poll() is None:
            circusd.kill()
            circusd.wait(10)
    serving.wait_until_gone()
