"""Real deployments for end-to-end tests: processes, sockets and files."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked_kit import FORKED, ForkedModule
from prometheus_client.parser import text_string_to_metric_families
from until import poll

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples/model"
START_TIMEOUT_S = 90.0
# The kernel gives ports from here on to connections and to sockets bound to port 0: to any process
# between the choice of a port and its use.
EPHEMERAL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
PORTS = range(10_000, max(EPHEMERAL, 30_000))[WORKER::WORKERS]
OUTPUTS = ("--stream-interval", os.environ.get("DYN_TEST_STREAM_INTERVAL", "1"))
"""How many tokens an output of the mockers has, in all tests of processes."""

_port_numbers = itertools.count(secrets.randbelow(len(PORTS)))  # other test processes have others


def free_port() -> int:
    """Return a port that is currently free, and that this function has not returned before."""
    for number in _port_numbers:
        port = PORTS[number % len(PORTS)]
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError("unreachable: the numbers have no end")


def interrupt_again(process: subprocess.Popen[Any]) -> None:
    """Press Ctrl-C when it is no copy of the stop request before, whose effect a test has seen."""
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)


class Deployment:
    """Processes of one namespace under one state directory, without an arbiter.

    Frontends and workers are ``forked``, or started as users do: see :class:`ForkedModule`.
    """

    def __init__(self, tmp_path: Path, forked: bool = True) -> None:
        self.forked = forked
        self.namespace = f"t{uuid.uuid4().hex[:8]}"
        self.state_dir = tmp_path / "state"
        self.logs = tmp_path
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.servers: list[subprocess.Popen[bytes]] = []
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "CUDA_"))},
            "DYN_LOCAL_STATE_DIR": str(self.state_dir),
            "DYN_NAMESPACE": self.namespace,
            "PYTHONUNBUFFERED": "1",
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, module: str, *flags: str, **env: str) -> subprocess.Popen[bytes]:
        """Start ``python -m module flags`` with its output in a file."""
        log = self.logs / f"{len(self.processes)}-{module}.log"
        process = self._spawn(module, flags, {**self.env, **env}, log)
        self.processes.append(process)
        return process

    def _spawn(
        self, module: str, flags: tuple[str, ...], env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        if self.forked and module in FORKED:
            return ForkedModule(module, flags, env, log)
        return self._run(module, flags, env, log)

    def _run(
        self, module: str, flags: tuple[str, ...], env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *flags]
        with log.open("wb") as output:
            return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)

    def frontend(self, *flags: str, **env: str) -> subprocess.Popen[bytes]:
        return self.start("dynamo.frontend", "--http-port", str(self.port), *flags, **env)

    def mocker(self, *flags: str, **env: str) -> subprocess.Popen[bytes]:
        model = ("--model-path", str(MODEL), "--model-name", "tiny")
        return self.start("dynamo.mocker", *model, *OUTPUTS, *flags, **env)

    def attached(self, port: int, *flags: str) -> subprocess.Popen[bytes]:
        """Start a worker in front of an ``openai_server.py`` that offers its model as ``tiny``."""
        name = ("--served-model-name", "tiny=org/remote-model", "--poll-interval-secs", "60")
        flags = ("--url", f"http://127.0.0.1:{port}", "--model-path", str(MODEL), *name, *flags)
        return self.start("dynamo.attach", *flags)

    def openai_server(self) -> int:
        """Start a server of another make; return its port. It ends with the deployment."""
        port = free_port()
        script = str(ROOT / "tests/e2e/openai_server.py")
        self.servers.append(subprocess.Popen([sys.executable, script, str(port)], env=self.env))
        self.until(lambda: self.request("GET", "/health", port=port)[0] == 200, "the server")
        return port

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        port: int | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request on a new connection; return status, headers, body."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=30)
        try:
            data = None if body is None else json.dumps(body).encode()
            sent = {"content-type": "application/json"} if data is not None else {}
            connection.request(method, path, data, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def wait_for_workers(self, count: int = 1, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until /health lists ``count`` generate instances; fails with the logs."""
        deadline = time.monotonic() + timeout_s
        seen: Any = None
        while time.monotonic() < deadline:
            try:
                seen = json.loads(self.request("GET", "/health")[2])
                models = json.loads(self.request("GET", "/v1/models")[2])["data"]
            except (OSError, ValueError):
                models = []
            else:
                live = [i for i in seen.get("instances", []) if i["endpoint"] == "generate"]
                if len(live) == count and (models or not count):
                    return
            for process in self.processes:
                assert process.poll() is None or process.returncode in (0, -9), self.tail()
            time.sleep(0.05)
        raise AssertionError(f"no {count} workers after {timeout_s} s: {seen}\n{self.tail()}")

    def sample(self, name: str, **labels: str) -> float:
        """The sum of the samples ``name`` with these labels on the frontend's page."""
        text = self.request("GET", "/metrics")[2].decode()
        return sum(
            float(one.value)
            for family in text_string_to_metric_families(text)
            for one in family.samples
            if one.name == name and labels.items() <= one.labels.items()
        )

    def until(
        self, condition: Callable[[], Any], what: str = "it", timeout_s: float = START_TIMEOUT_S
    ) -> float:
        """Poll ``condition``; return the seconds until it held. Fails with the logs."""
        return poll(
            lambda: self._holds(condition), lambda: f"{what}\n{self.tail()}", timeout_s, 0.02
        )

    def _holds(self, condition: Callable[[], Any]) -> bool:
        try:
            return bool(condition())
        except OSError:
            return False  # the process does not listen yet

    def tail(self) -> str:
        """The last lines of every process, for a failing test."""
        parts = []
        for log in sorted(self.logs.glob("*.log")):
            parts.append(f"--- {log.name}\n" + log.read_text(errors="replace")[-2000:])
        return "\n".join(parts)

    def close(self) -> None:
        """Stop all processes; each must exit 0, or be killed by the test."""
        try:
            self._close()
        finally:
            for server in self.servers:
                server.kill()
                server.wait()

    def _close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"{process.args!r} ignored SIGTERM\n{self.tail()}") from None
