"""Measure `dynamo serve` beside vLLM's own API server on your engine, your model and your GPU.

    python benchmarks/own_engine.py --model DIRECTORY [--rounds 2] [--json FILE] [-- VLLM FLAGS]

Both deployments run at the same time, each with its own engine and the same flags, and take turns
under the load of ``dynamo bench``. One GPU must hold the model twice, so each engine gets 40 % of
its memory unless the flags name a share. CPU is that of all processes but EngineCore, from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import psutil
import yaml

START_S = 420.0
STOP_S = 60.0


@dataclass(frozen=True)
class Load:
    """Options of ``dynamo bench``; ``prefix`` is the share that all prompts have in common."""

    name: str
    requests: int
    concurrency: int
    isl: int
    osl: int
    prefix: float = 0.0


LOADS = (
    Load("alone", 24, 1, 512, 64),
    Load("32 streams", 256, 32, 512, 128),
    Load("128 streams", 640, 128, 512, 128),
    Load("256 streams, shared prefix", 1024, 256, 1024, 128, 0.5),
)
SHOWN = (
    ("TTFT p50", "ms", "ttft_p50_ms"),
    ("TTFT p99", "ms", "ttft_p99_ms"),
    ("ITL p50", "ms", "itl_p50_ms"),
    ("output", "tokens/s", "tokens_per_s"),
    ("CPU outside EngineCore", "µs/token", "cpu_us_per_token"),
)


class Server:
    """A deployment as a child process; its output goes to a file in ``directory``."""

    def __init__(self, name: str, directory: Path, command: list[str], port: int) -> None:
        self.name, self.port = name, port
        self._log = directory / f"{name}.log"
        env = os.environ | {"DYN_LOCAL_STATE_DIR": str(directory / "state")}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=env
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def wait_ready(self) -> float:
        """Return the seconds until the server lists a model. Raises SystemExit with its log."""
        started_s = time.monotonic()
        while time.monotonic() - started_s < START_S:
            if self._process.poll() is not None:
                break
            try:
                url = f"http://127.0.0.1:{self.port}/v1/models"
                with urllib.request.urlopen(url, timeout=2) as response:
                    if json.load(response)["data"]:
                        return time.monotonic() - started_s
            except (OSError, ValueError):
                pass
            time.sleep(0.2)
        raise SystemExit(f"{self.name} did not start:\n{self._log.read_text()[-4000:]}")

    def cpu_s(self) -> float:
        """CPU seconds of the server's processes without its engine's."""
        tree = [psutil.Process(self._process.pid)]
        tree += tree[0].children(recursive=True)
        total_s = 0.0
        for process in tree:
            try:
                if "EngineCore" not in " ".join(process.cmdline()):
                    total_s += sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
        return total_s


def main() -> None:
    """Run the loads and print the table."""
    args = _arguments()
    flags = [flag for flag in args.flags if flag != "--"]
    if not any(flag.startswith("--gpu-memory-utilization") for flag in flags):
        flags += ["--gpu-memory-utilization=0.4"]
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        directory = Path(made)
        # One after the other: each engine measures the free memory while it starts.
        servers, start_s = [], {}
        for start in (_ours, _vllm):
            server = stack.enter_context(start(directory, args.model, flags))
            start_s[server.name] = server.wait_ready()
            servers.append(server)
            print(f"{server.name} ready after {start_s[server.name]:.1f} s", file=sys.stderr)
        found = {load.name: _rounds(servers, load, args.rounds, directory) for load in LOADS}
    if args.json:
        args.json.write_text(json.dumps({"start_s": start_s, "loads": found}, indent=1))
    _print(found)


def _ours(directory: Path, model: Path, flags: list[str]) -> Server:
    port = _free_port()
    worker: dict[str, Any] = {"run": "dynamo.vllm", "model": str(model), "served-model-name": "m"}
    pairs = iter(flags)
    for flag in pairs:
        name, equals, value = flag.removeprefix("--").partition("=")
        worker[name] = value if equals else True
    frontend = {"run": "dynamo.frontend", "http-port": port, "router-mode": "kv"}
    graph = directory / "graph.yaml"
    graph.write_text(yaml.safe_dump({"namespace": "own", "Frontend": frontend, "Worker": worker}))
    return Server("ours", directory, [sys.executable, "-m", "dynamo", "serve", str(graph)], port)


def _vllm(directory: Path, model: Path, flags: list[str]) -> Server:
    port = _free_port()
    return Server("vllm", directory, [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)),
        *("--disable-uvicorn-access-log", "--no-enable-log-requests", *flags),
    ], port)  # fmt: skip


def _rounds(servers: list[Server], load: Load, rounds: int, directory: Path) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    for number in range(-1, rounds):  # the first round warms both up and is not counted
        for server in servers if number % 2 else reversed(servers):
            sample = _bench(server, load, number + 1, directory)
            if number >= 0:
                found[server.name].append(sample)
    return found


def _bench(server: Server, load: Load, seed: int, directory: Path) -> dict[str, float]:
    output = directory / "bench.json"
    before_s = server.cpu_s()
    subprocess.run([
        *(sys.executable, "-m", "dynamo", "bench", "--url", f"http://127.0.0.1:{server.port}"),
        *("--requests", str(load.requests), "--concurrency", str(load.concurrency)),
        *("--isl", str(load.isl), "--osl", str(load.osl), "--prefix-ratio", str(load.prefix)),
        *("--seed", str(seed), "--ignore-eos", "--output", str(output)),
    ], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    cpu_s = server.cpu_s() - before_s
    result = json.loads(output.read_text())
    tokens = result["output_tokens"]
    return {
        "failed": result["requests"] - result["completed"],
        "ttft_p50_ms": result["ttft_ms"]["p50"],
        "ttft_p99_ms": result["ttft_ms"]["p99"],
        "itl_p50_ms": result["itl_ms"]["p50"],
        "tokens_per_s": tokens / result["duration_s"],
        "cpu_us_per_token": cpu_s / tokens * 1e6,
    }


def _print(found: dict[str, Any]) -> None:
    print(f"{'load':28} {'':24} {'ours':>10} {'vllm':>10} {'ratio':>6}")
    for load, samples in found.items():
        for text, unit, key in SHOWN:
            ours, theirs = (median(s[key] for s in samples[name]) for name in ("ours", "vllm"))
            row = f"{load:28} {text + ' ' + unit:32} {ours:10.2f} {theirs:10.2f}"
            print(f"{row} {ours / theirs:6.2f}")
        failed = {name: sum(s["failed"] for s in samples[name]) for name in samples}
        if any(failed.values()):
            print(f"{load:28} failed requests: {failed}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rounds", type=int, default=2, help="per load and server (default: 2)")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="-- flags of both engines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
