"""Comparison of policies with fixed deployments and with an oracle: runs, score, plot.

The oracle knows all arrivals. It estimates the work that arrives in each window and covers it at
several utilisations: a curve from lavish to tight. The curve is near-minimal, not a proven minimum;
longer windows, and more workers for the minutes in which targets are missed, give the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.planner.capacity.interpolation import load_library
from dynamo.planner.capacity.observation import Observation
from dynamo.planner.connector import DRAINING, READY, STARTING
from dynamo.planner.policies.base import Policy, PoolDecision, ScalingDecision
from dynamo.planner.policies.factory import named_policy
from dynamo.serve.graph.facts import DECODE, PREFILL
from dynamo_lab.simulation.cluster import ReplayCluster
from dynamo_lab.simulation.request import ReplayRequest
from dynamo_lab.simulation.result import (
    Point,
    ReplayPlanner,
    ReplayResult,
    Sample,
    frontier,
    hours_at,
    score,
    summarize,
)
from dynamo_lab.simulation.service_model import ReplaySetup, VirtualClock

ORACLE = "oracle"
_WINDOW_S = 10.0
_UTILISATIONS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5)
_HOPELESS = 0.15
_ROUNDS = 4
_BATCH, _USAGE = 16, 0.3
_PATIENCE_S = 3600.0
_SAMPLE_S = 10.0


def simulate(
    policy: Policy, requests: Sequence[ReplayRequest], setup: ReplaySetup, name: str | None = None
) -> ReplayResult:
    """Run ``policy`` on ``requests``, which are sorted by arrival; ``name`` is for the result.

    The replay ends with the last request. One that has not ended an hour after the last arrival
    counts as failed.
    """
    clock = VirtualClock()
    cluster = ReplayCluster(clock, setup, requests)
    planner = ReplayPlanner(clock, cluster, policy)
    samples: list[Sample] = []

    def sample() -> None:
        samples.append(_sample(cluster, clock.now_s))
        clock.at(clock.now_s + _SAMPLE_S, sample)

    clock.at(0.0, sample)
    last_s = (requests[-1].at_s if requests else 0.0) + _PATIENCE_S
    while not cluster.complete and clock.now_s <= last_s:
        clock.run_next()
    for pool in cluster.pools.values():
        pool.finish()
    return summarize(name or policy.name, cluster, planner, samples, clock.now_s)


def _sample(cluster: ReplayCluster, now_s: float) -> Sample:
    decode, prefill = cluster.pools[DECODE], cluster.pools.get(PREFILL)
    return Sample(
        at_s=now_s,
        ready=decode.count(READY),
        starting=decode.count(STARTING),
        draining=decode.count(DRAINING),
        prefill_ready=prefill.count(READY) if prefill else 0,
        arrived=cluster.counters.arrived,
        queued=cluster.counters.arrived - cluster.counters.rejected - cluster.counters.first_tokens,
    )


def comparison_figure() -> Any:
    """Return the class of the figure. Raises ConfigError without matplotlib."""
    return load_library("matplotlib.figure", "--plot", "the table or --json").Figure


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Write a PNG of the policies, beside the cheapest fixed deployment that is not worse than the
    best of them. Raises ConfigError if ``path`` can't be written."""
    figure = comparison_figure()(figsize=(11, 9), layout="constrained")
    load, workers, attainment = figure.subplots(3, sharex=True)
    _draw_load(load, comparison.results[0])
    for result in _shown(comparison):
        style = "--" if result.policy.startswith(("fixed", ORACLE)) else "-"
        minutes = [sample.at_s / 60 for sample in result.samples]
        counts = [s.ready + s.starting + s.draining + s.prefill_ready for s in result.samples]
        label = f"{result.policy}: {result.gpu_hours:.2f} GPU-hours, {result.attainment:.1%}"
        workers.step(minutes, counts, style, where="post", label=label)
        points = [(at + 0.5, 100 * s) for at, s in enumerate(result.minutes) if s is not None]
        attainment.plot([at for at, _ in points], [share for _, share in points], style)
    workers.set_ylabel("workers that hold GPUs")
    workers.legend(fontsize="small")
    attainment.set_ylabel("requests within targets (%)")
    attainment.set_xlabel("time (min)")
    for axes in (load, workers, attainment):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise ConfigError(f"--plot: can't write {path}: {error.strerror}") from None


def _draw_load(axes: Any, result: ReplayResult) -> None:
    pairs = list(pairwise(result.samples))
    rates = [(b.arrived - a.arrived) / (b.at_s - a.at_s) for a, b in pairs]
    axes.plot([a.at_s / 60 for a, _ in pairs], rates, color="gray")
    axes.set_ylabel("arrivals (1/s)")


