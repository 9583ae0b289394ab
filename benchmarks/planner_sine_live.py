"""The published experiment of the load planner, live: dynamo serve, its Planner, mockers, a load.

    python benchmarks/planner_sine_live.py [--speedup 2] [--periods 2] [--markdown OUT.md]

The load of ``planner_sine.py`` with everything ``--speedup`` times faster: arrivals, mockers,
starts and the planner's intervals. So durations in the table are multiplied by it, to compare with
the simulation. GPUs are numbers that no process uses (``--gpus 8``); their use is read from the
statefile every quarter of a second. The CPU column shows whether the machine was the limit.
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
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from live_routing import cpu_ticks, wait_for_workers
from planner_sine import HIGH, ISL, LOW, OSL, PERIOD_S

from dynamo_lab.simulation.request import generate, sine

ROOT = Path(__file__).resolve().parents[1]
DYNAMO = [sys.executable, "-m", "dynamo"]
NAMESPACE = "sine"
BLOCK_TOKENS = 512
SAMPLE_S = 0.25
PREFILL_SPEED, DECODE_SPEED = 0.445, 3.0
"""A prompt of 3,000 tokens takes 148 ms then; a decode step of a half full cache 19 ms."""

PROCESS_START_S = 1.5
"""What a mocker takes to start on an idle machine: with its simulated loading, 10 s in all."""

PUBLISHED = {
    "mode": "load",
    "decode-kv-scale-up-threshold": 0.6,
    "decode-kv-scale-down-threshold": 0.3,
    "prefill-queue-scale-up-threshold": 10,
    "prefill-queue-scale-down-threshold": 0.2,
}
CASES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "fixed 2P2D": (2, None),
    "load, published thresholds": (1, PUBLISHED),
    "load, default thresholds": (1, {"mode": "load"}),
    "load+sla, default": (1, {"mode": "load+sla", "ttft": 500, "itl": 50}),
}
"""Workers of each pool at the start, and the options of the planner; None: no planner."""


@dataclass
class LiveRow:
    """One case; times and GPU-hours are those at the original speed."""

    title: str
    requests: int
    failed: int
    duration_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gpu_hours: float
    most_gpus: int
    workers_added: int
    cpu: float


class GpuMeter:
    """Integrates the GPUs that the statefile shows as held, in a thread."""

    def __init__(self, statefile: Path) -> None:
        self._statefile = statefile
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.gpu_s = 0.0
        self.most = 0
        self.names: set[str] = set()

    def __enter__(self) -> GpuMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._stop.wait(SAMPLE_S):
            components = json.loads(self._statefile.read_text())["components"]
            held = {
                name: len(entry["resources"].get("allocated_gpus") or ())
                for name, entry in components.items()
            }
            now_s = time.monotonic()
            self.gpu_s += sum(held.values()) * (now_s - last_s)
            self.most = max(self.most, sum(held.values()))
            self.names |= {name for name, gpus in held.items() if gpus}
            last_s = now_s


def graph(workers: int, planner: dict[str, Any] | None, port: int, speed: float) -> dict[str, Any]:
    """The document of the deployment."""
    worker = {
        "run": "dynamo.mocker",
        "model-path": str(ROOT / "examples/model"),
        "model-name": "tiny",
        "block-size": 16,
        "kv-bytes-per-token": 131072,
        "num-gpu-blocks-override": 21875,  # 350,000 tokens
        "max-num-batched-tokens": 8192,
        "speedup-ratio": PREFILL_SPEED * speed,
        "decode-speedup-ratio": DECODE_SPEED,
        "startup-time": max(0.0, 10 / speed - PROCESS_START_S),
        "ServiceArgs": {"workers": workers, "resources": {"gpu": 1}},
    }
    document = {
        "namespace": NAMESPACE,
        "Frontend": {"run": "dynamo.frontend", "http-port": port, "router-mode": "kv"},
        "PrefillWorker": {**worker, "disaggregation-mode": "prefill"},
        "DecodeWorker": {**worker, "disaggregation-mode": "decode"},
    }
    if planner is not None:
        intervals = {"adjustment-interval": 10 / speed, "metric-pulling-interval": 1 / speed}
        document["Planner"] = {"run": "dynamo.planner", **intervals, **planner}
    return document


def write_trace(path: Path, periods: float) -> int:
    """Write the load as a Mooncake trace without common prefixes; return its requests."""
    found = generate(
        sine(LOW, HIGH, PERIOD_S), duration_s=PERIOD_S * periods, isl=ISL, osl=OSL, seed=1
    )
    blocks = -(-ISL // BLOCK_TOKENS)
    with path.open("w") as out:
        for number, request in enumerate(found):
            row = {
                "timestamp": request.at_s * 1000,
                "input_length": ISL,
                "output_length": OSL,
                "hash_ids": list(range(number * blocks, (number + 1) * blocks)),
            }
            out.write(json.dumps(row) + "\n")
    return len(found)


@contextmanager
def serving(document: dict[str, Any], directory: Path, port: int) -> Iterator[Path]:
    """``dynamo serve`` of ``document``; yields the statefile."""
    path = directory / "graph.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with (directory / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*DYNAMO, "serve", str(path), "--gpus", "8"],
            env={**os.environ, "DYN_LOCAL_STATE_DIR": str(directory / "state")},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            count = sum(
                service["ServiceArgs"]["workers"]
                for service in document.values()
                if isinstance(service, dict) and service["run"] == "dynamo.mocker"
            )
            wait_for_workers(port, count, process)
            yield directory / "state" / f"{NAMESPACE}.json"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=90)


def run(title: str, speed: float, periods: float, keep: Path | None) -> LiveRow:
    """Serve, load and measure one case."""
    workers, planner = CASES[title]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="dynamo-sine-") as made:
        directory = keep or Path(made)
        directory.mkdir(exist_ok=True)
        trace = directory / "trace.jsonl"
        write_trace(trace, periods)
        with serving(graph(workers, planner, port, speed), directory, port) as statefile:
            before = cpu_ticks()
            with GpuMeter(statefile) as meter:
                summary = bench(port, trace, speed, directory)
            after = cpu_ticks()
    busy, total = (late - early for early, late in zip(before, after, strict=True))
    return LiveRow(
        title=title,
        requests=summary["requests"],
        failed=summary["requests"] - summary["completed"],
        duration_s=summary["latency_ms"]["avg"] / 1000 * speed,
        ttft_p50_ms=summary["ttft_ms"]["p50"] * speed,
        ttft_p99_ms=summary["ttft_ms"]["p99"] * speed,
        gpu_hours=meter.gpu_s * speed / 3600,
        most_gpus=meter.most,
        workers_added=len(meter.names) - 2 * workers,
        cpu=busy / max(total, 1),
    )


def bench(port: int, trace: Path, speed: float, directory: Path) -> dict[str, Any]:
    """Replay the trace and return the summary."""
    out = directory / "bench.json"
    command = [*DYNAMO, "bench", "--url", f"http://127.0.0.1:{port}", "--model", "tiny"]
    command += ["--endpoint-type", "completions", "--prompt-format", "tokens", "--ignore-eos"]
    command += ["--trace", str(trace), "--trace-speedup", str(speed), "--output", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads(out.read_text())
    return summary


def table(rows: list[LiveRow]) -> str:
    """Return a Markdown table; the first row is the baseline."""
    base = rows[0]
    lines = [
        "| policy | requests (failed) | mean duration | speed-up | TTFT p50 | p99 | GPU-hours | "
        "most GPUs | CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gpus = f"{row.gpu_hours:.3f}"
        if row is not base:
            gpus += f" ({row.gpu_hours / base.gpu_hours - 1:+.1%})"
        lines.append(
            f"| {row.title} | {row.requests} ({row.failed}) | {row.duration_s:.2f} s | "
            f"{base.duration_s / row.duration_s:.2f} | {row.ttft_p50_ms:.0f} ms | "
            f"{row.ttft_p99_ms:.0f} ms | {gpus} | {row.most_gpus} | {row.cpu:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--speedup", type=float, default=2.0, help="how much faster than the original")
    add("--periods", type=float, default=2.0, help="periods of the sine; the original has 4")
    add("--cases", default=",".join(CASES), help="which rows, the baseline first", metavar="ROWS")
    add("--keep", type=Path, help="keep logs of the last case in this directory")
    add("--markdown", type=Path, help="write the table here")
    options = parser.parse_args()
    rows = []
    for title in (title for title in CASES if title in options.cases):
        rows.append(run(title, options.speedup, options.periods, options.keep))
        print(rows[-1], flush=True)
    print(table(rows))
    if options.markdown:
        options.markdown.write_text(table(rows))


if __name__ == "__main__":
    main()
