"""The policy auto: thresholds until the cost of a request is learned, then load+sla. Pure.

A pool never has more than twice the workers that it had one adjustment interval ago: what a few
requests have taught must not change more than that at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace

from dynamo.config.planner import PlannerSettings
from dynamo.planner.capacity.observation import Observation, Pool, Pull
from dynamo.planner.policies.base import PoolDecision, ScalingDecision
from dynamo.planner.policies.combined import CombinedPolicy
from dynamo.planner.policies.load import LoadPolicy
from dynamo.serve.graph.facts import DECODE, PREFILL


class AutoPolicy(CombinedPolicy):
    """Decides by :class:`LoadPolicy` once an adjustment interval until costs are learned."""

    name = "auto"

    def __init__(self, settings: PlannerSettings, prefill: bool) -> None:
        super().__init__(settings, prefill)
        self._load = LoadPolicy(settings)
        self._stepped: ScalingDecision | None = None
        self._step_s = settings.adjustment_interval_s
        self._since_s: float | None = None
        self._pulls: list[Pull] = []
        self._changed = False
        self._counts: dict[str, deque[tuple[float, int]]] = {PREFILL: deque(), DECODE: deque()}

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the workers to have now, of each pool at most twice those an interval ago."""
        self._stepped = None
        prefill = seen.prefill and self._bounded(PREFILL, seen.prefill, seen.now_s)
        decode = self._bounded(DECODE, seen.decode, seen.now_s)
        return super().decide(replace(seen, prefill=prefill, decode=decode))

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Forget the starts that failed; protect a decode worker that the load has added."""
        super().applied(decision, failed)
        if self._stepped is not None:
            self._load.applied(decision, failed)

    def _bounded(self, name: str, pool: Pool, now_s: float) -> Pool:
        """Return ``pool`` with a maximum of twice its workers one adjustment interval ago."""
        counts = self._counts[name]
        counts.append((now_s, pool.workers))
        # What was decided at the start of the interval is seen at the next decision only.
        while len(counts) > 1 and counts[1][0] <= now_s - self._step_s + self.interval_s:
            counts.popleft()
        most = max(2 * counts[0][1], pool.workers, 1)
        return replace(pool, maximum=most if pool.maximum is None else min(most, pool.maximum))

    def _unlearned(self, seen: Observation) -> Mapping[str, PoolDecision]:
        """Compare the load of the last adjustment interval with the thresholds."""
        if self._since_s is None:
            self._since_s = seen.now_s - seen.interval_s
        self._pulls += seen.pulls
        self._changed |= seen.changed
        if any(pool.starting or pool.draining for pool in seen.pools.values()):
            self._restart(seen.now_s)  # as in mode load: an interval begins when all is done
            return super()._unlearned(seen)
        if seen.now_s - self._since_s < self._step_s:
            return super()._unlearned(seen)
        observed = replace(seen, pulls=tuple(self._pulls), changed=self._changed)
        self._stepped = self._load.decide(observed)
        self._restart(seen.now_s)
        return {decision.pool: decision for decision in self._stepped.pools}

    def _restart(self, now_s: float) -> None:
        self._since_s, self._pulls, self._changed = now_s, [], False
