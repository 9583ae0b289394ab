"""Run a module of dynamo with probes: it reports each step of a request to a socket.

    python benchmarks/cancellation_probe.py SOCKET dynamo.mocker FLAGS…

Each report is ``step monotonic_ns``: ``arrived`` and ``aborted`` at a simulated engine, ``queued``
and ``left`` of the queue of a worker or of a router. ``benchmarks/cancellation.py`` starts it.
"""

from __future__ import annotations

import runpy
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.mocker.engine import EngineRank
from dynamo.router.queue.request_queue import RequestQueue
from dynamo.router.worker_pool import Saturation
from dynamo.runtime.requests.admission import AdmissionQueue

__all__ = ["main"]

STEPS: tuple[tuple[Any, str, str], ...] = (
    (EngineRank, "submit", "arrived"),
    (EngineRank, "abort", "aborted"),
    (AdmissionQueue, "withdraw", "left"),
    (RequestQueue, "_enqueue", "queued"),
    (RequestQueue, "_cancel", "left"),
    (PrefillRouter, "take", "queued"),
    (PrefillRouter, "cancelled", "left"),
)


def main() -> None:
    """Install the probes, then run the module as ``python -m`` would."""
    path, module, *flags = sys.argv[1:]
    reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    reports.connect(path)
    for owner, name, step in STEPS:
        setattr(owner, name, reported(getattr(owner, name), step, reports))
    submit = AdmissionQueue.submit

    def admit(queue: AdmissionQueue, start: Callable[[], None]) -> None:
        submit(queue, start)
        if queue.waiting:
            reports.send(b"queued %d" % time.monotonic_ns())

    setattr(AdmissionQueue, "submit", admit)  # noqa: B010 - a probe in place of the method
    if "--no-early-rejection" in flags:
        flags.remove("--no-early-rejection")
        setattr(Saturation, "changed", lambda self, saturated: None)  # noqa: B010
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def reported(call: Callable[..., Any], step: str, reports: socket.socket) -> Callable[..., Any]:
    def wrapped(*args: Any, **more: Any) -> Any:
        result = call(*args, **more)
        reports.send(f"{step} {time.monotonic_ns()}".encode())
        return result

    return wrapped


if __name__ == "__main__":
    main()
