"""One serving system: a frontend process and a mock engine process, started, measured, ended."""

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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from environment import SetupError, clean_environment

READY_S = 90.0
_END_S = 15.0
_METRICS = {
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
    """Both processes run and answer inside ``with System(...) as system``."""

    def __init__(
        self, product: Product, directory: Path, model: Path, speedup: float, env: dict[str, str]
    ) -> None:
        self.name = product.name
        self.port = free_port()
        self._product = product
        self._directory = directory
        self._model = model
        self._speedup = speedup
        self._env = clean_environment() | product.env | env
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> System:
        store = self._directory / "store"
        store.mkdir(parents=True)
        self._env |= {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(store),
            "DYN_LOCAL_STATE_DIR": str(self._directory / "state"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }
        try:
            self._start("mocker", "--model-path", str(self._model), "--model-name", "m",
                        "--num-workers", "2", "--block-size", "16",
                        "--speedup-ratio", f"{self._speedup:g}")  # fmt: skip
            self._start("frontend", "--router-mode", "kv", "--http-host", "127.0.0.1",
                        "--http-port", str(self.port))  # fmt: skip
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

    @property
    def frontend_pid(self) -> int:
        """The pid, for a profiler."""
        return self._processes[1].pid

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of the frontend and of the mocker."""
        mocker, frontend = self._processes
        return process_cpu_s(frontend.pid), process_cpu_s(mocker.pid)

    def metrics(self) -> dict[str, float]:
        """The frontend's counters of tokens and finished requests, summed over labels."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
        sums = {}
        for key, name in _METRICS.items():
            lines = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
            sums[key] = sum(map(float, lines))
        return sums

    def rss_bytes(self) -> int:
        """Resident memory of the frontend."""
        pages = int(Path(f"/proc/{self.frontend_pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def ask(self, prompt: str, max_tokens: int, timeout_s: float = 60.0) -> dict[str, int]:
        """Send one unary request and return its ``usage``."""
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
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            usage: dict[str, int] = json.load(answer)["usage"]
        return usage

    def _start(self, module: str, *flags: str) -> None:
        log = (self._directory / f"{module}.log").open("wb")
        command = [str(self._product.python), "-m", f"dynamo.{module}", *flags]
        with log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    cwd=self._directory,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        reason = "no answer yet"
        while time.monotonic() < deadline:
            for process in self._processes:
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
        for process in reversed(self._processes):
            end_process(process, signal.SIGTERM, _END_S)
        self._processes.clear()


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
