"""One serving system: its processes, started, measured and ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from environment import SetupError, clean_environment

READY_S = 90.0
_END_S = 15.0
FRONTEND_METRICS = {
    "tokens": "dynamo_frontend_output_tokens_total",
    "requests": "dynamo_frontend_requests_total",
}


@dataclass(frozen=True)
class Product:
    """A build to measure: its name in the tables, its interpreter, its settings."""

    name: str
    python: Path
    env: dict[str, str] = field(default_factory=dict)


class System:
    """Processes that run and answer inside ``with System(...) as system``.

    A subclass starts them in :meth:`start`; the last one started is the frontend.
    """

    def __init__(self, name: str, directory: Path, env: dict[str, str]) -> None:
        self.name = name
        self.port = free_port()
        self._directory = directory
        self._env = clean_environment() | {"HF_HUB_OFFLINE": "1"} | env
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        (self._directory / "store").mkdir(parents=True)
        try:
            self.start()
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def start(self) -> None:
        """Start every process with :meth:`run`."""
        raise NotImplementedError

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of what is measured and of the mock engine."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """The counters ``tokens`` and ``requests``, which only grow."""
        raise NotImplementedError

    def parts_cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of the measured processes by name, if there are several."""
        return {}

    @property
    def frontend_pid(self) -> int:
        """The pid, for a profiler."""
        return list(self._processes.values())[-1].pid

    def pid(self, name: str) -> int:
        """Return the pid of the process started as ``name``."""
        return self._processes[name].pid

    def rss_bytes(self) -> int:
        """Resident memory of the frontend."""
        pages = int(Path(f"/proc/{self.frontend_pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def ask(self, prompt: str, max_tokens: int, timeout_s: float = 60.0) -> dict[str, int]:
        """Send one unary request and return its ``usage``."""
        usage: dict[str, int] = self.answer(prompt, max_tokens, timeout_s)["usage"]
        return usage

    def answer(self, prompt: str, max_tokens: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Send one unary request and return the answer."""
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def run(self, name: str, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        """Start one process with its log in ``name``.log."""
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=self._directory,
                env=self._env | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        reason = "no answer yet"
        while time.monotonic() < deadline:
            for process in self._processes.values():
                if process.poll() is not None:
                    raise SetupError(f"{self.name}: a process ended at once\n{self._last_words()}")
            try:
                if self.ask("Are you there?", 2, timeout_s=5.0)["completion_tokens"] == 2:
                    return
            except (urllib.error.URLError, OSError, KeyError, ValueError) as error:
                reason = str(error)
            time.sleep(0.2)
        raise SetupError(
            f"{self.name}: not ready in {READY_S:.0f} s ({reason})\n{self._last_words()}"
        )

    def _last_words(self) -> str:
        lines = []
        for log in sorted(self._directory.glob("*.log")):
            lines += [f"{log.name}: {line}" for line in log.read_text().splitlines()[-8:]]
        return "\n".join(lines)

    def _end(self) -> None:
        """Stop the frontend, then the engine; kill the process group of one that does not exit."""
        for process in reversed(self._processes.values()):
            end_process(process, signal.SIGTERM, _END_S)
        self._processes.clear()


class MockerSystem(System):
    """``dynamo.frontend`` over ``dynamo.mocker``, ours or Dynamo's."""

    def __init__(
        self, product: Product, directory: Path, model: Path, speedup: float, env: dict[str, str]
    ) -> None:
        super().__init__(product.name, directory, file_discovery(directory) | product.env | env)
        self._product = product
        self._model = model
        self._speedup = speedup

    def start(self) -> None:
        """Start the mocker and the frontend."""
        self._module("mocker", "--model-path", str(self._model), "--model-name", "m",
                     "--num-workers", "2", "--block-size", "16",
                     "--speedup-ratio", f"{self._speedup:g}")  # fmt: skip
        self._module("frontend", "--router-mode", "kv", "--http-host", "127.0.0.1",
                     "--http-port", str(self.port))  # fmt: skip

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of the frontend and of the mocker."""
        return process_cpu_s(self.pid("frontend")), process_cpu_s(self.pid("mocker"))

    def metrics(self) -> dict[str, float]:
        """The frontend's counters of tokens and finished requests, summed over labels."""
        return counted(self.port, FRONTEND_METRICS)

    def _module(self, module: str, *flags: str) -> None:
        self.run(module, [str(self._product.python), "-m", f"dynamo.{module}", *flags])


def counted(port: int, names: dict[str, str]) -> dict[str, float]:
    """Return counters of ``/metrics``, each summed over its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    sums = {}
    for key, name in names.items():
        lines = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        sums[key] = sum(map(float, lines))
    return sums


def file_discovery(directory: Path) -> dict[str, str]:
    """Return the variables of a deployment of its own, with its files in ``directory``."""
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(directory / "store"),
        "DYN_LOCAL_STATE_DIR": str(directory / "state"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
    }


def end_process(process: subprocess.Popen[bytes], sign: signal.Signals, patience_s: float) -> None:
    """Terminate one of our processes, then kill its process group."""
    if process.poll() is None:
        process.send_signal(sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads its own session: start_new_session
    process.wait()


def process_cpu_s(pid: int) -> float:
    """User and system time of all threads, ended ones too, in nanosecond resolution.

    The process's CPU clock (clock_getcpuclockid(3)); /proc/PID/stat counts the same in 10 ms ticks.
    """
    return time.clock_gettime(((~pid) << 3) | 2)


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
