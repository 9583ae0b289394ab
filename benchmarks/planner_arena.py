"""Compare policies in a simulated arena: GPU-hours, attainment and score, as a Markdown table.

    python benchmarks/planner_arena.py --trace mooncake_conversation_trace.jsonl

At most 8 workers of the preset qwen3-8b-h100 with one GPU each, 4 of them ready at the start; TTFT
2 s, ITL 50 ms; every policy with its default options on every traffic:

* conversation: the trace at 0.2-2.2 times its rate with a period of 20 minutes (49 minutes);
* flat, bursts: 8 requests/s for 40 minutes, Poisson and with gaps of CV 4;
* day: 1-13 requests/s along a daily curve in two hours;
* flash: 3 requests/s, 12 for 3 minutes every half hour;
* whole-day: the daily curve, gaps of CV 2, and a crowd of 8 requests/s more for 3 minutes at noon.

``--days`` compares the third of three equal days with and without what the planner keeps of the
usual traffic: half an hour of the trace with a crowd is a day, at a rate of 0.4 and 1.8 times.

``--held-out`` has the trace with periods of 10 and 40 minutes, and the whole day with other random
numbers. ``--small-boxes`` compares ``load+sla`` with fixed deployments where demand swings little.

Synthetic prompts have 8,000 tokens and replies 350 on average, both with a CV of 1. The fixed
deployment shown is the cheapest one with 90 %, the oracle the cheapest schedule it found with 90 %.
G/Go is relative to the oracle at the same attainment. ``load+sla, profile`` and ``auto, profile``
have a profile of the simulated worker, as `dynamo profile` would measure it; ``auto`` has the
targets that follow from it. ``auto`` begins by the thresholds of ``load``, one worker an interval,
until the cost of a request is learned, and at most doubles a pool in an interval. The
whole table takes ten minutes of one core, most of it the oracle; ``--traffic`` runs a part.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dynamo.bench.trace import read_trace
from dynamo.config.planner import PlannerSettings
from dynamo.planner.capacity.interpolation import (
    DecodePoints,
    PrefillPoints,
    WorkerProfile,
    write_profile,
)
from dynamo_lab.simulation.compare import ORACLE, Baseline, fixed_runs, run_policy
from dynamo_lab.simulation.request import ReplayRequest, from_trace, generate, parse_pattern, warp
from dynamo_lab.simulation.result import Point, ReplayResult, frontier, hours_at
from dynamo_lab.simulation.service_model import ReplaySetup, ServiceModel

PROFILED = ", profile"
"""Ends the name of a policy that reads a profile."""

POLICIES = ("load", "sla", "load+sla", "load+sla, profile", "auto, profile", "hpa:12")
START_UPS = (5.0, 60.0, 180.0)
ATTAINMENT = 0.9
DAY_S = 1800.0
SETTINGS = PlannerSettings(ttft_ms=2000.0, itl_ms=50.0)
SETUP = ReplaySetup(workers=4, ttft_ms=2000.0, itl_ms=50.0)


def synthetic(
    curve: str, duration_s: float, cv: float = 1.0, seed: int = 12
) -> list[ReplayRequest]:
    return generate(
        parse_pattern(curve, "curve"),
        duration_s=duration_s,
        isl=8000,
        osl=350,
        cv=cv,
        spread=1.0,
        seed=seed,
    )


def whole_day(seed: int) -> list[ReplayRequest]:
    day = synthetic("day:1-11:7200", 7200.0, cv=2.0, seed=seed)
    crowd = synthetic("flat:8", 180.0, seed=seed + 1)
    return sorted(
        [*day, *(replace(one, at_s=one.at_s + 4200.0) for one in crowd)], key=lambda r: r.at_s
    )


def conversation(trace: Path, period_s: int) -> list[ReplayRequest]:
    curve = parse_pattern(f"sine:0.2-2.2:{period_s}", "curve")
    return warp(from_trace(read_trace(trace)), curve)


def traffics(trace: Path, held_out: bool) -> dict[str, Callable[[], list[ReplayRequest]]]:
    if held_out:
        return {
            "conversation-10min": lambda: conversation(trace, 600),
            "conversation-40min": lambda: conversation(trace, 2400),
            "whole-day-2": lambda: whole_day(7),
        }
    return {
        "conversation": lambda: conversation(trace, 1200),
        "flat": lambda: synthetic("flat:8", 2400.0),
        "day": lambda: synthetic("day:1-13:7200", 7200.0),
        "bursts": lambda: synthetic("flat:8", 2400.0, cv=4.0),
        "flash": lambda: synthetic("flash:3-12:1800", 3600.0),
        "whole-day": lambda: whole_day(12),
    }


def trace_at(trace: Path, curve: str, duration_s: float) -> list[ReplayRequest]:
    requests = warp(from_trace(read_trace(trace)), parse_pattern(curve, "curve"))
    return [request for request in requests if request.at_s < duration_s]


def small_boxes(trace: Path) -> list[str]:
    """``load+sla`` over fixed deployments: those of equal attainment, and the cheapest with 90 %.

    The hours of equal attainment are interpolated; above the best fixed one they are its own.
    """
    cases: list[tuple[str, list[ReplayRequest], Sequence[float]]] = [
        ("flat at 8/s", synthetic("flat:8", 1800.0), START_UPS),
        ("the same for two hours", synthetic("flat:8", 7200.0), (60.0,)),
        ("flat at 5/s", synthetic("flat:5", 1800.0), (60.0,)),
        ("5-9/s, period 15 min", synthetic("sine:5-9:900", 1800.0), (60.0,)),
        ("conversation at 0.5", trace_at(trace, "flat:0.5", 1500.0), (60.0,)),
        (
            "conversation at 0.35-0.65, period 10 min",
            trace_at(trace, "sine:0.35-0.65:600", 1500.0),
            (60.0,),
        ),
        (
            "conversation at 0.3-0.9, period 5 min",
            trace_at(trace, "sine:0.3-0.9:300", 1500.0),
            (60.0,),
        ),
    ]
    lines = ["| traffic, start-up | load+sla | of fixed | cheapest fixed with 90 % |"]
    lines.append("|---" * 4 + "|")
    for name, requests, start_ups in cases:
        fixed = fixed_runs(requests, SETUP, SETTINGS)
        best = max(fixed, key=lambda one: one.attainment)
        points = [Point(one.gpu_hours, one.attainment) for one in fixed]
        enough = [one for one in fixed if one.attainment >= ATTAINMENT] or [best]
        cheapest = min(enough, key=lambda one: one.gpu_hours)
        for start_up_s in start_ups:
            result = run("load+sla", requests, replace(SETUP, start_up_s=start_up_s))
            equal = hours_at(frontier(points), result.attainment) or best.gpu_hours
            lines.append(
                f"| {name}, {start_up_s:g} s | {result.attainment:.1%} at {result.gpu_hours:.2f} "
                f"| {result.gpu_hours / equal:.2f} "
                f"| {cheapest.attainment:.1%} at {cheapest.gpu_hours:.2f} "
                f"({cheapest.policy.removeprefix('fixed:')}) |"
            )
    return lines


def row(result: ReplayResult, baseline: Baseline, start_up_s: float) -> dict[str, Any]:
    result = baseline.scored(result)
    ideal = baseline.oracle_hours(result.attainment)
    hours = result.duration_s / 3600
    return {
        **result.figures(),
        "start_up_s": start_up_s,
        "of_oracle": result.gpu_hours / ideal if ideal else None,
        "actions_per_hour": result.actions / hours if hours else 0.0,
    }


def profile(model: ServiceModel) -> WorkerProfile:
    """What `dynamo profile` would measure of a worker of ``model`` with one GPU."""
    isl = np.geomspace(250, 64_000, 13).round()
    ttft_s = np.array([model.prefill_s(int(tokens)) for tokens in isl])
    grid: Any = np.meshgrid(np.linspace(0.02, 1.0, 15), isl.clip(500))
    usage, context = (axis.ravel() for axis in grid)
    sequences = np.maximum(usage * model.kv_tokens / context, 1.0)
    itl_s = np.array(
        [
            model.time.iteration_s(0, 0.0, round(count), share)
            for count, share in zip(sequences, usage, strict=True)
        ]
    )
    return WorkerProfile(
        prefill=PrefillPoints(isl=isl, ttft_ms=1000 * ttft_s, tokens_per_s=isl / ttft_s),
        decode=DecodePoints(
            kv_usage=usage,
            context=context,
            itl_ms=1000 * itl_s,
            tokens_per_s=sequences / itl_s,
            max_kv_tokens=model.kv_tokens,
        ),
    )


def run(name: str, requests: Sequence[ReplayRequest], setup: ReplaySetup) -> ReplayResult:
    if not name.endswith(PROFILED):
        return run_policy(name, requests, setup, SETTINGS)
    with tempfile.TemporaryDirectory() as directory:
        write_profile(Path(directory), profile(setup.model))
        policy = name.removesuffix(PROFILED)
        given = PlannerSettings() if policy == "auto" else SETTINGS
        settings = replace(given, profile_results_dir=directory)
        result = run_policy(policy, requests, setup, settings)
        return replace(result, policy=name)


def contest(
    requests: Sequence[ReplayRequest], policies: Sequence[str], start_ups: Sequence[float]
) -> list[dict[str, Any]]:
    fixed = fixed_runs(requests, SETUP, SETTINGS)
    enough = [one for one in fixed if one.attainment >= ATTAINMENT] or [fixed[-1]]
    rows = []
    for start_up_s in start_ups:
        setup = replace(SETUP, start_up_s=start_up_s)
        baseline = Baseline.of(requests, setup, fixed, ATTAINMENT)
        runs = [run(name, requests, setup) for name in policies]
        for result in (*runs, min(enough, key=lambda r: r.gpu_hours), baseline.best):
            rows.append(row(result, baseline, start_up_s))
    return rows


def repeated(day: Sequence[ReplayRequest], days: int) -> list[ReplayRequest]:
    """The same day again and again; no prefix of one day is cached on the next."""
    return [
        replace(
            one,
            at_s=one.at_s + number * DAY_S,
            parent=None if one.parent is None else one.parent + number * len(day),
            blocks=tuple(block + number * 10**9 for block in one.blocks),
        )
        for number in range(days)
        for one in day
    ]


def third_day(trace: Path, start_ups: Sequence[float]) -> list[str]:
    """Each day of three as the difference of replays of so many days."""
    curve = parse_pattern("flash:0.4-1.8:1800", "curve")
    day = [one for one in warp(from_trace(read_trace(trace)), curve) if one.at_s < DAY_S]
    lines = ["| start-up | usual traffic | day 1 | day 2 | day 3 |", "|---|---|---|---|---|"]
    for start_up_s in start_ups:
        for day_s in (None, DAY_S):
            setup = replace(SETUP, start_up_s=start_up_s, day_s=day_s)
            attained, hours, cells = 0.0, 0.0, []
            for days in (1, 2, 3):
                result = run("load+sla", repeated(day, days), setup)
                share = days * result.attainment - attained
                cells.append(f"{share:.1%} at {result.gpu_hours - hours:.2f}")
                attained, hours = days * result.attainment, result.gpu_hours
            known = "unknown" if day_s is None else "known"
            lines.append(f"| {start_up_s:g} s | {known} | {' | '.join(cells)} |")
    return lines


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| start-up | policy | GPU-hours | attained | G/Go | score | worst minute | TTFT p99 "
        "| actions/h | reversals |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for found in rows:
        lines.append(
            f"| {found['start_up_s']:g} s | {found['policy']} | {found['gpu_hours']:.2f} "
            f"| {found['attainment']:.1%} | {_number(found['of_oracle'])} "
            f"| {_number(found['score'])} | {found['worst_minute']:.0%} "
            f"| {found['ttft_p99_ms'] / 1000:.1f} s | {found['actions_per_hour']:.0f} "
            f"| {found['reversals']} |"
        )
    return lines


def summary(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """One line per traffic and start-up: attained at GPU-hours, score, actions and reversals."""
    lines: list[str] = []
    for traffic, rows in found.items():
        for start_up_s in dict.fromkeys(row["start_up_s"] for row in rows):
            cells = {}
            for row in rows:
                if row["start_up_s"] == start_up_s:
                    kind = "fixed" if row["policy"].startswith("fixed") else row["policy"]
                    cells[kind] = _cell(row)
            if not lines:
                lines.append(f"| traffic, start-up | {' | '.join(cells)} |")
                lines.append("|---" * (len(cells) + 1) + "|")
            lines.append(f"| {traffic}, {start_up_s:g} s | {' | '.join(cells.values())} |")
    return lines


def _cell(row: dict[str, Any]) -> str:
    text = f"{row['attainment']:.1%} at {row['gpu_hours']:.2f}"
    if row["policy"].startswith("fixed"):
        return f"{text} ({row['policy'].removeprefix('fixed:')})"
    if row["policy"] == ORACLE:
        return text
    shown = "" if row["score"] is None else f", η {row['score']:.2f}"
    return f"{text}{shown}; {row['actions_per_hour']:.0f}, {row['reversals']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake conversation trace")
    parser.add_argument("--traffic", action="append", help="only this one; may be repeated")
    parser.add_argument("--policy", action="append", help=f"default: {', '.join(POLICIES)}")
    parser.add_argument("--start-up", action="append", type=float, help="default: 5, 60, 180")
    parser.add_argument("--held-out", action="store_true", help="the other traffic, see above")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--days", action="store_true", help="three equal days, see above")
    parser.add_argument("--small-boxes", action="store_true", help="little swing, see above")
    options = parser.parse_args()
    if options.small_boxes:
        print(*small_boxes(options.trace), sep="\n")
        return
    if options.days:
        print(*third_day(options.trace, options.start_up or START_UPS), sep="\n")
        return
    known = traffics(options.trace, options.held_out)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in options.traffic or known:
        begin_s = time.monotonic()
        requests = known[name]()
        found[name] = contest(requests, options.policy or POLICIES, options.start_up or START_UPS)
        print(f"### {name}\n", *table(found[name]), "", sep="\n", flush=True)
        print(f"{name}: {time.monotonic() - begin_s:.0f} s", file=sys.stderr)
    print("### summary\n", *summary(found), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
