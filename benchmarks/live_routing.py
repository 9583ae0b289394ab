"""KV routing against the other modes, live: eight mock engines, one trace, one table.

    python benchmarks/live_routing.py --trace PATH [--requests 2000] [--speedup 6] [--json OUT]

Each mode gets a fresh `dynamo serve` of benchmarks/graphs/mockers8.yaml and the same requests on
the same clock through `dynamo bench`. The modes run one after the other on this machine.
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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
GRAPH = ROOT / "benchmarks/graphs/mockers8.yaml"
DYNAMO = [sys.executable, "-m", "dynamo"]


def main() -> None:
    """Run every mode and print the table."""
    options = arguments()
    results = {mode: run(mode, options) for mode in options.modes.split(",")}
    table = Table(title=f"{options.requests} requests of {Path(options.trace).name}, 8 mockers")
    for name in (
        "router mode",
        "hit rate",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "ITL p50 ms",
        "busiest worker",
        "its share of work",
        "work imbalance",
        "good req/s",
        "failed",
    ):
        table.add_column(name, justify="right")
    for mode, result in results.items():
        table.add_row(mode, *row(result))
    Console(width=130).print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default=str(ROOT / "benchmarks/traces/sample.jsonl"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--speedup", type=float, default=6.0, help="of the trace's clock")
    parser.add_argument("--modes", default="round-robin,kv")
    parser.add_argument("--goodput", default="ttft:2000,itl:50")
    parser.add_argument("--json", help="write all figures here")
    return parser.parse_args()


def run(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One mode: serve, replay, stop."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="dynamo-live-") as state:
        env = {**os.environ, "DYN_LOCAL_STATE_DIR": state}
        flags = [f"--Frontend.router-mode={mode}", f"--Frontend.http-port={port}"]
        serve = subprocess.Popen(
            [*DYNAMO, "serve", str(GRAPH), *flags],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for_workers(port, 8, serve)
            return bench(port, options)
        finally:
            serve.send_signal(signal.SIGINT)
            serve.wait(timeout=60)


def wait_for_workers(port: int, count: int, serve: subprocess.Popen[bytes]) -> None:
    """Until the frontend knows ``count`` workers."""
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


def bench(port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Replay the trace; the summary as a dict."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            *DYNAMO,
            "bench",
            *("--url", f"http://127.0.0.1:{port}", "--model", "tiny"),
            *("--endpoint-type", "completions", "--prompt-format", "tokens"),
            *("--trace", options.trace, "--requests", str(options.requests)),
            *("--trace-speedup", str(options.speedup), "--goodput", options.goodput),
            *("--worker-ids", "--ignore-eos", "--output", out.name),
        ]
        subprocess.run(command, check=True)
        summary: dict[str, Any] = json.loads(Path(out.name).read_text())
        return summary


def row(result: dict[str, Any]) -> list[str]:
    """One mode's cells."""
    failed = result["requests"] - result["completed"]
    ttft, itl = result.get("ttft_ms") or {}, result.get("itl_ms") or {}
    return [
        f"{result.get('hit_rate', 0):.1%}",
        f"{ttft.get('p50', 0):,.0f}",
        f"{ttft.get('p99', 0):,.0f}",
        f"{itl.get('p50', 0):,.1f}",
        f"{result.get('busiest_share', 0):.1%}",
        f"{result.get('busiest_work_share', 0):.1%}",
        f"{result.get('work_imbalance', 0):.2f}",
        f"{result.get('good_requests_per_s', 0):.2f}",
        str(failed),
    ]


if __name__ == "__main__":
    main()
