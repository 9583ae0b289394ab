"""Measure the cost of the router's queue for a request that need not wait.

Three variants of the same request, in turn within one run: a picker without a queue, the picker
without a threshold, and the picker behind an empty queue. A request is decided, gets its first
token and ends. The figure is the median of the rounds, in µs, and as a ratio to the first.

    python benchmarks/queue_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable
from functools import partial
from random import Random

from dynamo.config.router import RouterSettings
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.eligibility.eligibility_filter import EligibilityFilter
from dynamo.router.labels import RouterLabels
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.kv_metrics import DecisionMetrics
from dynamo.router.queue.classes import QueueMetrics
from dynamo.router.queue.request_queue import RequestQueue

BLOCK, WORKERS, RUNNING = 16, 16, 128
Request = Callable[[str, "array[int]"], None]


class Unaware(EligibilityFilter):
    """An eligibility filter without listeners for queued requests."""

    def load_changed(self, worker_id: int) -> None:
        """Notify no listener."""
        self.busy.update(worker_id)


def picker_of(settings: RouterSettings, prompts: list[array[int]]) -> KvPicker:
    """A picker with workers that are busy with other requests."""
    metrics = DecisionMetrics(Registry(), RouterLabels("ns", "backend"))
    made = KvPicker(settings, BLOCK, make_index(settings), metrics, Random(1))
    for worker in range(WORKERS):
        made.add_worker(worker, RuntimeConfig(max_num_batched_tokens=8192))
    for number in range(RUNNING):
        made.pick(f"running {number}", prompts[number % len(prompts)])
        made.mark_prefill_complete(f"running {number}")
    return made


def direct(picker: KvPicker, request_id: str, tokens: array[int]) -> None:
    """Without a queue."""
    picker.pick(request_id, tokens)
    picker.mark_prefill_complete(request_id)
    picker.free(request_id)


def queued(
    queue: RequestQueue,
    picker: KvPicker,
    request_id: str,
    tokens: array[int],
    ignore: Callable[..., None],
) -> None:
    """Through a queue, with the callback that a frontend creates for each request."""
    queue.submit(request_id, tokens, on_decision=partial(ignore, request_id), on_error=ignore)
    picker.mark_prefill_complete(request_id)
    picker.free(request_id)


def ways(prompts: list[array[int]]) -> dict[str, Callable[[], Request]]:
    """The three variants over one picker, so that its memory layout is the same for all."""
    settings = RouterSettings(mode="kv", queue_threshold=1.0)
    picker = picker_of(settings, prompts)
    eligibility = picker.eligibility
    queue = RequestQueue(picker, settings, partial(QueueMetrics, Registry(), "m"))

    def unaware() -> Request:
        eligibility.__class__ = Unaware
        return partial(direct, picker)

    def without() -> Request:
        eligibility.__class__, eligibility.on_change = EligibilityFilter, None
        return partial(direct, picker)

    def waiting() -> Request:
        eligibility.__class__, eligibility.on_change = EligibilityFilter, queue.wake
        return partial(queued, queue, picker, ignore=print)

    return {
        "no queue in the code": unaware,
        "no threshold": without,
        "threshold, empty queue": waiting,
    }


def measure(tokens: int, rounds: int, each: int) -> None:
    """One prompt length."""
    source = Random(2)
    prompts = [array("I", source.choices(range(150_000), k=tokens)) for _ in range(64)]
    made = ways(prompts)
    spent: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds):
        for name in sorted(made, key=lambda _: source.random()):
            request = made[name]()
            begun = time.perf_counter()
            for one in range(each):
                request(f"{number}/{one}", prompts[one % 64])
            spent[name].append((time.perf_counter() - begun) / each * 1e6)
    base = statistics.median(spent["no queue in the code"])
    print(f"{tokens} tokens, {WORKERS} workers:")
    for name, times in spent.items():
        middle = statistics.median(times)
        print(f"  {name:24} {middle:7.2f} µs  × {middle / base:.3f}")


def main() -> None:
    """Short and long prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--each", type=int, default=500)
    given = parser.parse_args()
    for tokens in (256, 4096):
        measure(tokens, given.rounds, given.each)


if __name__ == "__main__":
    main()
