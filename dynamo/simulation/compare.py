"""Replay several policies on one trace, and score them against fixed deployments and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.planner.policies.factory import named_policy
from dynamo.planner.replay.oracle import Oracle
from dynamo.planner.replay.score import Point, frontier, hours_at, score
from dynamo.planner.replay.setup import ReplaySetup
from dynamo.simulation.request import ReplayRequest
from dynamo.simulation.result import ReplayResult
from dynamo.simulation.simulation import simulate

__all__ = ["ORACLE", "Baseline", "Comparison", "compare", "fixed_runs", "run_policy"]

ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The runs that a score is based on; ``best`` is the oracle's answer to the attainment asked
    for. A schedule of the oracle may also be constant."""

    fixed: Sequence[ReplayResult]
    oracle: Sequence[ReplayResult]
    best: ReplayResult

    @classmethod
    def of(
        cls,
        requests: Sequence[ReplayRequest],
        setup: ReplaySetup,
        fixed: Sequence[ReplayResult],
        attainment: float,
    ) -> Baseline:
        """Let the oracle look for the cheapest schedule with ``attainment``."""
        oracle = Oracle(requests, setup)
        found = oracle.search(attainment)
        enough = [run for run in (found, *fixed) if run.attainment >= found.attainment]
        best = min(enough, key=lambda run: run.gpu_hours)
        return cls(fixed, oracle.runs, replace(best, policy=ORACLE))

    def scored(self, result: ReplayResult) -> ReplayResult:
        """Return ``result`` with its score."""
        value = score(_point(result), map(_point, self.fixed), map(_point, self.oracle))
        return replace(result, score=value)

    def oracle_hours(self, attainment: float) -> float | None:
        """Return the oracle's GPU-hours at ``attainment``; None above what it reaches."""
        runs = map(_point, (*self.oracle, *self.fixed))
        return hours_at(frontier(runs), attainment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The results of the policies, and what their score is based on."""

    results: Sequence[ReplayResult]
    baseline: Baseline | None = None


def compare(
    policies: Sequence[str],
    requests: Sequence[ReplayRequest],
    setup: ReplaySetup,
    settings: PlannerSettings,
    attainment: float | None,
) -> Comparison:
    """Run ``policies`` by name. Raises ConfigError for an unknown one.

    ``attainment`` is what the oracle aims at; None: no score, no oracle.
    """
    if not requests:
        raise ConfigError("the trace holds no request before --duration; raise it")
    if setup.prefill_workers is not None:
        attainment = None
    if ORACLE in policies and attainment is None:
        raise ConfigError(
            "--policy oracle needs aggregated serving: no --initial-prefill-workers, no --no-score"
        )
    results = {
        name: run_policy(name, requests, setup, settings) for name in policies if name != ORACLE
    }
    if attainment is None:
        return Comparison(results=list(results.values()))
    fixed = fixed_runs(requests, setup, settings)
    baseline = Baseline.of(requests, setup, fixed, attainment)
    results[ORACLE] = baseline.best
    return Comparison(
        results=[baseline.scored(results[name]) for name in policies], baseline=baseline
    )


def run_policy(
    name: str,
    requests: Sequence[ReplayRequest],
    setup: ReplaySetup,
    settings: PlannerSettings,
) -> ReplayResult:
    """Run the policy ``name``; a fixed deployment has its workers from the start."""
    prefill = setup.prefill_workers is not None
    policy = named_policy(name, settings, prefill)
    kind, _, argument = name.partition(":")
    if kind == "fixed":
        counts = [int(count) for count in argument.split("x")]
        first = counts[0] if prefill else None
        setup = replace(setup, workers=counts[-1], prefill_workers=first)
    return simulate(policy, requests, setup, name)


def fixed_runs(
    requests: Sequence[ReplayRequest], setup: ReplaySetup, settings: PlannerSettings
) -> list[ReplayResult]:
    """Return the results of 1, 2, ... workers, up to what the GPUs allow."""
    most = int(setup.max_gpus / setup.gpus_per_worker)
    names = [f"fixed:{workers}" for workers in range(1, most + 1)]
    return [run_policy(name, requests, setup, settings) for name in names]


def _point(result: ReplayResult) -> Point:
    return Point(result.gpu_hours, result.attainment)
