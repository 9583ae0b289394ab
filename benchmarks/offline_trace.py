"""Replay a trace through the router's own code: hit rate and balance over simulated workers.

    python benchmarks/offline_trace.py --trace PATH --workers 8 --blocks-per-worker 8000

Settings of the router come from the usual DYN_ROUTER_* variables, defaults otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from operator import attrgetter

from dynamo.bench.trace import parents, read_trace
from dynamo.bench.trace_formats import TraceRequest
from dynamo.config.option import from_env
from dynamo.config.router import ROUTER_MODES, RouterSettings
from dynamo.errors import ConfigError
from dynamo_lab.routing.replay import Arrival, Report, replay
from dynamo_lab.routing.simulated_worker import WorkerSpeed

__all__ = ["main"]

Row = tuple[str, int, list[Report]]
"""Router, blocks per worker, replays in order of hit rate."""


def main(argv: list[str] | None = None) -> None:
    """Parse, replay, print."""
    options = _options(argv)
    try:
        _run(options)
    except ConfigError as error:
        sys.exit(f"error: {error.message}")


def _run(options: argparse.Namespace) -> None:
    trace = read_trace(options.trace, options.limit)[options.skip :]
    arrivals = _arrivals(trace, options.speed, options.closed_loop)
    service = WorkerSpeed(
        options.prefill_tokens_per_s,
        0.02,
        options.inter_token_ms / 1e3,
        options.inter_token_ms_per_request / 1e3,
    )
    rows: list[Row] = []
    for name, settings in _variants(options.mode.split(","), options.predict):
        for blocks in options.blocks_per_worker:
            reports = [
                replay(
                    arrivals, settings, options.workers, blocks, service, options.block_tokens, seed
                )
                for seed in range(1, options.seeds + 1)
            ]
            rows.append((name, blocks, sorted(reports, key=attrgetter("hit_rate"))))
    if options.json:
        print(json.dumps([_record(*row) for row in rows], indent=2))
    else:
        _table(options.workers, rows)


def _arrivals(trace: list[TraceRequest], speed: float, closed_loop: bool) -> list[Arrival]:
    first_ms = min((one.timestamp for one in trace), default=0.0)
    waits_for = parents(trace) if closed_loop else [None] * len(trace)
    return [
        Arrival(
            (one.timestamp - first_ms) / 1e3 / speed,
            one.hash_ids,
            one.output_length,
            parent,
            one.delay / 1e3,
        )
        for one, parent in zip(trace, waits_for, strict=True)
    ]


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
    parser.add_argument("--skip", type=int, default=0, help="leave out the first requests")
    parser.add_argument(
        "--seeds", type=int, default=1, help="replays of each row: equal costs are a draw"
    )
    parser.add_argument("--limit", type=int, default=None, help="only the first requests")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=20_000.0)
    parser.add_argument("--inter-token-ms", type=float, default=10.0)
    parser.add_argument(
        "--inter-token-ms-per-request",
        type=float,
        default=0.0,
        help="added for each other request that the worker decodes at the same time",
    )
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals so much faster")
    parser.add_argument(
        "--closed-loop",
        action="store_true",
        help="a turn waits for the answer before it: the last one of its session_id or, without, "
        "of the prompt that it continues",
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def _record(mode: str, blocks: int, reports: list[Report]) -> dict[str, object]:
    report = reports[len(reports) // 2]
    record: dict[str, object] = {"mode": mode, "blocks_per_worker": blocks}
    record |= dataclasses.asdict(report)
    for name in ("hit_rate", "infinite_hit_rate", "of_infinite"):
        record[name] = getattr(report, name)
    record["computed_imbalance"] = report.computed_imbalance
    record["request_imbalance"] = report.request_imbalance
    record["least_of_infinite"] = reports[0].of_infinite
    record["greatest_imbalance"] = _imbalance(reports)
    return record


def _imbalance(reports: list[Report]) -> float:
    return max(max(report.computed_imbalance, report.request_imbalance) for report in reports)


def _table(workers: int, rows: list[Row]) -> None:
    print(
        f"{'mode':<13}{'workers':>8}{'blocks':>8}{'hit rate':>10}{'least':>9}"
        f"{'of inf.':>9}{'least':>8}{'imbalance':>11}{'prefill use':>13}{'TTFT mean':>11}{'p99':>8}"
    )
    for mode, blocks, reports in rows:
        report, least = reports[len(reports) // 2], reports[0]
        print(
            f"{mode:<13}{workers:>8}{blocks:>8}{report.hit_rate:>10.2%}{least.hit_rate:>9.2%}"
            f"{report.of_infinite:>9.1%}{least.of_infinite:>8.1%}{_imbalance(reports):>11.3f}"
            f"{report.utilisation:>13.1%}{report.ttft_mean_s:>9.2f} s{report.ttft_p99_s:>6.1f} s"
        )
    print(
        "hit rate: prompt blocks held by the chosen worker when it began to compute;"
        " imbalance: busiest worker over the mean, the greater of computed prompt tokens and"
        " requests, the greatest of all seeds; the rest: the replay of median hit rate"
    )


if __name__ == "__main__":
    main()
