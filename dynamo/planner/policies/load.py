"""The load policy: KV load and prefill queue against thresholds.

One decision may change each pool by one worker. It checks in this order: remove a prefill worker,
remove a decode worker, add a prefill worker, add a decode worker. All comparisons are strict.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from dynamo.config.planner import PlannerSettings
from dynamo.observability.logs import counted
from dynamo.planner.capacity.observation import Observation, Pool, WorkerLoad
from dynamo.planner.policies.base import PoolDecision, ScalingDecision
from dynamo.planner.policies.budget import at_limits, free_gpus
from dynamo.serve.gpus.gpus import fits
from dynamo.serve.graph.facts import DECODE, PREFILL

NEW_DECODE_WORKER_GRACE_PERIOD = 3
"""Full intervals after the addition of a decode worker in which none is removed."""
NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD = 3
"""Intervals over which the trend of the prefill queue is extended before a worker is added."""

_WAITING_WEIGHT = 0.02
"""KV load of one waiting request: 50 of them count as much as a full cache."""


class LoadPolicy:
    """Compares the means of one interval with the thresholds of the settings."""

    name = "load"
    blocking = True

    def __init__(self, settings: PlannerSettings) -> None:
        self.interval_s = settings.adjustment_interval_s
        self._settings = settings
        self._grace = 0
        self._decode_workers = 0

    @property
    def grace(self) -> int:
        """Intervals in which no decode worker is removed, the next one included."""
        return self._grace

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return at most one worker more or less per pool."""
        self._decode_workers = seen.decode.workers
        pools = [self._decode_signal(seen)]
        if seen.prefill is not None:
            pools.insert(0, self._prefill_signal(seen.prefill, seen))
        if seen.changed:
            reason = "the set of workers changed during the interval"
            return ScalingDecision(pools=tuple(signal.keep(reason) for signal in pools))
        self._grace = max(0, self._grace - 1)
        return ScalingDecision(pools=_in_order(pools, seen))

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Protect the decode workers if one was added."""
        for pool in decision.pools:
            added = pool.pool == DECODE and pool.wanted > self._decode_workers
            if added and DECODE not in failed:
                self._grace = NEW_DECODE_WORKER_GRACE_PERIOD

    def _prefill_signal(self, pool: Pool, seen: Observation) -> _Signal:
        depths = [pull.prefill_queue for pull in seen.pulls if pull.prefill_queue is not None]
        depths = [depth for depth in depths if math.isfinite(depth)]
        load = fmean(depths) if depths else None
        inputs: dict[str, float] = {}
        blocked = outlook = ""
        if depths:
            trend = depths[-1] - depths[0]
            predicted = depths[-1] + NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD * trend
            inputs["prefill_queue_predicted"] = predicted
            period = f"in {NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD} intervals"
            if predicted > self._settings.prefill_queue_scale_up_threshold:
                outlook = f", predicted {predicted:.4g} {period}"
            else:
                blocked = f"{predicted:.4g} is predicted {period}"
        return _Signal(
            pool_name=PREFILL,
            pool=pool,
            metric="prefill queue",
            load=load,
            low=self._settings.prefill_queue_scale_down_threshold,
            high=self._settings.prefill_queue_scale_up_threshold,
            add_blocked=blocked,
            outlook=outlook,
            more_inputs=inputs,
        )

    def _decode_signal(self, seen: Observation) -> _Signal:
        loads = [kv_load(worker) for pull in seen.pulls for worker in _reported(pull.decode)]
        blocked = ""
        if self._grace:
            period = NEW_DECODE_WORKER_GRACE_PERIOD
            blocked = f"a new worker has {self._grace} of {period} intervals of grace left"
        return _Signal(
            pool_name=DECODE,
            pool=seen.decode,
            metric="KV load",
            load=fmean(loads) if loads else None,
            low=self._settings.decode_kv_scale_down_threshold,
            high=self._settings.decode_kv_scale_up_threshold,
            remove_blocked=blocked,
            more_inputs={"grace": float(self._grace)},
        )


class LoadFallback:
    """Adds workers by load alone while the traffic is unknown, after ``patience_s`` of that.

    It removes none: the workers may be idle because nothing reaches them, or because nothing is
    read. It adds one at a time, as nothing says how many are needed.
    """

    def __init__(self, settings: PlannerSettings, patience_s: float) -> None:
        self._settings = settings
        self._patience_s = patience_s
        self._since_s: float | None = None

    def known(self) -> None:
        """End the outage: the traffic is known again."""
        self._since_s = None

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the workers to have while the traffic is unknown."""
        if self._since_s is None:
            self._since_s = seen.now_s - seen.interval_s
        outage_s = seen.now_s - self._since_s
        rule = "the traffic is unknown: a frontend does not answer"
        if outage_s < self._patience_s or any(pool.starting for pool in seen.pools.values()):
            return at_limits(seen, rule)
        decision = LoadPolicy(self._settings).decide(seen)
        pools = tuple(
            replace(
                pool,
                wanted=max(pool.wanted, seen.pools[pool.pool].workers),
                rule=f"{rule} for {outage_s:.0f} s; by load: {pool.rule}",
            )
            for pool in decision.pools
        )
        return ScalingDecision(pools=pools)


