"""The oracle: worker schedules made with knowledge of all arrivals and of the start-up delay.

It estimates the work that arrives in each window and covers it at several utilisations: a curve
from lavish to tight. The curve is near-minimal, not a proven minimum; longer windows, and more
workers for the minutes in which targets are missed, give the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

from dynamo.planner.observation import Observation
from dynamo.planner.policies.base import DECODE, PoolDecision, ScalingDecision
from dynamo.planner.replay.setup import ReplaySetup
from dynamo.simulation.request import ReplayRequest
from dynamo.simulation.result import ReplayResult
from dynamo.simulation.simulation import simulate

__all__ = ["Oracle", "SchedulePolicy"]

_WINDOW_S = 10.0
_UTILISATIONS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5)
_HOPELESS = 0.15
_ROUNDS = 4
_BATCH, _USAGE = 16, 0.3


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
            policy = SchedulePolicy(needed, self._setup.start_up_s)
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
