"""The workers that the SLA policy wants in disaggregated serving: Dynamo's formulas. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dynamo.config.planner import PlannerSettings
from dynamo.planner.capacity.interpolation import read_capacity
from dynamo.planner.capacity.learned import LearnedCapacity
from dynamo.planner.capacity.model import DecodeCapacity, PrefillCapacity, WorkerCapacity
from dynamo.planner.observation import Observation
from dynamo.planner.policies.budget import Workers
from dynamo.planner.policies.sizing import Demand, Sized, decode_workers, prefill_workers

__all__ = ["DisaggregatedSizing"]


class DisaggregatedSizing:
    """Sizes both pools by their throughput, from a profile or learned."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._itl_ms = settings.itl_ms
        self._learned = LearnedCapacity()
        profile = read_capacity(settings.profile_results_dir)
        self._capacity: WorkerCapacity = profile or self._learned
        self._correct = profile is not None and not settings.no_correction

    def observe(self, seen: Observation) -> None:
        """Take one interval."""
        self._learned.observe(seen)

    def size(self, demand: Demand, seen: Observation) -> Sized | None:
        """Return the workers; None before the capacity is known."""
        prefill, decode = self._capacity.prefill, self._capacity.decode
        if prefill is None or decode is None or seen.prefill is None:
            return None
        if self._correct:
            demand = _corrected(demand, seen, prefill, decode)
        wanted = Workers(
            prefill_workers(demand, prefill, seen.prefill.gpus_per_worker or 1.0),
            decode_workers(demand, decode, seen.decode.gpus_per_worker or 1.0, self._itl_ms),
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
