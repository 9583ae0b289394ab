"""Count the modules that one warm unary request enters in the frontend, and its changes of file.

    python benchmarks/request_path.py [--stream] [--calls] [--json]

A frontend (kv router) runs in this process, two mock workers in another; a thread sends the
requests. After a few of them ``sys.setprofile`` records every Python call of the loop's thread
during one more. A change of file is a call into another module than the call before it. Timers of
the frontend that happen to fire count too, so the minimum over several requests is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop

import dynamo
from dynamo.config.frontend import FrontendSettings
from dynamo.config.option import load
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.frontend.service import Frontend
from dynamo.runtime import DistributedRuntime

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(Path(dynamo.__file__).parent) + os.sep
WARM_UP = 20
SAMPLES = 20
READY_S = 30.0


@dataclass(frozen=True)
class CallTrace:
    """The calls of one request: their files in order, and the number of calls of each function."""

    files: list[str]
    functions: Counter[str]

    @property
    def modules(self) -> list[str]:
        """Return the files in order of first entry."""
        return list(dict.fromkeys(self.files))

    @property
    def changes(self) -> int:
        """Count calls into another file than the call before."""
        return sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))


class Recorder:
    """Record the calls of this thread into our package, inside a ``with``."""

    def __init__(self) -> None:
        self.trace = CallTrace([], Counter())

    def __enter__(self) -> Recorder:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            file = code.co_filename.removeprefix(PACKAGE)
            self.trace.files.append(file)
            self.trace.functions[f"{file}:{code.co_qualname}"] += 1


async def measure(port: int, stream: bool) -> CallTrace:
    """Return the shortest trace of ``SAMPLES`` requests."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for number in range(WARM_UP):
        await asyncio.to_thread(_ask, connection, number, stream)
    traces = []
    for number in range(SAMPLES):
        task = asyncio.ensure_future(asyncio.to_thread(_ask, connection, WARM_UP + number, stream))
        with Recorder() as recorder:
            await task
        traces.append(recorder.trace)
    connection.close()
    return min(traces, key=lambda trace: (trace.changes, len(trace.files)))


def _ask(connection: http.client.HTTPConnection, number: int, stream: bool) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"Note {number}: " + "tea rivers seven " * 20}],
        "max_tokens": 1,
        "stream": stream,
    }
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise SystemExit(f"status {answer.status}: {content[:500].decode()}")


@contextmanager
def mock_workers() -> Iterator[None]:
    """Run two mockers until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo.mocker", "--model-path", str(ROOT / "examples/model"),
         "--model-name", "m", "--num-workers", "2", "--speedup-ratio", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


async def run(stream: bool) -> CallTrace:
    """Start a frontend, wait for both workers, measure."""
    frontend_settings, router, runtime_settings = load(
        "request_path",
        "",
        [FrontendSettings, RouterSettings, RuntimeSettings],
        ["--router-mode", "kv", "--http-port", "0"],
    )
    runtime = DistributedRuntime(asyncio.get_running_loop(), runtime_settings)
    frontend = Frontend(runtime, frontend_settings, router)
    try:
        await runtime.start()
        _, port = await frontend.start()
        with mock_workers():
            deadline = time.monotonic() + READY_S
            while not await asyncio.to_thread(_serves, port):
                if time.monotonic() > deadline:
                    raise SystemExit(f"no worker within {READY_S:g} s")
                await asyncio.sleep(0.1)
            return await measure(port, stream)
    finally:
        await frontend.close()
        await runtime.close()


def _serves(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/v1/models")
        return bool(json.load(connection.getresponse())["data"])
    finally:
        connection.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stream", action="store_true", help="a streamed request instead")
    parser.add_argument("--calls", action="store_true", help="list every function that is called")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["DYN_DISCOVERY_BACKEND"] = "file"
        os.environ["DYN_FILE_KV"] = f"{directory}/store"
        os.environ["DYN_LOCAL_STATE_DIR"] = f"{directory}/state"
        trace = uvloop.run(run(options.stream))
    figures = {"modules": len(trace.modules), "changes": trace.changes, "calls": len(trace.files)}
    if options.json:
        json.dump({**figures, "files": trace.files, "functions": trace.functions}, sys.stdout)
        return
    for name, count in figures.items():
        sys.stdout.write(f"{name:10}{count}\n")
    rows: list[tuple[str, int]] = (
        list(trace.functions.items())
        if options.calls
        else [(file, trace.files.count(file)) for file in trace.modules]
    )
    for name, count in rows:
        sys.stdout.write(f"  {count:4}  {name}\n")


if __name__ == "__main__":
    main()
