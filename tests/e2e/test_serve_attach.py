"""`dynamo serve` with a worker that starts a server of its own: restarts, and nothing left over."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from deployment import free_port
from serving import ROOT, Serving

SERVER = ROOT / "tests/engines/upstream_server.py"
GRAPH = """
Frontend: {{run: dynamo.frontend, http-port: {port}}}
Worker:
  run: dynamo.attach
  exec: {command}
  ServiceArgs: {{workers: 2}}
"""


@pytest.fixture
def url(serving: Serving) -> str:
    """Start two servers behind a frontend; its address."""
    port = free_port()
    command = shlex.join([sys.executable, str(SERVER)]) + " {port} vllm m"
    serving.start(GRAPH.format(port=port, command=json.dumps(command)), wait="ready: ")
    serving.until(lambda: len(servers(serving)) == 2)
    return f"http://127.0.0.1:{port}"


def chat(url: str) -> int:
    """The status of one chat."""
    body = json.dumps({"model": "m", "messages": []}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def servers(serving: Serving) -> list[psutil.Process]:
    """The servers, not their launchers."""
    found = []
    for one in serving.survivors():
        with contextlib.suppress(psutil.Error):  # it ended just now
            words = one.cmdline()
            if str(SERVER) in words and "-m" not in words:
                found.append(one)
    return found


def test_a_killed_server_comes_back_and_a_stop_leaves_nothing(serving: Serving, url: str) -> None:
    assert chat(url) == 200
    first, second = servers(serving)
    first.kill()
    second.kill()
    serving.until(lambda: len(set(servers(serving)) - {first, second}) == 2)
    serving.until(lambda: chat(url) == 200)
    assert serving.stop() == 0
    serving.assert_clean()


@pytest.mark.parametrize("victim", ["guard", "arbiter"])
def test_a_killed_deployment_leaves_no_server(serving: Serving, url: str, victim: str) -> None:
    os.kill(serving.pid if victim == "guard" else serving.arbiter_pid, signal.SIGKILL)
    serving.wait_until_gone()


def test_the_output_of_the_server_is_in_the_workers_log(serving: Serving, url: str) -> None:
    logs = serving.state_dir / serving.namespace / "logs"
    text = Path(logs / f"{serving.namespace}_Worker.log").read_text()
    assert "server: loading the model" in text and chat(url) == 200
