"""Rows without a peer: the start of the quickstart, and the cost of one routing decision."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path

from environment import clean_environment
from results import Figure
from systems import Product, end_process, free_port

STARTUP_LIMIT_S = 2.0
DECISION_LIMIT_US = 60.0
_GIVE_UP_S = 60.0
_RETRY_S = 0.005
_BODY = json.dumps(
    {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello, box!"}],
        "stream": True,
        "max_tokens": 8,
    }
)
_REQUEST = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    f"content-type: application/json\r\ncontent-length: {len(_BODY)}\r\n\r\n{_BODY}"
).encode()


def startup(ours: Product, root: Path, directory: Path, rounds: int) -> Figure:
    """Return the seconds from ``dynamo serve`` to the first token, files in the page cache."""
    figure = Figure(
        "startup", "`dynamo serve` to first token of the quickstart, warm", "s", [],
        limit=STARTUP_LIMIT_S,
    )  # fmt: skip
    _start_once(ours, root, directory / "warm-up")
    for number in range(rounds):
        figure.ours.append(_start_once(ours, root, directory / f"start-{number}"))
    return figure


def decision(ours: Product, root: Path, directory: Path) -> Figure:
    """Return the µs of hash + match + score + reserve, by benchmarks/micro/bench_decision.py."""
    figure = Figure(
        "decision", "router decision: 4k tokens, 16 workers, 100k blocks", "µs", [],
        limit=DECISION_LIMIT_US,
    )  # fmt: skip
    directory.mkdir(parents=True)
    output = directory / "decision.json"
    command = [
        *(str(ours.python), "-m", "pytest", "benchmarks/micro/bench_decision.py", "-q"),
        *("--benchmark-enable", f"--benchmark-json={output}", "-p", "no:cacheprovider"),
    ]
    environment = clean_environment() | ours.env
    result = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    if not output.exists() or result.returncode:
        figure.valid = False
        figure.notes.append((result.stdout + result.stderr)[-300:])
        return figure
    cases = json.loads(output.read_text())["benchmarks"]
    medians_us = {case["name"]: case["stats"]["median"] * 1e6 for case in cases}
    figure.ours = [max(medians_us.values())]
    spread = ", ".join(f"{name} {value:.1f}" for name, value in medians_us.items())
    figure.notes.append(f"medians in µs, the slowest counts: {spread}")
    return figure


def _start_once(ours: Product, root: Path, directory: Path) -> float:
    directory.mkdir(parents=True)
    port = free_port()
    environment = clean_environment() | ours.env | {"DYN_LOCAL_STATE_DIR": str(directory / "state")}
    command = [str(ours.python), "-m", "dynamo", "serve", str(root / "examples/quickstart.yaml")]
    with (directory / "serve.log").open("wb") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            [*command, f"--Frontend.http-port={port}"],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _first_content(port, process, started + _GIVE_UP_S) - started
    finally:
        end_process(process, signal.SIGINT, 40.0)


def _first_content(port: int, process: subprocess.Popen[bytes], deadline: float) -> float:
    """Return the arrival time of the first content."""
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(_REQUEST)
                answer = b""
                while piece := connection.recv(65536):
                    answer += piece
                    if b'"content":"' in answer and b'"content":""' not in answer:
                        return time.monotonic()
        except OSError:
            pass
        time.sleep(_RETRY_S)
    raise RuntimeError(f"no token within {_GIVE_UP_S:.0f} s (exit status {process.poll()})")
