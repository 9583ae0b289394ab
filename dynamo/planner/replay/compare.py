"""Replay several policies on one trace, and score them against fixed deployments and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.planner.policies.factory import named_policy
from dynamo.planner.replay.oracle import oracle_runs
from dynamo.planner.replay.request import ReplayRequest
from dynamo.planner.replay.result import ReplayResult
from dynamo.planner.replay.score import Point, score
from dynamo.planner.replay.setup import ReplaySetup
from dynamo.planner.replay.simulation import simulate

__all__ = ["ORACLE", "Comparison", "compare", "run_policy"]

ORACLE = "oracle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The results of the policies, and those that the score is based on."""

    results: Sequence[ReplayResult]
    fixed: Sequence[ReplayResult] = ()
    oracle: Sequence[ReplayResult] = ()


def compare(
    policies: Sequence[str],
    requests: Sequence[ReplayRequest],
    setup: ReplaySetup,
    settings: PlannerSettings,
    attainment: float | None = 0.9,
) -> Comparison:
    """Run ``policies`` by name. Raises ConfigError for an unknown one.

    With ``attainment`` None nothing is scored. Otherwise ``oracle`` is its cheapest schedule with
    that attainment, or the best one if none reaches it.
    """
    if not requests:
        raise ConfigError("the trace holds no request before --duration; raise it")
    aggregated = setup.prefill_workers is None
    if ORACLE in policies and not aggregated:
        raise ConfigError("--policy oracle needs aggregated serving: no --initial-prefill-workers")
    scored = attainment is not None and aggregated
    results = {
        name: run_policy(name, requests, setup, settings) for name in policies if name != ORACLE
    }
    oracle = oracle_runs(requests, setup) if scored or ORACLE in policies else []
    if ORACLE in policies:
        results[ORACLE] = _cheapest(oracle, attainment or 0.9)
    fixed = _fixed(requests, setup, settings, results) if scored else []
    found = [results[name] for name in policies]
    if scored:
        found = [_scored(result, fixed, oracle) for result in found]
    return Comparison(results=found, fixed=fixed, oracle=oracle)


def run_policy(
    name: str,
    requests: Sequence[ReplayRequest],
    setup: ReplaySetup,
    settings: PlannerSettings,
) -> ReplayResult:
    """Run the policy ``name``; a fixed deployment has its workers from the start."""
    prefill = setup.prefill_workers is not None
    kind, _, argument = name.partition(":")
    if kind == "fixed":
        counts = [int(count) for count in argument.split("x") if count.isdecimal()]
        if counts:
            first = counts[0] if prefill else None
            setup = replace(setup, workers=counts[-1], prefill_workers=first)
    return simulate(named_policy(name, settings, prefill), requests, setup, name)


def _fixed(
    requests: Sequence[ReplayRequest],
    setup: ReplaySetup,
    settings: PlannerSettings,
    known: dict[str, ReplayResult],
) -> list[ReplayResult]:
    most = int(setup.max_gpus / setup.gpus_per_worker)
    names = [f"fixed:{workers}" for workers in range(1, most + 1)]
    return [known.get(name) or run_policy(name, requests, setup, settings) for name in names]


def _cheapest(runs: Sequence[ReplayResult], attainment: float) -> ReplayResult:
    enough = [run for run in runs if run.attainment >= attainment]
    if enough:
        return min(enough, key=lambda run: run.gpu_hours)
    return max(runs, key=lambda run: run.attainment)


def _scored(
    result: ReplayResult, fixed: Sequence[ReplayResult], oracle: Sequence[ReplayResult]
) -> ReplayResult:
    value = score(_point(result), map(_point, fixed), map(_point, oracle))
    return replace(result, score=value)


def _point(result: ReplayResult) -> Point:
    return Point(result.gpu_hours, result.attainment)
