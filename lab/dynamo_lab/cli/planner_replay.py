"""``dynamo planner replay``: run policies on a trace in virtual time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dynamo.bench.trace import read_trace
from dynamo.cli.text_table import figures
from dynamo.config import load
from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.planner.capacity.interpolation import read_capacity
from dynamo.planner.policies.factory import resolve_targets
from dynamo_lab.simulation.compare import Comparison, compare, comparison_figure, draw_comparison
from dynamo_lab.simulation.request import (
    ReplayRequest,
    from_trace,
    generate,
    parse_pattern,
    speed_up,
    warp,
)
from dynamo_lab.simulation.result import ReplayResult
from dynamo_lab.simulation.service_model import ReplaySetup, service_model
from dynamo_lab.simulation.settings import ReplaySettings

DESCRIPTION = """Run the planner's policies on a trace in virtual time, an hour in seconds."""
EPILOG = """examples:
  dynamo planner replay trace.jsonl --policy load --policy fixed:6 --ttft 2000
  dynamo planner replay --synthetic sine:5-20:150 --policy load --policy hpa:12 --plot replay.png
"""

_START_UP_S = 60.0
_COLUMNS = (
    "policy",
    "GPU-hours",
    "attained",
    "TTFT p99",
    "ITL p99",
    "worst minute",
    "actions",
    "reversals",
    "score",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    settings, planner = load(
        "dynamo planner replay", DESCRIPTION, [ReplaySettings, PlannerSettings], argv, epilog=EPILOG
    )
    if "auto" in (settings.policy or (planner.mode,)):
        _, reason = resolve_targets(replace(planner, mode="auto"))
        print(f"--mode auto: {reason}", file=sys.stderr)
    if settings.plot is not None:
        comparison_figure()
    comparison = compare(
        settings.policy or (planner.mode,),
        traffic(settings),
        _setup(settings, planner),
        planner,
        settings.attainment if settings.score else None,
    )
    if settings.plot is not None:
        draw_comparison(comparison, Path(settings.plot))
    if settings.json:
        print(json.dumps(_document(comparison)))
    else:
        _print_table(comparison)
    return 0


def traffic(settings: ReplaySettings) -> list[ReplayRequest]:
    """Return the requests that the settings describe. Raises ConfigError."""
    if (settings.trace is None) == (settings.synthetic is None):
        raise ConfigError("name either a trace or --synthetic, such as --synthetic sine:5-20:150")
    if settings.synthetic is not None:
        if settings.warp is not None or settings.rate != 1.0:
            raise ConfigError("--warp and --rate need a trace; --synthetic has its own rate")
        return generate(
            parse_pattern(settings.synthetic, "--synthetic"),
            duration_s=settings.duration_s,
            isl=settings.isl,
            osl=settings.osl,
            cv=settings.arrival_cv,
            spread=settings.length_cv,
            seed=settings.seed,
        )
    assert settings.trace is not None
    trace = read_trace(settings.trace, form=settings.trace_format)
    requests = speed_up(from_trace(trace), settings.rate)
    if settings.warp is not None:
        requests = warp(requests, parse_pattern(settings.warp, "--warp"))
    return [request for request in requests if request.at_s < settings.duration_s]


def _setup(settings: ReplaySettings, planner: PlannerSettings) -> ReplaySetup:
    start_s, wake_s = settings.start_up_s, settings.wake_s
    profile = read_capacity(planner.profile_results_dir)
    if profile is not None:
        start_s = profile.start_s if start_s is None else start_s
        wake_s = profile.wake_s if wake_s is None else wake_s
    return ReplaySetup(
        model=service_model(settings.service_model),
        start_up_s=_START_UP_S if start_s is None else start_s,
        stop_s=settings.stop_s,
        wake_s=wake_s,
        sleeping=(
            planner.max_gpu_budget
            if planner.max_sleeping_workers is None
            else planner.max_sleeping_workers
        ),
        max_gpus=planner.max_gpu_budget,
        gpus_per_worker=planner.decode_engine_num_gpu or 1.0,
        gpus_per_prefill_worker=planner.prefill_engine_num_gpu or 1.0,
        minimum=planner.least_workers(planner.decode_engine_num_gpu or 1.0),
        prefill_minimum=planner.least_workers(planner.prefill_engine_num_gpu or 1.0, "prefill"),
        workers=settings.initial_workers,
        prefill_workers=settings.initial_prefill_workers,
        max_queue=settings.max_queue,
        pull_s=planner.metric_pulling_interval_s,
        ttft_ms=planner.ttft_ms,
        itl_ms=planner.itl_ms,
    )


def _document(comparison: Comparison) -> dict[str, object]:
    document: dict[str, object] = {"policies": [result.figures() for result in comparison.results]}
    if comparison.baseline is not None:
        document["fixed"] = [run.figures() for run in comparison.baseline.fixed]
        document["oracle"] = [run.figures() for run in comparison.baseline.oracle]
    return document


def _print_table(comparison: Comparison) -> None:
    print("\n".join(figures([_COLUMNS, *map(_row, comparison.results)])))
    if comparison.baseline is not None and comparison.baseline.fixed:
        names = comparison.baseline.fixed[0].policy, comparison.baseline.fixed[-1].policy
        print(
            f"score: 0 as the best of {' to '.join(names)}, 1 as the oracle; --json has their runs"
        )


def _row(result: ReplayResult) -> list[str]:
    return [
        result.policy,
        f"{result.gpu_hours:.2f}",
        f"{result.attainment:.1%}",
        _ms(result.ttft_p99_ms),
        _ms(result.itl_p99_ms),
        "-" if result.worst_minute is None else f"{result.worst_minute:.0%}",
        str(result.actions),
        str(result.reversals),
        "-" if result.score is None else f"{result.score:.2f}",
    ]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"
