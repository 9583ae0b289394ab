"""`dynamo serve` reports readiness only for its own, working processes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import needs_ipv6
from deployment import free_port
from serving import QUICKSTART, Serving


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Serving]:
    (tmp_path / "other").mkdir()
    made = Serving(tmp_path / "other")
    yield made
    made.close()


def quickstart(serving: Serving, port: int, *flags: str, wait: str, **env: str) -> None:
    own = ("--namespace", serving.namespace, f"--Frontend.http-port={port}", *flags)
    serving.start(QUICKSTART, *own, wait=wait, **env)


def test_the_port_of_another_deployment(serving: Serving, other: Serving) -> None:
    """A probe of the first deployment must not make the second one "ready"."""
    port = free_port()
    quickstart(other, port, wait="ready: http://")
    quickstart(serving, port, wait="")
    assert serving.wait() == 2
    assert f"cannot listen on http://127.0.0.1:{port}: Address already in use" in serving.text()
    assert "--Frontend.http-port" in serving.text() and "ready: " not in serving.text()
    serving.assert_clean()
    assert other.stop() == 0


OTHER_SERVER = """
import http.server, json, sys

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"instances": [{"endpoint": "generate"}], "data": [{"id": "x"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy)
print("listening", flush=True)
server.serve_forever()
"""


def held_back(serving: Serving) -> tuple[Path, str]:
    """Return a file and the ``ServiceArgs`` of a service that does not start without it."""
    hold = serving.tmp_path / "hold"
    hold.mkdir()
    (hold / "sitecustomize.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(hold / 'go')!r}): time.sleep(0.01)\n"
    )
    path = ":".join([str(hold), *filter(None, [serving.env.get("PYTHONPATH")])])
    return hold / "go", f"{{envs: {{PYTHONPATH: {path!r}}}}}"


def test_another_program_that_takes_the_port_during_the_start(serving: Serving) -> None:
    """A healthy answer counts only if a process of the deployment listens."""
    port = free_port()
    go, held = held_back(serving)  # the frontend, until the other program listens
    graph = (
        f"Frontend: {{run: dynamo.frontend, http-port: {port}, ServiceArgs: {held}}}\n"
        "A: {run: SLEEPER}\n"
    )
    serving.start(graph, wait="starting 2 processes", DYN_SERVE_RESTART_BURST="3")
    words = [sys.executable, "-c", OTHER_SERVER, str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as intruder:
        try:
            assert intruder.stdout is not None and intruder.stdout.readline() == b"listening\n"
            go.touch()
            assert serving.wait(40) == 1
        finally:
            intruder.kill()
    assert "gave up" in serving.text() and "ready: " not in serving.text()


def test_workers_alone_are_ready_when_they_are_registered(serving: Serving) -> None:
    graph = f"W: {{run: dynamo.mocker, model-path: {QUICKSTART.parent / 'model'}}}\n"
    serving.start(graph, wait="ready: 1 process is registered")
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_bad_flag_of_our_own_program_starts_nothing(serving: Serving) -> None:
    serving.start("W: {run: dynamo.mocker, model-pth: x}\n", wait="")
    assert serving.wait() == 2
    assert "W.model-pth is not an option of dynamo.mocker (did you mean model-path?)" in (
        serving.text()
    )
    assert "starting" not in serving.text()
    serving.assert_clean()


MODEL = QUICKSTART.parent / "model"


def test_ready_waits_for_every_model(serving: Serving) -> None:
    """A model that loads slowly is named; "ready" comes when all workers serve."""
    port = free_port()
    go, held = held_back(serving)
    names = f"workers: 1; still waiting for {serving.namespace}_Slow"
    serving.start(
        f"Frontend: {{run: dynamo.frontend, http-port: {port}}}\n"
        f"Fast: {{run: dynamo.mocker, model-path: {MODEL}}}\n"
        f"Slow: {{run: dynamo.mocker, model-path: {MODEL}, ServiceArgs: {held}}}\n",
        wait=re.escape(f"serving: http://127.0.0.1:{port}/v1   model: model   {names}"),
    )
    assert "ready: " not in serving.text()
    go.touch()
    assert "workers: 2" in serving.wait_for("ready: ")
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_worker_that_never_serves_is_given_up(serving: Serving) -> None:
    """Each start takes longer than the window: deaths in the window alone would never end it."""
    (serving.tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\nif 'dynamo.mocker' in sys.orig_argv:\n"
        "    time.sleep(1.2)\n    print('CUDA error: unspecified launch failure', flush=True)\n"
        "    os._exit(1)\n"
    )
    path = ":".join([str(serving.tmp_path), *filter(None, [serving.env.get("PYTHONPATH")])])
    envs = f"ServiceArgs: {{envs: {{PYTHONPATH: {path!r}}}}}"
    serving.start(
        f"Frontend: {{run: dynamo.frontend, http-port: {free_port()}}}\n"
        f"Good: {{run: dynamo.mocker, model-path: {MODEL}}}\n"
        f"Bad: {{run: dynamo.mocker, model-path: {MODEL}, {envs}}}\n",
        wait="ready: ",
        DYN_SERVE_RESTART_BURST="2",
        DYN_SERVE_RESTART_WINDOW_S="1",
    )
    bad = f"{serving.namespace}_Bad"
    output = "last output: CUDA error: unspecified launch failure"
    assert f"restarting it now; {output}" in serving.text()
    assert f"gave up {bad}: 2 starts in a row ended before the model was served" in serving.text()
    assert f"given up: {bad}" in serving.lines[-1] and "workers: 1" in serving.lines[-1]
    assert serving.stop() == 1
    serving.assert_clean()


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "::1"])
def test_ipv6(serving: Serving, host: str) -> None:
    port = free_port()
    flag = f'--Frontend.http-host="{host}"'
    quickstart(serving, port, flag, wait=rf"ready: http://\[::1\]:{port}/v1")
    assert serving.stop() == 0


def test_discovery_private_to_a_process(serving: Serving) -> None:
    quickstart(serving, free_port(), wait="", DYN_DISCOVERY_BACKEND="mem")
    assert serving.wait() == 2
    assert "has discovery backend mem" in serving.text() and "file or etcd" in serving.text()


def test_a_variable_that_replaces_the_graph_is_named(serving: Serving) -> None:
    graph = f"namespace: {serving.namespace}\nB: {{run: [sleep, '1000']}}\n"
    serving.start("A: {run: SLEEPER}\n", DYN_DEPLOYMENT_CONFIG=graph)
    assert "graph.yaml: DYN_DEPLOYMENT_CONFIG replaces it" in serving.text()
    assert list(serving.document()["components"]) == [f"{serving.namespace}_B"]
    assert serving.stop() == 0
