"""`dynamo serve` under test: a real process, its output, and clean-up after the test.

Waits last less than the 30 s that a service gets to exit, or a restart is delayed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from until import poll

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples/quickstart.yaml"
SLEEPER = ROOT / "tests/e2e/service_sleep.py"
CIRCUSCTL = Path(sys.executable).with_name("circusctl")


def is_running(pid: int) -> bool:
    """Whether a process runs. A zombie, which process 1 of a container may never reap, does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Serving:
    """One ``dynamo serve`` in its own namespace and state directory."""

    def __init__(self, tmp_path: Path) -> None:
        self.namespace = f"t{uuid.uuid4().hex[:8]}"
        self.tmp_path = tmp_path
        self.state_dir = tmp_path / "state"
        self.marker = uuid.uuid4().hex
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "CUDA_"))},
            "DYN_LOCAL_STATE_DIR": str(self.state_dir),
            "SERVING_MARKER": self.marker,
        }
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def statefile(self) -> Path:
        return self.state_dir / f"{self.namespace}.json"

    @property
    def endpoint(self) -> str:
        return str(self.document()["circus_endpoint"])

    def graph(self, text: str, name: str = "graph.yaml") -> Path:
        """Write a graph file; ``SLEEPER`` is replaced by the command of the test service."""
        path = self.tmp_path / name
        sleeper = json.dumps(["python", str(SLEEPER)])
        path.write_text(f"namespace: {self.namespace}\n" + text.replace("SLEEPER", sleeper))
        return path

    def start(
        self,
        graph: Path | str,
        *flags: str,
        wait: str = "(ready|started): ",
        under: Sequence[str] = (),
        verb: str = "serve",
        **env: str,
    ) -> None:
        """Start, ``under`` another command if given, and wait for a line that contains ``wait``.

        With the ``verb`` run, ``graph`` is a model.
        """
        path = self.graph(graph) if isinstance(graph, str) and verb == "serve" else graph
        self.process = subprocess.Popen(
            [*under, sys.executable, "-m", "dynamo", verb, str(path), *flags],
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._queue = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self._queue), daemon=True).start()
        if wait:
            self.wait_for(wait)

    def _read(self, process: subprocess.Popen[bytes], lines: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line.decode(errors="replace").rstrip("\n"))
        lines.put(None)

    def wait_for(self, pattern: str, timeout_s: float = 75.0) -> str:
        """Return the next line that contains ``pattern`` (a regular expression)."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no line with {pattern!r} in:\n" + "\n".join(self.lines))
            self.lines.append(line)
            if re.search(pattern, line):
                return line

    def wait(self, timeout_s: float = 75.0) -> int:
        """Wait for the exit, return its status; ``lines`` then has the complete output."""
        assert self.process is not None
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            while not self._queue.empty():
                self.lines.append(str(self._queue.get()))
            left = [(one.pid, one.ppid(), one.status(), one.cmdline()) for one in self.survivors()]
            raise AssertionError(f"still running: {left}\n{self.text()}") from None
        while (line := self._queue.get(timeout=5)) is not None:
            self.lines.append(line)
        return status

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 75.0) -> int:
        """Stop it with a signal; return the exit status."""
        assert self.process is not None
        self.process.send_signal(signum)
        return self.wait(timeout_s)

    def text(self) -> str:
        return "\n".join(self.lines)

    def document(self) -> Any:
        """The statefile."""
        return json.loads(self.statefile.read_text())

    def pids(self, service: str) -> list[int]:
        """The pids in the statefile for the watcher of ``service``."""
        entry = self.document()["components"][f"{self.namespace}_{service}"]
        return [process["pid"] for process in entry["processes"]]

    def wait_for_pids(self, service: str, unlike: int = 0, timeout_s: float = 75.0) -> list[int]:
        """Wait until ``service`` has processes, none of them ``unlike``; return their pids."""
        self.until(lambda: unlike not in (self.pids(service) or [unlike]), timeout_s)
        return self.pids(service)

    def until(self, condition: Callable[[], Any], timeout_s: float = 75.0) -> None:
        """Poll ``condition``, for state of other processes that comes without an event."""
        poll(condition, self.text, timeout_s)

    @property
    def arbiter_pid(self) -> int:
        return int(self.document()["arbiter"]["pid"])

    def circusctl(self, *words: str) -> str:
        """Run the real circusctl and return its output."""
        command = [str(CIRCUSCTL), "--timeout", "25", "--endpoint", self.endpoint, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return (done.stdout + done.stderr).strip()

    def survivors(self) -> list[psutil.Process]:
        """Every process with our marker in its environment, whatever its parent."""
        needle = f"SERVING_MARKER={self.marker}".encode()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                if needle in environ and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until_gone(self, timeout_s: float = 75.0) -> None:
        """Wait until every process of this deployment has exited."""
        self.until(lambda: not self.survivors(), timeout_s)

    def leftovers(self) -> list[str]:
        """The remaining files, except logs and the learned speed of prefills."""
        if not self.state_dir.exists():
            return []
        kept = (self.state_dir / self.namespace, self.state_dir / self.namespace / "logs")
        return [
            str(path.relative_to(self.state_dir))
            for path in self.state_dir.rglob("*")
            if path not in kept and not {"logs", ".prefill-speed"}.intersection(path.parts)
        ]

    def assert_clean(self) -> None:
        """No process, no socket, no statefile, no lease."""
        self.wait_until_gone()
        assert self.leftovers() == [], [*self.leftovers(), self.text()]

    def close(self) -> None:
        """Kill the remaining processes."""
        for process in self.survivors():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.process is not None:
            self.process.wait(10)
