"""Tokens per second and CPU per token of one mocker process, through the request plane.

A real ``python -m dynamo.mocker --speedup-ratio 0`` answers a client in this process over a UNIX
socket; the client counts items and does nothing else.

    python benchmarks/mocker_throughput.py --concurrency 1 8 32 128
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from dynamo.config import environ
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError
from dynamo.protocols import codec
from dynamo.protocols.engine import PreprocessedRequest, StopConditions
from dynamo.runtime import Client, DistributedRuntime

MODEL = Path(__file__).resolve().parents[1] / "examples/model"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Load:
    """Keeps ``concurrency`` requests in flight until ``requests`` are answered; its own sink."""

    def __init__(self, client: Client, requests: int, prompt_tokens: int, max_tokens: int) -> None:
        self.items = 0
        self.done = asyncio.Event()
        self._client = client
        self._instance = client.instance_ids()[0]
        self._left = requests
        self._open = 0
        self._prompt_tokens = prompt_tokens
        self._stop = StopConditions(max_tokens=max_tokens)

    def start(self) -> None:
        """Send one more request, if any remain."""
        if not self._left:
            if not self._open:
                self.done.set()
            return
        self._left -= 1
        self._open += 1
        first = self._left * self._prompt_tokens
        prompt = codec.tokens(range(first, first + self._prompt_tokens))
        request = PreprocessedRequest("bench", prompt, self._stop)
        self._client.open(self._instance, codec.encode(request), self)

    def on_data(self, payload: bytes) -> None:
        """One item, that is one token."""
        self.items += 1

    def on_end(self) -> None:
        """Send the next request."""
        self._open -= 1
        self.start()

    def on_error(self, error: DynamoError) -> None:
        """Abort: the figures would be meaningless."""
        raise error


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of the process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def measure(settings: RuntimeSettings, pid: int, options: argparse.Namespace) -> None:
    """One line per concurrency."""
    runtime = DistributedRuntime(settings=settings)
    try:
        client = await runtime.endpoint(f"{settings.namespace}.backend.generate").client()
        await client.wait_for_instances()
        print(
            f"{'concurrency':>11} {'tokens/s':>10} {'worker µs/token':>16} {'client µs/token':>16}"
        )
        for concurrency in options.concurrency:
            requests = concurrency * options.rounds
            load = Load(client, requests, options.prompt_tokens, options.max_tokens)
            began, worker, mine = time.perf_counter(), cpu_s(pid), time.process_time()
            for _ in range(concurrency):
                load.start()
            await load.done.wait()
            spent = time.perf_counter() - began
            per_token = 1e6 / load.items
            print(
                f"{concurrency:>11} {load.items / spent:>10.0f} "
                f"{(cpu_s(pid) - worker) * per_token:>16.2f} "
                f"{(time.process_time() - mine) * per_token:>16.2f}"
            )
    finally:
        await runtime.close()


def main() -> None:
    """Start the mocker, measure, stop it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=10, help="requests per unit of concurrency")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as state:
        command = [sys.executable, "-m", "dynamo.mocker", "--model-path", str(MODEL)]
        env = {**environ(), "DYN_LOCAL_STATE_DIR": state, "DYN_NAMESPACE": "bench"}
        worker = subprocess.Popen([*command, "--speedup-ratio", "0"], env=env)
        try:
            settings = RuntimeSettings(namespace="bench", state_dir=state)
            uvloop.run(measure(settings, worker.pid, options))
        finally:
            worker.terminate()
            worker.wait()


if __name__ == "__main__":
    main()
