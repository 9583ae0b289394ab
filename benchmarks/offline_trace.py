"""Drive the router's own rooms with a trace: hit rate and balance over simulated workers.

    python benchmarks/offline_trace.py --trace PATH --workers 8 --blocks-per-worker 8000

Settings of the router come from the usual DYN_ROUTER_* variables, defaults otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from random import Random

from dynamo.bench.trace import read_trace
from dynamo.config.knob import from_env
from dynamo.config.router import ROUTER_MODES, RouterSettings
from dynamo.router.factory import make_index, make_predicted
from dynamo.router.indexer import Indexer
from dynamo.router.kv import KvPicker
from dynamo.router.modes import InflightPicker
from dynamo.router.picker import Picker
from dynamo.router.replay import Arrival, Replay, Report, ServiceModel

__all__ = ["main", "replay"]


class _NoCounts:
    """Counts nothing."""

    def applied(self, event_type: str, status: str) -> None:
        """Ignored."""

    def warning(self, kind: str, count: int = 1) -> None:
        """Ignored."""


def replay(
    arrivals: list[Arrival],
    settings: RouterSettings,
    workers: int,
    blocks_per_worker: int,
    service: ServiceModel | None = None,
    block_tokens: int = 512,
    seed: int = 1,
) -> Report:
    """One replay of ``arrivals`` with a router of these settings."""
    run = Replay(block_tokens, service or ServiceModel())
    index = make_index(settings)
    picker: Picker
    if settings.mode == "kv":
        predicted = make_predicted(settings, index)
        picker = KvPicker(settings, block_tokens, index, None, Random(seed), run.now, predicted)
    else:
        picker = InflightPicker(settings.mode, Random(seed))
    follows = index is not None and not settings.predicts
    indexer = Indexer(index, lambda recovery: None, _NoCounts()) if index and follows else None
    run.attach(picker, indexer, workers, blocks_per_worker)
    return run.run(arrivals)


def main(argv: list[str] | None = None) -> None:
    """Parse, replay, print."""
    options = _options(argv)
    trace = read_trace(options.trace, options.limit)
    arrivals = [Arrival(r.timestamp / 1e3, r.hash_ids, r.output_length) for r in trace]
    service = ServiceModel(options.prefill_tokens_per_s, 0.02, options.inter_token_ms / 1e3)
    rows = []
    for name, settings in _variants(options.mode.split(","), options.predict):
        for blocks in options.blocks_per_worker:
            began = time.perf_counter()
            report = replay(
                arrivals, settings, options.workers, blocks, service, options.block_tokens
            )
            rows.append((name, blocks, report, time.perf_counter() - began))
    if options.json:
        print(json.dumps([_record(*row) for row in rows], indent=2))
    else:
        _table(options.workers, rows)


def _variants(modes: list[str], predict: bool) -> Iterator[tuple[str, RouterSettings]]:
    for mode in modes:
        yield mode, from_env(RouterSettings, mode=mode)
        if predict and mode == "kv":
            for policy in ("ttl", "lru"):
                yield (
                    f"kv, {policy}",
                    from_env(
                        RouterSettings, mode=mode, kv_events=False, approximate_cache_policy=policy
                    ),
                )


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--trace", required=True, help="trace in the Mooncake format")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks-per-worker", type=int, nargs="+", default=[8000])
    parser.add_argument("--mode", default="kv", help=f"one or more of {','.join(ROUTER_MODES)}")
    parser.add_argument(
        "--predict",
        action="store_true",
        help="kv also without events, predicting caches by age (ttl) and by capacity (lru)",
    )
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--limit", type=int, default=None, help="only the first requests")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=20_000.0)
    parser.add_argument("--inter-token-ms", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def _record(mode: str, blocks: int, report: Report, wall_s: float) -> dict[str, object]:
    record: dict[str, object] = {"mode": mode, "blocks_per_worker": blocks, "wall_s": wall_s}
    record |= dataclasses.asdict(report)
    for name in ("hit_rate", "infinite_hit_rate", "of_infinite"):
        record[name] = getattr(report, name)
    record["computed_imbalance"] = report.computed_imbalance
    record["request_imbalance"] = report.request_imbalance
    return record


def _table(workers: int, rows: list[tuple[str, int, Report, float]]) -> None:
    print(
        f"{'mode':<13}{'workers':>8}{'blocks':>8}{'hit rate':>10}{'of inf.':>9}"
        f"{'imb. tokens':>13}{'imb. requests':>15}{'prefill use':>13}"
        f"{'TTFT mean':>11}{'p99':>8}{'wall':>8}"
    )
    for mode, blocks, report, wall_s in rows:
        print(
            f"{mode:<13}{workers:>8}{blocks:>8}{report.hit_rate:>10.2%}{report.of_infinite:>9.1%}"
            f"{report.computed_imbalance:>13.3f}{report.request_imbalance:>15.3f}"
            f"{report.utilisation:>13.1%}{report.ttft_mean_s:>9.2f} s{report.ttft_p99_s:>6.1f} s"
            f"{wall_s:>6.1f} s"
        )
    print(
        "hit rate: prompt blocks held by the chosen worker when it began to compute;"
        " imb. = busiest worker's share over the mean, of computed prompt tokens and of requests"
    )


if __name__ == "__main__":
    main()
