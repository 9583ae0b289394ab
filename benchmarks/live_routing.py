"""KV routing beside the other modes, live: eight mock engines, one trace, one table.

    python benchmarks/live_routing.py --trace PATH [--rates 50,85,115] [--rounds 3]
        [--markdown OUT.md] [--plot OUT.svg] [--json OUT.json]

Every (round, rate, mode) gets a fresh ``dynamo serve`` of benchmarks/graphs/mockers8.yaml with
empty caches. Each round plays another part of the trace; all modes get the same requests at the
same times, in turn. Blocks, outputs and engines are scaled (--block-tokens,
--output-scale, --engine-speedup), so that a part with enough reuse runs in half a minute on a small
machine. The CPU column shows whether the machine was the limit. All runs are reported.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from live_chart import chart
from live_report import COLUMNS, Run, cell, groups, markdown
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
GRAPH = ROOT / "benchmarks/graphs/mockers8.yaml"
DYNAMO = [sys.executable, "-m", "dynamo"]
MODES: dict[str, dict[str, str]] = {
    "kv, in seconds": {"router-mode": "kv", "router-cost": "seconds"},
    "kv": {"router-mode": "kv"},
    "kv, cache first": {
        "router-mode": "kv",
        "router-prefill-load-scale": "64",
        "router-duplicate-cost": "32",
    },
    "round-robin": {"router-mode": "round-robin"},
    "random": {"router-mode": "random"},
    "least-loaded": {"router-mode": "least-loaded"},
    "power-of-two": {"router-mode": "power-of-two"},
}
"""Flags of the frontend, by the name in the table."""

OTHERS: dict[str, dict[str, str]] = {
    "kv, cache first, own decisions believed for 5 s": {
        **MODES["kv, cache first"],
        "router-predicted-ttl-secs": "5",
    },
    "kv, cache first, lru without events": {
        **MODES["kv, cache first"],
        "no-router-kv-events": "true",
        "router-approximate-cache-policy": "lru",
    },
}
"""Flags of modes that run only when named in --modes."""


def main() -> None:
    """Run everything and report it."""
    options = arguments()
    modes = list(MODES) if options.modes == "all" else options.modes.split(";")
    rates = [float(rate) for rate in options.rates.split(",")]
    runs: list[Run] = []
    began = time.perf_counter()
    for round_number in range(options.rounds):
        turn = modes[round_number % len(modes) :] + modes[: round_number % len(modes)]
        for rate in rates:
            with part(options, round_number, rate) as trace:
                for mode in turn:
                    runs.append(run(mode, rate, round_number, trace, options))
                    progress(runs[-1], time.perf_counter() - began)
    runs.sort(key=lambda one: modes.index(one.mode))
    report(runs, options)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--trace", default=str(ROOT / "benchmarks/traces/sample.jsonl"))
    add("--requests", type=int, default=1400, help="of the trace, for each round")
    add("--rates", default="50,85,115", help="offered requests/s, comma-separated")
    add("--rounds", type=int, default=3)
    add("--modes", default="all", help=f"semicolon-separated: {'; '.join(MODES | OTHERS)}")
    add("--goodput", default="ttft:500,itl:50", help="limits in ms that make a request good")
    add("--block-tokens", type=int, default=64, help="tokens for each block of the trace")
    add("--output-scale", type=float, default=0.0625)
    add("--engine-speedup", type=float, default=0.75)
    add("--batched-tokens", type=int, default=2048, help="of one iteration of an engine")
    add("--blocks-per-worker", type=int, default=2000)
    add("--json", type=Path, help="write all figures here")
    add("--markdown", type=Path, help="write the table here")
    add("--plot", type=Path, help="write the chart here (SVG)")
    return parser.parse_args()


@contextmanager
def part(options: argparse.Namespace, round_number: int, rate: float) -> Iterator[str]:
    """The requests of one round, offered at ``rate`` on average, as a trace file."""
    lines = [json.loads(line) for line in Path(options.trace).read_text().splitlines() if line]
    count = min(options.requests, len(lines))
    begin = (len(lines) - count) * round_number // max(options.rounds - 1, 1)
    chosen = lines[begin : begin + count]
    first, last = chosen[0]["timestamp"], chosen[-1]["timestamp"]
    shrink = count / rate * 1000 / max(last - first, 1)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as out:
        for line in chosen:
            line["timestamp"] = (line["timestamp"] - first) * shrink
            out.write(json.dumps(line) + "\n")
        out.flush()
        yield out.name


def run(mode: str, rate: float, round_number: int, trace: str, options: argparse.Namespace) -> Run:
    """One mode under one load: serve, replay, stop."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f"--Frontend.{name}={value}" for name, value in (MODES | OTHERS)[mode].items()]
    flags += [
        f"--Frontend.http-port={port}",
        f"--Worker.block-size={options.block_tokens}",
        f"--Worker.num-gpu-blocks-override={options.blocks_per_worker}",
        f"--Worker.speedup-ratio={options.engine_speedup}",
        f"--Worker.max-num-batched-tokens={options.batched_tokens}",
    ]
    with tempfile.TemporaryDirectory(prefix="dynamo-live-") as state:
        serve = subprocess.Popen(
            [*DYNAMO, "serve", str(GRAPH), *flags],
            env={**os.environ, "DYN_LOCAL_STATE_DIR": state},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for_workers(port, 8, serve)
            before = cpu_ticks()
            summary = bench(port, trace, options)
            after = cpu_ticks()
        finally:
            serve.send_signal(signal.SIGINT)
            serve.wait(timeout=60)
    busy, total = (late - early for early, late in zip(before, after, strict=True))
    return Run(mode, rate, round_number, summary, busy / max(total, 1))


def cpu_ticks() -> tuple[int, int]:
    """Return busy and total ticks of all cores since boot."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def wait_for_workers(port: int, count: int, serve: subprocess.Popen[bytes]) -> None:
    """Wait until the frontend lists ``count`` workers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and serve.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            live = json.loads(connection.getresponse().read()).get("instances", [])
            if len([i for i in live if i["endpoint"] == "generate"]) == count:
                return
        except (OSError, ValueError):
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise SystemExit(f"the deployment did not come up (exit status {serve.poll()})")


def bench(port: int, trace: str, options: argparse.Namespace) -> dict[str, Any]:
    """Replay the trace and return the summary."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            *DYNAMO,
            "bench",
            *("--url", f"http://127.0.0.1:{port}", "--model", "tiny"),
            *("--endpoint-type", "completions", "--prompt-format", "tokens"),
            *("--trace", trace, "--goodput", options.goodput),
            *("--trace-block-tokens", str(options.block_tokens)),
            *("--output-scale", str(options.output_scale)),
            *("--worker-ids", "--ignore-eos", "--output", out.name),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads(Path(out.name).read_text())
        return summary


def progress(one: Run, spent_s: float) -> None:
    """Print a line for each finished run."""
    figures = ", ".join(f"{column.title} {cell(column, [one])}" for column in COLUMNS)
    print(
        f"[{spent_s:5.0f} s] round {one.round} at {one.rate:g}/s, {one.mode}: {figures}", flush=True
    )


def report(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Print the table and write the requested files."""
    table = Table(title=note(options))
    for title in ("req/s", "router mode", *(column.title for column in COLUMNS)):
        table.add_column(title, justify="right")
    for rate, mode, rounds in groups(runs):
        table.add_row(f"{rate:g}", mode, *(cell(column, rounds) for column in COLUMNS))
    Console(width=200).print(table)
    if options.json:
        found = [vars(one) for one in runs]
        options.json.write_text(json.dumps({"note": note(options), "runs": found}, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(runs, note(options)))
    if options.plot:
        options.plot.write_text(chart(runs))


def note(options: argparse.Namespace) -> str:
    """Return a description of the runs."""
    name = Path(options.trace).name
    limits = options.goodput.replace(":", " ≤ ").replace(",", " ms and mean ")
    return (
        f"{options.rounds} rounds of {options.requests} requests each of {name},"
        f" {options.block_tokens} tokens for each of its blocks, outputs by"
        f" {options.output_scale:g}; eight mock engines of {options.blocks_per_worker:,} such"
        f" blocks, {options.batched_tokens:,} tokens an iteration, at {options.engine_speedup:g}"
        f" of their speed. Median (least–most) of the rounds. Good: {limits} ms."
    )


if __name__ == "__main__":
    main()
