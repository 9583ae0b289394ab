"""Two frontends before the same workers, with and without --router-replica-sync: TTFT, balance.

    python benchmarks/replicas.py [--rounds 3] [--rate 24] [--requests 300] [--workers 4]

Each frontend gets half of the arrivals (Poisson): prompts that share nothing, of log-normal
length, so a router can only balance. In each round both variants get the same requests at the same
times, from fresh processes. Prints one line a run, then the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples/model"
WAYS = {"alone": (), "synced": ("--router-replica-sync",)}
BLOCK_TOKENS = 64


def main() -> None:
    """Run both variants in turn and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=24.0, help="requests/s, both together")
    parser.add_argument("--requests", type=int, default=300, help="both together")
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            found[way].append(run(way, number, options))
            print(f"round {number}, {way}: {line(found[way][-1])}", flush=True)
    for way, runs in found.items():
        medians = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
        print(f"median, {way}: {line(medians)}")


def line(figures: dict[str, float]) -> str:
    """The figures of one run."""
    return ", ".join(f"{name} {value:.2f}" for name, value in figures.items())


def run(way: str, number: int, options: argparse.Namespace) -> dict[str, float]:
    """Fresh workers and frontends, one load."""
    with tempfile.TemporaryDirectory(prefix="dynamo-replicas-") as state:
        env = {**os.environ, "DYN_LOCAL_STATE_DIR": state}
        ports = free_ports(2)
        model = ("--model-path", str(MODEL), "--model-name", "tiny")
        size = ("--block-size", str(BLOCK_TOKENS))
        commands: list[tuple[str, ...]] = [
            ("dynamo.mocker", *model, *size, "--num-workers", str(options.workers))
        ]
        for port in ports:
            flags = ("--http-port", str(port), "--router-mode", "kv", *WAYS[way])
            commands.append(("dynamo.frontend", *flags))
        started = [start(command, env) for command in commands]
        try:
            for port in ports:
                wait_for(port, options.workers)
            return load(ports, number, Path(state), options)
        finally:
            for process in started:
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.wait(timeout=30)


def start(command: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """``python -m …``, quiet."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-m", *command], env=env, stdout=quiet, stderr=quiet)


def load(
    ports: list[int], number: int, home: Path, options: argparse.Namespace
) -> dict[str, float]:
    """Replay one half at each frontend; figures of all requests together."""
    clients = []
    for half, port in enumerate(ports):
        trace, out = home / f"{half}.jsonl", home / f"{half}.json"
        trace.write_text(arrivals(random.Random(f"{number}/{half}"), half, options))
        target = ("--url", f"http://127.0.0.1:{port}", "--model", "tiny", "--worker-ids")
        what = ("--endpoint-type", "completions", "--prompt-format", "tokens", "--ignore-eos")
        source = ("--trace", str(trace), "--trace-block-tokens", str(BLOCK_TOKENS))
        command = ("dynamo", "bench", *target, *what, *source, "--output", str(out))
        clients.append((start(command, dict(os.environ)), out))
    halves = []
    for client, out in clients:
        if client.wait(timeout=300) != 0:
            raise SystemExit("a load generator failed")
        halves.append(json.loads(out.read_text()))
    return figures(halves)


def figures(halves: list[dict[str, Any]]) -> dict[str, float]:
    """Return the means over the halves, which have equally many requests."""
    shown = {
        f"TTFT {name} ms": statistics.mean(half["ttft_ms"][name] for half in halves)
        for name in ("p50", "p90", "p99")
    }
    return {**shown, "failed": sum(half["requests"] - half["completed"] for half in halves)}


def arrivals(chance: random.Random, half: int, options: argparse.Namespace) -> str:
    """A trace in Mooncake's format: every block of every prompt is its own."""
    lines, now_s, block = [], 0.0, half * 10_000_000
    for _ in range(options.requests // 2):
        now_s += chance.expovariate(options.rate / 2)
        blocks = max(1, min(int(chance.lognormvariate(3.3, 0.9)), 400))
        lines.append(
            json.dumps(
                {
                    "timestamp": int(now_s * 1000),
                    "input_length": blocks * BLOCK_TOKENS,
                    "output_length": max(2, int(chance.lognormvariate(3.5, 0.8))),
                    "hash_ids": list(range(block, block + blocks)),
                }
            )
        )
        block += blocks
    return "\n".join(lines) + "\n"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def wait_for(port: int, workers: int) -> None:
    """Wait until the frontend lists the workers and has loaded the model."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
                rows = [row for row in page.read().decode().splitlines() if REGISTERED in row]
            if len(rows) == workers:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("the deployment did not come up")


REGISTERED = "dynamo_frontend_worker_active_decode_blocks{"

if __name__ == "__main__":
    main()
