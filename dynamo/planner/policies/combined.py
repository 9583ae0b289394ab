"""The policy load+sla: a forecast as the lower bound, and a fast reaction to load. Pure.

Every few seconds it compares three figures of each pool, in workers:

- what the forecast needs when a worker that is added now will serve, one start-up from now, or
  one wake while workers sleep;
- what the backlog needs on top, if it will still be there then;
- the most that was needed in the last moments, or will be until a start-up from now, and a good
  half of the most in the last four start-ups.

Workers are added up to the sum of the first two at once, and removed down to the third.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from dynamo.config.planner import PlannerSettings
from dynamo.observability.logs import counted
from dynamo.planner.capacity.interpolation import read_capacity
from dynamo.planner.capacity.observation import Observation, Pool
from dynamo.planner.policies.attainment import Targets, WorkerLoadModel
from dynamo.planner.policies.base import PoolDecision, ScalingDecision, TargetedPolicy
from dynamo.planner.policies.budget import (
    ActionLimit,
    StartUpTime,
    Workers,
    allowed,
    clamp,
    kept,
)
from dynamo.planner.policies.kalman import RateForecast
from dynamo.planner.policies.sizing import (
    LoadMeter,
    backlog,
)
from dynamo.serve.graph.facts import DECODE, PREFILL

_REACTION_S = 5.0
_INTERVALS = 3
"""Decisions in one interval of the forecast."""

_AHEAD, _AHEAD_STARTS = 3, 0.5
_HOLD, _HOLD_STARTS = 6, 0.1
"""How far past the next start-up a decision looks, and for how long fewer workers must have been
enough: some decisions, and a part of a start-up, because mistakes last as long."""

_KEPT, _KEPT_STARTS = 0.55, 4.0
"""This share of what was needed at most in the last start-ups stays. A load that comes back would
wait for a whole start-up, and the workers that carry a low load attain the most for their hours."""

_LEARN = 60
"""Decisions before the first worker is removed: until then too little of the traffic was seen."""

_DOWN_MARGIN = 1.05
"""Workers are removed only if the rest bears so much more: they are not needed again at once."""

_DRAIN = 12
"""Decisions in which a backlog should be gone."""


class CombinedPolicy(TargetedPolicy):
    """Sizes the pools for the forecast, and for the backlog if there is one.

    Nothing has to be configured but the targets: what a request costs, how bursty the traffic is
    and how long a worker starts is learned. Decides every 5 s, or as often as
    --adjustment-interval says if that is shorter.
    """

    name = "load+sla"
    blocking = False

    def __init__(self, settings: PlannerSettings, prefill: bool) -> None:
        self.interval_s = min(_REACTION_S, settings.adjustment_interval_s)
        self._targets = Targets(ttft_ms=settings.ttft_ms, itl_ms=settings.itl_ms)
        names = (PREFILL, DECODE) if prefill else (DECODE,)
        profile = read_capacity(settings.profile_results_dir)
        self._pools = {name: _PoolSizing(name, StartUpTime(profile)) for name in names}
        self._forecast = RateForecast(_INTERVALS * self.interval_s)
        self._meter = LoadMeter(aggregated=not prefill, profile=profile)
        self._actions = ActionLimit()
        self._queued = 0
        self._now_s = 0.0

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the workers to have now; none before the cost of a request is known."""
        self._now_s = seen.now_s
        self._actions.refill(seen.now_s)
        for name, sizing in self._pools.items():
            sizing.start_up.observe(_pool(seen, name), seen.now_s)
        self._forecast.add(seen.traffic.arrived, seen.traffic.duration_s)
        self._meter.observe(seen, self._queued)
        self._queued = seen.traffic.queued
        needs = {}
        for name, sizing in self._pools.items():
            model = self._meter.model(name)
            if model is not None and self._forecast.known:
                start_up, pool = sizing.start_up, _pool(seen, name)
                need = sizing.need(model, self._outlook(seen, start_up.wake_s), seen, self._targets)
                if pool.asleep:
                    # Workers beyond the sleeping ones take longer, a start: look further ahead.
                    later = self._outlook(seen, start_up.seconds).later
                    started = model.workers(later, self._targets) - pool.asleep
                    need = replace(need, target=max(need.target, started))
                needs[name] = need
        return self._decision(needs, seen)

    def aim(self, ttft_ms: float, itl_ms: float) -> None:
        """Keep these targets from the next decision on."""
        self._targets = Targets(ttft_ms=ttft_ms, itl_ms=itl_ms)

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Forget the starts that failed."""
        for name in failed:
            self._pools[name].start_up.failed(self._now_s)

    def _outlook(self, seen: Observation, add_s: float) -> _Outlook:
        """Return the demand from the time on when a worker serves that takes ``add_s``."""
        start_s = add_s + self.interval_s
        ahead_s = _AHEAD * self.interval_s + _AHEAD_STARTS * add_s
        # What is decided now must last until the next action is allowed.
        ahead_s = max(ahead_s, self._actions.next_s)
        path = self._forecast.path(start_s + ahead_s, seen.usual)
        first = min(int(start_s / self._forecast.interval_s), len(path) - 1)
        return _Outlook(
            start_s=start_s,
            later=float(path[first:].max()),
            most=float(path.max()),
            arriving=float(path[:first].sum()) * self._forecast.interval_s,
            served_s=first * self._forecast.interval_s,
            backlog=backlog(seen.traffic.queued, self._forecast.rate, self._targets.mean_ttft_ms),
        )

    def _unlearned(self, seen: Observation) -> Mapping[str, PoolDecision]:
        """Return the decisions for pools while the cost of a request is not learned."""
        rule = "the cost of a request is not learned yet"
        return {
            name: PoolDecision(pool=name, wanted=_pool(seen, name).workers, rule=rule)
            for name in self._pools
        }

    def _decision(self, needs: Mapping[str, _Need], seen: Observation) -> ScalingDecision:
        """Return the needs within the budget and the limit of actions."""
        wanted = {name: _pool(seen, name).workers for name in (PREFILL, DECODE)}
        unlearned = self._unlearned(seen) if needs.keys() != self._pools.keys() else {}
        for name in self._pools.keys() - needs.keys():
            wanted[name] = unlearned[name].wanted
        for name in needs:
            wanted[name] = needs[name].change(wanted[name], self._actions)
        within = allowed(Workers(wanted[PREFILL], wanted[DECODE]), seen)
        decisions = []
        forecast: dict[str, float] = self._predicted() if needs else {}
        for name, sizing in self._pools.items():
            count = within.of(name)
            pool, need = _pool(seen, name), needs.get(name)
            if count != pool.workers:
                if need is not None:
                    self._actions.use()
                sizing.start_up.changed(pool, count, seen.now_s)
            if need is None:
                decision = unlearned[name]
                if count != decision.wanted:
                    rule = f"{decision.rule}; the limits allow {count}"
                    decision = kept(name, pool, count, rule)
                decisions.append(decision)
                continue
            decisions.append(need.decision(name, pool.workers, count))
            forecast |= need.forecast(name, pool.workers, count)
        return ScalingDecision(pools=tuple(decisions), forecast=forecast)

    def _predicted(self) -> dict[str, float]:
        isl, osl = self._meter.lengths
        return {
            "predicted_input_sequence_tokens": isl,
            "predicted_output_sequence_tokens": osl,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outlook:
    """Requests per second from a start-up from now on (``later``) and at most from now on.

    ``arriving`` requests come in the next ``served_s``; ``backlog`` wait longer than they should.
    """

    start_s: float
    later: float
    most: float
    arriving: float
    served_s: float
    backlog: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """``target`` workers for the forecast and ``extra`` for the backlog; at least ``floor``."""

    model: WorkerLoadModel
    outlook: _Outlook
    target: int
    extra: int
    floor: int
    learned: bool
    hold_s: float

    def change(self, workers: int, actions: ActionLimit) -> int:
        """Return the workers to have instead of ``workers``."""
        if self.target + self.extra > workers and actions.allows(up=True):
            return self.target + self.extra
        calm = self.learned and not self.outlook.backlog
        if self.floor < workers and calm and actions.allows(up=False):
            return self.floor
        return workers

    def decision(self, pool: str, workers: int, wanted: int) -> PoolDecision:
        """Return the decision for ``wanted`` workers, with its reason."""
        outlook = self.outlook
        rule = (
            f"forecast {outlook.later:.2f} requests/s in {outlook.start_s:.0f} s "
            f"needs {counted(self.target, 'worker')}"
        )
        if wanted > workers and self.extra:
            rule += f", {counted(round(outlook.backlog), 'queued request')} {self.extra} more"
        elif wanted < workers:
            enough = counted(self.floor, "worker was", "workers were")
            rule = f"{enough} enough for {self.hold_s:.0f} s and will be"
        elif wanted == workers and self.target + self.extra != workers:
            rule += f"; {self.floor} to {self.target + self.extra} keep {workers}"
        inputs = {
            "service_s": self.model.service_s,
            "burst": self.model.burst,
            "most_requests_per_second": outlook.most,
            "start_s": outlook.start_s,
            "backlog": outlook.backlog,
        }
        return PoolDecision(pool=pool, wanted=wanted, rule=rule, inputs=inputs)

    def forecast(self, pool: str, workers: int, wanted: int) -> dict[str, float]:
        """Return the figures for the metrics, with ``wanted`` instead of ``workers``."""
        rate, served = self.outlook.later, max(wanted, 1)
        change = self.target - workers
        figures = {
            "predicted_requests_per_second": rate,
            f"predicted_num_{pool}_replicas": float(self.target),
            "throughput_scaling_decision": math.copysign(1.0, change) if change else 0.0,
            "load_scaling_decision": 1.0 if self.extra else 0.0,
        }
        estimated = {
            "estimated_ttft_ms": self.model.ttft_ms(rate, served),
            "estimated_itl_ms": self.model.inter_token_ms(rate, served),
        }
        return figures | {name: ms for name, ms in estimated.items() if 0 < ms < math.inf}


class _PoolSizing:
    """One pool: what it needed recently, and how long its workers start."""

    def __init__(self, name: str, start_up: StartUpTime) -> None:
        self._name = name
        self.start_up = start_up
        self._recent: deque[tuple[float, int]] = deque()
        self._decisions = 0

    def need(
        self, model: WorkerLoadModel, outlook: _Outlook, seen: Observation, targets: Targets
    ) -> _Need:
        """Return what the pool needs."""
        ready = (seen.prefill or seen.decode).ready
        extra = 0
        if outlook.backlog > 0 and model.service_s > 0:
            # What is queued now, and what the ready workers do not finish until others serve.
            work_s = (outlook.backlog + outlook.arriving) * model.service_s
            extra = max(
                math.ceil((work_s - ready * outlook.served_s) / (_DRAIN * seen.interval_s)), 0
            )
        target = model.workers(outlook.later, targets)
        most = max(model.workers(_DOWN_MARGIN * outlook.most, targets), target) + extra
        self._decisions += 1
        wanted = Workers(most, 0) if self._name == PREFILL else Workers(0, most)
        self._recent.append((seen.now_s, clamp(wanted, seen).of(self._name)))
        hold_s = _HOLD * seen.interval_s + _HOLD_STARTS * self.start_up.wake_s
        longest_s = max(hold_s, _KEPT_STARTS * self.start_up.wake_s)
        while self._recent[0][0] < seen.now_s - longest_s:
            self._recent.popleft()
        since_s = seen.now_s - hold_s
        floor = max(workers for at_s, workers in self._recent if at_s >= since_s)
        kept = math.ceil(_KEPT * max(workers for _, workers in self._recent))
        return _Need(
            model=model,
            outlook=outlook,
            target=target,
            extra=extra,
            floor=max(floor, kept),
            hold_s=hold_s,
            learned=self._decisions > _LEARN,
        )


_NO_POOL = Pool(ready=0)


def _pool(seen: Observation, name: str) -> Pool:
    return seen.pools.get(name, _NO_POOL)
