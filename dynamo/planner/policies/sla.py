"""The SLA policy: size the pools for the predicted traffic and the targets. Spec 6.5. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo.config.planner import PlannerSettings
from dynamo.planner.capacity.interpolation import ProfiledCapacity
from dynamo.planner.capacity.learned import LearnedCapacity
from dynamo.planner.capacity.model import DecodeCapacity, PrefillCapacity, WorkerCapacity
from dynamo.planner.capacity.profile_files import read_profile
from dynamo.planner.observation import Observation, Traffic
from dynamo.planner.policies.base import DECODE, PREFILL, PoolDecision, ScalingDecision
from dynamo.planner.policies.budget import Workers, affordable, at_limits, clamp
from dynamo.planner.policies.predictors import make_predictor
from dynamo.planner.policies.sizing import (
    ITL_SHARE,
    Demand,
    aggregated_workers,
    decode_workers,
    prefill_workers,
    unqueued_workers,
)

__all__ = ["IDLE_INTERVALS", "SlaPolicy"]

IDLE_INTERVALS = 3
"""Intervals without a request after which both pools shrink to their minima."""


_MOST_PREFILL = 0.9
"""Share of a worker's time in prefill above which the ITL says nothing about decode."""


class SlaPolicy:
    """Predicts rate, ISL and OSL of the next interval, and sizes the pools for them.

    With a profile the capacity is the profile's, corrected by the observed TTFT and ITL; without
    one it is learned, and until it is known the workers stay as they are.
    """

    name = "sla"
    blocking = False

    def __init__(self, settings: PlannerSettings, prefill: bool) -> None:
        self.interval_s = settings.adjustment_interval_s
        self._ttft_ms, self._itl_ms = settings.ttft_ms, settings.itl_ms
        self._correct = not settings.no_correction
        window = settings.load_prediction_window_size
        self._series = {
            name: make_predictor(settings.load_predictor, window) for name in ("rate", "isl", "osl")
        }
        self._learned = LearnedCapacity(aggregated=not prefill)
        self._capacity: WorkerCapacity = self._learned
        self._idle = 0
        if settings.profile_results_dir is not None:
            self._capacity = ProfiledCapacity(read_profile(Path(settings.profile_results_dir)))

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the workers for the predicted traffic."""
        traffic = seen.traffic
        self._idle = 0 if traffic.arrived or traffic.inflight else self._idle + 1
        if self._idle >= IDLE_INTERVALS:
            rule = f"no request for {self._idle} intervals"
            return _decision(seen, Workers(0, 0), rule, {}, {})
        figures = _Figures.of(traffic)
        if figures is None:
            return at_limits(seen, "the means of the interval are not all known")
        self._learned.observe(seen)
        demand = self._predicted(figures, traffic)
        forecast = {
            "predicted_requests_per_second": demand.rate,
            "predicted_input_sequence_tokens": demand.isl,
            "predicted_output_sequence_tokens": demand.osl,
        }
        prefill, decode = self._capacity.prefill, self._capacity.decode
        if prefill is None or decode is None:
            return at_limits(seen, "the capacity of a worker is not learned yet", forecast)
        if self._correct and not isinstance(self._capacity, LearnedCapacity):
            demand = _corrected(demand, figures, seen, prefill, decode)
        wanted = self._size(demand, seen, prefill, decode)
        forecast |= _estimates(demand, wanted, prefill, decode)
        rule = (
            f"predicted {demand.rate:.2f} requests/s of {demand.isl:.0f} + {demand.osl:.0f} tokens"
        )
        inputs = {
            "prefill_correction": demand.prefill_correction,
            "decode_correction": demand.decode_correction,
        }
        return _decision(seen, wanted, rule, inputs, forecast)

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Nothing depends on it."""

    def _predicted(self, figures: _Figures, traffic: Traffic) -> Demand:
        values = {"rate": traffic.arrived / traffic.duration_s, "isl": figures.isl}
        values["osl"] = figures.osl
        for name, series in self._series.items():
            series.add(values[name])
        return Demand(**{name: series.predict() for name, series in self._series.items()})

    def _size(
        self, demand: Demand, seen: Observation, prefill: PrefillCapacity, decode: DecodeCapacity
    ) -> Workers:
        gpus = seen.decode.gpus_per_worker or 1.0
        if seen.prefill is not None:
            own = seen.prefill.gpus_per_worker or 1.0
            needed = decode_workers(demand, decode, gpus, self._itl_ms)
            return Workers(prefill_workers(demand, prefill, own), needed)
        targets_ms = self._ttft_ms, self._itl_ms * ITL_SHARE
        if not self._capacity.mixed:
            return Workers(0, aggregated_workers(demand, prefill, decode, gpus, targets_ms))
        unqueued = unqueued_workers(demand, prefill, gpus, targets_ms[0])
        return Workers(0, max(unqueued, decode_workers(demand, decode, gpus, targets_ms[1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """The means of an interval, all of them known."""

    isl: float
    osl: float
    ttft_ms: float
    itl_ms: float
    request_s: float

    @classmethod
    def of(cls, traffic: Traffic) -> _Figures | None:
        """Return the means; None if one is missing or not a number."""
        means = {name: getattr(traffic, name) for name in cls.__slots__}
        if any(value is None or not math.isfinite(value) for value in means.values()):
            return None
        return cls(**means)


def _corrected(
    demand: Demand,
    figures: _Figures,
    seen: Observation,
    prefill: PrefillCapacity,
    decode: DecodeCapacity,
) -> Demand:
    """Return ``demand`` with the corrections of the interval that ended."""
    rate = seen.traffic.arrived / seen.traffic.duration_s / max(seen.decode.ready, 1)
    context = figures.isl + figures.osl / 2
    profiled_ttft_ms = prefill.ttft_ms(figures.isl)
    profiled_itl_ms = decode.itl_ms(rate * figures.request_s, context)
    prefill_correction = figures.ttft_ms / profiled_ttft_ms if profiled_ttft_ms > 0 else 1.0
    if seen.prefill is None:
        # The profile's ITL is that without prompts in between.
        busy = rate * figures.isl * min(1.0, prefill_correction)
        busy /= prefill.tokens_per_s(figures.isl) * (seen.decode.gpus_per_worker or 1.0)
        profiled_itl_ms /= 1.0 - min(busy, _MOST_PREFILL)
    return Demand(
        rate=demand.rate,
        isl=demand.isl,
        osl=demand.osl,
        prefill_correction=prefill_correction,
        decode_correction=figures.itl_ms / profiled_itl_ms if profiled_itl_ms > 0 else 1.0,
    )


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


def _decision(
    seen: Observation,
    wanted: Workers,
    rule: str,
    inputs: Mapping[str, float],
    forecast: Mapping[str, float],
) -> ScalingDecision:
    """Return ``wanted`` within the limits, prefill first."""
    allowed = affordable(clamp(wanted, seen), seen)
    pools = [PoolDecision(pool=DECODE, wanted=allowed.decode, rule=rule, inputs=inputs)]
    change = allowed.decode - seen.decode.workers
    figures = {**forecast, "predicted_num_decode_replicas": float(wanted.decode)}
    if seen.prefill is not None:
        pools.insert(0, PoolDecision(pool=PREFILL, wanted=allowed.prefill, rule=rule))
        change += allowed.prefill - seen.prefill.workers
        figures["predicted_num_prefill_replicas"] = float(wanted.prefill)
    figures["throughput_scaling_decision"] = math.copysign(1.0, change) if change else 0.0
    return ScalingDecision(pools=tuple(pools), forecast=figures)
