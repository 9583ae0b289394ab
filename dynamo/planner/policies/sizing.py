"""The workers that a demand needs by Dynamo's formulas, and the observed cost of a request. Pure.

Throughputs are per GPU, as the profile has them. With ``rate`` in requests per second:

    prefill = ceil(rate * isl * min(1, prefill correction) / throughput / GPUs of a worker)
    decode  = ceil(rate * osl / throughput at (ITL target / decode correction) / GPUs of a worker)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from dynamo.planner.capacity.interpolation import DecodeSurface, PrefillCurve, ProfiledCapacity
from dynamo.planner.capacity.learned import LearnedDecode, LearnedPrefill, fit_line
from dynamo.planner.capacity.observation import Observation, Pull, WorkerLoad
from dynamo.planner.policies.attainment import WorkerLoadModel, wait_factor
from dynamo.planner.policies.budget import Workers
from dynamo.serve.graph.facts import DECODE, PREFILL

PrefillCapacity: TypeAlias = LearnedPrefill | PrefillCurve
DecodeCapacity: TypeAlias = LearnedDecode | DecodeSurface
"""Prefill and decode of one worker."""
_ROUNDING = 1e-9
_UNREMARKABLE = 3
"""Queued requests that are no backlog."""
_MEMORY_S = 150.0
"""Time after which an observation counts about a third."""
_MEMORIES_S = {
    **dict.fromkeys(
        ("waited_s", "mm_wait_s", "itl_more_ms", "itl_even_ms", "itl_error", "itl_square"), 600.0
    ),
    **dict.fromkeys(("recent_started", "recent_s"), 30.0),
}
"""How bursty the traffic is shows in its rare moments; its rate is that of now."""
_PRIOR_BURST, _PRIOR_S = 1.5, 20.0
"""First guess of the burst factor, and the seconds of waiting for which it counts."""
_BURST_RANGE = (0.3, 16.0)
_PRIOR_ITL_MS, _ITL_BURST_RANGE = 100.0, (0.7, 4.0)
"""For how much of it the first guess of the factor of the ITL, 1, counts: ms times seconds."""
_PRIOR_ITL_SQUARE, _VARIANCES = 1000.0, (0.05, 4.0)
"""The same for its variance, which is 1 in an exponential distribution: square ms times seconds."""
_CALM = 0.9
"""Share of busy workers above which waits come from a backlog, not from bursts."""
_UNLOADED = 0.1
"""Quantile of the TTFTs per prompt token that is taken for those without waiting."""
_INTERVALS = 120
_PRIOR_PROMPTS = 20.0
"""Prompts for which the profile counts."""
_FEW_PROMPTS = 5
"""Prompts that tell what one costs: the first ones on a new engine take longer than the rest."""
_FEW_SEQUENCES = 8.0
_PRIOR_SHARE, _SHARES = 0.5, (0.2, 0.9)
"""Share of a decode step that grows with the sequences: first guess, and what is plausible."""


class LoadMeter:
    """Averages of the last minutes. All sums fade alike, so their ratios do not lag.

    The share of load reports in which a worker computes a prompt is the share of its time that
    prefill takes; divided by the rate it is the time that one request takes. Prefill workers, and
    engines such as vLLM, report no prompts: there it is the TTFT of quiet intervals.

    A ``profile`` is the first guess of the time of a prompt, the upper bound of that in quiet
    intervals, and says how much of a decode step grows with the sequences.
    """

    def __init__(self, aggregated: bool, profile: ProfiledCapacity | None = None) -> None:
        self._aggregated = aggregated
        self._profile = profile
        self._is_reported = False
        self._prompts = 0
        self._sums: dict[str, float] = {}
        self._steps: deque[tuple[float, float]] = deque(maxlen=_INTERVALS)
        self._ttft_s_per_token: deque[float] = deque(maxlen=_INTERVALS)

    def observe(self, seen: Observation, queued_before: int) -> None:
        """Take one interval that began with ``queued_before`` requests without a first token."""
        traffic = seen.traffic
        for name in self._sums:
            memory_s = _MEMORIES_S.get(name, _MEMORY_S)
            self._sums[name] *= math.exp(-traffic.duration_s / memory_s)
        # The prompts that began: what waited or arrived, without what waits still.
        started = max(traffic.arrived + queued_before - traffic.queued, 0)
        self._prompts += started
        if traffic.isl is not None:
            self._add("prompts", started)
            self._add("isl", started * traffic.isl)
        if traffic.osl is not None:
            self._add("finished", traffic.finished)
            self._add("osl", traffic.finished * traffic.osl)
        workers = [worker for pull in seen.pulls for worker in pull.decode]
        busy = self._busy(seen, started)
        if busy is not None:
            self._observe_prefill(seen, started, busy)
        if workers and self._aggregated:
            self._observe_decode(seen, workers, (busy or 0.0) / max(seen.decode.ready, 1))
        elif workers:
            self._observe_decode(seen, workers, 0.0)

    @property
    def lengths(self) -> tuple[float, float]:
        """Mean ISL and OSL of the last minutes."""
        return self._ratio("isl", "prompts"), self._ratio("osl", "finished")

    def model(self, pool: str) -> WorkerLoadModel | None:
        """Return the cost of a request in ``pool``; None before enough of them were measured."""
        prefill = self._aggregated or pool == PREFILL
        decode = self._aggregated or pool == DECODE
        service_s = self._service_s()
        measured = self._profile is not None or self._prompts >= _FEW_PROMPTS
        if prefill and not (measured and service_s > 0.0):
            return None
        if decode and not self._sum("finished"):
            return None
        waited_s = self._sum("waited_s") + _PRIOR_BURST * _PRIOR_S
        burst = waited_s / (self._sum("mm_wait_s") + _PRIOR_S)
        step_ms, sequence_ms = self._decode_step()
        more_ms = self._sum("itl_more_ms") + _PRIOR_ITL_MS
        even_ms = self._sum("itl_even_ms") + _PRIOR_ITL_MS
        itl_burst = more_ms / even_ms
        error = self._sum("itl_error") + _PRIOR_ITL_SQUARE
        variance = error / (self._sum("itl_square") + _PRIOR_ITL_SQUARE)
        return WorkerLoadModel(
            service_s=service_s if prefill else 0.0,
            burst=min(max(burst, _BURST_RANGE[0]), _BURST_RANGE[1]),
            itl_burst=min(max(itl_burst, _ITL_BURST_RANGE[0]), _ITL_BURST_RANGE[1]),
            itl_variance=min(max(variance, _VARIANCES[0]), _VARIANCES[1]),
            step_ms=step_ms if decode else 0.0,
            sequence_ms=sequence_ms if decode else 0.0,
            osl=self._ratio("osl", "finished"),
            kv=self._ratio("kv", "running") if decode else 0.0,
        )

    def _busy(self, seen: Observation, started: float) -> float | None:
        """Return the mean number of workers that compute a prompt; None if it is unknown."""
        if self._aggregated:
            reported = _reported_busy(seen.pulls)
            self._is_reported |= bool(reported)
            if self._is_reported or reported is None:
                return reported
        traffic = seen.traffic
        if traffic.ttft_ms is None or not traffic.isl:
            return None
        self._ttft_s_per_token.append(traffic.ttft_ms / 1000.0 / traffic.isl)
        alone_s = float(np.quantile(self._ttft_s_per_token, _UNLOADED)) * traffic.isl
        if self._profile is not None:
            # Above the profile is a wait, below it a cached prefix.
            alone_s = min(alone_s, self._profile.prefill.ttft_ms(traffic.isl) / 1000.0)
        return started * alone_s / traffic.duration_s

    def _service_s(self) -> float:
        """Return the mean time of a prompt: observed, and a few as profiled."""
        if self._profile is None or not self._sum("prompts"):
            return self._ratio("busy_s", "started")
        alone_s = self._profile.prefill.ttft_ms(self.lengths[0]) / 1000.0
        total_s = self._sum("busy_s") + _PRIOR_PROMPTS * alone_s
        return total_s / (self._sum("started") + _PRIOR_PROMPTS)

    def _observe_prefill(self, seen: Observation, started: float, busy: float) -> None:
        traffic, pool = seen.traffic, seen.prefill or seen.decode
        self._add("busy_s", busy * traffic.duration_s)
        self._add("started", started)
        self._add("recent_started", started)
        self._add("recent_s", traffic.duration_s)
        ready = max(pool.ready, 1)
        calm = busy < _CALM * ready and not seen.changed
        if traffic.ttft_ms is None or not calm or not self._sum("started"):
            return
        service_s = self._service_s()
        load = min(self._ratio("recent_started", "recent_s") * service_s, _CALM * ready)
        self._add("waited_s", started * max(traffic.ttft_ms / 1000.0 - service_s, 0.0))
        self._add("mm_wait_s", started * service_s * wait_factor(load, ready))

    def _observe_decode(
        self, seen: Observation, workers: Sequence[WorkerLoad], busy: float
    ) -> None:
        """Take the load of the decode workers, which compute prompts for ``busy`` of the time."""
        duration_s, itl_ms = seen.traffic.duration_s, seen.traffic.itl_ms
        if itl_ms is None:
            return
        running = sum(worker.running + worker.waiting for worker in workers) / len(workers)
        usage = sum(worker.kv_usage for worker in workers) / len(workers)
        # Prompts interrupt decoding: their share of the time is no part of a step.
        step_ms = itl_ms * (1.0 - min(busy, _CALM))
        self._steps.append((running, step_ms))
        model = self.model(DECODE)
        if model is not None and not seen.changed:
            used = model.usage(self._ratio("recent_started", "recent_s"), max(seen.decode.ready, 1))
            if used < _CALM:
                more_ms = max(itl_ms - model.step_ms, 0.0)
                even_ms = model.step_ms * used / (1.0 - used)
                expected_ms = model.itl_burst * even_ms
                self._add("itl_more_ms", duration_s * more_ms)
                self._add("itl_even_ms", duration_s * even_ms)
                self._add("itl_error", duration_s * (more_ms - expected_ms) ** 2)
                self._add("itl_square", duration_s * expected_ms**2)
        self._add("itl_s", duration_s)
        self._add("itl_ms", duration_s * step_ms)
        self._add("running", duration_s * running)
        self._add("kv", duration_s * usage)

    def _decode_step(self) -> tuple[float, float]:
        """Return the fixed part of a decode step and that of each sequence, in ms."""
        whole_ms, running = self._ratio("itl_ms", "itl_s"), self._ratio("running", "itl_s")
        if whole_ms <= 0:
            return 0.0, 0.0
        if self._profile is not None:
            isl, osl = self.lengths
            profiled = self._profile.decode.line(isl + osl / 2)
            grows_ms = profiled.slope * running
            share = min(grows_ms / max(profiled.offset + grows_ms, 1e-9), _SHARES[1])
            return whole_ms * (1.0 - share), whole_ms * share / max(running, 1e-3)
        line = fit_line(self._steps)
        share = line.slope * running / whole_ms if line else _PRIOR_SHARE
        # Of few sequences the share is small, and cannot be measured.
        few = min(running / _FEW_SEQUENCES, 1.0)
        share = min(max(share, _SHARES[0] * few), _SHARES[1] * few)
        return whole_ms * (1.0 - share), whole_ms * share / max(running, 1e-3)

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def _sum(self, name: str) -> float:
        return self._sums.get(name, 0.0)

    def _ratio(self, above: str, below: str) -> float:
        total = self._sum(below)
        return self._sum(above) / total if total > 0 else 0.0


def _reported_busy(pulls: Sequence[Pull]) -> float | None:
    if not pulls:
        return None
    busy = sum(worker.active_prefill_tokens > 0 for pull in pulls for worker in pull.decode)
    return busy / len(pulls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests per second and their mean lengths, with the corrections of what the profile says.

    ``queued`` requests wait longer than they should; they are to be served ``within_s``.
    ``prefill_correction`` is the observed TTFT divided by the profile's, ``decode_correction`` the
    same of the ITL.
    """

    rate: float
    isl: float
    osl: float
    queued: float = 0.0
    within_s: float = 1.0
    prefill_correction: float = 1.0
    decode_correction: float = 1.0

    @property
    def context(self) -> float:
        """Mean length of a running sequence."""
        return self.isl + self.osl / 2

    @property
    def work_rate(self) -> float:
        """Requests per second to serve: those that arrive, and those that wait."""
        return self.rate + self.queued / self.within_s

    def itl_target_ms(self, itl_ms: float) -> float:
        """Return the ITL to look up for a target of ``itl_ms``."""
        return itl_ms / self.decode_correction if self.decode_correction > 0 else itl_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The workers for a demand, the figures used, and estimates by the names of metrics."""

    workers: Workers
    inputs: Mapping[str, float] = field(default_factory=dict)
    estimates: Mapping[str, float] = field(default_factory=dict)


def backlog(queued: int, rate: float, ttft_ms: float) -> float:
    """Return how many of ``queued`` are more than wait at a mean TTFT of ``ttft_ms``."""
    return max(queued - rate * ttft_ms / 1000.0 - _UNREMARKABLE, 0.0)


def prefill_workers(demand: Demand, model: PrefillCapacity, gpus: float) -> int:
    """Return the prefill workers of ``gpus`` GPUs that ``demand`` needs."""
    # A TTFT above the profile's comes from waiting: that is load, which the rate already says.
    # A TTFT below it comes from cached prefixes, whose tokens are not computed.
    tokens_per_s = demand.work_rate * demand.isl * min(1.0, demand.prefill_correction)
    return _ceil(tokens_per_s / model.tokens_per_s(demand.isl) / gpus)


def decode_workers(demand: Demand, model: DecodeCapacity, gpus: float, itl_ms: float) -> int:
    """Return the decode workers of ``gpus`` GPUs that keep ``itl_ms``."""
    best = model.best(demand.itl_target_ms(itl_ms), demand.context)
    return _ceil(demand.work_rate * demand.osl / best.tokens_per_s / gpus)


def _ceil(workers: float) -> int:
    return max(math.ceil(workers - _ROUNDING), 0)
