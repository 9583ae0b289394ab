"""Compare the cost in seconds with every other mode and setting, over many cells of a replay.

    python benchmarks/routing_cells.py --trace conversation=PATH --jobs 2 --json cells.json

A cell is a trace, a number of workers, a size of their caches and a load. Its load is the share of
the workers' time that the prompts would take if each block had to be computed once. Each policy is
replayed with several seeds; a cell shows the median. The figure of a policy is its mean (or 99th
percentile) of the time to first token over that of the best policy of the cell.

The traces, beside those given: a hot prefix, agents in closed loop, tools with shared system
prompts, and prompts that share nothing with the lengths of a given trace.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from make_trace import agents, hot_prefix

from dynamo.bench.routing_replay import Arrival, replay
from dynamo.bench.simulated_worker import WorkerSpeed
from dynamo.bench.trace import read_trace
from dynamo.config.option import from_env
from dynamo.config.router import RouterSettings

__all__ = ["main"]

BLOCK_TOKENS = 16
"""Traces have blocks of 512 tokens; small ones at a smaller rate decide alike, and hash fast."""
SERVICE = WorkerSpeed(20_000.0 * BLOCK_TOKENS / 512)
POLICIES: dict[str, dict[str, Any]] = {
    "seconds": {"mode": "kv", "cost": "seconds"},
    "kv": {"mode": "kv"},
    "kv ttl60": {"mode": "kv", "predicted_ttl_s": 60.0},
    "kv 4": {"mode": "kv", "prefill_load_scale": 4.0},
    "kv 4 ttl60": {"mode": "kv", "prefill_load_scale": 4.0, "predicted_ttl_s": 60.0},
    "kv 4 copy32 ttl60": {
        "mode": "kv",
        "prefill_load_scale": 4.0,
        "duplicate_cost": 32.0,
        "predicted_ttl_s": 60.0,
    },
    "kv 1 copy8 ttl60": {"mode": "kv", "duplicate_cost": 8.0, "predicted_ttl_s": 60.0},
    "kv 16 copy32 ttl60": {
        "mode": "kv",
        "prefill_load_scale": 16.0,
        "duplicate_cost": 32.0,
        "predicted_ttl_s": 60.0,
    },
    "cache first": {"mode": "kv", "prefill_load_scale": 64.0, "duplicate_cost": 32.0},
    "cache first ttl60": {
        "mode": "kv",
        "prefill_load_scale": 64.0,
        "duplicate_cost": 32.0,
        "predicted_ttl_s": 60.0,
    },
    "least-loaded": {"mode": "least-loaded"},
    "power-of-two": {"mode": "power-of-two"},
    "round-robin": {"mode": "round-robin"},
}


class Cell(NamedTuple):
    """One comparison."""

    trace: str
    workers: int
    blocks: int
    load: float


def tools(prompts: int = 12, requests: int = 3000, seed: int = 1) -> list[Arrival]:
    """Short requests to tools: each has a system prompt of 4 to 40 blocks, some are much in use."""
    rng = random.Random(seed)
    next_id, systems = 0, []
    for _ in range(prompts):
        length = rng.randrange(4, 41)
        systems.append(list(range(next_id, next_id + length)))
        next_id += length
    arrivals, at_s = [], 0.0
    for _ in range(requests):
        at_s += rng.expovariate(1.0)
        system = systems[min(int(rng.paretovariate(1.0)) - 1, prompts - 1)]
        new = rng.choice((1, 1, 2, 3, 6))
        blocks = [*system, *range(next_id, next_id + new)]
        next_id += new
        arrivals.append(Arrival(at_s, blocks, rng.randrange(20, 300)))
    return arrivals


def arrivals_of(cell: Cell, traces: dict[str, str], limit: int, seed: int = 1) -> list[Arrival]:
    """The requests of a cell, at its load."""
    if cell.trace == "agents":
        # In closed loop the sessions are the load: so many that their work would fill the workers.
        return _agents(cell)
    if cell.trace == "hot-prefix":
        rows = list(hot_prefix(limit, cell.workers, 1.0, seed=seed))
        found = [
            Arrival(row["timestamp"] / 1e3, row["hash_ids"], row["output_length"]) for row in rows
        ]
    elif cell.trace == "tools":
        found = tools(requests=limit, seed=seed)
    else:
        name = cell.trace.removesuffix("-unshared")
        found = [
            Arrival(row.timestamp / 1e3, row.hash_ids, row.output_length)
            for row in read_trace(traces[name], limit)
        ]
        if name != cell.trace:
            found = _unshared(found, seed)
    found = [one._replace(block_ids=one.block_ids[: cell.blocks]) for one in found]
    work_s = _work_s(found)
    span_s = found[-1].at_s - found[0].at_s
    speed = cell.load * cell.workers * span_s / work_s
    return [one._replace(at_s=(one.at_s - found[0].at_s) / speed) for one in found]


def _agents(cell: Cell) -> list[Arrival]:
    one = _work_s(_arrivals(agents(1)))
    last_s = 20 * (1.75 + 150 * SERVICE.inter_token_s)  # turns: think and answer
    sessions = max(round(cell.load * cell.workers * (last_s + one) / one), 1)
    return _arrivals(agents(sessions))


def _arrivals(rows: Iterator[dict[str, Any]]) -> list[Arrival]:
    found: list[Arrival] = []
    last: dict[str, int] = {}
    for row in rows:
        session = row["session_id"]
        at_s, delay_s = row["timestamp"] / 1e3, row["delay"] / 1e3
        found.append(
            Arrival(at_s, row["hash_ids"], row["output_length"], last.get(session), delay_s)
        )
        last[session] = len(found) - 1
    return found


def _unshared(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    rng, next_id, found, at_s = random.Random(seed), 0, [], 0.0
    for one in arrivals:
        at_s += rng.expovariate(1.0)
        count = len(one.block_ids)
        found.append(one._replace(at_s=at_s, block_ids=range(next_id, next_id + count)))
        next_id += count
    return found


def _work_s(arrivals: list[Arrival]) -> float:
    """Seconds of prefill if each block were computed once."""
    blocks: set[int] = set()
    for one in arrivals:
        blocks.update(one.block_ids)
    fixed_s = SERVICE.prefill_fixed_s * len(arrivals)
    return fixed_s + len(blocks) * BLOCK_TOKENS / SERVICE.prefill_tokens_per_s


def run_cell(
    cell: Cell, policies: dict[str, dict[str, Any]], traces: dict[str, str], limit: int, seeds: int
) -> dict[str, Any]:
    """Replay a cell with each policy; medians over the seeds."""
    arrivals = arrivals_of(cell, traces, limit)
    row: dict[str, Any] = cell._asdict() | {"policies": {}}
    for name, settings in policies.items():
        found = [
            replay(
                arrivals,
                from_env(RouterSettings, {}, **settings),
                cell.workers,
                cell.blocks,
                SERVICE,
                BLOCK_TOKENS,
                seed,
            )
            for seed in range(1, seeds + 1)
        ]
        row["policies"][name] = {
            "ttft_mean_s": median(one.ttft_mean_s for one in found),
            "ttft_p99_s": median(one.ttft_p99_s for one in found),
            "hit_rate": median(one.hit_rate for one in found),
            "utilisation": median(one.utilisation for one in found),
        }
    return row


def summary(rows: list[dict[str, Any]], names: list[str], key: str, within: float) -> None:
    """Print, for each policy, its figure over the best of each cell."""
    print(f"\n{key} over the best policy of the cell, {len(rows)} cells")
    print(f"{'policy':<20}{'geo. mean':>10}{'worst':>8}{f'<= {within:g}':>10}{'> 1.25':>8}")
    best = [min(one[key] for one in row["policies"].values()) for row in rows]
    for name in names:
        ratios = [row["policies"][name][key] / least for row, least in zip(rows, best, strict=True)]
        near = sum(one <= within for one in ratios) / len(ratios)
        far = sum(one > 1.25 for one in ratios)
        print(f"{name:<20}{geometric_mean(ratios):>10.2f}{max(ratios):>8.2f}{near:>10.0%}{far:>8}")


def main(argv: list[str] | None = None) -> None:
    """Parse, replay, print."""
    options = _options(argv)
    traces = dict(one.split("=", 1) for one in options.trace)
    names = ["hot-prefix", "agents", "tools"]
    for name in traces:
        names += [name, f"{name}-unshared"]
    names = options.only.split(",") if options.only else names
    cells = [Cell(*one) for one in product(names, options.workers, options.blocks, options.load)]
    wanted = options.policies.split(",") if options.policies else list(POLICIES)
    policies = {name: POLICIES[name] for name in wanted}
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = [
            pool.submit(run_cell, cell, policies, traces, options.limit, options.seeds)
            for cell in cells
        ]
        for job in jobs:
            row = job.result()
            rows.append(row)
            _show(row)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1))
    summary(rows, wanted, "ttft_mean_s", 1.05)
    summary(rows, wanted, "ttft_p99_s", 1.15)


def _show(row: dict[str, Any]) -> None:
    means = {name: one["ttft_mean_s"] for name, one in row["policies"].items()}
    best_name, best = min(means.items(), key=itemgetter(1))
    first = next(iter(means))
    where = f"{row['trace']:<24}{row['workers']:>3} x {row['blocks']:<6}{row['load']:>5.0%}"
    print(
        f"{where}  best {best_name} {best:.2f} s; {first} {means[first] / best:.2f}, hits "
        f"{row['policies'][first]['hit_rate']:.1%} of "
        f"{max(one['hit_rate'] for one in row['policies'].values()):.1%}",
        flush=True,
    )


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--only", help="traces, separated by commas; default: all")
    parser.add_argument("--policies", help="separated by commas; default: all")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--load", type=float, nargs="+", default=[0.2, 0.5, 0.8, 1.0])
    parser.add_argument("--limit", type=int, default=3000, help="requests of each trace")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write every cell to FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
