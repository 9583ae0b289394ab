"""The workers that the SLA policy wants in aggregated serving: queueing formulas. Pure.

A profile has prefill and decode apart, and was measured at equal lengths. What a request costs
under the traffic of now (the spread of lengths and gaps, cached prefixes, the share of both
phases) is observed; the profile fills in what is not observed yet.
"""

from __future__ import annotations

import math

from dynamo.config.planner import PlannerSettings
from dynamo.planner.capacity.interpolation import ProfiledCapacity, read_capacity
from dynamo.planner.observation import Observation
from dynamo.planner.policies.base import DECODE
from dynamo.planner.policies.budget import Workers
from dynamo.planner.policies.load_meter import LoadMeter
from dynamo.planner.policies.sizing import Demand, Sized
from dynamo.planner.policies.staffing import WorkerLoadModel, mean_limits

__all__ = ["AggregatedSizing"]


class AggregatedSizing:
    """Sizes one pool so that 9 in 10 requests keep the targets."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._limits = mean_limits(settings.ttft_ms, settings.itl_ms)
        self._profile = read_capacity(settings.profile_results_dir)
        self._correct = not settings.no_correction
        self._meter = LoadMeter(aggregated=True, profile=self._profile)
        self._queued = 0

    def observe(self, seen: Observation) -> None:
        """Take one interval."""
        self._meter.observe(seen, self._queued)
        self._queued = seen.traffic.queued

    def size(self, demand: Demand, seen: Observation) -> Sized | None:
        """Return the workers; None before the cost of a request is known."""
        if self._profile is not None and not self._correct:
            model: WorkerLoadModel | None = _as_profiled(self._profile, demand)
        else:
            model = self._meter.model(DECODE)
        if model is None:
            return None
        wanted = model.workers(demand.work_rate, self._limits)
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
