"""Time a scrape of a frontend in kv mode in both formats, and its longest part.

python benchmarks/micro/bench_exposition.py
"""

from __future__ import annotations

import sys
import time
import timeit
from functools import partial
from itertools import pairwise

from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.labels import RouterLabels
from dynamo.router.load.active_load import ActiveLoad, WorkerMetrics
from dynamo.router.modes.kv_metrics import DecisionMetrics
from dynamo.router.queue.classes import QueueMetrics
from dynamo.router.worker_pool import Member

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def registry(models: int, workers: int) -> Registry:
    """The metrics of ``models``, each with its own ``workers``."""
    made = Registry()
    frontend = FrontendMetrics(made)
    for number in range(models):
        name = f"model-{number}"
        frontend.model(name)
        labels = RouterLabels("dynamo", f"backend{number}", name, f"{number:016x}")
        DecisionMetrics(made, labels)
        QueueMetrics(made, name)
        rows, load = WorkerMetrics(made, labels), ActiveLoad(16)
        for worker in range(workers):
            worker_id = 1000 * number + worker
            rows.added(Member(worker_id, RuntimeConfig(), "cuda", {0: worker}), load)
            frontend.workers[worker_id, 0, "decode"].ttft.value = 0.1234
    return made


def main() -> None:
    """One row per number of models and workers of each."""
    for models, workers in ((1, 64), (4, 64), (16, 64), (64, 2)):
        made = registry(models, workers)
        lines = len(made.render().splitlines())
        text, openmetrics = (
            min(timeit.repeat(partial(made.exposition, accept), number=1, repeat=15)) * 1e3
            for accept in ("", OPENMETRICS)
        )
        sys.stdout.write(
            f"{models:2} models with {workers:2} workers, {lines:7} lines: text {text:.1f} ms, "
            f"OpenMetrics {openmetrics:.1f} ms, longest part {longest_part_ms(made):.1f} ms\n"
        )


def longest_part_ms(made: Registry) -> float:
    """The longest part of a scrape as text: the least of several scrapes."""
    found = []
    for _ in range(15):
        parts, _ = made.slices("")
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in parts]
        found.append(max(b - a for a, b in pairwise(times)))
    return min(found) * 1e3


if __name__ == "__main__":
    main()
