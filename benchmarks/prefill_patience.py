"""Measure the gain of waiting for the prefill worker that has a prompt cached.

    python benchmarks/prefill_patience.py --trace PATH --workers 4 --speed 1 --patience 0,1,3

Virtual time. The prefill queue, cost and choice are the router's own code. Workers compute one
prompt after the other at a fixed rate, and cache what an LRU of their size predicts.
"""

from __future__ import annotations

import argparse
import heapq
from array import array
from collections.abc import Sequence
from random import Random

from dynamo.bench.trace import read_trace
from dynamo.config.router import RouterSettings
from dynamo.frontend.disagg.pool import prefill_settings
from dynamo.protocols.codec import Tokens, tokens
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker
from dynamo.router.queue.prefill import PrefillQueue, capacity_of

__all__ = ["main"]

_BLOCK = 512
_BATCH = 8192
Arrival = tuple[float, Tokens]
"""Seconds, prompt."""


class Run:
    """One replay with a ``patience_s``."""

    def __init__(self, arrivals: Sequence[Arrival], options: argparse.Namespace) -> None:
        given = RouterSettings(mode="kv", kv_events=False, approximate_cache_policy="lru")
        settings = prefill_settings(given)
        index = make_index(settings)
        self.now_s = 0.0
        self.picker = KvPicker(
            settings,
            _BLOCK,
            index,
            random=Random(1),
            clock=lambda: self.now_s,
        )
        self.queue: PrefillQueue[int] = PrefillQueue(len(arrivals))
        self.arrivals = arrivals
        self.rate = options.prefill_tokens_per_s
        self.patience_s = 0.0
        self.cached = 0
        self.ttft_s: list[float] = []
        self._busy_until: dict[int, float] = {}
        self._bound: set[int] = set()
        self._events = [(at_s, number, "come") for number, (at_s, _) in enumerate(arrivals)]
        config = RuntimeConfig(
            total_kv_blocks=options.blocks_per_worker, max_num_batched_tokens=_BATCH
        )
        for worker_id in range(1, options.workers + 1):
            self.picker.add_worker(worker_id, config)
            self.queue.set_worker(worker_id, capacity_of(config, None))
            self._busy_until[worker_id] = 0.0

    def run(self, patience_s: float) -> None:
        """Run until the last prompt is computed."""
        self.patience_s = patience_s
        heapq.heapify(self._events)
        while self._events:
            self.now_s, number, kind = heapq.heappop(self._events)
            if kind == "come":
                self.queue.add(number, self.now_s)
            elif kind == "enough":
                self.queue.bind(number, None)
            else:
                self.picker.free(str(number))
                self.queue.finish(number)
                self.ttft_s.append(self.now_s - self.arrivals[number][0])
            while (turn := self.queue.next()) is not None:
                self._serve(turn.request, turn.workers)
        self.ttft_s.sort()

    def _serve(self, number: int, free: list[int] | None) -> None:
        prompt = self.arrivals[number][1]
        if free is not None and self.patience_s and number not in self._bound:
            best = self.picker.pick(None, prompt).worker_id
            if best not in free:
                self._bound.add(number)
                self.queue.bind(number, best)
                heapq.heappush(self._events, (self.now_s + self.patience_s, number, "enough"))
                return
        routing = None if free is None else Routing(allowed_worker_ids=free)
        found = self.picker.pick(str(number), prompt, routing=routing)
        new = max(len(prompt) - found.overlap_blocks * _BLOCK, 1)
        self.cached += len(prompt) - new
        self.queue.start(number, found.worker_id, new)
        done_s = max(self._busy_until[found.worker_id], self.now_s) + new / self.rate
        self._busy_until[found.worker_id] = done_s
        heapq.heappush(self._events, (done_s, number, "done"))


def main(argv: list[str] | None = None) -> None:
    """Parse, replay, print."""
    options = _options(argv)
    trace = read_trace(options.trace, options.limit)
    arrivals = [(one.timestamp / 1e3 / options.speed, _prompt(one.hash_ids)) for one in trace]
    total = sum(len(prompt) for _, prompt in arrivals)
    print("patience s   cached   TTFT mean      p50      p90      p99 s")
    for patience_s in options.patience:
        run = Run(arrivals, options)
        run.run(patience_s)
        last = len(run.ttft_s) - 1
        shown = [run.ttft_s[int(share * last)] for share in (0.5, 0.9, 0.99)]
        mean = sum(run.ttft_s) / len(run.ttft_s)
        cells = "".join(f"{value:9.2f}" for value in shown)
        print(f"{patience_s:10g} {run.cached / total:8.1%} {mean:11.2f}{cells}")


def _prompt(block_ids: Sequence[int]) -> Tokens:
    ids = array("I")
    for block_id in block_ids:
        ids.extend([block_id] * _BLOCK)
    return tokens(ids)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", required=True, help="Mooncake trace, one request a line")
    parser.add_argument("--limit", type=int, default=6000, help="requests of it")
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as it was")
    parser.add_argument("--workers", type=int, default=4, help="prefill workers")
    parser.add_argument("--blocks-per-worker", type=int, default=2000, help="of 512 tokens")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=10_000.0)
    parser.add_argument(
        "--patience",
        type=lambda text: [float(one) for one in text.split(",")],
        default=[0.0, 1.0, 3.0, 10.0],
        help="seconds, separated by commas",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