def kv_load(worker: WorkerLoad) -> float:
    """Return the KV usage of ``worker``, and more while requests wait; it may exceed 1."""
    if worker.running > 0 and worker.waiting > 0:
        return worker.kv_usage + _WAITING_WEIGHT * worker.waiting
    return worker.kv_usage


def _reported(workers: Iterable[WorkerLoad]) -> Iterable[WorkerLoad]:
    """Leave out workers that have not reported the size of their KV cache."""
    return (worker for worker in workers if worker.kv_total_blocks > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signal:
    """One pool, the mean of its metric, its thresholds, and what forbids a change."""

    pool_name: str
    pool: Pool
    metric: str
    load: float | None
    low: float
    high: float
    add_blocked: str = ""
    outlook: str = ""
    remove_blocked: str = ""
    more_inputs: Mapping[str, float] = field(default_factory=dict)

    def judge(self) -> PoolDecision:
        """Compare the load with the thresholds; the budget is checked later."""
        pool, load = self.pool, self.load
        if pool.workers < pool.minimum:
            workers = counted(pool.workers, "worker")
            return self._change(1, f"{workers}, the minimum is {pool.minimum}")
        if load is None:
            return self.keep(f"no {self.metric} was reported")
        if load < self.low:
            return self._remove(f"{self.metric} {load:.4g} < {self.low:g}")
        if load > self.high:
            return self._add(f"{self.metric} {load:.4g} > {self.high:g}")
        return self.keep(f"{self.metric} {load:.4g} is between {self.low:g} and {self.high:g}")

    def keep(self, rule: str) -> PoolDecision:
        """Return the decision to change nothing."""
        return self._change(0, rule)

    def _remove(self, rule: str) -> PoolDecision:
        # The last worker goes by the idle timeout only, which counts requests.
        least = max(1, self.pool.minimum)
        if self.pool.workers <= least:
            return self.keep(f"{rule}, but {least} is the minimum")
        if self.remove_blocked:
            return self.keep(f"{rule}, but {self.remove_blocked}")
        return self._change(-1, rule)

    def _add(self, rule: str) -> PoolDecision:
        maximum = self.pool.maximum
        if maximum is not None and self.pool.workers >= maximum:
            return self.keep(f"{rule}, but {maximum} is the maximum")
        if self.add_blocked:
            return self.keep(f"{rule}, but {self.add_blocked}")
        return self._change(1, rule + self.outlook)

    def _change(self, step: int, rule: str) -> PoolDecision:
        inputs = {} if self.load is None else {self.metric.replace(" ", "_").lower(): self.load}
        inputs |= self.more_inputs
        workers = self.pool.workers + step
        return PoolDecision(pool=self.pool_name, wanted=workers, rule=rule, inputs=inputs)


def _in_order(signals: list[_Signal], seen: Observation) -> tuple[PoolDecision, ...]:
    """Return removals, then the additions that the budget allows, then unchanged pools."""
    judged = [(signal, signal.judge()) for signal in signals]
    removed = [
        (signal, decision) for signal, decision in judged if decision.wanted < signal.pool.workers
    ]
    # Removals come first in a decision, so additions may use their GPUs.
    free = free_gpus(seen) + sum(signal.pool.gpus_per_worker for signal, _ in removed)
    added: list[PoolDecision] = []
    kept: list[PoolDecision] = []
    for signal, decision in judged:
        need = signal.pool.gpus_per_worker
        if decision.wanted == signal.pool.workers:
            kept.append(decision)
        elif decision.wanted > signal.pool.workers and fits(free, need):
            free -= need
            added.append(decision)
        elif decision.wanted > signal.pool.workers:
            left = f"{max(0.0, free):g} of {seen.max_gpus:g} GPUs are free"
            kept.append(signal.keep(f"{decision.rule}, but {left} and a worker needs {need:g}"))
    return (*(decision for _, decision in removed), *added, *kept)
