"""Compare the cost in seconds with every other mode and setting, over many cells of a replay.

    python benchmarks/routing_cells.py --trace conversation=PATH --json cells.json

A cell is a trace, a number of workers, a size of their caches and a load. Its load is the share of
the workers' time that the prompts would take if each block had to be computed once. Each policy is
replayed with several seeds, each of which has other requests: another part of a given trace. The
figure of a policy is its mean (or 99th percentile) of the time to first token over that of the best
policy of the same cell and seed; a cell shows the median of its seeds.

The traces, beside those given: a hot prefix, agents in closed loop, tools with shared system
prompts, and prompts that share nothing with the lengths of a given trace. With --only also:
documents, about each of which a few questions are asked; bursts of equal prompts; and any trace
with the suffix -mixed, for workers of which every second one takes three times as long.

Replays that are in the file of --json are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from make_trace import agents, hot_prefix

from dynamo.bench.trace import read_trace
from dynamo.config.option import from_env
from dynamo.config.router import RouterSettings
from dynamo.runtime.process.paths import write_atomic
from dynamo_lab.routing.replay import Arrival, replay
from dynamo_lab.routing.simulated_worker import WorkerSpeed

__all__ = ["main"]

BLOCK_TOKENS = 16
"""Traces have blocks of 512 tokens; small ones at a smaller rate decide alike, and hash fast."""
SERVICE = WorkerSpeed(20_000.0 * BLOCK_TOKENS / 512)
MIXED = "-mixed"
SLOWER = WorkerSpeed(
    SERVICE.prefill_tokens_per_s / 3, SERVICE.prefill_fixed_s * 3, SERVICE.inter_token_s * 3
)
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


KEYS = ("ttft_mean_s", "ttft_p99_s", "hit_rate", "utilisation")
Figures = dict[str, dict[str, float]]
"""Of each policy, by key."""


class Cell(NamedTuple):
    """One comparison."""

    trace: str
    workers: int
    blocks: int
    load: float


def tools(requests: int, seed: int, prompts: int = 12) -> list[Arrival]:
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


def documents(requests: int, seed: int) -> list[Arrival]:
    """Documents of 50 to 300 blocks, two to six questions about each, some time apart."""
    rng = random.Random(seed)
    next_id, at_s = 0, 0.0
    rows: list[Arrival] = []
    while len(rows) < requests:
        length = rng.randrange(50, 301)
        document = list(range(next_id, next_id + length))
        next_id += length
        at_s += rng.expovariate(1 / 4)
        asked_s = at_s
        for _ in range(rng.randrange(2, 7)):
            new = rng.randrange(1, 5)
            blocks = [*document, *range(next_id, next_id + new)]
            next_id += new
            rows.append(Arrival(asked_s, blocks, rng.randrange(50, 300)))
            asked_s += rng.expovariate(1 / 8)
    return sorted(rows)[:requests]


def bursts(requests: int, seed: int) -> list[Arrival]:
    """Half of the prompts come in bursts of 10 to 40 equal ones, the others share nothing."""
    rng = random.Random(seed)
    next_id, at_s = 0, 0.0
    rows: list[Arrival] = []
    while len(rows) < requests:
        for count in (rng.randrange(10, 41), *[1] * rng.randrange(10, 41)):
            length = rng.randrange(4, 81)
            blocks = list(range(next_id, next_id + length))
            next_id += length
            at_s += rng.expovariate(1.0)
            rows += [Arrival(at_s, blocks, rng.randrange(20, 300)) for _ in range(count)]
    return rows[:requests]


MADE = {"tools": tools, "documents": documents, "bursts": bursts}


def arrivals_of(cell: Cell, traces: dict[str, str], limit: int, seed: int) -> list[Arrival]:
    """The requests of a cell, at its load."""
    name = cell.trace.removesuffix(MIXED)
    if name == "agents":
        # In closed loop the sessions are the load: so many that their work would fill the workers.
        return _agents(cell, seed)
    if name == "hot-prefix":
        found = _arrivals(hot_prefix(limit, cell.workers, 1.0, seed=seed))
    elif name in MADE:
        found = MADE[name](limit, seed)
    else:
        name = name.removesuffix("-unshared")
        found = [
            Arrival(row.timestamp / 1e3, row.hash_ids, row.output_length)
            for row in read_trace(traces[name], limit * seed)[-limit:]
        ]
        if "-unshared" in cell.trace:
            found = _unshared(found, seed)
    found = [one._replace(block_ids=one.block_ids[: cell.blocks]) for one in found]
    work_s = _work_s(found)
    span_s = found[-1].at_s - found[0].at_s
    speed = cell.load * _equal_workers(cell) * span_s / work_s
    return [one._replace(at_s=(one.at_s - found[0].at_s) / speed) for one in found]


def _equal_workers(cell: Cell) -> float:
    return cell.workers * (2 / 3 if cell.trace.endswith(MIXED) else 1)


def _agents(cell: Cell, seed: int) -> list[Arrival]:
    one = _work_s(_arrivals(agents(1, seed=seed)))
    last_s = 20 * (1.75 + 150 * SERVICE.inter_token_s)  # turns: think and answer
    sessions = max(round(cell.load * _equal_workers(cell) * (last_s + one) / one), 1)
    return _arrivals(agents(sessions, seed=seed))


def _arrivals(rows: Iterator[dict[str, Any]]) -> list[Arrival]:
    found: list[Arrival] = []
    last: dict[str, int] = {}
    for row in rows:
        session, parent = row.get("session_id"), None
        if session is not None:
            parent, last[session] = last.get(session), len(found)
        at_s, delay_s = row["timestamp"] / 1e3, row.get("delay", 0.0) / 1e3
        found.append(Arrival(at_s, row["hash_ids"], row["output_length"], parent, delay_s))
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


def run_cell(cell: Cell, policies: list[str], arrivals: list[Arrival], seed: int) -> Figures:
    """Replay a cell with each policy."""
    figures = {}
    for name in policies:
        found = replay(
            arrivals,
            from_env(RouterSettings, {}, **POLICIES[name]),
            cell.workers,
            cell.blocks,
            SERVICE,
            BLOCK_TOKENS,
            seed,
            SLOWER if cell.trace.endswith(MIXED) else None,
        )
        figures[name] = {key: round(getattr(found, key), 5) for key in KEYS}
    return figures


def ratios(rows: list[dict[str, Any]], name: str, key: str) -> dict[Cell, list[float]]:
    """The figures of a policy over the best of the same cell and seed, by cell."""
    found: defaultdict[Cell, list[float]] = defaultdict(list)
    for row in rows:
        least = min(one[key] for one in row["policies"].values())
        found[_cell(row)].append(row["policies"][name][key] / least)
    return found


def summary(rows: list[dict[str, Any]], names: list[str], key: str, within: float) -> None:
    """Print, for each policy that all rows have, its figure over the best of each cell."""
    print(f"\n{key} over the best policy of the cell and seed, {len(rows)} replays")
    head = f"{'policy':<20}{'geo. mean':>10}{'worst':>8}{f'<= {within:g}':>10}{'> 1.25':>8}"
    print(head + f"{'worst seed':>12}")
    for name in names:
        if any(name not in row["policies"] for row in rows):
            continue
        seeds = ratios(rows, name, key)
        cells = [median(one) for one in seeds.values()]
        near = sum(one <= within for one in cells) / len(cells)
        far, worst = sum(one > 1.25 for one in cells), max(map(max, seeds.values()))
        print(
            f"{name:<20}{geometric_mean(cells):>10.3f}{max(cells):>8.2f}{near:>10.1%}{far:>8}"
            f"{worst:>12.2f}"
        )


def table(rows: list[dict[str, Any]], name: str) -> None:
    """Print a row of Markdown for each trace and pool: mean and p99 of a policy over the best."""
    means, tails = ratios(rows, name, "ttft_mean_s"), ratios(rows, name, "ttft_p99_s")
    loads = sorted({cell.load for cell in means})
    print("| trace | workers × blocks |" + "".join(f" {load:.0%} |" for load in loads))
    print("|---|---|" + "---|" * len(loads))
    for trace, workers, blocks in dict.fromkeys(cell[:3] for cell in means):
        line = f"| {trace} | {workers} × {blocks:,} |"
        for load in loads:
            cell = Cell(trace, workers, blocks, load)
            line += f" {median(means[cell]):.2f}, {median(tails[cell]):.2f} |"
        print(line)


def _cell(row: dict[str, Any]) -> Cell:
    return Cell(row["trace"], row["workers"], row["blocks"], row["load"])


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
    file = Path(options.json) if options.json else None
    rows = json.loads(file.read_text()) if file and file.exists() else []
    known = {(_cell(row), row["seed"], row["limit"]): row for row in rows}
    for seed, cell in product(options.seeds, cells):
        row = known.get((cell, seed, options.limit))
        if row is None:
            row = cell._asdict() | {"seed": seed, "limit": options.limit, "policies": {}}
            rows.append(row)
        missing = [name for name in wanted if name not in row["policies"]]
        if missing:
            arrivals = arrivals_of(cell, traces, options.limit, seed)
            row["policies"] |= run_cell(cell, missing, arrivals, seed)
            _show(row)
            if file:
                write_atomic(file, json.dumps(rows).encode())
    summary(rows, wanted, "ttft_mean_s", 1.05)
    summary(rows, wanted, "ttft_p99_s", 1.15)
    if options.table:
        table(rows, options.table)


def _show(row: dict[str, Any]) -> None:
    means = {name: one["ttft_mean_s"] for name, one in row["policies"].items()}
    best_name, best = min(means.items(), key=itemgetter(1))
    first = next(iter(means))
    where = f"{row['trace']:<24}{row['workers']:>3} x {row['blocks']:<6}{row['load']:>5.0%}"
    print(
        f"{where} seed {row['seed']}  best {best_name} {best:.2f} s; {first} "
        f"{means[first] / best:.2f}, hits {row['policies'][first]['hit_rate']:.1%} of "
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", metavar="FILE", help="keep every replay in FILE")
    parser.add_argument("--table", metavar="POLICY", help="print each cell of POLICY as Markdown")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
