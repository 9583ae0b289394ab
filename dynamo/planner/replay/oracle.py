"""The oracle: worker schedules made with knowledge of all arrivals and of the start-up delay.

It estimates the work that arrives in each window and covers it at several utilisations. Then it
repeats the replay: minutes in which too many requests missed the targets get more workers for their
work, the other ones fewer. The schedules found are a near-minimal curve, not a proven minimum.
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

__all__ = ["Oracle", "SchedulePolicy"]

_WINDOW_S = 10.0
_MINUTE_S = 60.0
_UTILISATIONS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5)
_MISSES = 0.03
_ROUNDS = 4
_MORE, _FEWER = 1.15, 0.93
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
        self._possible = _possible(requests, setup)
        self._known: dict[tuple[int, ...], ReplayResult] = {}

    def search(self, attainment: float) -> ReplayResult:
        """Return the cheapest run with ``attainment``, or the best one if none reaches it."""
        lavish = min(_UTILISATIONS)
        for utilisation in _UTILISATIONS:
            if self._run_evenly(utilisation).attainment >= attainment:
                lavish = max(lavish, utilisation)
        tight = min((u for u in _UTILISATIONS if u > lavish), default=lavish)
        for _ in range(_ROUNDS):
            middle = (lavish + tight) / 2
            if self._run_evenly(middle).attainment >= attainment:
                lavish = middle
            else:
                tight = middle
        factors = [1 / lavish] * len(self._possible)
        for _ in range(_ROUNDS):
            self._adjust(factors, self._run(factors))
        enough = [run for run in self.runs if run.attainment >= attainment]
        if enough:
            return min(enough, key=lambda run: run.gpu_hours)
        return max(self.runs, key=lambda run: run.attainment)

    def _run_evenly(self, utilisation: float) -> ReplayResult:
        return self._run([1 / utilisation] * len(self._possible))

    def _run(self, factors: Sequence[float]) -> ReplayResult:
        needed = self._cover(factors)
        if needed not in self._known:
            policy = SchedulePolicy(needed, self._setup.start_up_s)
            self._known[needed] = simulate(policy, self._requests, self._setup)
            self.runs.append(self._known[needed])
        return self._known[needed]

    def _cover(self, factors: Sequence[float]) -> tuple[int, ...]:
        setup, work = self._setup, self._work
        most = int(setup.max_gpus / setup.gpus_per_worker)
        needed = []
        for number in range(len(work)):
            # A window and its neighbours: requests last longer than one window.
            near = work[max(0, number - 2) : number + 2]
            factor = factors[min(int(number * _WINDOW_S / _MINUTE_S), len(factors) - 1)]
            need = ceil(factor * sum(near) / len(near) / _WINDOW_S)
            needed.append(max(setup.minimum, 1, min(most, need)))
        return tuple(needed)

    def _adjust(self, factors: list[float], run: ReplayResult) -> None:
        for minute, possible in enumerate(self._possible):
            reached = run.minutes[minute] if minute < len(run.minutes) else None
            missed = 0.0 if reached is None else possible - reached
            factors[minute] *= _MORE if missed > _MISSES else _FEWER
            if missed > _MISSES and minute:  # the requests that were queued before
                factors[minute - 1] *= _MORE / _FEWER


def _work_s(requests: Sequence[ReplayRequest], setup: ReplaySetup) -> list[float]:
    """Return the seconds of a worker that the arrivals of each window need."""
    windows = [0.0] * (int(requests[-1].at_s // _WINDOW_S) + 2)
    model = setup.model
    token_s = model.time.iteration_s(0, 0.0, _BATCH, _USAGE) / _BATCH
    for request in requests:
        spent_s = model.prefill_s(request.isl) + request.osl * token_s
        windows[int(request.at_s // _WINDOW_S)] += spent_s
    return windows


def _possible(requests: Sequence[ReplayRequest], setup: ReplaySetup) -> list[float]:
    """Return the share of the arrivals of each minute whose TTFT an idle worker could attain."""
    minutes = int(requests[-1].at_s // _MINUTE_S) + 1
    arrived, possible = [0] * minutes, [0] * minutes
    for request in requests:
        minute = int(request.at_s // _MINUTE_S)
        arrived[minute] += 1
        possible[minute] += setup.model.prefill_s(request.isl) * 1000 <= setup.ttft_ms
    return [
        good / number if number else 1.0 for good, number in zip(possible, arrived, strict=True)
    ]
