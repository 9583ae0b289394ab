"""Time a scrape of a frontend in kv mode with 64 workers per model, in both formats.

python benchmarks/micro/bench_exposition.py
"""

from __future__ import annotations

import sys
import timeit
from functools import partial

from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.observability.metrics import Registry
from dynamo.protocols.card import RuntimeConfig
from dynamo.router.load.active import ActiveLoad
from dynamo.router.metrics import DecisionMetrics, RouterLabels, WorkerMetrics
from dynamo.router.queue.metrics import QueueMetrics
from dynamo.router.worker_pool import Member

WORKERS = 64
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def registry(models: int) -> Registry:
    """The metrics of ``models``, each with its own workers."""
    made = Registry()
    frontend = FrontendMetrics(made)
    for number in range(models):
        name = f"model-{number}"
        frontend.model(name)
        labels = RouterLabels("dynamo", f"backend{number}", name, f"{number:016x}")
        DecisionMetrics(made, labels)
        QueueMetrics(made, name)
        rows, load = WorkerMetrics(made, labels), ActiveLoad(16)
        for worker in range(WORKERS):
            worker_id = 1000 * number + worker
            rows.added(Member(worker_id, RuntimeConfig(), "cuda", {0: worker}), load)
            frontend.workers[worker_id, 0, "decode"].ttft.value = 0.1234
    return made


def main() -> None:
    """One row per number of models."""
    for models in (1, 4, 16):
        made = registry(models)
        lines = len(made.render().splitlines())
        text, openmetrics = (
            min(timeit.repeat(partial(made.exposition, accept), number=1, repeat=15)) * 1e3
            for accept in ("", OPENMETRICS)
        )
        sys.stdout.write(f"{lines:7} lines: text {text:.1f} ms, OpenMetrics {openmetrics:.1f} ms\n")


if __name__ == "__main__":
    main()
