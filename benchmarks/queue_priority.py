"""Measure the router's queue for urgent requests under more load than the workers can compute.

Two mock workers, requests for four seconds at one and a half times their prefill speed, a tenth of
them with ``latency_sensitivity``. The same requests at the same times without a queue and with
``--router-queue-threshold``; time to the first token, urgent requests and others.

    python benchmarks/queue_priority.py [--threshold 1.0] [--rounds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

MODEL = Path(__file__).resolve().parents[1] / "examples/model"
PROMPT_TOKENS, SECONDS, RATE, URGENT = 1500, 4.0, 75.0, 0.1


@contextmanager
def deployment(*router: str) -> Iterator[int]:
    """Two mockers and a frontend; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mocker = ("dynamo.mocker", "--model-path", str(MODEL), "--model-name", "tiny")
    batch = ("--max-num-batched-tokens", "2048", "--num-workers", "2")
    front = ("dynamo.frontend", "--http-port", str(port), "--router-mode", "kv", *router)
    with tempfile.TemporaryDirectory() as state:
        env = {**os.environ, "DYN_LOCAL_STATE_DIR": state, "DYN_NAMESPACE": "queue"}
        running = [
            subprocess.Popen(
                [sys.executable, "-m", *one],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for one in ((*mocker, *batch), front)
        ]
        try:
            yield port
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait(30)


async def first_token(port: int, prompt: list[int], urgent: bool) -> float:
    """Seconds from sending to the first token; raises OSError while the port is closed."""
    hints = {"latency_sensitivity": 60.0} if urgent else {}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "stream": True}
    raw = json.dumps({**body, "nvext": {"agent_hints": hints}}).encode()
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(raw)}\r\n"
    writer.write(
        f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + raw
    )
    try:
        await reader.readuntil(b"data: ")
    except asyncio.IncompleteReadError as error:
        raise OSError(error.partial[:200]) from None
    seconds = time.perf_counter() - begun
    await reader.read()
    writer.close()
    return seconds


async def offer(port: int, seed: int) -> tuple[list[float], list[float]]:
    """First tokens of the urgent requests and of the others, seconds."""
    source = Random(seed)
    deadline = time.perf_counter() + 30
    while True:
        try:
            await first_token(port, [1, 2, 3], False)
            break
        except OSError:
            if time.perf_counter() > deadline:
                raise
            await asyncio.sleep(0.1)
    urgent: list[asyncio.Task[float]] = []
    others: list[asyncio.Task[float]] = []
    async with asyncio.TaskGroup() as group:
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            prompt = source.choices(range(200), k=PROMPT_TOKENS)
            hurry = source.random() < URGENT
            task = group.create_task(first_token(port, prompt, hurry))
            (urgent if hurry else others).append(task)
            await asyncio.sleep(source.expovariate(RATE))
    return [one.result() for one in urgent], [one.result() for one in others]


def main() -> None:
    """Run both variants in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threshold", default="1.0")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    ways = {"no queue": (), "queue": ("--router-queue-threshold", given.threshold)}
    for number in range(given.rounds):
        for name, flags in ways.items():
            with deployment(*flags) as port:
                found = asyncio.run(offer(port, number))
            cells = []
            for kind, times in zip(("urgent", "others"), found, strict=True):
                p50, p95 = statistics.median(times), statistics.quantiles(times, n=20)[-1]
                cells.append(f"{kind} ({len(times)}) p50 {p50:.2f} s p95 {p95:.2f} s")
            print(f"{name:9} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