def _shown(comparison: Comparison) -> list[ReplayResult]:
    results = list(comparison.results)
    if comparison.baseline is None:
        return results
    best = max(result.attainment for result in results)
    enough = [run for run in comparison.baseline.fixed if run.attainment >= best]
    fixed = enough[0] if enough else comparison.baseline.fixed[-1]
    if all(result.policy != fixed.policy for result in results):
        results.append(fixed)
    return results


class SchedulePolicy:
    """Has ``needed[i]`` workers ready in the i-th window.

    It starts them ``start_up_s`` earlier, and wakes those that sleep ``wake_s`` earlier.
    """

    name = "oracle"
    interval_s = _WINDOW_S
    blocking = False

    def __init__(
        self, needed: Sequence[int], start_up_s: float, wake_s: float | None = None
    ) -> None:
        self._needed = needed
        self._ahead = ceil(start_up_s / _WINDOW_S)
        self._wake_ahead = self._ahead if wake_s is None else ceil(wake_s / _WINDOW_S)

    def wanted(self, now_s: float, asleep: int = 0) -> int:
        """Return the workers that serve or start at ``now_s``, while others are ``asleep``."""
        begin = min(round(now_s / _WINDOW_S), len(self._needed) - 1)
        started = max(self._needed[begin : begin + self._ahead + 1])
        if not asleep:
            return started
        return max(*self._needed[begin : begin + self._wake_ahead + 1], started - asleep)

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the scheduled workers."""
        workers = self.wanted(seen.now_s, seen.decode.asleep)
        pool = PoolDecision(pool=DECODE, wanted=workers, rule=f"scheduled {workers}")
        return ScalingDecision(pools=(pool,))

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Nothing depends on it."""


class Oracle:
    """Finds schedules for ``requests``; :attr:`runs` has a result for each that was tried."""

    def __init__(self, requests: Sequence[ReplayRequest], setup: ReplaySetup) -> None:
        self.runs: list[ReplayResult] = []
        self._requests, self._setup = requests, setup
        self._work = _work_s(requests, setup)
        self._known: dict[tuple[int, ...], ReplayResult] = {}

    def search(self, attainment: float) -> ReplayResult:
        """Return the cheapest run with ``attainment``, or the best one if none reaches it."""
        lavish, tight = self._sweep(attainment)
        for _ in range(_ROUNDS):
            middle = (lavish + tight) / 2
            if self._run(middle).attainment >= attainment:
                lavish = middle
            else:
                tight = middle
        enough = [run for run in self.runs if run.attainment >= attainment]
        if enough:
            return min(enough, key=lambda run: run.gpu_hours)
        return max(self.runs, key=lambda run: run.attainment)

    def _sweep(self, attainment: float) -> tuple[float, float]:
        """Return the highest utilisation that reaches ``attainment``, and the next one."""
        lavish = min(_UTILISATIONS)
        for utilisation in _UTILISATIONS:
            reached = self._run(utilisation).attainment
            if reached >= attainment:
                lavish = utilisation
            elif reached < attainment - _HOPELESS:
                break
        return lavish, min((u for u in _UTILISATIONS if u > lavish), default=lavish)

    def _run(self, utilisation: float) -> ReplayResult:
        needed = self._cover(utilisation)
        if needed not in self._known:
            policy = SchedulePolicy(needed, self._setup.start_up_s, self._setup.wake_s)
            self._known[needed] = simulate(policy, self._requests, self._setup)
            self.runs.append(self._known[needed])
        return self._known[needed]

    def _cover(self, utilisation: float) -> tuple[int, ...]:
        setup, work = self._setup, self._work
        most = int(setup.max_gpus / setup.gpus_per_worker)
        needed = []
        for number in range(len(work)):
            # A window and its neighbours: requests last longer than one window.
            near = work[max(0, number - 2) : number + 2]
            need = ceil(sum(near) / len(near) / _WINDOW_S / utilisation)
            needed.append(max(setup.minimum, 1, min(most, need)))
        return tuple(needed)


def _work_s(requests: Sequence[ReplayRequest], setup: ReplaySetup) -> list[float]:
    """Return the seconds of a worker that the arrivals of each window need."""
    windows = [0.0] * (int(requests[-1].at_s // _WINDOW_S) + 2)
    model = setup.model
    token_s = model.time.iteration_s(0, 0.0, _BATCH, _USAGE) / _BATCH
    for request in requests:
        spent_s = model.prefill_s(request.isl) + request.osl * token_s
        windows[int(request.at_s // _WINDOW_S)] += spent_s
    return windows


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
        schedule = oracle.search(attainment)
        enough = [run for run in (schedule, *fixed) if run.attainment >= schedule.attainment]
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
