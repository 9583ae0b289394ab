"""The oracle: worker schedules made with knowledge of all arrivals and of the start-up delay.

It first estimates the work that arrives in each window and covers it with enough workers at
several utilisations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

from dynamo.planner.observation import Observation
from dynamo.planner.policies.base import DECODE, PoolDecision, ScalingDecision
from dynamo.planner.replay.request import ReplayRequest
from dynamo.planner.replay.result import ReplayResult
from dynamo.planner.replay.setup import ReplaySetup
from dynamo.planner.replay.simulation import simulate

__all__ = ["SchedulePolicy", "oracle_runs"]

_WINDOW_S = 10.0
_UTILISATIONS = (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)
_BATCH = 16


class SchedulePolicy:
    """Has ``needed[i]`` workers ready in the i-th window; starts them ``start_up_s`` earlier."""

    name = "oracle"
    interval_s = _WINDOW_S
    blocking = False

    def __init__(self, needed: Sequence[int], start_up_s: float) -> None:
        self._needed = needed
        self._ahead = ceil(start_up_s / _WINDOW_S)

    def wanted(self, now_s: float) -> int:
        """Return the workers that serve or start at ``now_s``."""
        begin = min(round(now_s / _WINDOW_S), len(self._needed) - 1)
        return max(self._needed[begin : begin + self._ahead + 1])

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the scheduled workers."""
        workers = self.wanted(seen.now_s)
        made = PoolDecision(pool=DECODE, wanted=workers, rule=f"scheduled {workers}")
        return ScalingDecision(pools=(made,))

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Nothing depends on it."""


def oracle_runs(requests: Sequence[ReplayRequest], setup: ReplaySetup) -> list[ReplayResult]:
    """Return the results of schedules from lavish to tight."""
    work = _work(requests, setup)
    found: dict[tuple[int, ...], ReplayResult] = {}
    for utilisation in _UTILISATIONS:
        needed = _cover(work, utilisation, setup)
        if needed not in found:
            policy = SchedulePolicy(needed, setup.start_up_s)
            found[needed] = simulate(policy, requests, setup)
    return list(found.values())


def _work(requests: Sequence[ReplayRequest], setup: ReplaySetup) -> list[float]:
    """Return the seconds of a worker that the arrivals of each window need."""
    windows = [0.0] * (int(requests[-1].at_s // _WINDOW_S) + 2)
    model = setup.model
    token_s = model.time.iteration_s(0, 0.0, _BATCH, 0.3) / _BATCH
    for request in requests:
        spent_s = model.prefill_s(request.isl) + request.osl * token_s
        windows[int(request.at_s // _WINDOW_S)] += spent_s
    return windows


def _cover(work: Sequence[float], utilisation: float, setup: ReplaySetup) -> tuple[int, ...]:
    most = int(setup.max_gpus / setup.gpus_per_worker)
    needed = []
    for number in range(len(work)):
        # A window and its neighbours: requests last longer than one window.
        near = work[max(0, number - 2) : number + 2]
        need = ceil(sum(near) / len(near) / _WINDOW_S / utilisation)
        needed.append(max(setup.minimum, 1, min(most, need)))
    return tuple(needed)
