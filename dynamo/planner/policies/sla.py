"""The SLA policy: size the pools for the predicted traffic and the targets. Pure.

A profile has prefill and decode apart, and was measured at equal lengths. What a request costs
under the traffic of now (the spread of lengths and gaps, cached prefixes, the share of both
phases) is observed; the profile fills in what is not observed yet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace

from dynamo.config.planner import PlannerSettings
from dynamo.observability.logs import counted
from dynamo.planner.capacity.interpolation import ProfiledCapacity, read_capacity
from dynamo.planner.capacity.learned import LearnedCapacity
from dynamo.planner.capacity.observation import Observation, Traffic
from dynamo.planner.policies.attainment import Targets, WorkerLoadModel
from dynamo.planner.policies.base import PoolDecision, ScalingDecision, TargetedPolicy
from dynamo.planner.policies.budget import (
    ActionLimit,
    StartUpTime,
    Workers,
    allowed,
    at_limits,
)
from dynamo.planner.policies.predictors import make_predictor
from dynamo.planner.policies.sizing import (
    DecodeCapacity,
    Demand,
    LoadMeter,
    PrefillCapacity,
    Sized,
    backlog,
    decode_workers,
    prefill_workers,
)
from dynamo.serve.graph.facts import DECODE, PREFILL

IDLE_INTERVALS = 3
"""Intervals without a request after which both pools shrink to their minima."""
_HOLD, _HOLD_STARTS = 2, 2
"""For how long fewer workers must have been enough before some are removed: intervals, and
start-ups, so that a worker that was added serves for longer than it started."""
_DOWN_MARGIN = 1.05
"""Workers are removed only if the rest bears so much more: they are not needed again at once."""


class DisaggregatedSizing:
    """Sizes both pools by their throughput, from a profile or learned."""

    def __init__(self, settings: PlannerSettings, profile: ProfiledCapacity | None) -> None:
        self._learned = LearnedCapacity()
        self._capacity = profile or self._learned
        self._correct = profile is not None and not settings.no_correction

    def observe(self, seen: Observation) -> None:
        """Take one interval."""
        self._learned.observe(seen)

    def size(self, demand: Demand, seen: Observation, targets: Targets) -> Sized | None:
        """Return the workers; None before the capacity is known.

        Prefill workers are sized by throughput alone.
        """
        prefill, decode = self._capacity.prefill, self._capacity.decode
        if prefill is None or decode is None or seen.prefill is None:
            return None
        if self._correct:
            demand = _corrected(demand, seen, prefill, decode)
        wanted = Workers(
            prefill_workers(demand, prefill, seen.prefill.gpus_per_worker or 1.0),
            decode_workers(demand, decode, seen.decode.gpus_per_worker or 1.0, targets.itl_ms),
        )
        inputs = {
            "prefill_correction": demand.prefill_correction,
            "decode_correction": demand.decode_correction,
        }
        estimates = _estimates(demand, wanted, prefill, decode)
        return Sized(workers=wanted, inputs=inputs, estimates=estimates)


def _corrected(
    demand: Demand, seen: Observation, prefill: PrefillCapacity, decode: DecodeCapacity
) -> Demand:
    """Return ``demand`` with the corrections of the interval that ended, whose means are known."""
    traffic = seen.traffic
    isl, osl = traffic.isl or 0.0, traffic.osl or 0.0
    rate = traffic.arrived / traffic.duration_s / max(seen.decode.ready, 1)
    profiled_ttft_ms = prefill.ttft_ms(isl)
    profiled_itl_ms = decode.itl_ms(rate * (traffic.request_s or 0.0), isl + osl / 2)
    return replace(
        demand,
        prefill_correction=_ratio(traffic.ttft_ms, profiled_ttft_ms),
        decode_correction=_ratio(traffic.itl_ms, profiled_itl_ms),
    )


def _ratio(observed_ms: float | None, profiled_ms: float) -> float:
    return (observed_ms or 0.0) / profiled_ms if profiled_ms > 0 else 1.0


def _estimates(
    demand: Demand, wanted: Workers, prefill: PrefillCapacity, decode: DecodeCapacity
) -> Mapping[str, float]:
    """Return what the wanted workers are estimated to reach, before the budget limits them."""
    itl_ms = decode.itl_ms(0.0, demand.context)
    for _ in range(3):  # the concurrency depends on the ITL, and settles quickly
        running = demand.rate * demand.osl * itl_ms / 1000.0 / max(wanted.decode, 1)
        itl_ms = decode.itl_ms(running, demand.context)
    return {
        "estimated_ttft_ms": prefill.ttft_ms(demand.isl) * demand.prefill_correction,
        "estimated_itl_ms": itl_ms * demand.decode_correction,
    }


class AggregatedSizing:
    """Sizes one pool so that 9 in 10 requests keep the targets."""

    def __init__(self, settings: PlannerSettings, profile: ProfiledCapacity | None) -> None:
        self._profile = profile
        self._correct = not settings.no_correction
        self._meter = LoadMeter(aggregated=True, profile=self._profile)
        self._queued = 0

    def observe(self, seen: Observation) -> None:
        """Take one interval."""
        self._meter.observe(seen, self._queued)
        self._queued = seen.traffic.queued

    def size(self, demand: Demand, seen: Observation, targets: Targets) -> Sized | None:
        """Return the workers; None before the cost of a request is known."""
        if self._profile is not None and not self._correct:
            model: WorkerLoadModel | None = _as_profiled(self._profile, demand)
        else:
            model = self._meter.model(DECODE)
        if model is None:
            return None
        wanted = model.workers(demand.work_rate, targets)
        estimates = {
            "estimated_ttft_ms": model.ttft_ms(demand.rate, wanted),
            "estimated_itl_ms": model.inter_token_ms(demand.rate, wanted),
        }
        return Sized(
            workers=Workers(0, wanted),
            inputs={"service_s": model.service_s, "burst": model.burst},
            estimates={name: ms for name, ms in estimates.items() if 0 < ms < math.inf},
        )


def _as_profiled(profile: ProfiledCapacity, demand: Demand) -> WorkerLoadModel:
    """Return what a request costs on an even load of equal lengths."""
    line = profile.decode.line(demand.context)
    return WorkerLoadModel(
        service_s=profile.prefill.ttft_ms(demand.isl) / 1000.0,
        step_ms=line.offset,
        sequence_ms=line.slope,
        osl=demand.osl,
        kv=demand.context / profile.decode.max_kv_tokens,
    )


class SlaPolicy(TargetedPolicy):
    """Predicts the rate until a worker that is added now serves, and sizes the pools for it.

    Requests that wait then are part of the demand. With a profile the capacity is the profile's,
    corrected by what is observed; without one it is learned, and until it is known the workers
    stay as they are.
    """

    name = "sla"
    blocking = False

    def __init__(self, settings: PlannerSettings, prefill: bool) -> None:
        self.interval_s = settings.adjustment_interval_s
        self._targets = Targets(ttft_ms=settings.ttft_ms, itl_ms=settings.itl_ms)
        window = settings.load_prediction_window_size
        self._series = {
            name: make_predictor(settings.load_predictor, window) for name in ("rate", "isl", "osl")
        }
        profile = read_capacity(settings.profile_results_dir)
        self._sizing = (DisaggregatedSizing if prefill else AggregatedSizing)(settings, profile)
        self._start_ups = {name: StartUpTime(profile) for name in (PREFILL, DECODE)}
        self._recent: deque[tuple[float, Workers]] = deque()
        self._actions = ActionLimit()
        self._wanted: dict[str, int] = {}
        self._idle = 0
        self._now_s = 0.0

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the workers for the predicted traffic."""
        self._now_s, traffic = seen.now_s, seen.traffic
        self._actions.refill(seen.now_s)
        for name, pool in seen.pools.items():
            self._start_ups[name].observe(pool, seen.now_s)
        self._sizing.observe(seen)
        self._idle = 0 if traffic.arrived or traffic.inflight else self._idle + 1
        if self._idle >= IDLE_INTERVALS:
            self._recent.clear()
            rule = f"no request for {counted(self._idle, 'interval')}"
            return self._decision(seen, Sized(workers=Workers(0, 0)), rule)
        if not _is_complete(traffic):
            return at_limits(seen, "the means of the interval are not all known")
        demand = self._predicted(traffic)
        forecast = {
            "predicted_requests_per_second": demand.rate,
            "predicted_input_sequence_tokens": demand.isl,
            "predicted_output_sequence_tokens": demand.osl,
        }
        sized = self._sizing.size(demand, seen, self._targets)
        if sized is None:
            return at_limits(seen, "the capacity of a worker is not learned yet", forecast)
        self._note(demand, sized, seen)
        rule = (
            f"predicted {demand.rate:.2f} requests/s of {demand.isl:.0f} + {demand.osl:.0f} tokens"
        )
        if demand.queued >= 1:
            rule += f", {counted(round(demand.queued), 'queued request')}"
        return self._decision(seen, self._held(sized, seen), rule, forecast)

    def aim(self, ttft_ms: float, itl_ms: float) -> None:
        """Keep these targets from the next decision on."""
        self._targets = Targets(ttft_ms=ttft_ms, itl_ms=itl_ms)

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Forget the starts that failed."""
        for name in failed:
            self._start_ups[name].failed(self._now_s)

    def _predicted(self, traffic: Traffic) -> Demand:
        values = {"isl": traffic.isl or 0.0, "osl": traffic.osl or 0.0}
        values["rate"] = traffic.arrived / traffic.duration_s
        for name, series in self._series.items():
            series.add(values[name])
        served_s = max(start.seconds for start in self._start_ups.values()) + self.interval_s
        rate = self._series["rate"].highest(math.ceil(served_s / self.interval_s))
        return Demand(
            rate=rate,
            isl=self._series["isl"].predict(),
            osl=self._series["osl"].predict(),
            queued=backlog(traffic.queued, rate, self._targets.mean_ttft_ms),
            within_s=served_s,
        )

    def _note(self, demand: Demand, sized: Sized, seen: Observation) -> None:
        """Remember what was needed now, as long as it forbids a removal."""
        higher = replace(demand, rate=_DOWN_MARGIN * demand.rate)
        more = self._sizing.size(higher, seen, self._targets) or sized
        self._recent.append((seen.now_s, more.workers))
        longest_s = max(map(self._hold_s, seen.pools))
        while self._recent[0][0] <= seen.now_s - longest_s:
            self._recent.popleft()

    def _held(self, sized: Sized, seen: Observation) -> Sized:
        """Return ``sized``, but remove only what has not been needed for a while."""
        counts = {PREFILL: 0, DECODE: 0}
        for name, pool in seen.pools.items():
            since_s = seen.now_s - self._hold_s(name)
            needed = max(workers.of(name) for at_s, workers in self._recent if at_s > since_s)
            counts[name] = max(sized.workers.of(name), min(needed, pool.workers))
        return replace(sized, workers=Workers(counts[PREFILL], counts[DECODE]))

    def _paced(self, wanted: Workers, seen: Observation) -> Workers:
        """Return ``wanted`` where the limit of changes allows it, else the workers of now."""
        counts = {PREFILL: 0, DECODE: 0}
        for name, pool in seen.pools.items():
            count = wanted.of(name)
            # A decision that was postponed is no further change.
            again = count == self._wanted.get(name)
            may = again or self._actions.allows(up=count > pool.workers)
            counts[name] = count if may else pool.workers
        return Workers(counts[PREFILL], counts[DECODE])

    def _hold_s(self, pool: str) -> float:
        return _HOLD * self.interval_s + _HOLD_STARTS * self._start_ups[pool].seconds

    def _decision(
        self,
        seen: Observation,
        sized: Sized,
        rule: str,
        forecast: Mapping[str, float] | None = None,
    ) -> ScalingDecision:
        """Return the workers of ``sized`` within the limits, prefill first."""
        wanted = sized.workers
        within = allowed(self._paced(wanted, seen), seen)
        change, pools = 0, []
        for name, pool in seen.pools.items():
            paced = "; the limit of changes keeps the workers"
            kept = wanted.of(name) != pool.workers and within.of(name) == pool.workers
            why = rule + paced if kept and not self._actions.allows(up=False) else rule
            decision = PoolDecision(
                pool=name, wanted=within.of(name), rule=why, inputs=sized.inputs
            )
            if decision.wanted not in (pool.workers, self._wanted.get(name)):
                self._actions.use()
            self._wanted[name] = decision.wanted
            pools.append(decision)
            change += decision.wanted - pool.workers
            self._start_ups[name].changed(pool, decision.wanted, seen.now_s)
        figures = {**(forecast or {}), **sized.estimates}
        figures["predicted_num_decode_replicas"] = float(wanted.decode)
        if seen.prefill is not None:
            figures["predicted_num_prefill_replicas"] = float(wanted.prefill)
        figures["throughput_scaling_decision"] = math.copysign(1.0, change) if change else 0.0
        return ScalingDecision(pools=tuple(pools), forecast=figures)


def _is_complete(traffic: Traffic) -> bool:
    """Whether all means of the interval are known, and numbers."""
    means = traffic.isl, traffic.osl, traffic.ttft_ms, traffic.itl_ms, traffic.request_s
    return all(mean is not None and math.isfinite(mean) for mean in means)
